"""Do claims carry a fleet of 1,000 hosts? The claim code itself; hosts and an object store that exist in numbers only.

    python -m benchmarks fleet_simulated                                  1,000 hosts, 100,000 problems
    python -m benchmarks fleet_simulated --hosts 100 --problems 10000     and less

Real: taking and dropping claims (gemmtuned/fleet/claims.py), which units a host tries to claim (claiming.py), when it
exchanges (times.py), what is listed.  Claims are read by the real code at one exchange in 200, and must equal what is
kept up to date for the others.  A model: time; the store, with a latency for each request, pages of 1,000 names, and
limits on reads and writes a second, over which a request waits; and the hosts: each waits for the same number of
problems, drawn so that few problems are wanted by many hosts, searches what it claimed and checks what others found.
All hosts start within a minute and see problems in one order of worth.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

import record
from fleet_simulated_store import ENVIRONMENT, Hub, Store

from gemmtuned.configs.errors import TryLater
from gemmtuned.db.fleet import LOW
from gemmtuned.fleet import claiming, claims
from gemmtuned.fleet.fetch_results import FETCH
from gemmtuned.fleet.sync import OPEN
from gemmtuned.fleet.times import PACE, SLACK_S


class Fleet:
    """All hosts, and what became of the problems."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.choose = random.Random(args.seed)
        self.hub = Hub()
        self.store = Store(self.hub, self.choose, reads=args.reads, writes=args.writes)
        self.units = [sha256(str(n).encode()).hexdigest()[:32] for n in range(args.problems)]
        self.searched: Counter[str] = Counter()
        self.first_s: dict[str, float] = {}  # when a unit had its first result
        self.exchanges_s: list[float] = []
        self.failed = 0
        self.covered_s: list[float] = []
        self.hosts = [Host(self, number, wanted) for number, wanted in enumerate(self._wanted())]

    def _wanted(self) -> list[list[str]]:
        """What each host waits for, worth most first: every problem at one host at least, the first ones at many."""
        args = self.args
        wanted: list[set[int]] = [set() for _ in range(args.hosts)]
        for number in range(args.problems):
            wanted[number % args.hosts].add(number)
        for one in wanted:
            while len(one) < args.wanted:
                one.add(int(args.problems * self.choose.random() ** 3))
        return [[self.units[number] for number in sorted(one)] for one in wanted]

    def run(self) -> None:
        for host in self.hosts:
            self.hub.start(host.exchanges)
            self.hub.start(host.device)
        began_s, told_s = time.monotonic(), time.monotonic()

        def over() -> bool:
            nonlocal told_s
            if time.monotonic() - told_s > 30:
                told_s = time.monotonic()
                print(
                    f"{self.hub.now_s:8.0f} s simulated, {told_s - began_s:6.0f} s here: {len(self.first_s)} results, "
                    f"{len(self.covered_s)} hosts covered", file=sys.stderr, flush=True,
                )  # fmt: skip
            done = len(self.covered_s) == len(self.hosts) and len(self.first_s) == len(self.units)
            return done or self.hub.now_s > self.args.most_s

        self.hub.run(over)


