"""The exchange of hosts that share results, without processes: real stores, claims and objects, a planted search."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import planted_search
import pytest
from fleet_killed import killer
from fleets import Host, note, problem, rounds, running, searches

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.fleet import wiring
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.times import ALONE_S, EVERY_S, LEASE_S, MOST_S, REQUEST_S, SLACK_S, WORK_S, Mark, Pace

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_search, "pause_s", 0.0)


class Around:
    """Objects with something wrong; all else as it is."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


class LosesClaims(Around):
    """Every second claim is answered as won, and is not there."""

    created = 0

    def create(self, path: str, data: bytes) -> bool:
        self.created += 1
        return True if self.created % 2 else self._objects.create(path, data)


class CutOff(Around):
    """Nothing is reached after so many requests."""

    def __init__(self, objects: Objects, after: int = 0) -> None:
        super().__init__(objects)
        self.left = after

    def __getattr__(self, name: str) -> Any:
        if name not in ("can_claim", "flush"):
            self.left -= 1
            if self.left < 0:
                raise TryLater("the store cannot be reached")
        return super().__getattr__(name)


class EndsEarly(Around):
    """The time for an exchange is over after so many results were put or fetched."""

    moved = 0

    def put(self, path: str, data: bytes) -> None:
        self.moved += path.startswith("results/")
        self._objects.put(path, data)

    def get(self, path: str, *, limit: int) -> bytes | None:
        self.moved += path.startswith("results/")
        return self._objects.get(path, limit=limit)


def fleet(folder: Path, number: int = 3) -> list[Host]:
    return [Host(folder / f"h{i}", (folder / "shared").as_uri()) for i in range(number)]


def test_the_times_follow_their_rules() -> None:
    assert MOST_S == WORK_S + 2 * REQUEST_S < SLACK_S - REQUEST_S / 2
    assert ALONE_S >= 2 * EVERY_S and LEASE_S > ALONE_S + MOST_S
    waits = [Pace().wait_s(failed, asked=False) for failed in range(1, 30)]
    assert max(waits) <= EVERY_S / 2 * 1.2, "who was cut off is back within a minute"
    assert len(set(waits)) == len(waits), "hosts that started together do not go on together"
    fruitless = [Pace().wait_s(0, asked=True, fruitless=number) for number in range(30)]
    assert fruitless[0] <= 6.0 and min(fruitless[4:]) >= 0.8 * EVERY_S and max(fruitless) <= 1.2 * EVERY_S


def test_an_exchange_that_lasts_is_no_cut_and_one_that_fails_is_one_after_a_while() -> None:
    pace = Pace()
    mark = Mark(pace)
    assert mark.begin(1000.0) > 1000.0 + pace.most_s, "the first exchange may be a long one"
    mark.reached(1200.0)
    for begin_s in (1260.0, 1560.0, 1860.0):  # each takes as long as it may
        assert mark.until_s > begin_s
        assert mark.begin(begin_s) > begin_s + pace.most_s
        assert mark.reached(begin_s + pace.most_s) > begin_s + pace.most_s + pace.every_s * 1.2
    assert mark.failed() == 2100.0 + pace.alone_s, "counted from the last that succeeded"
    assert mark.begin(2400.0) == 2100.0 + pace.alone_s, "who is alone stays so while it tries again"
    assert Mark(pace).failed() == 0.0, "who never reached anybody is alone at once"


def test_every_problem_is_tuned_once_though_each_exchange_outlasts_the_time_after_which_one_is_alone(
    tmp_path: Path,
) -> None:
    hosts = fleet(tmp_path)
    problems = [problem(i) for i in range(18)]
    with running(hosts):
        for host in hosts:
            host.see(*problems)
            host.turn()
        for _ in range(9):
            for host in hosts:
                host.store.fleet_sync.begin(host.url, live_until_s=host.mark.begin(host.now_s()))
                host.skew_s += MOST_S - 1.0  # the exchange is under way for so long while the daemon goes on
                host.work(4)
                host.exchange(claim=True).run(now_s=host.now_s() - MOST_S)
                host.store.fleet_sync.begin(host.url, live_until_s=host.mark.reached(host.now_s()))
        assert {len(host.solved()) for host in hosts} == {18}
        assert searches(hosts) == {str(p): 1 for p in problems}


