"""The driver is asked in a child process: answers come late, or never, and a turn that came late is nobody's fault."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemmtuned.daemon.device.sampler import ANSWER_S, STALE_S, Sampler

CHILD = """
import json, sys, time
for _ in sys.stdin:
    time.sleep(float(sys.argv[1]))
    print(json.dumps({"gpus": [{"uuid": "GPU-0"}]}), flush=True)
"""


class Clock:
    """Time that passes when it is told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def sampler(answers_after_s: float, clock: Clock) -> Sampler:
    return Sampler(command=[sys.executable, "-S", "-c", CHILD, str(answers_after_s)], clock=clock)


def answered(one: Sampler, clock: Clock) -> bool:
    """Ask, give the child real time and the clock a little, and look again."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        clock.now_s += 0.001
        if one.facts():
            return True
        time.sleep(0.01)
    return False


def test_after_a_turn_that_came_late_the_last_answer_serves_until_the_next_one_is_there() -> None:
    clock = Clock()
    one = sampler(0.0, clock)
    try:
        assert answered(one, clock)
        clock.now_s += 30  # the daemon was waiting for a worker to end, say
        assert one.facts() == {"GPU-0": {"uuid": "GPU-0"}}
    finally:
        one.close()


def test_a_driver_that_does_not_answer_is_not_known_after_a_moment_and_asked_anew_in_the_end() -> None:
    clock = Clock()
    one = sampler(60.0, clock)
    try:
        assert not one.facts()
        one._answer = {"GPU-0": {}}  # as if it had answered before
        clock.now_s += STALE_S + 0.1
        assert not one.facts()
        clock.now_s += ANSWER_S
        one.facts()
        assert "no answer" in one.error
    finally:
        one.close()


def test_a_driver_that_fails_is_not_asked_ten_times_a_second(tmp_path: Path) -> None:
    clock, log = Clock(), tmp_path / "starts"
    child = f"import sys; open({str(log)!r}, 'a').write('x'); sys.stdin.readline(); print('{{\"error\": \"lost\"}}')"
    one = Sampler(command=[sys.executable, "-S", "-c", child], clock=clock)
    try:
        assert not one.wait() and one.error == "lost"
        for _ in range(15):
            clock.now_s += 0.1
            one.facts()
        assert log.read_text() == "x"
        assert one._child is not None
        one._child.wait(timeout=30)  # it answers first and ends after that
        clock.now_s += 1.0
        one.facts()
        until = time.monotonic() + 30
        while log.read_text() != "xx" and time.monotonic() < until:
            time.sleep(0.01)
        assert log.read_text() == "xx"
    finally:
        one.close()


class Unkillable:
    """What a child is to us that is stuck in its driver: a signal does nothing to it until the driver lets it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kills: list[subprocess.Popen[bytes]] = []
        self._real = subprocess.Popen.kill
        monkeypatch.setattr(subprocess.Popen, "kill", lambda child: self.kills.append(child))

    def let_go(self) -> None:
        for child in self.kills:
            self._real(child)
            child.wait(30)


def test_a_child_that_cannot_be_killed_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(), tmp_path / "starts"
    child = f"open({str(log)!r}, 'a').write('x'); import time; time.sleep(100)"
    one = Sampler(command=[sys.executable, "-S", "-c", child], clock=clock)
    stuck = Unkillable(monkeypatch)
    try:
        for _ in range(200):  # twenty minutes of turns
            one.facts()
            clock.now_s += 6
        assert len({child.pid for child in stuck.kills}) == 1
        assert f"process {stuck.kills[0].pid}, which asked the driver, cannot be killed" in one.error
        assert one.facts() == {}
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < until:  # opened, and written to
            time.sleep(0.01)
        stuck.let_go()
        clock.now_s += 6
        one.facts()
        while log.read_text() != "xx" and time.monotonic() < until:
            time.sleep(0.01)
        assert log.read_text() == "xx", "once it is gone the driver is asked anew"
    finally:
        monkeypatch.undo()
        one.close()
