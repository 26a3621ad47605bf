"""`gemmtuned fleet tune` on a real Ray cluster: two nodes of one CPU each, real workers, a planted search.

Ray (the extra [ray]) is 80 MB to fetch and 240 MB installed, so it is no part of [dev]: without it these are left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import ENVIRONMENT
from fleets import Host, problem, running, until_covered
from ray_nodes import RAY, Cluster, Node, Run, once, planted_slower, ray_cluster, tuners

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, cpu_device
from gemmtuned.fleet.on_ray import How, cluster, look_around, tasks_for
from gemmtuned.fleet.ran import Ran

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytest.importorskip("obstore", reason="the extra [fleet] is not installed")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster of one node with one CPU, and another program that is called as Ray's are."""
    with pytest.MonkeyPatch.context() as patch, stranger() as other:
        for name, value in RAY.items():
            patch.setenv(name, value)
        with ray_cluster(1) as cluster:
            yield cluster
        assert other.poll() is None, "of other clusters nothing is ended"


@pytest.fixture
def address(nodes: Cluster) -> str:
    return nodes.address


@pytest.fixture
def second_node(nodes: Cluster) -> Iterator[Node]:
    """One more node of one CPU."""
    node = nodes.join()
    yield node
    node.kill()


@contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """What looks like the node of somebody else's cluster."""
    process = subprocess.Popen(["ray/raylet/raylet", "60000"], executable="/bin/sleep")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def nodes_of(ran: Ran) -> set[str]:
    return {node for _, _, node in ran.done}


@pytest.mark.long
def test_two_tasks_find_what_the_daemon_finds(address: str, second_node: Node, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    one, two = Host(tmp_path / "one", shared.as_uri()), Host(tmp_path / "two", (tmp_path / "none").as_uri())
    problems = [*(problem(i) for i in range(38)), Problem(m=8, n=17, k=64), Problem(m=8, n=29, k=64)]
    with running([one, two]):
        one.see(*problems)
        run = Run(one, address, 2, planted_slower(tmp_path, 0.05)).run()
        two.see(*problems)
        two.start()
        until_covered([two], problems[:39], 60)
        assert run.verdicts == {p: (s.backend, s.us, s.state) for p, s in two.solved().items()}
        assert len(run.verdicts) == 39 and not run.ran.lost and not run.ran.left
        assert [answer.reason for _, answer, _ in run.ran.done if answer.state == "failed"] == [
            "this one cannot be done"
        ]
        assert len(nodes_of(run.ran)) == 2, "each task has a node of its own"
        assert files(shared / "results") == 39 and files(shared / "claims") == 0
        one.start()  # a host that waits for these takes them over, after a check of its own
        until_covered([one], problems[:39], 60)
        assert one.searched() <= {str(problems[39])}, "and searches but what nobody could do"


def test_a_node_that_dies_costs_one_problem_which_is_done_elsewhere(
    address: str, second_node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    problems = [problem(i) for i in range(14)]
    with running([host]):
        host.see(*problems)
        run = Run(host, address, 2, planted_slower(tmp_path, 0.4))
        with once(lambda: run.done >= 3 and run.at_work == 2, second_node.kill):
            run.run()
    assert set(run.verdicts) == set(problems) and not run.ran.left
    (lost,) = run.ran.lost
    (at,) = [str(one) for one in problems if f", at {one}: " in lost]
    (dead,) = [node for node in nodes_of(run.ran) if f" on {node}, " in lost]
    (where,) = [node for unit, _, node in run.ran.done if str(unit.unit.problem) == at]
    assert where != dead and nodes_of(run.ran) == {where, dead}
    assert capsys.readouterr().out == "", "Ray tells of the node, and standard output is the report's"
    assert files(tmp_path / "shared" / "claims") == 0


def test_an_interrupted_run_keeps_what_it_found_and_holds_nothing(nodes: Cluster, address: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    with running([host]):
        host.see(*(problem(i) for i in range(60)))
        run = Run(host, address, 1, planted_slower(tmp_path, 0.1))
        with once(lambda: run.done >= 3, lambda: os.kill(os.getpid(), signal.SIGINT)):
            run.run()
        solved = len(run.verdicts)
        assert run.ran.code == 130 and 3 <= solved < 60
        assert files(tmp_path / "shared" / "results") == solved and files(tmp_path / "shared" / "claims") == 0
        assert {why for _, why in run.ran.left} == {"interrupted"} and len(run.ran.left) == 60 - solved
        until(lambda: not tuners(nodes.nodes[0]))

        again = Run(host, address, 1, planted_slower(tmp_path, 0.002)).run()  # the next run does the rest
        assert len(again.verdicts) == 60 - solved and len(again.client.solved_elsewhere) == solved


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)


def test_a_dry_run_says_what_would_run_where_and_starts_nothing(address: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    with cluster(address) as ray:
        (node,) = look_around(ray)
        assert tasks_for(ray, How(gpu=False), 40) == 1
    with running([host]):
        host.see(problem(0))
        host.see(problem(1), problem(2), environment=Environment(cpu_device(), {"torch": node.torch}))
        host.see(problem(3), environment=Environment(cpu_device(), {"torch": "1.0"}))
    command = [sys.executable, "-m", "gemmtuned", "fleet", "tune", host.url, "--ray", address, "--dry-run", "--json"]
    env = {**os.environ, "GEMMTUNED_HOME": str(tmp_path / "host")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    where = {row["problem"]: row["where"] for row in plan["rows"]}
    assert where == {
        str(problem(0)): f"nowhere: no node has {ENVIRONMENT.device.key}",
        str(problem(1)): node.name, str(problem(2)): node.name,
        str(problem(3)): f"nowhere: torch there is {node.torch}, wanted 1.0",
    }  # fmt: skip
    assert plan["tasks"] == 1 and not files(tmp_path / "shared")
