"""What a program has put in the place of the interpreter's functions before the hook begins, or has taken away."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import select, sys, time
{before}
from gemmtuned.configs.stderr_lines import begin, say
begin()
say("on")
"""


def said(before: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_a_function_that_was_taken_away_before_is_had_anew() -> None:
    """eventlet.monkey_patch(), in a program's first line, deletes select.poll: no hook began, without a word."""
    assert said("del select.poll") == (0, "gemmtuned: on\n")


def test_a_function_that_was_replaced_before_is_not_called() -> None:
    """gevent's would make an event loop in our thread."""
    assert said("select.poll = time.sleep = lambda *given: sys.exit(3)") == (0, "gemmtuned: on\n")
