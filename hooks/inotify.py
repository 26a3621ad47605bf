"""File events of a few folders, read from the kernel by ctypes: no package is imported into a host for them.

The descriptor is the one thing that we hold between two turns.  A program may close every descriptor it finds and open
its own under our number, so before each use /proc says whether what is there is still ours.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.unpatched import builtins, fcntl, os
from gemmtuned.hooks.background import Sleeper

if TYPE_CHECKING:
    from gemmtuned.hooks.native import Native

__builtins__ = builtins

MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE, CLOSE_WRITE = 0x2, 0x40, 0x80, 0x100, 0x200, 0x8
DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
WATCHED: Final = MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | CLOSE_WRITE | DELETE_SELF | MOVE_SELF
_EVENT: Final = struct.Struct("iIII")
_ROOM: Final = 1 << 16
_PART: Final = 1024  # bytes of /proc read together, enough for a few watches
_STDERR: Final = 2
_BUSY_S: Final = 0.05
GAP_S: Final = 0.05  # between two looks at events: a program may write a log beside its table, line by line
_libc = ctypes.CDLL(None, use_errno=True)


class Events(Sleeper):
    """A sleeper that file events wake: `watch` opens it, without it it only sleeps."""

    def __init__(self, native: Callable[[], Native | None] = lambda: None) -> None:
        super().__init__(native)
        self._fd: int | None = None
        self._names: dict[int, Collection[str]] = {}  # by watch: the file names that matter there
        self._inodes: dict[int, int] = {}  # by watch: what the kernel says of it as long as it is ours
        self._facts = b""  # what /proc said of the descriptor when all watches were new
        self._lock_fd = FrameLock()  # around opening, using and closing the descriptor
        self._informed: Native | None = None  # the library, once it knows what a forked child is to close
        self._read_s = 0.0  # when events were read last, of clock.monotonic()
        self.changed = False  # a name that matters, or the folder itself, since it was last set to False
        self.alive = False  # False also when a folder went away, or the descriptor

    def watch(self, folders: Mapping[Path, Collection[str]]) -> None:
        """Watch these folders for these names. Raises OSError where events cannot be had."""
        self.close()
        with self._lock_fd:
            fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if fd < 0:
                raise _error("inotify_init1")
            if fd <= _STDERR:  # a standard stream of the program's is closed: its number is the program's
                low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
                os.close(low)
            try:
                for folder, names in folders.items():
                    number = _libc.inotify_add_watch(fd, os.fsencode(folder), ctypes.c_uint32(WATCHED))
                    if number < 0:
                        raise _error(str(folder))
                    self._names[number] = {*self._names.get(number, ()), *names}  # one folder may have two names
                    self._inodes[number] = folder.stat().st_ino
                if not self._is_ours(fd):
                    raise OSError("/proc does not show the descriptor")
                self._facts = _facts_of(fd)
            except BaseException:
                os.close(fd)
                self._names, self._inodes = {}, {}
                raise
            self._fd, self.alive = fd, True
            self._informed = None

    def wait(self, timeout_s: float) -> None:
        """As Sleeper.wait; returns too when something happened in the folders, GAP_S after the last time or later."""
        until_s = clock.monotonic() + timeout_s
        gap_s = self._read_s + GAP_S - clock.monotonic()
        if not self.alive or gap_s > 0:
            super().wait(min(gap_s, timeout_s) if self.alive else timeout_s)
        fd = self._fd
        if fd is None or not self.alive:  # a second `wake` finds no watch to take away, and would end no sleep there
            return
        self._tell(fd)
        if self._sleep(fd, until_s - clock.monotonic()):
            self._read_s = clock.monotonic()
            self._read()

    def wake(self) -> None:
        """Taking a watch away is an event, too."""
        super().wake()
        if not self._lock_fd.enter(_BUSY_S):  # our thread has it, so it is awake; a file server may not answer it
            return
        try:
            if self._fd is not None and self._is_ours(self._fd):
                for number in self._names:
                    _libc.inotify_rm_watch(self._fd, number)
        finally:
            self._lock_fd.leave()

    def close(self) -> None:
        """Close the descriptor, if it is still ours."""
        with self._lock_fd:
            fd, self._fd, self.alive = self._fd, None, False
            if self._informed is not None:
                self._informed.watched(-1, b"")
            if fd is not None and self._is_ours(fd):
                os.close(fd)
            self._names, self._inodes = {}, {}

    def _tell(self, fd: int) -> None:
        native = self.native()
        if native is not None and native is not self._informed:
            with self._lock_fd:
                if fd == self._fd:
                    native.watched(fd, self._facts)
                    self._informed = native

    def descriptor(self) -> int | None:
        """What a forked child will have of it and should close, if it is still ours."""
        fd = self._fd
        return fd if fd is not None and self._is_ours(fd) else None

    def _read(self) -> None:
        with self._lock_fd:
            fd = self._fd
            if fd is None or not self._is_ours(fd):
                self._fd, self.alive, self.changed = None, False, True  # the program's descriptor by now: let it be
                return
            data = b""
            with suppress(BlockingIOError):
                data = os.read(fd, _ROOM)
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            if mask & (DELETE_SELF | MOVE_SELF | OVERFLOW | IGNORED):
                self.alive, self.changed = False, True
            elif name in self._names.get(number, ()):
                self.changed = True
        if not self.alive:  # a forked child knows it no more by what /proc says, and would keep its copy
            self.close()

    def _is_ours(self, fd: int) -> bool:
        """Whether /proc says that this descriptor has our watches and no other."""
        try:
            facts = _facts_of(fd)
        except OSError:
            return False
        if facts == self._facts:  # mostly so, and a forked child has each page copied that more work here writes to
            return bool(facts)
        if "inotify" not in os.readlink(f"/proc/thread-self/fd/{fd}"):
            return False
        found = {}
        for line in facts.decode().splitlines():
            if line.startswith("inotify "):
                fields = dict(part.split(":", 1) for part in line.split()[1:] if ":" in part)
                found[int(fields["wd"])] = int(fields["ino"], 16)
        return found.items() <= self._inodes.items()


def _facts_of(fd: int) -> bytes:
    """What /proc says of a descriptor, watch by watch. Raises OSError where there is none."""
    proc = os.open(f"/proc/thread-self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        facts = part = os.read(proc, _PART)
        while len(part) == _PART:
            part = os.read(proc, _PART)
            facts += part
        return facts
    finally:
        os.close(proc)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
