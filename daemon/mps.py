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
        pipe: Callable[[], bool] = mps_pipe,
        names: Callable[[], Iterator[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipe = pipe
        self._names = names or _names
        self._clock = clock
        self._look_at_s = float("-inf")
        self._process = False

    def is_running(self) -> bool:
        """True when it serves somebody here, as far as can be seen."""
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._process = any(name.startswith(PROCESSES) for name in self._names())
            self._look_at_s = now_s + LOOK_S
        return self._process or self._pipe()


def _names() -> Iterator[str]:
    for process in psutil.process_iter(["name"]):
        yield process.info["name"] or ""
