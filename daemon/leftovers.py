"""Child processes that were killed and are perhaps not gone: one stuck in a driver or at a dead disk stays.

Whoever starts another in its place each time fills the machine with them, so nobody does before the last one was
reaped; and nobody waits for one, for that may take for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import IO

import psutil


class Leftovers:
    """The processes that one owner has killed."""

    def __init__(self) -> None:
        self._killed: list[subprocess.Popen[bytes]] = []
        self._groups: list[int] = []  # leaders killed with their group, until that is empty

    def kill(self, process: subprocess.Popen[bytes], *, group: bool = False) -> None:
        """SIGKILL it, with all of its process group if it leads one, and close its pipes; returns at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(process.pid, signal.SIGKILL)
                self._groups.append(process.pid)
            else:
                process.kill()
        pipes: tuple[IO[bytes] | None, ...] = (process.stdin, process.stdout)
        for pipe in pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._killed.append(process)

    def alive(self) -> list[int]:
        """The process numbers of those that are still there."""
        self._killed = [process for process in self._killed if process.poll() is None]
        left = [process.pid for process in self._killed]
        self._groups = [leader for leader in self._groups if leader in left or not reap_orphans(leader)]
        return left

    def wait(self, seconds: float) -> list[int]:
        """Wait up to `seconds`; the processes that are still there. One that can die is gone within milliseconds."""
        until_s = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < until_s:
            time.sleep(0.002)
        return left


def reap_orphans(leader: int) -> bool:
    """Reap what has ended in a group, whose leader was reaped, and became ours. True: nothing of it is ours any more.

    Orphans do where we are process 1 of a container: what compilers of a killed worker leave would stay as zombies.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass
        return False
    return True


def alive_in_group(leader: int) -> list[int]:
    """Processes of this group that have not ended. A zombie has: it only waits for its parent to notice.

    While one is left the number of the group cannot become another's.
    """
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
