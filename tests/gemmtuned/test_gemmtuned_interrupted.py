"""A command that a signal ends: it says which by its exit code, without a traceback, and ends what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment
from hooked import wait_for

from gemmtuned.cli import main


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_command_that_a_signal_ends_says_which_and_ends_what_it_has_started(
    tmp_path: Path, number: int, code: int
) -> None:
    """In a fork of this process; `make long` has it in one of its own."""
    mark = tmp_path / "pid"
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.environ.update(environment(tmp_path, GEMMTUNED_NATIVE="0"))  # to build it takes 15 s, the first time
            code_of_it = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 60"
            sys.argv = ["gemmtuned", "compare", "--", "/bin/sh", "-c", code_of_it]
            main()
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(1)
    try:
        wait_for(mark.exists)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)  # else it would run its command again and again
        os.waitpid(pid, 0)
        raise
    os.kill(pid, number)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize("at", ["gemmtuned.cli", "typer", "gemmtuned.configs.errors", "gemmtuned.commands.status"])
def test_an_interrupt_while_a_command_is_imported_ends_it_with_130_and_no_word(tmp_path: Path, at: str) -> None:
    """Who has mistyped presses Ctrl-C within the first tenths of a second. In an exec, as dataclasses have it, too."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            exec("os.kill(os.getpid(), signal.SIGINT)")
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
"""
    )
    command = [sys.executable, "-m", "gemmtuned", "status"]
    env = environment(tmp_path, PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, env=env)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.long
def test_an_interrupt_ends_with_130_and_stops_the_program(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-m", "gemmtuned", "compare", "--", sys.executable, "-c", code]
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        mark.unlink(missing_ok=True)
        process = subprocess.Popen(
            command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == expected
        assert "Traceback" not in stderr
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)
