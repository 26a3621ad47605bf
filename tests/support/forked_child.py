"""Work in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Exit status of a forked child that ran work."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
