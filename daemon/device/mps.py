"""Is CUDA's multi-process service running?  Then a fault of ours would end the clients of others.

By who listens on its control pipe where this process would look for it, and by its processes wherever that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import psutil

from gemmtuned.configs.settings import mps_pipe

LOOK_S: Final = 10.0  # it lists all processes of the machine
PROCESSES: Final = "nvidia-cuda-mps"  # -control, -server; the kernel keeps 15 letters of a name


class Mps:
    """One answer for all GPUs. pipe, names: replaced in tests."""

    def __init__(
        self,
        *,
        pipe: Callable[[], str | bool] = mps_pipe,
        names: Callable[[], Iterator[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipe = pipe
        self._names = names or _names
        self._clock = clock
        self._look_at_s = float("-inf")
        self._process = ""

    def seen(self) -> str:
        """What shows it: a process, or a pipe and its owner; "" for nothing."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._process = next((name for name in self._names() if name.startswith(PROCESSES)), "")
            self._look_at_s = now_s + LOOK_S
        return self._process or str(self._pipe() or "")


def _names() -> Iterator[str]:
    for process in psutil.process_iter(["name"]):
        yield process.info["name"] or ""