@pytest.mark.parametrize("skews_s", [(0.0, 0.0, 0.0), (0.0, 3600.0, -3600.0)])
def test_three_hosts_tune_each_problem_once(skews_s: tuple[float, ...], tmp_path: Path) -> None:
    hosts = fleet(tmp_path)
    problems = [problem(i) for i in range(40)]
    with running(hosts):
        for host, host.skew_s in zip(hosts, skews_s, strict=True):
            host.see(*problems)
        rounds(hosts)
        assert {len(host.solved()) for host in hosts} == {40}
        assert searches(hosts) == {str(p): 1 for p in problems}
        assert min(len(host.searched()) for host in hosts) > 5, "the work was shared"
        assert not list((tmp_path / "shared" / "claims").rglob("*.0")), "and claims are given back"


def test_lost_claims_cost_work_and_nothing_else(tmp_path: Path) -> None:
    hosts = fleet(tmp_path)
    problems = [problem(i) for i in range(30)]
    with running(hosts):
        for host in hosts:
            host.see(*problems)
        for _ in range(12):
            for host in hosts:
                host.turn(LosesClaims(open_objects(host.url)))
            for host in hosts:
                host.work(8)
        assert {len(host.solved()) for host in hosts} == {30}
        assert 30 < sum(searches(hosts).values()) < 60
        assert {s.backend for host in hosts for s in host.solved().values()} == {"fast"}


def test_a_host_cut_off_goes_on_alone_leaves_what_others_claimed_and_comes_back(tmp_path: Path) -> None:
    one, two = hosts = fleet(tmp_path, 2)
    problems = [problem(i) for i in range(12)]
    with running(hosts):
        for host in hosts:
            host.see(*problems)
        one.turn()  # asks for nothing yet
        one.work()
        one.turn()
        claimed = {str(u.unit.problem) for u in one.store.fleet_sync.ours(planted_search.ENVIRONMENT)}
        assert len(claimed) == 4
        two.turn()
        two.work()
        assert two.turn(CutOff(open_objects(two.url))) is None
        assert two.work() == 0, "cut off for a moment only"
        two.skew_s = ALONE_S + 1.0
        assert two.turn(CutOff(open_objects(two.url))) is None
        assert two.work() == 8
        assert not two.searched() & claimed
        rounds(hosts)
        assert {len(host.solved()) for host in hosts} == {12}
        assert searches(hosts) == {str(p): 1 for p in problems}


@pytest.mark.part(4)
@pytest.mark.parametrize("after", range(1, 20, 2))
def test_an_exchange_cut_off_anywhere_loses_nothing(after: int, tmp_path: Path) -> None:
    one, two = hosts = fleet(tmp_path, 2)
    problems = [problem(i) for i in range(8)]
    with running(hosts):
        for host in hosts:
            host.see(*problems)
        two.turn()
        one.turn()
        one.work()
        one.turn(CutOff(open_objects(one.url), after))
        one.work(2)
        one.turn(CutOff(open_objects(one.url), after))
        rounds(hosts)
        assert {len(host.solved()) for host in hosts} == {8}
        assert searches(hosts) == {str(p): 1 for p in problems}


