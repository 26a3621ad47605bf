"""How a worker runs code of other packages, so that one that breaks costs its own part and nothing else.

Other packages add backends and families by entry points, and kernels through backends that we have written for them.
Only workers, which measure, import them; programs never do.  The code is run in pieces: the import of a module, or one
call.  A piece that raises is left out, and that is said.  A piece that ends the whole process cannot be caught: so each
is announced before it runs (`Guests.tell`), and the daemon, which then knows what its worker died of, starts the next
one without that piece (daemon/seats/left_out.py).
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
from gemmtuned.configs.passing import lack_in, with_lack

logger = logging.getLogger("gemmtuned.kernels")
_T = TypeVar("_T")
_ALIKE: Final = 6  # similar names that are listed for one that nothing has


class NotRun(Exception):
    """A piece of another package is left out, so it is not run."""


class Guests:
    """The code of other packages in this process.

    tell: is called with (piece, package) before a piece runs, and with ("", "") when none runs any more.
    say: is called with (name, why, wanted) for each backend, family or entry point that is left out.
    without: names, or patterns of names, that a user excludes: of backends, families, entry points and packages.
    ended: pieces that ended an earlier worker, each with how it did; "*" means every piece.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str, str], object] = lambda piece, package: None
        self.say: Callable[[str, str, bool], object] = _log
        self.without: tuple[str, ...] = ()
        self.ended: Mapping[str, str] = {}
        self.lacking: dict[str, str] = {}  # what is left out because something is missing that may come back, with why
        self.package_of: dict[str, str] = {}  # by name, of backends and families that entry points have added
        self._running: list[tuple[str, str]] = []
        self._said: dict[str, str] = {}
        self._used: set[str] = set()  # patterns of `without` that fitted a name
        self._names: set[str] = set()  # all names that `is_unwanted` was asked about

    def is_unwanted(self, *names: str) -> bool:
        """Whether a user excludes one of these names; then nothing of it is run, not even to learn its version."""
        self._names.update(filter(None, names))
        pattern = next((p for p in self.without for name in names if is_named(name, p)), "")
        if pattern:
            self._used.add(pattern)
            self.leave_out(names[0], f"GEMMTUNED_WITHOUT or --without names {pattern}", wanted=True)
        return bool(pattern)

    def say_unused(self) -> None:
        """Say which patterns of `without` fit no name: they may be misspelt."""
        for pattern in self.without:
            if pattern in self._used:
                continue
            alike = sorted(name for name in self._names if name.startswith(pattern))
            only = f", only {', '.join(alike[:_ALIKE])}{' and more' * (len(alike) > _ALIKE)}" if alike else ""
            self.leave_out(pattern, f"GEMMTUNED_WITHOUT or --without names it, and nothing here has that name{only}")

    def run(self, piece: str, package: str, do: Callable[[], _T]) -> _T:
        """Run `do` as this piece. Raises NotRun where the piece ended an earlier worker, and whatever `do` raises."""
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
        """As `run`; where it raises, say that `name` is left out, and return `otherwise`."""
        try:
            return self.run(piece, package, do)
        except BaseException as err:  # other people's code may raise anything, to end the process, too
            self.leave_out(name, reason_of(err))
            return otherwise

    def leave_out(self, name: str, why: str, *, wanted: bool = False) -> None:
        """Say that this is left out, once for each reason. wanted: a user excludes it, so nothing is wrong."""
        if not wanted and lack_in(why):
            self.lacking[name] = why
        if self._said.get(name) != why:
            self._said[name] = why
            self.say(name, why, wanted)

    def load(self, modules: Iterable[str], package: str) -> None:
        """Import modules of a package, each as a piece. Raises as `run` does."""
        for module in modules:
            self.run(f"import of {module}", package, partial(import_module, module))


def _log(name: str, why: str, wanted: bool) -> None:
    logger.log(logging.DEBUG if wanted else logging.WARNING, "%s left out reason=%r", name, why)


GUESTS: Final = Guests()


def reason_of(err: BaseException) -> str:
    """The error on one line, with what was missing where that is known."""
    said = str(err) if isinstance(err, NotRun) else f"{type(err).__name__}: {err}"
    return with_lack(" ".join(said.split())[:300], err)


def is_named(name: str, pattern: str) -> bool:
    """Whether a name or pattern of a user fits: case does not matter, and - is as good as _."""
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
    """The objects that the entry points of this group name. Those that do not load, or are refused, are left out.

    kind: what they are, for messages.  objection: why an object is refused; "" where it is not.
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
