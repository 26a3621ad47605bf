"""One daemon on a GPU at a time, whoever's it is and whatever its home: a lock file named by the GPU's UUID.

Held while a worker is there, so daemons of several users take turns.  The kernel frees it however its holder dies.
Whoever cleans /tmp may remove the file meanwhile: its holder asks for it now and then, which touches it, and takes the
new one where that has happened.  The folder is one for all users of the machine (`GEMMTUNED_DEVICE_LOCKS`);
containers that share a GPU must mount the same.  Each of them must be able to lock it, so anybody can, and keep us off
the GPU: the message says who does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import Final, Protocol

from gemmtuned.configs.open_files import limit_reached
from gemmtuned.configs.solution import slug
from gemmtuned.db.descriptors import identity_of
from gemmtuned.db.lockfile import STOPPED, holder, lies_at, open_lock, what_lies_there

logger = logging.getLogger("gemmtuned.daemon")

_TRIES: Final = 3


class Lock(Protocol):
    """What a worker needs to hold."""

    def take(self) -> str:
        """Hold it, or see that we still do; "" when it is ours, else why it is not. Never waits."""

    def lost(self) -> str:
        """As take, of one that we hold; "" too where nobody can be seen to have it: it may not be asked for now."""

    def drop(self) -> None:
        """Let it go."""


class LockingError(Exception):
    """A lock file that cannot be opened or locked; the text names it, and the way out."""


class DeviceLock:
    """The lock of one device. who: of us, for the message of others. own: of one home, so that nobody else holds it."""

    def __init__(self, folder: Path, device_id: str, who: str, *, own: bool = False) -> None:
        self._own = own
        self._path = folder / f"gemmtuned-{slug(device_id, 80)}.lock"
        self._who = who
        self._fd: int | None = None
        self._which: tuple[int, int] | None = None  # the file that it is of
        self._said = ""

    def take(self) -> str:
        """Hold it; "" when it is ours, else why it is not. Never waits."""
        try:
            return self.hold()
        except LockingError as err:
            return str(err)

    def lost(self) -> str:
        """As Lock.lost: where it cannot be asked for (no file can be opened), nothing says that it is lost."""
        try:
            return self.hold()
        except LockingError as err:
            if str(err) != self._said:
                self._said = str(err)
                logger.warning("lock not looked at, asked again reason=%r", self._said)
            return ""

    def hold(self) -> str:
        """As take, but for a file that cannot be locked by anybody here: raises LockingError."""
        if self._fd is not None and self._is_there(self._fd):
            with contextlib.suppress(OSError):  # for those who clean /tmp by age; another user's cannot be touched
                os.utime(self._fd)
            return ""
        self._mind_descriptor()
        for _ in range(_TRIES):
            fd, why = self._locked()
            if fd is None:
                return why
            if fd == self._fd:
                return ""
            if self._is_there(fd):
                break
            os.close(fd)  # it was removed before we had it
        else:
            raise LockingError(f"{self._path}: is removed again and again. Set GEMMTUNED_DEVICE_LOCKS")
        self.drop()  # the one that was removed while we held it
        self._fd, self._which = fd, identity_of(fd)
        with contextlib.suppress(OSError):  # another user's file can be locked, but not written
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode(f"{self._who}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"), 0)
        return ""

    def _is_there(self, fd: int) -> bool:
        """Whether the file that is open here is the one that others would lock."""
        found = identity_of(fd)
        return found is not None and found == lies_at(self._path)

    def _locked(self) -> tuple[int | None, str]:
        """A descriptor of the file that lies there, locked; or None, and who holds it. Raises LockingError.

        The descriptor is the one that we have where that file is the same: a look at it may have failed once.
        """
        try:
            fd = self._open()
        except OSError as err:
            full = limit_reached(err)
            if full:
                raise LockingError(f"{self._path}: cannot be opened: {full}") from err
            raise LockingError(
                f"{self._path}: cannot be opened ({err.strerror or err}). Set GEMMTUNED_DEVICE_LOCKS"
            ) from err
        if self._fd is not None and identity_of(fd) == self._which:
            os.close(fd)
            return self._fd, ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = self._held_by(fd)
            os.close(fd)
            return None, why
        except OSError as err:
            os.close(fd)
            raise LockingError(
                f"{self._path}: cannot be locked ({err.strerror or err}). Set GEMMTUNED_DEVICE_LOCKS"
            ) from err
        return fd, ""

    def drop(self) -> None:
        """Let it go."""
        self._mind_descriptor()
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def _mind_descriptor(self) -> None:
        """Forget one that was closed under us: it may be another file's by now."""
        if self._fd is not None and (self._which is None or identity_of(self._fd) != self._which):
            self._fd = None

    def _held_by(self, fd: int) -> str:
        """Who tunes there by its own words, and which process holds the lock if these do not name it."""
        said = ""
        with contextlib.suppress(OSError):
            said = os.pread(fd, 300, 0).decode(errors="replace").strip()
        why = f"another gemmtuned daemon tunes on it: {said or 'it just started'}"
        found = holder(self._path)
        if found and (STOPPED in found or not said.startswith(found.partition(" (")[0] + ",")):
            why += f"; its lock {self._path} is held by {found}"
        return why

    def _open(self) -> int:
        """Whatever lies there, this returns at once; a descriptor of a regular file, or OSError."""
        if self._own:
            return open_lock(self._path)
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        for _ in range(3):
            for access in (os.O_RDWR, os.O_RDONLY):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    return _regular(os.open(self._path, access | flags))
            if not self._path.parent.is_dir():
                with contextlib.suppress(FileExistsError):
                    self._path.parent.mkdir(parents=True)
                    self._path.parent.chmod(0o1777)  # for all users, as the folder that we take where none is named
            with contextlib.suppress(FileExistsError):
                return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
        raise PermissionError(f"uid {os.geteuid()} may not open it")


def _regular(fd: int) -> int:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(f"{what_lies_there(mode)} lies there; remove it")
    return fd
