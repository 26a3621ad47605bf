"""Processes of this machine, as /proc tells of them, and which of them this one is."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Final

from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

_WIPED_IN_CHILDREN: Final = 18  # MADV_WIPEONFORK, of Linux 4.14


def life_of(pid: int) -> tuple[bool, str]:
    """(whether it is over, clock ticks from boot to its start).

    One that nobody has waited for is over, as in many a container; one whose first thread alone has ended has others.
    Raises FileNotFoundError when there is none of that number, OSError or IndexError when /proc does not tell: it hides
    the process, say (hidepid), or is another PID namespace's.
    """
    # /proc/PID/stat: what is in brackets may hold anything; behind it state, threads (18th) and start (20th)
    try:
        facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        if _answers(pid):
            raise PermissionError(errno.EACCES, "/proc does not show a process that is there", str(pid)) from None
        raise
    return facts[0] == b"Z" and int(facts[17]) <= 1, facts[19].decode()


def _answers(pid: int) -> bool:
    """Whether there is a process of this number in our own PID namespace, whatever /proc shows."""
    try:
        os.kill(pid, 0)  # 0 sends nothing, it only checks
    except (ProcessLookupError, OverflowError):
        return False
    except Exception:  # it is another user's, or an audit hook of the program forbids the question
        return True
    return True


def is_stopped(pid: int) -> bool:
    """Whether it was told to stop where it is (SIGSTOP, Ctrl-Z, a debugger), and not yet to go on."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def pid_namespace() -> str | None:
    """The boot and the PID namespace of this process: where both are equal, a pid that is gone says the process is.

    The kernel gives a namespace's number to another only once all processes of the first are gone.  None where that
    cannot be known: without /proc, or where it is another namespace's, so that a number in it is another process.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot[:80]} {namespace_of('self')}"
    except OSError:
        return None


def namespace_of(pid: int | str, proc: Path = Path("/proc")) -> int:
    """The inode of the PID namespace of a process; raises OSError where /proc does not tell.

    For `self` it is right also where /proc is that of a namespace further out, which has another number for us.
    """
    return (proc / str(pid) / "ns/pid").stat().st_ino


def _page() -> memoryview | None:
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPED_IN_CHILDREN)
    except Exception:  # an older Linux or one that is imitated, an audit hook of the program
        return None
    return memoryview(page).cast("Q")


_its_page: Final = _page()
_newest = 0
_newest_pid = os.getpid()


def own_process() -> int:
    """A number that no process has had from which this one was forked, also where C code forked it unnoticed.

    A child may have its parent's pid, as the first process of another PID namespace has whose parent is the first of
    its own.  So this goes by a page of memory that Linux empties in each forked child, and by the pid as well: what
    imitates Linux may say that it will empty the page, and not do so.
    """
    global _newest, _newest_pid
    pid = os.getpid()
    if _its_page is None:
        return pid
    before, its_pid = _newest, _newest_pid  # first: another thread may notice the same fork meanwhile
    number = _its_page[0]
    if not number or its_pid != pid:
        _its_page[0] = number = before + 1
    if number != before:
        _newest, _newest_pid = number, pid
    return number
