"""Work that has time: it takes only the CPU that others leave."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gemmtuned.configs.unpatched import sleep


def give_way(nice: int) -> None:
    """Lower this process's priority, and its session's when it leads one. Each step is tried; none is vital."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    if os.getsid(0) == os.getpid():  # where sessions share the CPU fairly, nice counts inside our session only
        with contextlib.suppress(OSError):
            for _ in range(3):
                with contextlib.suppress(BlockingIOError):  # the kernel takes one in 100 ms from unprivileged processes
                    Path("/proc/self/autogroup").write_text(str(nice), encoding="utf-8")
                    return
                sleep(0.11)
