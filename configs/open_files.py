"""Why files cannot be opened or written: said so, with what helps.

A process may open no more files, or write no larger ones; a disk is full; a file lies where a folder would have to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Final

from gemmtuned.configs.unpatched import sleep

_NEEDED: Final = 8  # descriptors that SQLite and we have open at once, at most
_RLIMIT_FSIZE, _RLIMIT_NOFILE, _RLIMIT_AS = 1, 7, 9  # Linux's numbers, on every architecture that torch is built for
SHUT_S: Final = (0.001, 0.005, 0.025, 0.1)  # waits until another process has opened a folder that it has made
_NO_LIMIT: Final = ctypes.c_ulong(-1).value


def free_bytes(folder: str | os.PathLike[str]) -> int | None:
    """Bytes that may be written in a folder; None where its file system counts none. Raises OSError.

    A tmpfs without a limit, and some of FUSE, have no blocks at all, and say that none of them is free.
    """
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def limit_reached(err: BaseException | None = None) -> str:
    """What helps where no more files can be opened, worded as the end of a message; "" for another error.

    err: what was raised. None, or an error that has no number: whether as many as a database takes can be opened now.
    """
    number = err.errno if isinstance(err, OSError) else _probed()
    if number == errno.ENFILE:
        return "the machine has no room for more open files. Close programs, or raise it: sysctl -w fs.file-max=..."
    if number != errno.EMFILE:
        return ""
    soft, hard = _limits(_RLIMIT_NOFILE)
    raised, by = (hard, "") if hard > soft else (max(4 * soft, 1024), " (as root)")
    now = f"prlimit --pid {os.getpid()} --nofile={raised}:{max(raised, hard)}"
    return (
        f"this process has as many files open as it may ({soft}). Raise that{by}: ulimit -n {raised} before it starts "
        f"(LimitNOFILE= of a service), or if it runs on: {now}"
    )


def size_limit() -> str:
    """How large this process may make a file, worded as the end of a message; "" where nothing limits it.

    SQLite calls a write beyond that an error of the disk.
    """
    most = _limits(_RLIMIT_FSIZE)[0]
    if most == _NO_LIMIT:
        return ""
    return (
        f"this process may make no file larger than {most >> 10} KiB. Raise that: ulimit -f unlimited before it starts "
        "(LimitFSIZE= of a service)"
    )


def memory_limit() -> str:
    """How much memory this process may map, worded as the end of a message; "" where nothing limits it.

    SQLite maps what users of a database share, and calls it an error of the disk where that fails.
    """
    most = _limits(_RLIMIT_AS)[0]
    if most == _NO_LIMIT:
        return ""
    return (
        f"this process may map no more than {most >> 20} MiB of memory. Raise that: ulimit -v unlimited before it "
        "starts (LimitAS= of a service)"
    )


def in_the_way(folder: Path) -> str:
    """What keeps this folder from being made, such as "/home/locks is a file"; "" where it is there, or can be made."""
    for there in (folder, *folder.parents):
        try:
            is_link = stat.S_ISLNK(there.lstat().st_mode)
            if there.is_dir():
                return ""
            return f"{there} is " + (f"a link to {there.readlink()}, which is no folder" if is_link else "a file")
        except (FileNotFoundError, NotADirectoryError):  # noqa: PERF203
            pass
        except OSError:
            return ""
    return ""


def make_folders(folder: Path) -> None:
    """Make the folder and those above it. Raises OSError; NotADirectoryError says what is in the way, and no name.

    What it makes is open to its owner, whatever the umask: that may be a program's which is about to write a secret.
    Another process may be between making one and opening it, so what is refused in a folder of ours is tried again.
    """
    for wait_s in (*SHUT_S, None):
        try:
            _make(folder)
            return
        except PermissionError:  # noqa: PERF203  mostly it is made at once
            if wait_s is None or not _lies_in_ours(folder):
                raise
            sleep(wait_s)
        except (FileExistsError, NotADirectoryError) as err:
            what = in_the_way(folder)
            if not what:
                raise
            raise NotADirectoryError(errno.ENOTDIR, what) from err


def _lies_in_ours(folder: Path) -> bool:
    """Whether the last of these folders that can be looked at is this user's."""
    for there in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return there.stat().st_uid == os.geteuid()
    return False


def _make(folder: Path, *, its_parents: bool = True) -> None:
    try:
        folder.mkdir()
    except FileNotFoundError:  # also where the parent is there and takes no folders, as /proc
        if not its_parents or folder.parent == folder:
            raise
        _make(folder.parent)
        _make(folder, its_parents=False)
    except OSError:  # another process was faster, or it was there
        if not folder.is_dir():
            raise
    else:
        open_to_owner(folder)


def open_to_owner(path: Path) -> None:
    """Give a file or folder that was just made what the umask has kept from its owner. Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    owners = 0o700 if path.is_dir() else 0o600
    if mode & owners != owners:
        path.chmod(mode | owners)


def _limits(of: int) -> tuple[int, int]:
    """One limit of this process, and how far it may raise it.

    The C library is asked: torch does not import `resource`, and a program may have a resource.py of its own.
    """
    both = (ctypes.c_ulong * 2)()
    ctypes.CDLL(None).getrlimit(of, both)
    return both[0], both[1]


def _probed() -> int | None:
    held: list[int] = []
    try:
        for _ in range(_NEEDED):
            held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))  # noqa: PERF401  what was opened is to be closed
    except OSError as err:
        return err.errno
    finally:
        for fd in held:
            with contextlib.suppress(OSError):
                os.close(fd)
    return None
