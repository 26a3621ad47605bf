"""Simulated time, and an object store in it: what fleet_simulated.py has in place of a clock and a bucket."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import greenlet

from gemmtuned.configs.errors import TryLater
from gemmtuned.fleet import claims
from gemmtuned.fleet.layout import CLAIMS, claim_parts, claim_path
from gemmtuned.fleet.objects import AT_ONCE, Entry
from gemmtuned.fleet.times import PACE

ENVIRONMENT = "cuda-nvidia-h200-132-0123456789ab"
NAME_BYTES = 420  # of a name in a page of S3's ListObjectsV2: key, date, ETag, size, class, tags
PAGE = 1000
TIMEOUT_S = 20.0  # buckets.py
CHECKED = 200  # at one exchange in so many the real code reads the claims


def parts(path: str) -> tuple[str, int]:
    """(unit, number) of a claim."""
    found = claim_parts(path)
    assert found is not None
    return found


class Hub:
    """Simulated time: each host and each device is a greenlet that sleeps until its time has come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, greenlet]] = []
        self._number = 0
        self._main = greenlet.getcurrent()

    def start(self, work: Any) -> None:
        self._at(self.now_s, greenlet(work, self._main))

    def sleep(self, seconds: float) -> None:
        self._at(self.now_s + seconds, greenlet.getcurrent())
        self._main.switch()

    def run(self, until: Any) -> None:
        """Until it holds, or nothing is left."""
        while self._due and not until():
            self.now_s, _, next_ = heapq.heappop(self._due)
            next_.switch()

    def _at(self, at_s: float, what: greenlet) -> None:
        self._number += 1
        heapq.heappush(self._due, (at_s, self._number, what))


@dataclass
class Store:
    """Objects as a fleet knows them (gemmtuned/fleet/objects.py), in memory, in simulated time.

    read_s, write_s, list_s: medians of a request's time; a page of a listing takes list_s.  reads, writes: how many a
    second the store takes, listings among the reads.
    """

    hub: Hub
    choose: random.Random
    read_s: float = 0.02
    write_s: float = 0.04
    list_s: float = 0.12
    reads: float = 5500.0
    writes: float = 3500.0
    can_claim = True
    claimed: dict[str, Entry] = field(default_factory=dict)
    newest: dict[str, tuple[int, float]] = field(default_factory=dict)  # of each unit: number, when it was claimed
    results: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # units by minute
    requests: Counter[str] = field(default_factory=Counter)
    by_second: Counter[int] = field(default_factory=Counter)
    listed_bytes: int = 0
    refused: int = 0
    lost_creates: int = 0
    most_claims: int = 0
    longest_wait_s: float = 0.0
    _free_s: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})

    def request(self, kind: str, median_s: float, way: str) -> None:
        """One request: it waits for its turn, then takes its time."""
        now_s = self.hub.now_s
        turn_s = max(self._free_s[way], now_s)
        wait_s = turn_s - now_s
        self.requests[kind] += 1
        self.by_second[int(now_s)] += 1
        if wait_s > TIMEOUT_S:
            self.refused += 1
            self.hub.sleep(TIMEOUT_S)
            raise TryLater("slow down")
        self._free_s[way] = turn_s + 1 / (self.reads if way == "read" else self.writes)
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self.hub.sleep(wait_s + median_s * self.choose.lognormvariate(0.0, 0.5))

    def put(self, path: str, data: bytes) -> None:
        self.request("put", self.write_s, "write")

    def create(self, path: str, data: bytes) -> bool:
        self.request("create", self.write_s, "write")
        if path in self.claimed:
            self.lost_creates += 1
            return False
        self.claimed[path] = Entry(path, len(data), self.hub.now_s)
        unit, number = parts(path)
        self.newest[unit] = max(self.newest.get(unit, (-1, 0.0)), (number, self.hub.now_s))
        self.most_claims = max(self.most_claims, len(self.claimed))
        return True

    def get(self, path: str, *, limit: int) -> bytes | None:
        self.request("get", self.read_s, "read")
        return b""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        assert prefix == f"{CLAIMS}/{ENVIRONMENT}", prefix
        self.pages(len(self.claimed))
        return iter(list(self.claimed.values()))

    def pages(self, names: int) -> None:
        """The requests of a listing of so many names."""
        for _ in range(max(-(-names // PAGE), 1)):
            self.request("list", self.list_s, "read")
        self.listed_bytes += NAME_BYTES * names

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.request("delete", self.write_s, "write")
            self.claimed.pop(path, None)
            unit, number = parts(path)
            if self.newest.get(unit, (-1, 0.0))[0] == number:
                del self.newest[unit]
                left = [n for n in range(number) if claim_path(ENVIRONMENT, unit, n) in self.claimed]
                if left:
                    older = claim_path(ENVIRONMENT, unit, left[-1])
                    self.newest[unit] = (left[-1], self.claimed[older].modified_s)

    def read(self, clock_s: float) -> Known:
        """What claims.read says: by itself now and then, else from what is kept."""
        if self.requests["put"] % CHECKED == 0:
            read = claims.read(self, ENVIRONMENT, clock_s=clock_s)
            known = Known(self, clock_s)
            assert read == {unit: known[unit] for unit in self.newest}
            return known
        self.pages(len(self.claimed))
        return Known(self, clock_s)

    def clock_s(self, path: str) -> float:
        self.request("head", self.read_s, "read")
        return self.hub.now_s

    def put_results(self, units: Sequence[str]) -> None:
        """As put_many does: several side by side."""
        self.side_by_side("put", len(units), self.write_s, "write")
        self.results[int(self.hub.now_s // 60)].update(units)

    def list_results(self, after_minute: int) -> list[set[str]]:
        """Units of results from this minute on, minute by minute."""
        found = [self.results[minute] for minute in range(after_minute, int(self.hub.now_s // 60) + 1)]
        self.pages(sum(map(len, found)))
        return found

    def side_by_side(self, kind: str, count: int, median_s: float, way: str) -> None:
        """So many requests, AT_ONCE at a time: those of one row take as long as one."""
        for row in range(0, count, AT_ONCE):
            more = min(AT_ONCE, count - row) - 1
            self.requests[kind] += more
            self.by_second[int(self.hub.now_s)] += more
            self._free_s[way] += more / (self.reads if way == "read" else self.writes)
            self.request(kind, median_s, way)


class Known(dict[str, claims.Claim]):
    """The newest claims at one time, each made when it is asked for."""

    def __init__(self, store: Store, clock_s: float) -> None:
        super().__init__()
        self._newest, self._clock_s = dict(store.newest), clock_s

    def __contains__(self, unit: object) -> bool:
        return unit in self._newest

    def __getitem__(self, unit: str) -> claims.Claim:
        number, at_s = self._newest[unit]
        return claims.Claim(number, min(at_s + PACE.lease_s - self._clock_s, PACE.lease_s))

    def get(self, unit: str, default: Any = None) -> Any:
        return self[unit] if unit in self._newest else default
