"""CHILD side: the candidates that a search tries: those asked for, else those that the backends offer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment
from gemmtuned.daemon.child.outcome import DEFAULT
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels.backends import candidates
from gemmtuned.kernels.backends.base import Backend, CompiledBackend
from gemmtuned.kernels.budget import MOST, in_turns


class Offers:
    """members: the sizes that a candidate must hold.  skip: candidates that failed before."""

    def __init__(
        self,
        members: Sequence[Problem],
        environment: Environment,
        options: SearchOptions,
        skip: Collection[Candidate],
        backends: Mapping[str, Backend],
    ) -> None:
        self._members, self._environment, self._options = members, environment, options
        self._skip, self._backends = skip, backends

    def at(self, main: Problem) -> Iterator[Candidate]:
        """Seeds first, then our own in turns of backends and sizes (the most called member, the largest).

        MOST in all, or as few as `first` of the options says.

        Those that a backend itself likes least give way.  A candidate must hold the rows of X of every member.
        """
        seeds, only = self._options.seeds, self._options.only
        if only is not None:
            return self._distinct(chain(seeds, only))
        lists: dict[tuple[str, Problem], list[Candidate]] = {}
        for size in dict.fromkeys((main, self._members[-1])):
            for candidate in candidates(size, self._environment):
                lists.setdefault((candidate.backend, size), []).append(candidate)
        return islice(self._distinct(chain(seeds, in_turns(lists.values()))), min(self._options.first or MOST, MOST))

    def _distinct(self, offered: Iterable[Candidate | None]) -> Iterator[Candidate]:
        return distinct(offered, self._skip, self._can_be_tried)

    def _can_be_tried(self, candidate: Candidate) -> bool:
        if self._environment.stamp_of(candidate) is None or not self._options.allows(candidate):
            return False
        backend = self._backends.get(candidate.backend)
        if isinstance(backend, CompiledBackend) and self._options.only is None:  # who asks for it reads why not
            return all(backend.holds(candidate, member) for member in self._members)
        return backend is not None


def distinct(
    offered: Iterable[Candidate | None], skip: Collection[Candidate], can_be_tried: Callable[[Candidate], bool]
) -> Iterator[Candidate]:
    """Each once of those that can be tried; not torch's own, which is in every race, nor those to skip."""
    seen = {DEFAULT, *skip}
    for candidate in offered:
        if candidate is not None and candidate not in seen and can_be_tried(candidate):
            seen.add(candidate)
            yield candidate