def test_a_home_makes_one_exchange_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a daemon that was killed goes on for a while: it and the next one's would lose each other's claims."""
    url = (tmp_path / "shared").as_uri()
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path / "home")})
    monkeypatch.setattr(wiring, "MOST_S", 0.05)
    with wiring.exchange(settings, url) as one:
        with pytest.raises(TryLater, match="another exchange"), wiring.exchange(settings, url):
            pass
        with wiring.exchange(settings, url, dry_run=True):
            pass
        assert one.run(now_s=time.time()).sent == 0
    with wiring.exchange(settings, url):
        pass


def test_an_exchange_that_nobody_waits_for_begins_nothing_more(tmp_path: Path) -> None:
    one, two = hosts = fleet(tmp_path, 2)
    with running(hosts):
        one.see(problem(0))
        one.work()
        done = one.exchange(is_left=lambda: True).run(now_s=time.time())
        assert (done.sent, done.left) == (0, 1)
        assert one.exchange().run(now_s=time.time()).sent == 1
        two.see(problem(0))
        done = two.exchange(is_left=lambda: True).run(now_s=time.time())
        assert (done.fetched, done.left) == (0, 1)


def killed_at(points: Iterable[int], folder: Path, number: int) -> tuple[int, int]:
    """Two hosts, one of which is killed in the middle of its exchanges; (kills, problems that were searched twice)."""
    one, two = hosts = fleet(folder, 2)
    problems = [problem(i) for i in range(number)]
    kills = 0
    with running(hosts), killer() as kill:
        for host in hosts:
            host.see(*problems)
        one.turn()
        for point in points:
            one.work(1)
            kills += kill(one, point) == signal.SIGKILL
            one.work(1)  # what it claimed while it was killed is not known here yet
            if point % 4 == 0:
                two.turn()
                two.work(1)
        rounds(hosts, most=40)
        assert {len(host.solved()) for host in hosts} == {number}
        assert {s.backend for host in hosts for s in host.solved().values()} == {"fast"}
        return kills, sum(searches(hosts).values()) - number


@pytest.mark.long
def test_a_host_killed_while_it_claims_finds_its_claims_again(tmp_path: Path) -> None:
    kills, twice = killed_at(range(2, 14, 2), tmp_path, 20)
    assert kills >= 4 and twice == 0


@pytest.mark.soak
def test_two_hundred_kills_lose_nothing_and_have_nothing_searched_twice(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("FLEET_SEED", time.time_ns() % 1_000_000))
    draw = random.Random(seed)
    kills, twice, runs, began = 0, 0, 0, time.monotonic()
    while kills < 200:
        points = [draw.randrange(14) for _ in range(25)]
        more, again = killed_at(points, tmp_path / str(runs), 60)
        kills, twice, runs = kills + more, twice + again, runs + 1
    note("kills", url="file", seed=seed, kills=kills, problems=60 * runs, searched_twice=twice, began=began)
    assert twice <= 0.01 * 60 * runs, f"seed {seed}"


def test_what_one_exchange_has_no_time_for_comes_with_the_next_and_nobody_searches_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmtuned.fleet import fetch_results, send_results

    monkeypatch.setattr(fetch_results, "BATCH", 2)
    monkeypatch.setattr(send_results, "BATCH", 2)
    one, two = hosts = fleet(tmp_path, 2)
    problems = [problem(i) for i in range(7)]
    with running(hosts):
        one.see(*problems)
        two.see(*problems)
        one.work()
        sent = []
        while not sent or sent[-1].left:
            objects = EndsEarly(open_objects(one.url))
            monkeypatch.setattr("gemmtuned.fleet.sync.Turn.is_over", property(lambda turn, o=objects: o.moved >= 2))
            done = one.turn(objects)
            assert done is not None
            sent.append(done)
        assert [(done.sent, done.left) for done in sent] == [(2, 5), (2, 3), (2, 1), (1, 0)]
        objects = EndsEarly(open_objects(two.url))
        monkeypatch.setattr("gemmtuned.fleet.sync.Turn.is_over", property(lambda turn: objects.moved >= 2))
        done = two.turn(objects)
        assert done is not None and (done.fetched, done.left) == (2, 5)
        monkeypatch.undo()
        monkeypatch.setattr(planted_search, "pause_s", 0.0)
        two.work()
        rounds(hosts)
        assert len(two.solved()) == 7 and not two.searched()


class Counted(Around):
    """How often each kind of request was made."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if callable(call) and name != "flush":
            self.requests[name] += 1
        return call


