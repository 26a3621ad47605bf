"""Three hosts as processes, one environment, a folder or an S3 server (moto's) between them, and what can go wrong.

The forms of `make soak`: 300 problems (FLEET_PROBLEMS) each.  A line about each run goes to the file that
FLEET_RESULTS names.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fakes import ENVIRONMENT
from fleet_s3 import Wire, s3_server
from fleets import Host, note, problem, running, searches, until_covered

from gemmtuned.configs.problem import Problem
from gemmtuned.fleet.layout import claim_path, environment_name, unit_name
from gemmtuned.fleet.opening import open_objects

pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
PROBLEMS = int(os.environ.get("FLEET_PROBLEMS", "300"))
pytestmark = [pytest.mark.soak, pytest.mark.alone]
CLOCK = """
import os, time
skew_s = float(os.environ.get("FLEET_SKEW_S", "0"))
def skewed(now, scale): return lambda: now() + type(now())(skew_s * scale)
time.time, time.time_ns = skewed(time.time, 1), skewed(time.time_ns, 1e9)
"""


class Fleet:
    """Three hosts, where they share, and what is between them and it."""

    def __init__(self, folder: Path, url: str, variables: dict[str, str]) -> None:
        self.folder, self.url, self.variables = folder, url, variables
        self.server = folder / "s3"
        self.problems = [problem(i) for i in range(PROBLEMS)]
        self.wires: list[Wire] = []
        self.hosts: list[Host] = []

    @property
    def kind(self) -> str:
        return self.url.partition(":")[0]

    def join(self, *skews_s: float, problems: Sequence[Problem] = ()) -> list[Host]:
        """Three hosts that have seen all problems, each with a way of its own to the store."""
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(CLOCK)
        for number in range(3):
            path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables = {**self.variables, "PYTHONPATH": os.pathsep.join(path)}
            if self.kind == "s3":
                self.wires.append(Wire(int(self.variables["AWS_ENDPOINT"].rpartition(":")[2])))
                variables["AWS_ENDPOINT"] = f"http://127.0.0.1:{self.wires[-1].port}"
            if skews_s:
                variables["FLEET_SKEW_S"] = str(skews_s[number])
            self.hosts.append(Host(self.folder / f"h{number}", self.url, **variables))
            self.hosts[-1].see(*(problems or self.problems))
        return self.hosts

    def judge(self, scenario: str, began: float, *, most_twice: float = 0.01, **facts: object) -> None:
        """Nothing wrong is published, and hardly anything was searched twice."""
        for host in self.hosts:
            assert {s.backend for s in host.solved().values()} == {"fast"}
            assert {s.us for s in host.solved().values()} == {50.0}, "times are those measured here"
            assert "imported in the parent: []" in host.log.read_text() or host.process is not None
        twice = sum(searches(self.hosts).values()) - len(self.problems)
        by_host = [len(host.searched()) for host in self.hosts]
        note(
            scenario, url=self.kind, problems=len(self.problems), searched_by_host=by_host, searched_twice=twice,
            began=began, **facts,
        )  # fmt: skip
        assert twice <= most_twice * len(self.problems), (twice, by_host)


@pytest.fixture(params=["file", "s3"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    if request.param == "file":
        one = Fleet(tmp_path, (tmp_path / "shared").as_uri(), {})
        with running(one.hosts):
            yield one
        return
    pytest.importorskip("moto", reason="the S3 server is moto's")
    with s3_server(tmp_path / "s3") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        one = Fleet(tmp_path, "s3://fleet/tables", variables)
        with running(one.hosts):
            yield one


def covered(fleet: Fleet, seconds: float = 600.0) -> float:
    return until_covered(fleet.hosts, fleet.problems, seconds)


def share_of_all(fleet: Fleet, share: float) -> Callable[[], bool]:
    return lambda: sum(len(host.solved()) for host in fleet.hosts) >= share * 3 * len(fleet.problems)


def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.2)


@pytest.mark.parametrize("skews_s", [(), (0.0, 3600.0, -3600.0)], ids=["clocks-right", "clocks-an-hour-wrong"])
def test_each_problem_is_searched_once_and_all_hosts_are_covered(skews_s: tuple[float, ...], fleet: Fleet) -> None:
    began = time.monotonic()
    for host in fleet.join(*skews_s):
        host.start()
    took_s = covered(fleet)
    fleet.judge("clock skew of an hour" if skews_s else "plain", began, covered_s=round(took_s, 1))


def test_a_slow_store_makes_nobody_alone(fleet: Fleet) -> None:
    """Each request takes 0.3 s: an exchange takes longer than the time after which a host is alone (here 2 s)."""
    if fleet.kind == "file":
        pytest.skip("a folder is not slow")
    fleet.problems = fleet.problems[: len(fleet.problems) // 3]
    began = time.monotonic()
    (fleet.server / "slow").write_text("0.3")
    for host in fleet.join():
        host.start("--alone-s", "2")
    took_s = covered(fleet)
    fleet.judge("slow store, 0.3 s a request", began, covered_s=round(took_s, 1))


def test_lost_claims_cost_work_only(fleet: Fleet) -> None:
    if fleet.kind == "file":
        pytest.skip("tests/fleet/test_fleet_exchange.py has it")
    began = time.monotonic()
    (fleet.server / "lose_claims").touch()
    for host in fleet.join():
        host.start()
    took_s = covered(fleet)
    fleet.judge("every second claim lost", began, most_twice=1.0, covered_s=round(took_s, 1))


def test_a_host_cut_off_for_a_minute_catches_up_within_a_minute(fleet: Fleet) -> None:
    """It goes on alone after a while, the others go on together; once healed all are covered in less than a minute."""
    began = time.monotonic()
    one, *_ = fleet.join()
    for host in fleet.hosts:
        host.start("--alone-s", "20")
    until(share_of_all(fleet, 0.15))
    wire = fleet.folder / "shared"
    if fleet.kind == "s3":
        fleet.wires[0].cut()
    else:  # of a folder that all mount all are cut off
        wire.rename(fleet.folder / "unmounted")
        wire.write_text("")
    solved = len(one.solved())
    time.sleep(60)
    alone = len(one.solved()) - solved
    if fleet.kind == "s3":
        fleet.wires[0].heal()
    else:
        wire.unlink()
        (fleet.folder / "unmounted").rename(wire)
    healed = time.monotonic()
    more = [problem(i) for i in range(len(fleet.problems), len(fleet.problems) + 12)]  # found by the others from now on
    for host in fleet.hosts:
        host.see(*more)
    fleet.problems = [*fleet.problems, *more]
    covered(fleet, 60)
    fleet.judge(
        "a host cut off for a minute" if fleet.kind == "s3" else "the folder gone for a minute", began,
        most_twice=2.0, solved_while_cut_off=alone, covered_after_healing_s=round(time.monotonic() - healed, 1),
    )  # fmt: skip
    assert alone > 0, "a host cut off goes on"


def test_hosts_killed_again_and_again_lose_nothing(fleet: Fleet) -> None:
    kills, draw, began = 0, random.Random(int(os.environ.get("FLEET_SEED", "1"))), time.monotonic()
    for host in fleet.join():
        host.start()
    while kills < 20 and not share_of_all(fleet, 0.95)():
        time.sleep(draw.uniform(1.0, 4.0))
        host = draw.choice(fleet.hosts)
        host.kill()
        host.start()
        kills += 1
    took_s = covered(fleet)
    fleet.judge("daemons killed", began, most_twice=0.05, kills=kills, covered_s=round(took_s, 1))


def test_objects_cut_short_and_forged_while_hosts_work_change_nothing(fleet: Fleet) -> None:
    """Somebody else who can write there spoils results as they come: cut short, changed, of other hosts' names."""
    began, spoilt, draw = time.monotonic(), 0, random.Random(2)
    objects = open_objects(fleet.url)
    for host in fleet.join():
        host.start()
    seen: set[str] = set()
    while not share_of_all(fleet, 0.9)():
        time.sleep(0.5)
        for path in [entry.path for entry in objects.list("results") if entry.path not in seen]:
            seen.add(path)
            if draw.random() < 0.2 and (data := objects.get(path, limit=1 << 20)):
                objects.put(path, data[:-9] if draw.random() < 0.5 else data.replace(b'"us":50.0', b'"us":1.0'))
                spoilt += 1
    took_s = covered(fleet)
    fleet.judge("results spoilt", began, most_twice=0.5, spoilt=spoilt, covered_s=round(took_s, 1))
    assert spoilt


def test_with_a_key_a_stranger_who_claims_everything_keeps_nobody_from_tuning(fleet: Fleet) -> None:
    """And what the stranger sends is not even looked at."""
    key = fleet.folder / "key"
    key.write_text("a secret of members")
    key.chmod(0o600)
    fleet.variables["GEMMTUNED_SYNC_KEY"] = str(key)
    began, objects, folder = time.monotonic(), open_objects(fleet.url), environment_name(ENVIRONMENT)
    for one in fleet.problems:
        objects.create(claim_path(folder, unit_name(one, "exact"), 7), b"stranger-00000000")
    with_none = Host(fleet.folder / "stranger", fleet.url)
    with running([with_none]):
        with_none.see(*fleet.problems[:20])
        with_none.work()
        assert with_none.exchange().run(now_s=time.time()).sent == 20
    for host in fleet.join():
        host.start()
    took_s = covered(fleet)
    fleet.judge("a stranger claims all, the hosts have a key", began, covered_s=round(took_s, 1))
    assert len(searches(fleet.hosts)) == len(fleet.problems), "what the stranger sent is searched, too"
