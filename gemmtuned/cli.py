"""The command `gemmtuned`: one list of commands, and one place where an error becomes a line and an exit code.

Exit codes: 0 done, 1 found something wrong or failed, 2 wrong usage, 75 try later, 130 interrupted, 143 terminated.
Nothing heavy is imported here or at the top of a command: `gemmtuned status` must not wait for torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from gemmtuned import __version__
from gemmtuned.commands import (
    compare,
    coverage,
    daemon,
    db,
    demo,
    doctor,
    explain,
    export,
    gains,
    import_,
    pause,
    pin,
    report,
    run,
    status,
    trials,
    tune,
    untuned,
    withdraw,
)
from gemmtuned.commands.aiter_flags import AiterCommand
from gemmtuned.commands.options import ShapeCommand
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.reports.render import complain

# In the order of --help. A command's function name is its name on the command line.
COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    demo.demo,
    run.run,
    daemon.daemon,
    coverage.coverage,
    untuned.untuned,
    gains.gains,
    report.report,
    trials.trials,
    explain.explain,
    status.status,
    doctor.doctor,
    compare.compare,
    tune.tune,
    import_.import_,
    export.export,
    pause.pause,
    pause.resume,
    withdraw.withdraw,
    pin.pin,
    pin.forget,
    pin.retune,
    pin.rollback,
)
GROUPS: Final = (db.app,)
# Commands that read their arguments in a way of their own
CLASSES: Final[dict[Callable[..., None], type[ShapeCommand]]] = {
    tune.tune: AiterCommand,
    **dict.fromkeys((explain.explain, trials.trials, withdraw.withdraw, pin.pin, pin.forget, pin.retune), ShapeCommand),
}
WRAPPERS: Final = (run.run, compare.compare)  # what follows their first argument is another program's


class _Group(TyperGroup):
    """Runs a command and turns what it raises into the promised exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except GemmtunedError as err:
            complain(str(err))
            raise typer.Exit(err.exit_code) from err
        except KeyboardInterrupt as err:
            raise typer.Exit(130) from err
        except BrokenPipeError as err:  # the reader of our output has seen enough: `gemmtuned untuned | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from err
        except OSError as err:  # a name that no file can have, a folder closed to us: whoever gave it is told
            where = f"{str(err.filename)[:200]}: " if err.filename else ""
            complain(f"{where}{err.strerror or err}")
            raise typer.Exit(1) from err
        except UnicodeEncodeError as err:  # an argument that is no text
            complain(f"{err.object[:200]!r} is no text that can be used here")
            raise typer.Exit(2) from err
        return result


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gemmtuned {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Your model's matrix products get faster while it runs, by itself.

    Start your program with GEMMTUNED=1 (or `gemmtuned run`) and `gemmtuned daemon` beside it.
    """


def build() -> typer.Typer:
    """The application, assembled from the lists above."""
    app = typer.Typer(
        name="gemmtuned", cls=_Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for command in COMMANDS:
        settings = {"allow_interspersed_args": command not in WRAPPERS}
        app.command(cls=CLASSES.get(command), context_settings=settings)(command)
    for group in GROUPS:
        app.add_typer(group)
    return app


def main() -> None:
    """Entry point of the console script and of `python -m gemmtuned`."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a name the terminal cannot spell is no reason to fail
    build()(prog_name="gemmtuned")


def _terminated(signum: int, frame: object) -> None:
    sys.exit(128 + signum)  # an exception, so that what was started is stopped and locks are given back
