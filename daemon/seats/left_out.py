"""What workers must not run: pieces of other packages that ended a worker's process, and names that a user excludes.

A piece is the import of a module, or one call into it.  A worker says which piece of which package it is about to run
(kernels/other_packages.py), so that the daemon knows which one ended it.  That piece is written to a file of the home,
and no later worker runs it for as long as the same versions of that package and of torch are installed.  After a hang
or a SIGKILL, which may be nobody's fault, it is left out for a day only.

Hosts and environments may share a home.  Each of them removes from the file only what it has written itself, and what
is too old; a lock beside the file keeps two writers from undoing each other's changes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Final

from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.protocol.wire import Hello, LeftOut, Message
from gemmtuned.daemon.status_file import MOST_NUMBER, replace_file
from gemmtuned.db.lockfile import LockFile

logger = logging.getLogger("gemmtuned.daemon")

FILE: Final = "left_out.json"
LOCK: Final = "left_out.lock"
MOST_BYTES: Final = 1 << 18
MOST: Final = 200  # pieces in the file
DOUBTFUL_S: Final = 86_400.0
FOREIGN_S: Final = 30 * DOUBTFUL_S  # after which a piece that another host or environment has written is removed
LOCK_S: Final = 1.0  # to wait for the lock; a home may lie where there are none, and is then written without
UNEXPLAINED: Final = 2  # workers in a row that ended at their start, after some pieces had run: the next one runs none
ALL: Final = "*"  # every piece
_WHY_ALL: Final = "is left out with all of other packages: workers ended at their start, and nothing says at which"
# From outside: a service manager ends all processes of a daemon at the same time
FROM_OUTSIDE: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Ended:
    """A piece that ended a worker: a row of the file.

    installed: what was installed then, as `installed` gives it.  doubtful: it may not be the piece's fault.  where: the
    host and environment that wrote the row; "" where an earlier version did.
    """

    piece: str
    package: str
    version: str
    installed: str
    how: str
    at_s: float
    doubtful: bool
    where: str = ""

    def holds(self, now_s: float) -> bool:
        """Whether the piece is still to be left out here."""
        return self.installed == installed(self.package) and not self._is_over(now_s)

    def is_kept(self, now_s: float) -> bool:
        """Whether the row stays in the file: it holds here, or it may on another host or in another environment."""
        if self.where in ("", here()):
            return self.holds(now_s)
        return self.at_s + FOREIGN_S >= now_s and not self._is_over(now_s)

    def is_same(self, other: Ended) -> bool:
        """Whether `other` replaces this row: the same piece, written here too, or with the same installation."""
        return self.piece == other.piece and (self.where in ("", other.where) or self.installed == other.installed)

    def _is_over(self, now_s: float) -> bool:
        return self.doubtful and self.at_s + DOUBTFUL_S < now_s


class Pieces:
    """The pieces that workers of a home must not run.

    home: None keeps them in memory alone, for as long as this process lives.  without: names that a user excludes.
    """

    def __init__(self, home: Path | None = None, without: tuple[str, ...] = ()) -> None:
        self.without = without
        self._home = home
        self._unwritten: tuple[Ended, ...] = ()
        self._unexplained: dict[str, int] = {}  # by device: workers in a row, as UNEXPLAINED counts them

    @classmethod
    def of(cls, settings: Settings) -> Pieces:
        """The pieces of the home that these settings name, with the names that they exclude."""
        return cls(settings.home, settings.without)

    def ended(self, device: str = "") -> dict[str, str]:
        """The pieces that no worker of this device may run now, each with how it ended one; ALL means all pieces."""
        now_s = time.time()
        found = {one.piece: f"ended a worker: {one.how}" for one in self._known() if one.holds(now_s)}
        return {**found, ALL: _WHY_ALL} if self._unexplained.get(device, 0) >= UNEXPLAINED else found

    def at_start(self, device: str, *, well: bool, with_pieces: bool) -> None:
        """Note how a worker started. well: it came up.  with_pieces: it ran pieces of other packages before.

        A thread that a piece has begun may end the process a moment later, when nothing tells which piece it was.
        """
        if with_pieces:
            self._unexplained[device] = 0 if well else self._unexplained.get(device, 0) + 1
        elif not well:  # without pieces, too: so it is not their fault
            self._unexplained[device] = 0

    def blame(self, piece: str, package: str, how: str, *, doubtful: bool) -> None:
        """Note that this piece ended a worker. doubtful: it may not be the piece's fault."""
        now_s = time.time()
        one = Ended(piece, package, _version(package), installed(package), how[:300], now_s, doubtful, here())
        where = "this process"
        with self._alone():
            before = self._known()
            kept = [known for known in before if known.is_kept(now_s) and not known.is_same(one)]
            everything = (*kept, one)[-MOST:]
            text = json.dumps({"pieces": [asdict(one) for one in everything]}, indent=1) + "\n"
            self._unwritten = everything
            if self._home is not None and replace_file(self._home / FILE, text):
                self._unwritten, where = (), str(self._home / FILE)
        if any(known.piece == piece and known.holds(now_s) for known in before):  # by another seat's worker
            return
        logger.warning(
            "left out piece=%r package=%s version=%s reason=%r kept_in=%s",
            piece, package, one.version, f"it ended a worker: {one.how}", where,
        )  # fmt: skip

    def _known(self) -> tuple[Ended, ...]:
        written = read(self._home) if self._home is not None else ()
        new = [one for one in self._unwritten if one not in written]
        return (*(one for one in written if not any(map(one.is_same, new))), *new)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from changing the file meanwhile, where there is a lock."""
        lock = LockFile(self._home / LOCK) if self._home is not None and os.path.isdir(self._home) else None  # noqa: PTH112  never raises
        held = False
        if lock is not None:
            with suppress(OSError):
                held = lock.acquire(LOCK_S, make=True)
        try:
            yield
        finally:
            if lock is not None and held:
                lock.release()
            if lock is not None:
                lock.close()


class Announced:
    """What the worker of one seat leaves out, as it announces it: logged once, and kept for reports."""

    def __init__(self, device_id: str) -> None:
        self._device_id, self._pid = device_id, 0
        self._names: dict[str, str] = {}
        self._logged: set[LeftOut] = set()

    def hear(self, message: Message, pid: int) -> None:
        """Take a message of the worker; most are of other kinds."""
        if not isinstance(message, (LeftOut, Hello)):
            return
        if pid != self._pid:
            self._pid, self._names = pid, {}
        if isinstance(message, LeftOut):
            self._names[message.name] = message.why
            if message not in self._logged and len(self._logged) < MOST:
                self._logged.add(message)
                level = logging.INFO if message.wanted else logging.WARNING
                logger.log(level, "left out device=%s name=%s reason=%r", self._device_id, message.name, message.why)

    def lines(self) -> list[str]:
        """One line for each name that is left out, with why."""
        return [f"{name}: {why}" for name, why in self._names.items()]


def read(home: Path) -> tuple[Ended, ...]:
    """The rows of a home's file; none where there is no such file, or it holds something else."""
    try:
        found = json.loads(read_small(home / FILE, MOST_BYTES))["pieces"]
        return tuple(_checked(one) for one in found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _checked(row: Mapping[str, object]) -> Ended:
    types: dict[str, tuple[type, ...]] = {"str": (str,), "float": (int, float), "bool": (bool,)}
    for field in fields(Ended):
        if not isinstance(row.get(field.name, "" if field.name == "where" else None), types[str(field.type)]):
            raise TypeError(field.name)
    if not abs(row["at_s"]) < MOST_NUMBER:  # type: ignore[arg-type]
        raise ValueError("at_s")
    return Ended(**row)  # type: ignore[arg-type]


def here() -> str:
    """This host and environment."""
    return f"{socket.gethostname()} {sys.prefix}"


def installed(package: str) -> str:
    """Text that is equal while a piece of the package is unchanged: its version, its installation, torch, Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    when = ""
    with suppress(Exception):  # not installed, or broken: then it has no folder
        # The folder of its metadata, which every installation makes anew
        where = getattr(distribution(package), "_path", None)
        when = str(Path(where).stat().st_mtime_ns) if where is not None else ""
    return f"{package} {_version(package)} of {when}, torch {_version('torch')}, Python {python}"


def _version(package: str) -> str:
    try:
        return version(package) or ""  # None where its metadata names none
    except Exception:  # not installed, or its metadata cannot be read
        return ""
