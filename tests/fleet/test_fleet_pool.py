"""Tuning for a fleet on somebody's cluster, up to where Ray begins: demand, board, claims, and a lent device."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ENVIRONMENT, NEWER, FakeMonitor, solution
from fleets import HERE, Host, problem

from gemmtuned.configs.errors import TableError, TryLater, WorkerFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.device.devices import CpuMonitor
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.db.fleet import Unit
from gemmtuned.db.store import Store
from gemmtuned.fleet import claims, demand, ray_task
from gemmtuned.fleet.bench import Answer, Bench
from gemmtuned.fleet.board import OVER, Board, TaskDevice
from gemmtuned.fleet.demand import Wanted
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import environment_name, result_path
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.on_this_host import tune_here
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.pool_client import PoolClient
from gemmtuned.fleet.seen import Seen

HERE_IS = TaskDevice("node a", "cpu", ENVIRONMENT.key)


def wanted(number: int, worth: float = 1.0, environment: Environment = ENVIRONMENT) -> Wanted:
    one = problem(number)
    return Wanted(environment, Unit(one, "exact"), {one: 10}, worth, frozenset({"a"}))


def solved(one: Wanted) -> Answer:
    found = solution(one.unit.problem)
    return Answer(one.name, "solved", "", ENVIRONMENT, (found,), {"conditions": "", "others": None, "published_us": 1})


@pytest.mark.parametrize("seed", range(4))
def test_units_of_a_host_are_those_that_its_own_database_asks_for(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    store = Store(tmp_path / "tune.db", locks=tmp_path)
    now_s = time.time()
    called = {
        Problem(m=choose.choice((1, 2, 3, 17, 18, 19, 20, 21, 40, 300, 301, 302, 303)), n=n, k=64, dtype=dtype)
        for n in (64, 128, 256)
        for dtype in ("bf16", "fp16")
        for _ in range(choose.randint(1, 12))
    } | {Problem(m=m, n=n, k=64) for m in (33, 34, 35, 36) for n in (64, 128)}
    sightings = [Sighting(p, "miss", choose.randint(1, 99)) for p in called]
    store.sightings.add("serve", ENVIRONMENT, sightings, now_s=now_s)
    work = store.leases.lease_next("me", ENVIRONMENT, now_s=now_s, hold_s=60.0)
    assert work is not None
    store.solutions.install(work, [solution(work.problem, covers=work.covers)], environment=ENVIRONMENT, now_s=now_s)

    found = demand.wanted(demand.of_store(store, "a", now_s=now_s), now_s=now_s)
    asked = store.fleet_sync.open(ENVIRONMENT, now_s=now_s, limit=4096)
    store.close()
    assert {(one.unit.problem, one.unit.covers) for one in found} == {(u.problem, u.covers) for u in asked}
    assert [one.worth for one in found] == pytest.approx([u.worth for u in asked])
    assert any(one.unit.covers == "fine" for one in found)


def test_worth_is_that_of_the_whole_fleet() -> None:
    def told(host: str, worth: dict[int, float], **more: Any) -> Seen:
        rows = [
            {"problem": str(problem(n)), "calls": 5, "us": 1.0, "hits": 0, "covered": 0, "worth": w,
             "last_seen_us": 1e15, **more}
            for n, w in worth.items()
        ]  # fmt: skip
        return Seen(host, 1, ENVIRONMENT, rows, [])

    hosts = [told("a", {0: 3.0, 1: 2.0}), told("b", {1: 2.0}), told("c", {2: 9.0}, covered=1)]
    found = demand.wanted([*hosts, replace(hosts[0], host="d", environment=NEWER)], now_s=1e9)
    assert [(one.unit.problem.n, one.worth, len(one.hosts), one.environment.key) for one in found] == [
        (1001, 4.0, 2, ENVIRONMENT.key), (1000, 3.0, 1, ENVIRONMENT.key), (1000, 3.0, 1, NEWER.key),
        (1001, 2.0, 1, NEWER.key),
    ]  # fmt: skip
    assert not demand.wanted([told("a", {0: 1.0}, last_seen_us=1)], now_s=1e9), "nobody called it for a week"


def test_a_board_gives_each_unit_once_and_takes_back_what_a_lost_task_held() -> None:
    board = Board("1", [ENVIRONMENT.key])
    board.trade([wanted(0), wanted(1)], [])
    first, second = board.next("one", HERE_IS, "1"), board.next("two", HERE_IS, "1")
    assert isinstance(first, Wanted) and isinstance(second, Wanted) and first != second
    assert board.next("three", HERE_IS, "1") == OVER
    assert "gemmtuned 2" in str(board.next("four", HERE_IS, "2"))
    assert board.take_back("one") == first and board.take_back("one") is None
    board.answer("one", solved(first))  # it is slow, not dead: its unit is another's now
    board.answer("two", solved(second))
    answers, stock, devices, held = board.trade([first], [ENVIRONMENT.key])
    assert [answer.name for _, answer in answers] == [second.name]
    assert stock == {ENVIRONMENT.key: 1} and "four" not in devices and not held
    assert board.next("five", HERE_IS, "1") == first
    assert board.next("six", HERE_IS, "1") is None, "more is to come"
    assert board.clear() == []
    assert board.next("six", HERE_IS, "1") == OVER


def test_a_client_leaves_out_what_others_have_or_hold_and_publishes_what_hosts_take(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    url = (tmp_path / "shared").as_uri()
    objects = open_objects(url)
    mine, other = (PoolClient(objects, f"{name}-0000000{i}", Trust()) for i, name in enumerate(("mine", "other")))
    units = [wanted(i) for i in range(5)]
    (held,), rest = other.claim(units, 1)
    assert held == units[0] and rest == units[1:]
    other.publish(units[1], solved(units[1]))

    won, rest = mine.claim(units, 2)
    assert (won, rest) == ([units[2], units[3]], [units[4]])
    assert {name for _, name in mine.solved_elsewhere} == {units[1].name}
    assert {name for _, name in mine.held_elsewhere} == {units[0].name}
    mine.publish(units[2], solved(units[2]))
    with pytest.raises(TableError):
        mine.publish(units[3], replace(solved(units[3]), trials=({"us": "fast"},)))
    mine.drop_all()
    assert [path.name for path in (tmp_path / "shared" / "claims").rglob("*.0")] == [f"{units[0].name}.0"]

    host = Host(tmp_path / "host", url)
    host.see(problem(1), problem(2))
    assert host.exchange().run(now_s=time.time()).fetched == 2
    host.store.close()


def test_one_unit_in_two_environments_is_two(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    client = PoolClient(open_objects((tmp_path / "shared").as_uri()), "mine-00000000", Trust())
    here, newer = wanted(0), wanted(0, environment=NEWER)
    assert client.claim([here], 1)[0] == [here] and client.claim([newer], 1)[0] == [newer]
    client.drop([here])
    (left,) = (tmp_path / "shared" / "claims").rglob("*.0")
    assert left.parent.name == environment_name(NEWER)


def test_a_lent_device_is_used_as_the_daemon_uses_its_own(tmp_path: Path) -> None:
    """Planted: n 17 aborts at a candidate, 29 cannot be done, 43 not now; five sizes are one bucket."""
    make_worker = partial(Worker, nice=0, search=f"{HERE / 'planted_search.py'}:tune")
    bench = Bench(CpuMonitor(), tmp_path, make_worker)
    assert bench.environment == ENVIRONMENT

    def of(*problems: Problem, covers: str = "exact", filed: Problem | None = None) -> Wanted:
        unit = Unit(filed or problems[0], covers)
        return Wanted(ENVIRONMENT, unit, dict.fromkeys(problems, 10), 1.0, frozenset())

    sizes = [Problem(m=m, n=500, k=64) for m in (17, 18, 19, 20, 21)]
    try:
        said = [bench.tune(of(Problem(m=8, n=n, k=64))) for n in (1000, 17, 29, 43)]
        bucket = bench.tune(of(*sizes, covers="fine", filed=sizes[0].with_m(32)))
        alone = bench.tune(of(sizes[0]))
    finally:
        bench.close()
    assert [answer.state for answer in said] == ["solved", "solved", "failed", "put off"]
    assert [answer.reason for answer in said[2:]] == ["this one cannot be done", "the CPU is in use"]
    assert said[0].solutions[0].backend == "fast" and {one["backend"] for one in said[1].trials} == {
        "torch", "slow", "fast",
    }  # fmt: skip
    assert [(s.problem.m, s.covers) for a in (bucket, alone) for s in a.solutions] == [(32, "fine"), (17, "exact")]


def test_claims_wait_for_a_url_that_cannot_be_reached() -> None:
    class Gone:
        can_claim = True

        def get(self, path: str, *, limit: int) -> bytes | None:
            return None

        def put(self, path: str, data: bytes) -> None:
            raise TryLater("it cannot be reached")

    client = PoolClient(Gone(), "a-00000000", Trust())  # type: ignore[arg-type]
    with pytest.raises(TryLater):
        client.claim([wanted(0)], 1)
    assert not client.passed_over


class Failing:
    """Objects at a store that fails at its request of this number, before that arrives or after it."""

    def __init__(self, objects: Objects, at: int, *, arrives: bool) -> None:
        self._objects, self._left, self._arrives = objects, at, arrives
        self.can_claim = objects.can_claim

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._objects, name)

        def counted(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left or self._arrives:
                said = call(*args, **named)
            if not self._left:
                raise TryLater("it cannot be reached")
            return said

        return counted


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "arrived"])
@pytest.mark.parametrize("look_s", [0.0, 60.0], ids=["read-anew", "known"])
def test_what_was_claimed_when_the_store_failed_is_ours(
    look_s: float, arrives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    monkeypatch.setattr("gemmtuned.fleet.pool_client.CLAIMS_S", look_s)
    units = [wanted(i) for i in range(4)]
    for number in range(1, 9):
        objects = open_objects((tmp_path / f"shared{number}").as_uri())
        PoolClient(objects, "mine-00000000", Trust()).claim(units[3:], 1)  # another run of the same home holds the last
        mine = PoolClient(
            Failing(objects, number + 1, arrives=arrives), "mine-00000000", Trust()
        )  # the first: is_repository
        try:
            won, _ = mine.claim(units, 4)
        except TryLater:
            won, _ = mine.claim(units, 4)
        assert won == units[:3] and mine.held_elsewhere == {units[3].key}, number
        mine.drop_all()
        assert [path.stem for path in (tmp_path / f"shared{number}" / "claims").rglob("*.0")] == [units[3].name]


def test_a_name_that_somebody_made_up_is_no_result(tmp_path: Path) -> None:
    """A pool leaves a unit out because of a result that its hosts would read, and not because of a name."""
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    url, members = (tmp_path / "shared").as_uri(), Trust(b"a secret of members")
    units = [wanted(i) for i in range(3)]
    for trust, unit in ((members, units[0]), (Trust(), units[1])):  # the second is a stranger's
        PoolClient(open_objects(url), "other-00000000", trust).publish(unit, solved(unit))
    made_up = result_path(environment_name(ENVIRONMENT), units[2].name, "0" * 64, time.time())
    open_objects(url).put(made_up, b"{}")
    mine = PoolClient(open_objects(url), "mine-00000000", members)
    assert mine.claim(units, 3)[0] == units[1:] and mine.solved_elsewhere == {units[0].key}


def test_a_result_is_there_also_when_reading_it_failed_at_first(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    url = (tmp_path / "shared").as_uri()
    units = [wanted(i) for i in range(3)]
    PoolClient(open_objects(url), "other-00000000", Trust()).publish(units[0], solved(units[0]))
    PoolClient(open_objects(url), "mine-00000000", Trust()).publish(units[1], solved(units[1]))
    for number in range(2, 14):  # the first: is_repository
        objects = Failing(open_objects(url), number, arrives=False)
        mine = PoolClient(
            objects, "mine-00000000", Trust(hosts=["other-*"])
        )  # its own results are its own, listed or not
        try:
            won, _ = mine.claim(units, 3)
        except TryLater:
            won, _ = mine.claim(units, 3)
        assert won == [units[2]], number
        shutil.rmtree(tmp_path / "shared" / "claims")


def test_a_claim_that_somebody_made_too_large_is_another_hosts(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    objects = open_objects((tmp_path / "shared").as_uri())
    objects.put("claims/a", b"mine-00000000" * 30)
    assert not claims.is_held_by(objects, "claims/a", "mine-00000000")


@pytest.mark.parametrize("at", [8, 11], ids=["claim-unsure", "giving-back-failed"])
def test_claims_are_given_back_when_the_store_is_there_again(at: int, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    objects = Failing(open_objects((tmp_path / "shared").as_uri()), at, arrives=at == 8)
    mine = PoolClient(objects, "mine-00000000", Trust())
    for call in (lambda: mine.claim([wanted(i) for i in range(3)], 3), mine.drop_all, mine.drop_all):
        with suppress(TryLater):
            call()
    assert list((tmp_path / "shared" / "claims").iterdir()) and not list((tmp_path / "shared" / "claims").rglob("*.0"))


def test_two_that_run_side_by_side_share_the_work_by_claims_alone(tmp_path: Path) -> None:
    """`gemmtuned fleet tune URL` in a batch job: planted workers, one folder."""
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    url = (tmp_path / "shared").as_uri()
    units = [
        *(wanted(i) for i in range(6)),
        Wanted(NEWER, Unit(problem(9), "exact"), {problem(9): 1}, 1.0, frozenset()),
    ]
    make_worker = partial(Worker, nice=0, search=f"{HERE / 'planted_search.py'}:tune")
    other = PoolClient(open_objects(url), "other-00000000", Trust())
    other.claim(units[:2], 2)
    said: list[str] = []

    def tell(done: int, total: int, doing: str) -> None:
        said.append(f"{done} of {total}")
        if doing == str(units[4].unit.problem):
            raise KeyboardInterrupt

    client = PoolClient(open_objects(url), "job-00000001", Trust())
    ran = tune_here(units, client, CpuMonitor(), tell, make_worker=make_worker)
    assert [(one.unit.problem, answer.state) for one, answer, _ in ran.done] == [
        (problem(2), "solved"), (problem(3), "solved"),
    ]  # fmt: skip
    assert said == ["2 of 6", "3 of 6", "4 of 6"] and ran.code == 130
    assert [why for _, why in ran.left] == [f"not for this device: {NEWER.key}", "interrupted", "interrupted"]
    assert len(list((tmp_path / "shared" / "claims").rglob("*.0"))) == 2, "the other's"


class Away:
    """Objects at a store that takes this many results, is away for so many requests, and is there again."""

    def __init__(self, objects: Objects, results: int, requests: int) -> None:
        self._objects, self._results, self._requests = objects, results, requests
        self.can_claim = objects.can_claim

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._objects, name)

        def counted(*args: Any, **named: Any) -> Any:
            self._results -= name == "put" and args[0].startswith("results/")
            if self._results < 0 < self._requests:
                self._requests -= 1
                raise TryLater("it cannot be reached")
            return call(*args, **named)

        return counted


@pytest.mark.parametrize("requests", [5, 1 << 30], ids=["for-a-moment", "for-good"])
def test_a_search_is_not_lost_when_the_url_is_away(
    requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    monkeypatch.setattr("gemmtuned.fleet.outbox.AGAIN_S", 0.01)
    monkeypatch.setattr("gemmtuned.fleet.outbox.END_S", 0.1)
    monkeypatch.setattr("gemmtuned.fleet.on_this_host.AWAY_S", 0.1 if requests > 5 else 60.0)
    shared = tmp_path / "shared"
    units = [wanted(i) for i in range(3)]
    client = PoolClient(Away(open_objects(shared.as_uri()), 1, requests), "job-00000001", Trust())
    make_worker = partial(Worker, nice=0, search=f"{HERE / 'planted_search.py'}:tune")
    ran = tune_here(units, client, CpuMonitor(), lambda *said: None, make_worker=make_worker)
    arrived = 3 if requests == 5 else 1
    assert [one for one, _, _ in ran.done] == units[:arrived] and len(list(shared.rglob("*.json"))) == arrived
    assert ran.left == [(one, "it cannot be reached") for one in units[arrived:]]
    assert ran.unpublished == (arrived == 1) and not ran.code


@pytest.mark.parametrize(
    ("given", "lent"),
    [(["1"], "GPU-bbb-2"), (["GPU-aaa-1"], "GPU-aaa-1"), (["GPU-bbb"], "GPU-bbb-2"), (["7"], ""), ([], "")],
    ids=["index", "uuid", "short-uuid", "unknown", "none"],
)
def test_a_task_takes_the_gpu_that_ray_gave_it(given: list[str], lent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [FakeMonitor(id=id_, name=f"cuda:{n}") for n, id_ in enumerate(("GPU-aaa-1", "GPU-bbb-2"))]
    monkeypatch.setattr(ray_task, "find_monitors", lambda: [CpuMonitor(), *gpus])
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given, "TPU": []})
    ray = SimpleNamespace(get_runtime_context=lambda: context)
    if lent:
        assert ray_task._lent(ray).id == lent
    else:
        with pytest.raises(WorkerFailed, match="none of that name is seen there"):
            ray_task._lent(ray)
