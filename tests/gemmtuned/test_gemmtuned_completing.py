"""The shell completes commands, options and problems: asked as bash, zsh and fish ask."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import says
from store_cases import NEW, new_store, open_store, problem, saw
from typer.main import get_command

from gemmtuned.cli import build
from gemmtuned.commands import completing

COMMANDS = ("explain", "trials", "withdraw", "pin", "forget", "retune", "tune")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store = new_store(tmp_path)
    store.sightings.add(
        "serve", NEW, [saw(problem(8), 100), saw(problem(8, threads=1)), saw(problem(16))], now_s=time.time()
    )
    store.close()
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    return tmp_path


def test_problems_are_offered_by_shape_and_as_they_are_spelled(home: Path) -> None:
    assert completing.problems("8x") == ["8x1024x512"]
    assert sorted(completing.problems("fp32:8x")) == sorted(map(str, (problem(8), problem(8, threads=1))))
    assert completing.problems("bf16") == []


def test_without_a_database_nothing_is_offered_and_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path / "none", tmp_path / "file/home"):
        (tmp_path / "file").touch()
        monkeypatch.setenv("GEMMTUNED_HOME", str(place))
        assert completing.problems("8") == completing.runs("") == []
    assert capsys.readouterr() == ("", "")


def test_programs_are_offered_by_name_unless_it_is_more_than_text(home: Path) -> None:
    store = open_store(home)
    for name in ("embed service", "\x1b[31mred", "two\nlines"):
        store.sightings.add(name, NEW, [saw(problem(8))], now_s=time.time())
    store.close()
    assert completing.runs("") == ["embed service", "serve"] and completing.runs("se") == ["serve"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_takes_problems_completes_them(home: Path, name: str) -> None:
    command = get_command(build()).commands[name]
    (argument,) = [param for param in command.params if param.param_type_name == "argument"]
    with command.make_context(name, [], resilient_parsing=True) as context:
        assert "16x1024x512" in [item.value for item in argument.shell_complete(context, "16")]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("explain 16", "16x1024x512"),
        ("explain --fam", "--family"),
        ("unt", "untuned"),
        ("coverage --by la", "layer"),
        ("gains --by s", "solution"),
        ("explain --dtype bf", "bf16"),
        ("daemon --log-format j", "json"),
        ("daemon --log-level w", "warning"),
        ("untuned --run se", "serve"),
    ],
)
def test_bash_is_answered(home: Path, monkeypatch: pytest.MonkeyPatch, typed: str, offered: str) -> None:
    words = f"gemmtuned {typed}"
    monkeypatch.setenv("_GEMMTUNED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    done = says(home)

    assert done.stdout.split() == [offered], done.stderr


def test_bash_itself_completes(home: Path) -> None:
    """The script that --show-completion prints, in a bash that has read it."""
    program = Path(sys.executable).with_name("gemmtuned")
    script = """
        eval "$(_GEMMTUNED_COMPLETE=source_bash "$PROGRAM")"
        COMP_WORDS=(gemmtuned explain 8x) COMP_CWORD=2
        "$(complete -p gemmtuned | sed 's/.*-F \\([^ ]*\\).*/\\1/')" "$PROGRAM"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PROGRAM": str(program)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)

    assert done.stdout.split() == ["8x1024x512"], done.stderr
