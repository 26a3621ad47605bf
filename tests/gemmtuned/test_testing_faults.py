"""Failpoints themselves: a test that arms one must be able to rely on what it does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmtuned._testing import faults


def test_a_point_does_nothing_unless_armed() -> None:
    faults.point("anything")


def test_the_nth_passing_fails_and_no_other() -> None:
    with faults.armed("a.*=3:ENOSPC") as passed:
        faults.point("a.write")
        faults.point("b.write")
        faults.point("a.fsync")
        with pytest.raises(OSError, match="No space left") as caught:
            faults.point("a.write")
        faults.point("a.write")
    assert caught.value.errno == errno.ENOSPC
    assert passed == ["a.write", "b.write", "a.fsync", "a.write", "a.write"]
    faults.point("a.write")


def test_from_the_nth_passing_on_all_fail() -> None:
    with faults.armed("a=2+:EIO; b=sleep 0.05"):
        faults.point("a")
        for _ in range(3):
            with pytest.raises(OSError):
                faults.point("a")
        began_s = time.monotonic()
        faults.point("b")
        assert time.monotonic() - began_s >= 0.05


@pytest.mark.parametrize("rules", ["a", "a=", "a=EWRONG", "a=0:EIO", "=EIO"])
def test_a_rule_that_cannot_be_read_is_an_error(rules: str) -> None:
    with pytest.raises(ValueError, match="is no rule"), faults.armed(rules):
        pass


def test_a_process_started_with_the_variable_dies_there_and_its_log_says_where(tmp_path: Path) -> None:
    code = "from gemmtuned._testing import faults; [faults.point(n) for n in ('a', 'b', 'c')]; print('lived')"
    env = {**os.environ, faults.VARIABLE: "*=2:kill", faults.LOG_VARIABLE: str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "log").read_text() == "a\nb\n"
