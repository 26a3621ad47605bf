"""Arguments that are read without pydantic are read as typer reads them, and no report imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer._click.exceptions import ClickException
from typer.main import get_command

from gemmtuned import arguments
from gemmtuned.cli import COMMANDS, build
from gemmtuned.configs.settings import child_env

LINES = (
    "status", "status --json", "status --watch", "status --nonsense", "status too many",
    "coverage", "coverage --by run --weight calls --since 7d --limit 3 --run serve", "coverage --by=problem --json",
    "coverage --by nothing", "coverage --since", "coverage --limit -3", "coverage --limit 1e3", "coverage --url x",
    "untuned --limit 0", "gains --all", "trials 8 64 64 --limit 5", "trials bf16:8x64x64,threads=2", "trials 8 64",
    "explain 1 2 3 --threads 2", "explain 1 2 3 --threads many", "explain --family dense 1 2 3", "explain",
    "tune 1x2x3 8x64x64 --tp 2 --dtype bf16 --libtype torch --libtype triton --timeout 2.5 --dry-run",
    "tune -i pyproject.toml -o out.csv", "tune -i missing.csv", "tune --model-dir . --nsets 1,512", "tune --tp two",
    "tune --untune_file pyproject.toml --errRatio 0.05", "tune", "tune 1x2x3 --atol nan",
    "import", "import a.csv b.csv", "import --dry-run pyproject.toml", "export --format aiter-csv --out .",
    "export --format none", "export", "pause --for 1m", "pause", "withdraw 1 2 3 --dry-run", "withdraw",
    "rollback --generation 3", "rollback", "rollback --generation x", "purge --yes", "sync", "sync file:///x --once",
    "run -- python x.py --json", "run", "compare --rounds 3 -- python x.py -v", "daemon --once --log-level debug",
    "daemon --metrics-port 9750", "daemon --metrics-port port", "doctor --build", "report --out x.html", "top",
    "db check --json", "db backup", "db backup there.db", "db nothing", "db", "db publish --give-up",
    "fleet tune", "fleet tune file:///x --dry-run", "fleet check", "fleet check .", "fleet init a b", "--version",
    "--help", "status --help", "fleet check --help",
)  # fmt: skip


def understood(line: str) -> Any:
    """What a command's function would be given, or how the user is told that it is not."""
    words = line.split()
    try:
        group: Any = get_command(build())
        context = group.make_context("gemmtuned", list(words))
        given = [dict(context.params)]
        words = [*context._protected_args, *context.args]
        while words and hasattr(group, "resolve_command"):
            name, group, words = group.resolve_command(context, words)
            context = group.make_context(name, words, parent=context)
            given.append(dict(context.params))
            words = [*context._protected_args, *context.args]
    except ClickException as err:
        return type(err).__name__, err.exit_code, err.format_message()
    except (SystemExit, Exception) as err:
        return type(err).__name__, str(err)
    return given


def with_types(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: with_types(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return type(found), [with_types(value) for value in found]
    return type(found), found


@pytest.mark.parametrize("line", LINES)
def test_arguments_are_read_as_typer_reads_them(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = understood(line)
    monkeypatch.setattr(arguments, "_plain", lambda param: param)

    assert with_types(ours) == with_types(understood(line))


def test_every_command_is_in_the_table() -> None:
    assert {line.split()[0] for line in LINES} >= set(COMMANDS) - {"demo", "resume", "pin", "forget", "retune"}


PLAIN = (
    "status", "status --json", "coverage --by problem --since 7d --limit 5", "untuned", "gains", "trials",
    "explain 8 64 64", "withdraw 8 64 64", "db check", "doctor --quick", "tune 8x64x64 --dry-run", "pause --for 1m",
    "run -- true",
)  # fmt: skip


def test_commands_read_their_arguments_without_pydantic(tmp_path: Path) -> None:
    """Each in a fork of a process that has imported what all commands need, as `gemmtuned` does before it looks."""
    code = (
        "import os, sys; sys.modules['pydantic'] = None\n"  # an import of it fails
        "from gemmtuned.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.argv[1:] = line.split()\n"
        "        main()\n"
        "    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "    print(f'ended with {status}: {line}', flush=True)\n"
    )
    env = child_env(GEMMTUNED_HOME=str(tmp_path), GEMMTUNED_DB=None, GEMMTUNED_CONFIG_DIR=None)
    done = subprocess.run([sys.executable, "-c", code, *PLAIN], capture_output=True, text=True, env=env, timeout=120)

    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    ended = [line.removeprefix("ended with ") for line in done.stdout.splitlines() if line.startswith("ended with ")]
    assert [line.partition(": ")[2] for line in ended] == [*PLAIN]
    assert {line.partition(": ")[0] for line in ended} <= {"0", "1"}, ended