def test_a_fleet_at_rest_asks_little(tmp_path: Path) -> None:
    hosts = fleet(tmp_path, 2)
    with running(hosts):
        for host in hosts:
            host.see(*map(problem, range(4)))
        rounds(hosts)
        objects = Counted(open_objects(hosts[0].url))
        assert hosts[0].turn(objects) is not None
        # Its beat and the clock of the store, the mark of a repository that is not there, names of results; no claims
        assert objects.requests == {"get": 1, "put": 1, "clock_s": 1, "list": 1}
        hosts[0].see(problem(5))
        objects = Counted(open_objects(hosts[0].url))
        hosts[0].turn(objects)
        assert (objects.requests["list"], objects.requests["create"]) == (3, 1), (
            "claims, results, and again after a claim"
        )


def test_results_that_came_by_hand_are_checked_by_a_daemon_without_a_fleet(tmp_path: Path) -> None:
    one, two = hosts = fleet(tmp_path, 2)
    with running(hosts):
        for host in hosts:
            host.see(problem(0))
        one.work()
        one.exchange().run(now_s=time.time())
        two.exchange().run(now_s=time.time())
        assert two.work() == 1 and len(two.solved()) == 1
        assert two.searched() == set()


def test_a_visit_to_another_url_leaves_what_is_known_of_the_daemons_own(tmp_path: Path) -> None:
    hosts = fleet(tmp_path, 2)
    one, public = hosts[0], (tmp_path / "public").as_uri()
    with running(hosts):
        for host in hosts:
            host.see(problem(0), problem(1))
        rounds(hosts)
        one.see(problem(2))
        one.work(0)
        mine, one.url = one.url, public
        first, again = (one.exchange().run(now_s=time.time()) for _ in range(2))
        one.url = mine
        assert (first.sent, again.sent) == (2, 0), "what lies there is not sent again"
        done = one.turn()
        assert done is not None and done.sent == 0, "and nothing is sent again to the daemon's own"
        stranger = Host(tmp_path / "h9", public)
        with running([stranger]):
            stranger.see(problem(0), problem(2))
            rounds([stranger])
            one.url = public
            assert one.exchange().run(now_s=time.time()).fetched == 1
            one.url = mine
            one.work()
            assert len(one.solved()) == 3


class Counts(Around):
    """What is listed, and claims that somebody else makes a moment before us."""

    def __init__(self, objects: Objects, first: int = 0) -> None:
        super().__init__(objects)
        self.listed: list[str] = []
        self.first = first

    def list(self, prefix: str, *, after: str = "") -> Any:
        self.listed.append(prefix.partition("/")[0])
        return self._objects.list(prefix, after=after)

    def create(self, path: str, data: bytes) -> bool:
        if self.first:
            self.first -= 1
            assert self._objects.create(path, b"somebody-00000000")
        return self._objects.create(path, data)


def test_where_others_were_first_a_host_looks_further_at_once(tmp_path: Path) -> None:
    (one,) = fleet(tmp_path, 1)
    with running([one]):
        one.see(*(problem(i) for i in range(80)))
        one.turn()
        one.work()  # asks for claims
        done = one.turn(Counts(open_objects(one.url), first=8))
        assert done is not None and done.claimed == 4, "those it tried first were all taken under its eyes"


def test_a_host_that_has_what_it_wants_reads_no_claims(tmp_path: Path) -> None:
    (one,) = fleet(tmp_path, 1)
    with running([one]):
        one.see(problem(0))
        rounds([one])
        idle = Counts(open_objects(one.url))
        one.turn(idle)
        assert idle.listed == ["results"]
        one.see(problem(1))
        busy = Counts(open_objects(one.url))
        one.turn(busy)
        assert "claims" in busy.listed


def test_how_much_a_host_claims_goes_by_its_searches_and_not_by_its_checks(tmp_path: Path) -> None:
    one, two = hosts = fleet(tmp_path, 2)
    with running(hosts):
        one.see(*(problem(i) for i in range(6)))
        rounds([one])
        two.see(*(problem(i) for i in range(6)))
        rounds([two])
        solved = [host.store.fleet_sync.solved(planted_search.ENVIRONMENT, since_s=0.0) for host in hosts]
        assert [len(host.solved()) for host in hosts] == [6, 6] and solved == [6, 0]
