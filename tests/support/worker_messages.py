"""What a real worker says to the test that started it."""

from __future__ import annotations

import time
from collections.abc import Callable

from gemmtuned.daemon.protocol.wire import Message
from gemmtuned.daemon.seats.worker import Worker


def said(worker: Worker, until: Callable[[list[Message]], bool], seconds: float = 20.0) -> list[Message]:
    """All messages from now on up to those that `until` takes; it must not last longer than so many seconds."""
    heard: list[Message] = []
    end = time.monotonic() + seconds
    while not until(heard):
        heard += worker.poll()
        assert time.monotonic() < end, f"heard only {heard}"
        time.sleep(0.002)
    return heard