class Host:
    """One host: a daemon that exchanges and a device that searches and checks."""

    def __init__(self, fleet: Fleet, number: int, wanted: list[str]) -> None:
        self.fleet, self.name = fleet, f"host-{number:08x}"
        self.open = dict.fromkeys(wanted)  # worth most first
        self.rank = {unit: position for position, unit in enumerate(wanted)}
        self.ours: dict[str, str] = {}  # claimed: name of the claim
        self.to_search: list[tuple[int, str]] = []
        self.to_check: list[tuple[int, str]] = []
        self.unread: set[str] = set()
        self.fetched: set[str] = set()
        self.unsent: list[str] = []
        self.found_s: list[float] = []  # when a search ended, or with --count-checks a check, too
        self.asked = True
        self.after_minute = 0
        self.failed = 0

    # --- the device

    def device(self) -> None:
        fleet, hub = self.fleet, self.fleet.hub
        while self.open:
            search = self.to_search[0] if self.to_search else (1 << 60, "")
            check = self.to_check[0] if self.to_check else (1 << 60, "")
            if search == check:
                self.asked = True
                hub.sleep(1.0)
                continue
            if check < search:  # by worth, as the daemon leases
                heapq.heappop(self.to_check)
                hub.sleep(fleet.args.check_s)
                self.open.pop(check[1], None)
                if fleet.args.count_checks:
                    self.found_s.append(hub.now_s)
                continue
            heapq.heappop(self.to_search)
            if len(self.to_search) < LOW:
                self.asked = True
            fleet.searched[search[1]] += 1
            hub.sleep(fleet.args.search_s * fleet.choose.uniform(0.5, 1.5))
            self.found_s.append(hub.now_s)
            if search[1] in self.open:
                self.open.pop(search[1])
                self.unsent.append(search[1])
        fleet.covered_s.append(hub.now_s)

    # --- the exchange

    def exchanges(self) -> None:
        hub, fleet = self.fleet.hub, self.fleet
        hub.sleep(fleet.choose.uniform(0.0, fleet.args.start_s))
        while self.open or self.unsent:
            began_s = hub.now_s
            try:
                self.exchange()
                self.failed = 0
            except TryLater:
                self.failed += 1
                fleet.failed += 1
            fleet.exchanges_s.append(hub.now_s - began_s)
            while hub.now_s - began_s < PACE.wait_s(self.failed, asked=self.asked):
                hub.sleep(PACE.look_s)

    def exchange(self) -> None:
        store = self.fleet.store
        store.put("beat", b"")
        clock_s = store.clock_s("beat")
        known: dict[str, claims.Claim] = {}
        if self.open or self.ours:
            known = store.read(clock_s)
        self._list(clock_s)
        self._fetch()
        self._send()
        self._share_out(known, clock_s)

    def _list(self, clock_s: float) -> list[set[str]]:
        found = self.fleet.store.list_results(self.after_minute)
        self.after_minute = max(int((clock_s - SLACK_S) // 60), 0)
        for minute in found:
            self.unread |= (self.open.keys() & minute) - self.fetched
        return found

    def _fetch(self) -> None:
        todo = sorted(self.unread & self.open.keys(), key=self.rank.__getitem__)[:FETCH]
        self.fleet.store.side_by_side("get", len(todo), self.fleet.store.read_s, "read")
        for unit in todo:
            if unit not in self.ours:
                heapq.heappush(self.to_check, (self.rank[unit], unit))
        self.fetched.update(todo)
        self.unread.difference_update(todo)

    def _send(self) -> None:
        units, self.unsent = self.unsent, []
        if units:
            self.fleet.store.put_results(units)
            for unit in units:
                self.fleet.first_s.setdefault(unit, self.fleet.hub.now_s)
            self.fetched.update(units)

    def _share_out(self, known: dict[str, claims.Claim], clock_s: float) -> None:
        store, args = self.fleet.store, self.fleet.args
        over = [unit for unit in self.ours if unit not in self.open and unit not in self.unsent]
        claims.done(store, [self.ours.pop(unit) for unit in over])
        if not self.asked:
            return
        least, most = claiming.BATCH
        lately = sum(at_s > clock_s - claiming.RATE_S for at_s in self.found_s[-2 * most :])
        wanted = max(min(2 * lately, most), least) - sum(unit in self.open for unit in self.ours)
        taken = self.ours.keys() | self.unread | self.fetched
        free = [unit for unit in list(self.open)[:OPEN] if unit not in taken]
        free = [unit for unit in free if unit not in known or known[unit].left_s <= 0]
        self.asked = False
        won: dict[str, str] = {}
        for near in islice(claiming.tries(free, max(wanted, 0), self.name), 1 if args.one_try else None):
            if len(won) >= wanted:
                break
            won |= claims.take(store, ENVIRONMENT, near, known, host=self.name, most=wanted - len(won))
        if won:
            listed = self._list(clock_s)
            come = {unit for unit in won if any(unit in minute for minute in listed)}
            claims.done(store, [path for unit, path in won.items() if unit in come])
            self.ours |= {unit: path for unit, path in won.items() if unit not in come}
            for unit in won:
                if unit not in come:
                    heapq.heappush(self.to_search, (self.rank[unit], unit))


def shares(values: Sequence[float]) -> dict[str, float]:
    """Median, 95 % and largest of these."""
    found = sorted(values) or [float("nan")]
    return {
        name: round(found[int(at * (len(found) - 1))], 2) for name, at in (("median", 0.5), ("p95", 0.95), ("max", 1))
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--wanted", type=int, default=300, help="problems that each host waits for")
    parser.add_argument("--search-s", type=float, default=20.0)
    parser.add_argument("--check-s", type=float, default=1.5)
    parser.add_argument("--start-s", type=float, default=60.0)
    parser.add_argument(
        "--reads", type=float, default=5500.0, help="that the store takes a second (S3: for one prefix)"
    )
    parser.add_argument("--writes", type=float, default=3500.0)
    parser.add_argument("--most-s", type=float, default=86_400.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--one-try", action="store_true", help="do not look further where others were first, as before")
    parser.add_argument("--count-checks", action="store_true", help="claim as many as were checked lately, as before")
    args = parser.parse_args(argv)
    fleet, began_s = Fleet(args), time.monotonic()
    fleet.run()
    store, span_s = fleet.store, fleet.hub.now_s
    checks = args.hosts * args.wanted - len(fleet.searched)
    busy_s = sum(fleet.searched.values()) * args.search_s + checks * args.check_s
    rates = [store.by_second[second] for second in range(int(span_s) + 1)]
    result = {
        "model": {name: value for name, value in vars(args).items() if name != "out"}
        | {"read_s": store.read_s, "write_s": store.write_s, "list_s": store.list_s},
        "covered": len(fleet.covered_s), "results": len(fleet.first_s),
        "all_results_s": round(max(fleet.first_s.values(), default=0.0)), "all_hosts_s": round(span_s),
        "half_results_s": round(sorted(fleet.first_s.values())[len(fleet.first_s) // 2]),
        "searches": sum(fleet.searched.values()),
        "duplicates": sum(fleet.searched.values()) - len(fleet.searched),
        "requests": dict(store.requests), "requests_a_second": shares(rates),
        "mean_requests_a_second": round(sum(rates) / len(rates), 1),
        "listed_mb_a_second": round(store.listed_bytes / span_s / 1e6, 2),
        "exchanges": len(fleet.exchanges_s), "exchange_s": shares(fleet.exchanges_s), "failed_exchanges": fleet.failed,
        "creates_lost": store.lost_creates, "most_claims": store.most_claims,
        "longest_wait_s": round(store.longest_wait_s, 2), "refused": store.refused,
        "devices_at_work": round(busy_s / (args.hosts * span_s), 3),
        "took_s": round(time.monotonic() - began_s),
    }  # fmt: skip
    kind = "".join(f"-{name}" for name in ("one-try", "count-checks") if getattr(args, name.replace("-", "_")))
    path = record.save(f"fleet_simulated-{args.hosts}{kind}-{time.strftime('%Y-%m-%d')}", result, args.out)
    print(json.dumps(result, indent=1))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
