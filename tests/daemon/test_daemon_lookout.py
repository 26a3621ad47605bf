"""The second look at devices goes on after it has failed once."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from gemmtuned.daemon.service.lookout import Lookout


class Failing:
    """A daemon whose second look fails at first."""

    has_workers = True

    def __init__(self) -> None:
        self.looks = 0

    def mind(self, now_s: float, *, leave: bool) -> None:
        self.looks += 1
        if self.looks == 1:
            raise OSError("no devices to be had")


def test_a_look_that_fails_is_said_and_followed_by_others(caplog: pytest.LogCaptureFixture) -> None:
    daemon: Any = Failing()
    stop: Any = type("Stop", (), {"has_come": False})()
    with caplog.at_level(logging.ERROR, "gemmtuned.daemon"), Lookout(daemon, stop) as lookout, lookout.turn():
        until_s = time.monotonic() + 10
        while daemon.looks < 3 and time.monotonic() < until_s:
            time.sleep(0.02)
    assert daemon.looks >= 3
    assert "no devices to be had" in caplog.text and caplog.text.count("second look") == 1
