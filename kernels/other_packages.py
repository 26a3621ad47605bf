"""What other packages add to ours, and how a worker runs it: a package that breaks costs its own part and nothing else.

They add backends and families by entry points, and kernels of theirs by backends that we have written.  Workers, which
measure, import them for that; programs never do.  What a piece of theirs raises leaves out that piece, with a word.  A
piece that ends the whole process cannot be caught, so it is told before it runs (`Guests.tell`): the daemon then knows
what its worker died of, and starts the next one without it (daemon/seats/left_out.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from typing import Final, TypeVar

from gemmtuned.configs.named_points import named_points, package_of
from gemmtuned.configs.passing import lack_in, told

logger = logging.getLogger("gemmtuned.kernels")
_T = TypeVar("_T")
_ALIKE: Final = 6  # names that are said where one fits none


class NotRun(Exception):
    """A piece of another package is left out, so it is not run."""


class Guests:
    """The other packages in this process.

    tell: called with (piece, package) before a piece runs, and with ("", "") once none does.
    say: called with (name, why, wanted) for each backend, family or entry point that is left out.
    without: names that somebody wants left out, or patterns of them: of backends, families, entry points and packages.
    ended: pieces that ended an earlier worker, with how they did; "*" stands for every piece.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str, str], object] = lambda piece, package: None
        self.say: Callable[[str, str, bool], object] = _log
        self.without: tuple[str, ...] = ()
        self.ended: Mapping[str, str] = {}
        self.lacking: dict[str, str] = {}  # what is left out for want of something that may be there again, with why
        self.package_of: dict[str, str] = {}  # of backends and families that came by entry points, by their names
        self._running: list[tuple[str, str]] = []
        self._said: dict[str, str] = {}
        self._used: set[str] = set()  # patterns of `without` that something has
        self._names: set[str] = set()  # all that were asked for

    def is_unwanted(self, *names: str) -> bool:
        """Whether somebody wants one of these names left out; then nothing of it is run, nor its version asked for."""
        self._names.update(filter(None, names))
        pattern = next((p for p in self.without for name in names if is_named(name, p)), "")
        if pattern:
            self._used.add(pattern)
            self.leave_out(names[0], f"GEMMTUNED_WITHOUT or --without names {pattern}", wanted=True)
        return bool(pattern)

    def say_unused(self) -> None:
        """Say which names of `without` nothing has: they may be misspelt."""
        for pattern in self.without:
            if pattern in self._used:
                continue
            alike = sorted(name for name in self._names if name.startswith(pattern))
            only = f", only {', '.join(alike[:_ALIKE])}{' and more' * (len(alike) > _ALIKE)}" if alike else ""
            self.leave_out(pattern, f"GEMMTUNED_WITHOUT or --without names it, and nothing here has that name{only}")

    def run(self, piece: str, package: str, do: Callable[[], _T]) -> _T:
        """What `do` gives. Raises NotRun for a piece that ended an earlier worker, and whatever `do` raises."""
        why = self.ended.get(piece) or self.ended.get("*")
        if why:
            raise NotRun(f"{piece} {why}")
        self._running.append((piece, package))
        self.tell(piece, package)
        try:
            return do()
        finally:
            self._running.pop()
            self.tell(*(self._running[-1] if self._running else ("", "")))

    def ask(self, name: str, piece: str, package: str, do: Callable[[], _T], otherwise: _T) -> _T:
        """As `run`; `otherwise`, with a word that `name` is left out, where it raises."""
        try:
            return self.run(piece, package, do)
        except BaseException as err:  # other people's code may raise anything, to end the process, too
            self.leave_out(name, reason_of(err))
            return otherwise

    def leave_out(self, name: str, why: str, *, wanted: bool = False) -> None:
        """Say so, once for each reason. wanted: somebody asked for it, so nothing is wrong."""
        if not wanted and lack_in(why):
            self.lacking[name] = why
        if self._said.get(name) != why:
            self._said[name] = why
            self.say(name, why, wanted)

    def load(self, modules: Iterable[str], package: str) -> None:
        """Import modules of a package, each a piece of its own. Raises as `run` does."""
        for module in modules:
            self.run(f"import of {module}", package, partial(import_module, module))


def _log(name: str, why: str, wanted: bool) -> None:
    logger.log(logging.DEBUG if wanted else logging.WARNING, "%s left out reason=%r", name, why)


GUESTS: Final = Guests()


def reason_of(err: BaseException) -> str:
    """What an error says, on one line, and what it was short of."""
    said = str(err) if isinstance(err, NotRun) else f"{type(err).__name__}: {err}"
    return told(" ".join(said.split())[:300], err)


def is_named(name: str, pattern: str) -> bool:
    """Whether somebody means it by this name or pattern: a package's may have - or _, and any case."""
    return fnmatchcase(name, pattern) or fnmatchcase(_plain(name), _plain(pattern))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def installed(packages: str | tuple[str, ...]) -> tuple[str, str]:
    """(name, version) of the first of these distributions that is installed.

    Raises PackageNotFoundError, and ValueError where its metadata cannot be read, or names no version.
    """
    for name in (packages,) if isinstance(packages, str) else packages:
        try:
            found: str | None = version(name)
        except PackageNotFoundError:  # the next name
            continue
        except Exception as err:
            raise ValueError(f"the metadata of {name} cannot be read: {reason_of(err)}") from err
        if not found:
            raise ValueError(f"the metadata of {name} names no version")
        return name, found
    raise PackageNotFoundError(str(packages))


def found(group: str, kind: str, objection: Callable[[_T], str]) -> Iterator[_T]:
    """What the entry points of this group name; those that do not load, or have an objection, are left out with a word.

    kind: what it is, for the word.  objection: why it cannot be taken; "" where it can.
    """
    points, broken = named_points(group)
    for path, why in broken.items():
        GUESTS.leave_out(path, f"its metadata cannot be read: {why}")
    for point in points:
        package = package_of(point)
        if GUESTS.is_unwanted(point.name, package):
            continue
        piece = f"{kind} {point.name} = {point.value}"
        nothing: list[tuple[str, _T]] = []
        for name, one in GUESTS.ask(point.name, piece, package, partial(_loaded, point, objection), nothing):
            if not GUESTS.is_unwanted(name):
                GUESTS.package_of[name] = package
                yield one


def _loaded(point: EntryPoint, objection: Callable[[_T], str]) -> list[tuple[str, _T]]:
    one: _T = point.load()
    why = objection(one)
    if why:
        raise ValueError(why)
    return [(str(one.name), one)]  # type: ignore[attr-defined]
