"""What a pool does at the URL: it claims units before they are tuned and puts results there, as any one host does."""

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

LOOK_S: Final = 30.0  # claims of others are read again after this long
AHEAD: Final = 64  # units whose results are looked at together


@dataclass
class _Known:
    """Of one environment: units with a result that hosts would read, names of results that nobody has looked at here,
    by unit, and those that somebody has; up to which name they were listed, claims and when they were read."""

    units: set[str] = field(default_factory=set)
    unread: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    looked: set[str] = field(default_factory=set)
    after: str = ""
    claims: dict[str, claims.Claim] = field(default_factory=dict)
    read_s: float = float("-inf")


class Shelf:
    """See the module. All methods raise TryLater when the store cannot be reached."""

    def __init__(self, objects: Objects, host: str, trust: Trust) -> None:
        self._objects, self._host, self._trust = objects, host, trust
        self._claims = objects.can_claim and not is_repository(objects)
        self._known: dict[str, _Known] = {}
        self._ours: dict[tuple[str, str], str] = {}  # (environment, unit): name of the claim
        self._unsure: dict[tuple[str, str], str] = {}  # the same where the store has not said yet who won
        self._holder = f"{host} {secrets.token_hex(4)}"  # the daemon of this home, and other runs, have the same host
        self.there: set[tuple[str, str]] = set()  # (environment, unit) passed over: somebody's result is there
        self.theirs: set[tuple[str, str]] = set()  # or somebody tunes them now

    @property
    def passed_over(self) -> set[tuple[str, str]]:
        """Units that are not ours to tune."""
        return self.there | self.theirs

    def claim(self, wanted: Sequence[Wanted], most: int) -> tuple[list[Wanted], list[Wanted]]:
        """Claim up to `most` of these units of one environment; (those that are ours now, those not looked at)."""
        if not wanted:
            return [], []
        name = environment_name(wanted[0].environment)
        known = self._known.setdefault(name, _Known())
        clock_s = self._clock()
        if self._claims and time.monotonic() - known.read_s > LOOK_S:
            known.claims = claims.read(self._objects, name, clock_s=clock_s, key=self._trust.key)
            known.read_s = time.monotonic()
        self._list(name, known, clock_s)
        won: list[Wanted] = []
        for number, one in enumerate(wanted):
            if len(won) == most:
                return self._still_open(name, known, clock_s, won), list(wanted[number:])
            if self._is_there(known, one.name, ahead=wanted[number : number + AHEAD]):
                self.there.add(one.key)
            elif self._take(name, known, one):
                won.append(one)
            else:
                self.theirs.add(one.key)
        return self._still_open(name, known, clock_s, won), []

    def publish(self, wanted: Wanted, answer: Answer) -> str:
        """Put the result of a unit there; its name. Raises TableError when it is none that others would read."""
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
        """Bring what was put there, where a store takes many objects in one step."""
        self._objects.flush()

    def drop(self, wanted: Iterable[Wanted]) -> None:
        """These are left to others, or done."""
        self._give_back([one.key for one in wanted if one.key in self._ours])

    def drop_all(self) -> None:
        """Nothing is ours any more."""
        for key, path in list(self._unsure.items()):
            self._learn(key, path)
        self._give_back(list(self._ours))

    def _give_back(self, keys: Sequence[tuple[str, str]]) -> None:
        """A store that fails leaves them ours, for the next try."""
        claims.done(self._objects, [self._ours[key] for key in keys])
        for key in keys:
            del self._ours[key]

    def _take(self, name: str, known: _Known, one: Wanted) -> bool:
        """Whether this unit is ours now: claimed at this moment, or before the store failed."""
        if not self._claims or one.key in self._ours:
            return True
        path = claims.next_path(name, one.name, known.claims, self._trust.key) or self._unsure.get(one.key)
        if path is None:
            return False
        self._unsure[one.key] = path
        if self._objects.create(path, claims.content(path, self._holder, self._trust.key)):
            self._ours[one.key] = self._unsure.pop(one.key)
            return True
        return self._learn(one.key, path)

    def _learn(self, key: tuple[str, str], path: str) -> bool:
        """Ask whose this claim is; whether it is ours."""
        is_ours = claims.is_held_by(self._objects, path, self._holder, self._trust.key)
        del self._unsure[key]
        if is_ours:
            self._ours[key] = path
        return is_ours

    def _still_open(self, name: str, known: _Known, clock_s: float, won: list[Wanted]) -> list[Wanted]:
        """The units for which no result came while we claimed; a host that brings one drops its claim."""
        if won and self._claims:
            self._list(name, known, clock_s)
            come = [one for one in won if self._is_there(known, one.name, ahead=won)]
            self.drop(come)
            self.there |= {one.key for one in come}
        return [one for one in won if one.name not in known.units]

    def _is_there(self, known: _Known, unit: str, *, ahead: Iterable[Wanted]) -> bool:
        """Whether a result of this unit is there. A name alone says nothing: anybody can make one up.

        ahead: units that are asked for next; their results are looked at with it, side by side.
        """
        if unit not in known.units and known.unread.get(unit):
            units = {one.name for one in ahead}
            paths = sorted(path for one in units for path in known.unread.get(one, ()))
            found = list(get_many(self._objects, paths, limit=record.MAX_BYTES))  # or all of them are asked for again
            known.looked.update(paths)
            for one in units:
                known.unread.pop(one, None)
            known.units.update(result.unit for path, data in found if (result := self._result(path, data)) is not None)
        return unit in known.units

    def _result(self, path: str, data: bytes | TableError | None) -> Result | None:
        """What hosts of this trust would read there."""
        if not isinstance(data, bytes):
            return None
        try:
            result = record.read(path, data, key=self._trust.key)
        except TableError:
            return None
        return result if result.host == self._host or self._trust.allows(result.host) else None

    def _list(self, name: str, known: _Known, clock_s: float) -> None:
        for path, unit in record.listed(self._objects, name, after=known.after):
            if path not in known.looked:
                known.unread[unit].add(path)
        if self._claims:  # elsewhere names go by hosts' own clocks
            known.after = result_floor(name, clock_s - SLACK_S)

    def _clock(self) -> float:
        if not self._claims:
            return time.time()
        return store_now_s(self._objects, beat_path(self._host))
