"""The command `gemmtuned`: one list of commands, and what makes an error a line and an exit code.

Exit codes: 0 done, 1 found something wrong or failed, 2 wrong usage, 75 try later, 129 terminal closed, 130
interrupted, 143 terminated.
A command's file is imported when the command is asked for, and nothing heavy is imported at its top: `gemmtuned status`
must wait neither for torch nor for the files of twenty other commands.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer

from gemmtuned import __version__
from gemmtuned.arguments import Command, Group
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.open_files import limit_reached
from gemmtuned.reports.render import complain


class _Command(NamedTuple):
    """Where a command lies (file of gemmtuned/commands, function or group), and its line in --help."""

    file: str
    name: str
    line: str
    reader: str = ""  # file:class that reads its arguments, where it has a way of its own
    wraps: bool = False  # what follows its first argument is another program's


_REFUSED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # by a disk that takes no more
_SHAPES: Final = "options:ShapeCommand"
# In the order of --help. The lines are the first ones of the commands' docstrings.
COMMANDS: Final = {
    "demo": _Command("demo", "demo", "See the loop on this machine, with a small decoder."),
    "run": _Command("run", "run", "Start a program with capture and dispatch on.", wraps=True),
    "daemon": _Command("daemon", "daemon", "Tune on idle devices until you stop it."),
    "coverage": _Command("coverage", "coverage", "How much of the traffic is tuned."),
    "untuned": _Command("untuned", "untuned", "What waits to be tuned, worth most first."),
    "gains": _Command("gains", "gains", "What was gained, solution by solution."),
    "report": _Command("report", "report", "Write one HTML page: coverage, gains by layer, what is next."),
    "trials": _Command("trials", "trials", "What was measured, newest first.", _SHAPES),
    "explain": _Command("explain", "explain", "Why a problem runs what it runs.", _SHAPES),
    "status": _Command("status", "status", "What goes on: daemon, programs, generations."),
    "top": _Command("top", "top", "Watch daemon, devices and programs."),
    "doctor": _Command("doctor", "doctor", "Check this installation, name what mends it."),
    "compare": _Command("compare", "compare", "Measure what is gained by one of your programs.", wraps=True),
    "tune": _Command("tune", "tune", "Tune problems now, in the foreground.", "aiter_flags:AiterCommand"),
    "import": _Command("import_", "import_", "Keep what other tools' tables say."),
    "export": _Command("export", "export", "Write what was found in the form that another tool reads."),
    "sync": _Command("sync", "sync", "Share results with other hosts: a folder or an object store."),
    "fleet": _Command("fleet", "app", "Tune for many hosts, export what they report."),
    "pause": _Command("pause", "pause", "Stop tuning until `gemmtuned resume`."),
    "resume": _Command("pause", "resume", "Tune again after `gemmtuned pause`."),
    "withdraw": _Command("withdraw", "withdraw", "Take solutions out of use.", _SHAPES),
    "pin": _Command("pin", "pin", "Keep the solutions of these problems, whatever is found.", _SHAPES),
    "forget": _Command("pin", "forget", "Drop all about these problems, as if never seen.", _SHAPES),
    "retune": _Command("pin", "retune", "Have the daemon tune these problems again, before all else.", _SHAPES),
    "rollback": _Command("pin", "rollback", "Publish what an earlier generation had."),
    "purge": _Command("purge", "purge", "Remove the database, published tables and cache of this home."),
    "db": _Command("db", "app", "Look after the database: check, backup, vacuum, publish."),
}  # fmt: skip


# What people look for under names that are no commands
MEANT: Final = {
    "build": "gemmtuned doctor --build",
    "config": "gemmtuned doctor --variables: every setting is a variable",
    "disable": "touch the file `disabled` in the home that gemmtuned status names; in a program gemmtuned.disable()",
    "enable": "gemmtuned run -- COMMAND, or GEMMTUNED=1 COMMAND",
    "freeze": "gemmtuned.freeze(model) in the program",
    "help": "gemmtuned --help, or gemmtuned COMMAND --help",
    "history": "gemmtuned rollback, which lists what was published, or gemmtuned trials",
    "layers": "gemmtuned coverage --by layer",
    "list": "gemmtuned gains for what is tuned, gemmtuned untuned for what waits",
    "metrics": "gemmtuned daemon --metrics-port 9750",
    "start": "gemmtuned daemon",
    "stats": "gemmtuned coverage, or gemmtuned gains",
    "stop": "gemmtuned pause, which lets the daemon rest; kill the pid that gemmtuned status names to end it",
    "uninstall": "gemmtuned purge, then pip uninstall gemmtuned",
    "version": "gemmtuned --version",
}


class _Commands(Mapping[str, Any]):
    """Click's commands by name; each is made, and its file imported, when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _make(name, COMMANDS[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _make(name: str, command: _Command) -> Any:
    """The command, or the group of commands, of this name."""
    found = _from(command.file, command.name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    reader = _from(*command.reader.split(":")) if command.reader else Command
    alone.command(name, cls=reader, context_settings={"allow_interspersed_args": not command.wraps})(found)
    return typer.main.get_command(alone)


def _from(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"gemmtuned.commands.{file}"), name)


class _Group(Group):
    """Lists the commands, runs one, and turns what it raises into the promised exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.line) for name, command in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in MEANT:
            ctx.fail(f"No such command '{args[0]}'. It is: {MEANT[args[0]]}")
        return super().resolve_command(ctx, args)

    def make_context(self, *given: Any, **named: Any) -> Any:
        with _promised():  # `--version` and `--help` print here
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        with _promised():
            return super().invoke(ctx)


@contextlib.contextmanager
def _promised() -> Iterator[None]:
    """Turn what is raised inside into one line and the promised exit code."""
    try:
        yield
        sys.stdout.flush()
    except GemmtunedError as err:
        complain(str(err))
        raise typer.Exit(err.exit_code) from err
    except KeyboardInterrupt as err:
        raise typer.Exit(130) from err
    except BrokenPipeError as err:  # the reader of our output has seen enough: `gemmtuned untuned | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from err
    except OSError as err:  # a name that no file can have, a folder closed to us: who gave it reads that
        what = limit_reached(err) or err.strerror or str(err)
        if err.filename:
            what = f"{str(err.filename)[:200]}: {what}"
        elif err.errno in _REFUSED:  # files of ours have their names by here
            what = f"the output cannot be written ({what})"
        complain(what)
        raise typer.Exit(1) from err
    except UnicodeEncodeError as err:  # an argument that is no text
        complain(f"{err.object[:200]!r} is no text that can be used here")
        raise typer.Exit(2) from err


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
    """The application, assembled from the list above."""
    app = typer.Typer(
        name="gemmtuned", cls=_Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    return app


def main() -> None:
    """Run the command that the arguments name, and exit."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        signal.signal(signal.SIGHUP, _terminated)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a name the terminal cannot spell is no reason to fail
    build()(prog_name="gemmtuned")


def _open_closed_streams() -> None:
    """Have 0, 1 and 2 lead somewhere: a program started with one of them closed (`>&-`) says what it says to nobody.

    Else the first file that is opened, the database say, would be what is written to.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _terminated(signum: int, frame: object) -> None:
    sys.exit(128 + signum)  # an exception, so that what was started is stopped and locks are given back
