"""A pool of devices at the fleet's URL, as one host: it claims units before they are tuned, and puts results there."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gemmtuned import __version__
from gemmtuned.configs.errors import TableError
from gemmtuned.fleet import claims, record
from gemmtuned.fleet.bench import Answer
from gemmtuned.fleet.demand import Wanted
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import beat_path, environment_name, result_floor, result_path
from gemmtuned.fleet.objects import Objects, get_many, store_now_s
from gemmtuned.fleet.record import Result
from gemmtuned.fleet.tables import is_repository
from gemmtuned.fleet.times import SLACK_S

CLAIMS_S: Final = 30.0  # claims of others are read again after this long
AHEAD: Final = 64  # units whose results are read together


@dataclass
class _Known:
    """What this pool knows of one environment at the URL.

    solved: units with a result that a host of this trust would take.  unread: names of results that were listed and
    not read yet, by unit.  read: names of results that were read.  listed_to: names up to this one were listed.
    claims: the newest claim of each unit, as read at claims_s (of the monotonic clock).
    """

    solved: set[str] = field(default_factory=set)
    unread: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    read: set[str] = field(default_factory=set)
    listed_to: str = ""
    claims: dict[str, claims.Claim] = field(default_factory=dict)
    claims_s: float = float("-inf")


class PoolClient:
    """See the module. All methods raise TryLater when the store of objects cannot be reached.

    solved_elsewhere, held_elsewhere: (environment, unit) of what `claim` passed over, because somebody's result is at
    the URL, or because somebody else tunes it now.
    """

    def __init__(self, objects: Objects, host: str, trust: Trust) -> None:
        self._objects, self._host, self._trust = objects, host, trust
        self._makes_claims = objects.can_claim and not is_repository(objects)
        self._known: dict[str, _Known] = {}  # by the environment's name
        self._held: dict[tuple[str, str], str] = {}  # (environment, unit): name of our claim
        self._undecided: dict[tuple[str, str], str] = {}  # the same where the store has not said yet who won
        self._holder = f"{host} {secrets.token_hex(4)}"  # the daemon of this home, and other runs, have the same host
        self.solved_elsewhere: set[tuple[str, str]] = set()
        self.held_elsewhere: set[tuple[str, str]] = set()

    @property
    def passed_over(self) -> set[tuple[str, str]]:
        """(environment, unit) of all that is not ours to tune."""
        return self.solved_elsewhere | self.held_elsewhere

    def claim(self, wanted: Sequence[Wanted], most: int) -> tuple[list[Wanted], list[Wanted]]:
        """Claim up to `most` of these units of one environment.

        Returns (the units that are ours now, those that were not tried because enough had been claimed).
        """
        if not wanted:
            return [], []
        name = environment_name(wanted[0].environment)
        known = self._known.setdefault(name, _Known())
        clock_s = self._clock()
        if self._makes_claims and time.monotonic() - known.claims_s > CLAIMS_S:
            known.claims = claims.read(self._objects, name, clock_s=clock_s, key=self._trust.key)
            known.claims_s = time.monotonic()
        self._list(name, known, clock_s)
        won: list[Wanted] = []
        for number, one in enumerate(wanted):
            if len(won) == most:
                return self._still_open(name, known, clock_s, won), list(wanted[number:])
            if self._is_solved(known, one.name, ahead=wanted[number : number + AHEAD]):
                self.solved_elsewhere.add(one.key)
            elif self._take(name, known, one):
                won.append(one)
            else:
                self.held_elsewhere.add(one.key)
        return self._still_open(name, known, clock_s, won), []

    def publish(self, wanted: Wanted, answer: Answer) -> str:
        """Put the result of a unit at the URL; its name. Raises TableError for a result that others would not read."""
        assert answer.environment is not None
        result = Result(
            self._host, __version__, answer.environment, wanted.unit.covers, answer.solutions, answer.measured,
            answer.trials,
        )  # fmt: skip
        data, digest = record.write(result, self._trust.key)
        path = result_path(environment_name(answer.environment), result.unit, digest, self._clock())
        record.read(path, data, key=self._trust.key)
        self._objects.put(path, data)
        self.drop([wanted])
        return path

    def flush(self) -> None:
        """Send what was put, where a store takes many objects in one step."""
        self._objects.flush()

    def drop(self, wanted: Iterable[Wanted]) -> None:
        """Give back our claims of these units: they are done, or left to others."""
        self._give_back([one.key for one in wanted if one.key in self._held])

    def drop_all(self) -> None:
        """Give back all our claims."""
        for key, path in list(self._undecided.items()):
            self._decide(key, path)
        self._give_back(list(self._held))

    def _give_back(self, keys: Sequence[tuple[str, str]]) -> None:
        """Where the store fails they stay ours, and the next try gives them back."""
        claims.done(self._objects, [self._held[key] for key in keys])
        for key in keys:
            del self._held[key]

    def _take(self, name: str, known: _Known, one: Wanted) -> bool:
        """Whether this unit is ours now: claimed at this moment, or before the store failed."""
        if not self._makes_claims or one.key in self._held:
            return True
        path = claims.next_path(name, one.name, known.claims, self._trust.key) or self._undecided.get(one.key)
        if path is None:
            return False
        self._undecided[one.key] = path
        if self._objects.create(path, claims.content(path, self._holder, self._trust.key)):
            self._held[one.key] = self._undecided.pop(one.key)
            return True
        return self._decide(one.key, path)

    def _decide(self, key: tuple[str, str], path: str) -> bool:
        """Whether this claim turns out to be ours: asks the store whose it is."""
        is_ours = claims.is_held_by(self._objects, path, self._holder, self._trust.key)
        del self._undecided[key]
        if is_ours:
            self._held[key] = path
        return is_ours

    def _still_open(self, name: str, known: _Known, clock_s: float, won: list[Wanted]) -> list[Wanted]:
        """The units of which no result came while we claimed: its host then dropped its claim, and so we won one."""
        if won and self._makes_claims:
            self._list(name, known, clock_s)
            solved = [one for one in won if self._is_solved(known, one.name, ahead=won)]
            self.drop(solved)
            self.solved_elsewhere |= {one.key for one in solved}
        return [one for one in won if one.name not in known.solved]

    def _is_solved(self, known: _Known, unit: str, *, ahead: Iterable[Wanted]) -> bool:
        """Whether a result of this unit is at the URL. Its name alone proves nothing: anybody can make one up.

        ahead: the unit and those that are asked for next, whose results are read in the same step.
        """
        if unit not in known.solved and known.unread.get(unit):
            units = {one.name for one in ahead}
            paths = sorted(path for one in units for path in known.unread.get(one, ()))
            found = list(get_many(self._objects, paths, limit=record.MAX_BYTES))  # or all of them are asked for again
            known.read.update(paths)
            for one in units:
                known.unread.pop(one, None)
            known.solved.update(result.unit for path, data in found if (result := self._result(path, data)) is not None)
        return unit in known.solved

    def _result(self, path: str, data: bytes | TableError | None) -> Result | None:
        """The result that a host of this trust would take from this object; None where it would take none."""
        if not isinstance(data, bytes):
            return None
        try:
            result = record.read(path, data, key=self._trust.key)
        except TableError:
            return None
        return result if result.host == self._host or self._trust.allows(result.host) else None

    def _list(self, name: str, known: _Known, clock_s: float) -> None:
        """Note the results that have come since the last time."""
        for path, unit in record.listed(self._objects, name, after=known.listed_to):
            if path not in known.read:
                known.unread[unit].add(path)
        if self._makes_claims:  # elsewhere names carry the times of hosts' own clocks, which may differ
            known.listed_to = result_floor(name, clock_s - SLACK_S)

    def _clock(self) -> float:
        if not self._makes_claims:
            return time.time()
        return store_now_s(self._objects, beat_path(self._host))
