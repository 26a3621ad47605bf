"""Counts that are not in the store yet: summed up, bounded in number, and written when they are due.

Opening the store costs a hundred times as much as reading the counters.  So a count that is new (another problem,
outcome, phase or label) is due at once, and more calls of one that the store has already are due after STEADY flushes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

from gemmtuned.configs import clock
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

MAX_PENDING: Final = 65_536  # distinct problems kept while the store is out of reach
MOST_AT_ONCE: Final = 2_000  # written in one transaction, about 0.1 s, for which other programs wait
MAX_COMPILED: Final = 4096  # distinct GEMMs inside kernels of torch.compile, kept while the store is out of reach
STEADY: Final = 5  # flushes after which known counts are due
STEADY_S: Final = 5.0  # seconds after which they are due at the latest: the session's beat opens the store then anyway

Key = tuple[Problem, str, bool, str, str, str]  # problem, outcome, graph, place, phase, run
Counts = dict[Key, list[float]]


class Pending:
    """flush_s: between two flushes."""

    def __init__(self, flush_s: float) -> None:
        self._wait_s = min(STEADY * flush_s, STEADY_S)
        self._counts: Counts = {}
        self._written: set[int] = set()  # hashes of what the store has: the collector counts none of them
        self._has_new = False  # some of what is pending is not among them
        self._due_s = 0.0  # a time of clock.monotonic()

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def calls(self) -> int:
        """Calls in all."""
        return int(sum(sums[0] for sums in self._counts.values()))

    @property
    def is_due(self) -> bool:
        """Whether it is to be written now."""
        return bool(self._counts) and (self._has_new or clock.monotonic() >= self._due_s)

    def add(self, s: Sighting, run: str, *, keep: bool) -> bool:
        """Sum it up; False when there is no room. keep: False where only what is known already is summed up."""
        key = (s.problem, s.outcome, s.graph, s.place, s.phase, run)
        sums = self._counts.get(key)
        if sums is None:
            if not keep or len(self._counts) >= MAX_PENDING:
                return False
            is_new = hash(key) not in self._written
            sums = self._counts[key] = [0, 0, 0.0]
            self._has_new = self._has_new or is_new
        sums[0] += s.calls
        sums[1] += s.sampled_calls
        sums[2] += s.sampled_us
        return True

    def batches(self) -> Iterator[tuple[str, str, Counts]]:
        """(place, run, counts), MOST_AT_ONCE at most: all of it, piece by piece."""
        kinds: dict[tuple[str, str], list[Key]] = {}
        for key in self._counts:
            kinds.setdefault((key[3], key[5]), []).append(key)
        for (place, run), keys in kinds.items():
            for at in range(0, len(keys), MOST_AT_ONCE):
                yield place, run, {key: self._counts[key] for key in keys[at : at + MOST_AT_ONCE]}

    def forget(self, counts: Counts, *, written: bool) -> None:
        """The store has taken these, or nobody ever will."""
        if written:
            self._written.update(map(hash, counts))
        for key in counts:
            del self._counts[key]
        if not self._counts:
            self._counts = {}  # an emptied one keeps its room

    def all_given(self) -> None:
        """The store has been offered all of it, and has taken it."""
        self._has_new = False
        self._due_s = clock.monotonic() + self._wait_s
        if len(self._written) > MAX_PENDING:
            self._written.clear()


class Notes:
    """Notes on problems, (problem, name, place and what else they say), until the store has them: kernels that
    torch.compile has made of them, engines' operators that wait for a solution.
    """

    def __init__(self, take: Callable[[], Iterable[tuple[Any, ...]]]) -> None:
        self._take = take  # yields those that came since its last call
        self._notes: dict[tuple[Any, ...], None] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def collect(self, *, keep: bool) -> None:
        """Take what came, as far as there is room, or drop all."""
        for note in self._take():
            if keep and len(self._notes) < MAX_COMPILED:
                self._notes[note] = None

    def give(
        self, environment_of: Callable[[str], Environment | None], put: Callable[..., object], late: PutOff
    ) -> None:
        """Have `put(environment, [(problem, name), ...], what else)` write all of it, for each place and what else.

        Those of a place without an environment are forgotten, and those of one that raises wait for the next time.
        """
        for rest in {note[2:] for note in self._notes}:
            try:
                environment = environment_of(rest[0])
            except Exception as err:
                late.note(err)
                continue
            if environment is not None:
                put(environment, [note[:2] for note in self._notes if note[2:] == rest], *rest[1:])
            self._notes = {note: None for note in self._notes if note[2:] != rest}


class PutOff:
    """Errors that must keep no counts back: what is raised inside `with` is raised by `now`, the first of them."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> bool:
        if isinstance(err, Exception):
            self.note(err)
        return isinstance(err, Exception)

    def note(self, err: Exception) -> Literal[False]:
        """Keep it for `now`; False for the caller: something is not done."""
        self._first = self._first or err
        return False

    def now(self) -> None:
        """Raise it, if there is one."""
        if self._first is not None:
            raise self._first


def sightings(counts: Counts) -> list[Sighting]:
    """The sightings of one batch, as the store takes them."""
    return [Sighting(*k[:2], int(c[0]), k[2], int(c[1]), c[2], *k[3:5]) for k, c in counts.items()]
