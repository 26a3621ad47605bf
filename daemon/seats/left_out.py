"""What workers do without: pieces of other packages that ended one, and names that somebody wants left out.

A worker says which piece of which package it is about to run (kernels/other_packages.py).  One that ends it is kept in
a file of the home, so that no later worker runs it, for as long as the same version of that package is installed, with
the same torch.  What may not be its own fault, a hang or a SIGKILL, is kept for a day.

Hosts and environments may share a home.  Each takes away only what it has written itself and what is too old, and a
lock beside the file keeps two that write at once from losing each other's.
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
MOST: Final = 200  # pieces
DOUBTFUL_S: Final = 86_400.0
FOREIGN_S: Final = 30 * DOUBTFUL_S  # after which a piece of another host or environment goes
LOCK_S: Final = 1.0  # a home may lie where no lock can be had: then without
IN_THE_DARK: Final = 2  # workers that ended at their start, in a row, behind pieces of others: the next one runs none
ALL: Final = "*"  # every piece
_WHY_ALL: Final = "is left out with all of other packages: workers ended at their start, and nothing says at which"
# From outside: a service manager ends all processes of a daemon at the same time
FROM_OUTSIDE: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Ended:
    """A piece that ended a worker.

    installed: what was installed then.  doubtful: perhaps by no fault of its own.  where: the host and environment that
    wrote it; "" of an earlier version.
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
        """Whether it is still to be left out."""
        return self.installed == installed(self.package) and not self._is_over(now_s)

    def is_kept(self, now_s: float) -> bool:
        """Whether it stays in the file: it holds, or it may hold for another host or environment."""
        if self.where in ("", here()):
            return self.holds(now_s)
        return self.at_s + FOREIGN_S >= now_s and not self._is_over(now_s)

    def is_same(self, other: Ended) -> bool:
        """Whether it is the same piece of the same installation, or of an earlier one at the same path."""
        return self.piece == other.piece and (self.where in ("", other.where) or self.installed == other.installed)

    def _is_over(self, now_s: float) -> bool:
        return self.doubtful and self.at_s + DOUBTFUL_S < now_s


class Pieces:
    """Those of a home; of none, for as long as this process lives. without: names that somebody wants left out."""

    def __init__(self, home: Path | None = None, without: tuple[str, ...] = ()) -> None:
        self.without = without
        self._home = home
        self._unwritten: tuple[Ended, ...] = ()
        self._in_the_dark: dict[str, int] = {}  # by device

    @classmethod
    def of(cls, settings: Settings) -> Pieces:
        """Those of a home, without what its user wants left out."""
        return cls(settings.home, settings.without)

    def ended(self, device: str = "") -> dict[str, str]:
        """The pieces that no worker of this device may run now, each with how it ended one; ALL stands for all."""
        now_s = time.time()
        found = {one.piece: f"ended a worker: {one.how}" for one in self._known() if one.holds(now_s)}
        return {**found, ALL: _WHY_ALL} if self._in_the_dark.get(device, 0) >= IN_THE_DARK else found

    def at_start(self, device: str, *, well: bool, with_pieces: bool) -> None:
        """How a worker started that has run pieces of other packages, or was to run none.

        A thread that one of them began may end the process a moment later, when nothing tells which it was.
        """
        if with_pieces:
            self._in_the_dark[device] = 0 if well else self._in_the_dark.get(device, 0) + 1
        elif not well:  # then it is no fault of theirs
            self._in_the_dark[device] = 0

    def blame(self, piece: str, package: str, how: str, *, doubtful: bool) -> None:
        """This piece ended a worker. doubtful: perhaps by no fault of its own."""
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
        """While no other process changes the file, as far as a lock can be had."""
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


class Told:
    """What the worker of one seat does without, as it says it itself: said once in the log, kept for reports."""

    def __init__(self, device_id: str) -> None:
        self._device_id, self._pid = device_id, 0
        self._names: dict[str, str] = {}
        self._logged: set[LeftOut] = set()

    def hear(self, message: Message, pid: int) -> None:
        """Whatever a worker says."""
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
        """One for each name, with why."""
        return [f"{name}: {why}" for name, why in self._names.items()]


def read(home: Path) -> tuple[Ended, ...]:
    """What the file of a home says; nothing where it is none of ours."""
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
    """What must be equal for a piece of it to be as it was: its version and when that was installed, torch, Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    when = ""
    with suppress(Exception):  # not installed, or broken: then it has no folder
        # The folder of its facts, which every installation makes anew
        where = getattr(distribution(package), "_path", None)
        when = str(Path(where).stat().st_mtime_ns) if where is not None else ""
    return f"{package} {_version(package)} of {when}, torch {_version('torch')}, Python {python}"


def _version(package: str) -> str:
    try:
        return version(package) or ""  # None where its metadata names none
    except Exception:  # not installed, or its metadata cannot be read
        return ""
