"""`gemmtuned fleet tune` on a real Ray cluster: two nodes of one CPU each, real workers, a planted search.

Ray (the extra [ray]) is 80 MB to fetch and 240 MB installed, so it is no part of [dev]: without it these are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import ENVIRONMENT
from fleets import HERE, Host, problem, running, until_covered

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, cpu_device
from gemmtuned.fleet import demand
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.shelf import Shelf

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
from gemmtuned.fleet.on_ray import How, Pool, cluster, look_around, tasks_for
from gemmtuned.fleet.ran import Ran

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(HERE)}


def ray_command(*command: str) -> None:
    program = str(Path(sys.executable).parent / "ray")
    done = subprocess.run([program, *command], env={**os.environ, **RAY}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one node with one CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = {name: os.environ.get(name) for name in RAY}
    os.environ.update(RAY)
    ray_command("start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1",
                "--include-dashboard=false")  # fmt: skip
    yield f"127.0.0.1:{port}"
    ray_command("stop", "--force")
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def second_node(address: str) -> Iterator[int]:
    """One more node; the pid of the process that holds it."""
    there = set(raylets(address))
    ray_command("start", f"--address={address}", "--node-ip-address=127.0.0.2", "--num-cpus=1")
    (pid,) = set(raylets(address)) - there
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def raylets(address: str) -> list[int]:
    """The processes that hold nodes of this cluster; the machine may have other clusters."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            program, *words = path.read_bytes().split(b"\0")
            if program.endswith(b"/raylet") and any(word.endswith(b"=" + address.encode()) for word in words):
                found.append(int(path.parent.name))
    return found


def planted(folder: Path, pause_s: float) -> str:
    """The planted search, with candidates that take so long."""
    text = (HERE / "planted_search.py").read_text().replace("pause_s = 0.002", f"pause_s = {pause_s}")
    path = folder / "planted_slower.py"
    path.write_text(text)
    return f"{path}:tune"


class Run:
    """One run of a pool for what this host saw; what it said, and when."""

    def __init__(self, host: Host, address: str, tasks: int, search: str) -> None:
        self.done = 0
        wanted = demand.wanted(demand.of_store(host.store, "seer-00000000", now_s=time.time()), now_s=time.time())
        self.shelf = Shelf(open_objects(host.url), "pool-00000000", Trust())
        with cluster(address) as ray:
            assert tasks_for(ray, How(gpu=False), 40) == int(ray.cluster_resources()["CPU"])
            self.pool = Pool(ray, wanted, self.shelf, How(gpu=False, tasks=tasks, search=search), self.tell)
            self.ran = self.pool.run()

    def tell(self, done: int, total: int, doing: str) -> None:
        self.done = done

    @property
    def verdicts(self) -> dict[Problem, tuple[str, float, str]]:
        return {s.problem: (s.backend, s.us, s.state) for _, answer, _ in self.ran.done for s in answer.solutions}


def files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def nodes_of(ran: Ran) -> set[str]:
    return {node for _, _, node in ran.done}


def test_two_tasks_find_what_the_daemon_finds(address: str, second_node: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    one, two = Host(tmp_path / "one", shared.as_uri()), Host(tmp_path / "two", (tmp_path / "none").as_uri())
    problems = [*(problem(i) for i in range(38)), Problem(m=8, n=17, k=64), Problem(m=8, n=29, k=64)]
    with running([one, two]):
        one.see(*problems)
        run = Run(one, address, 2, planted(tmp_path, 0.05))
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
    address: str, second_node: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    problems = [problem(i) for i in range(24)]
    killer = threading.Thread(target=kill_at, args=(second_node, tmp_path / "shared" / "results", 6))
    with running([host]):
        host.see(*problems)
        killer.start()
        run = Run(host, address, 2, planted(tmp_path, 0.2))
        killer.join()
    assert set(run.verdicts) == set(problems) and not run.ran.left
    assert len(run.ran.lost) == 1, run.ran.lost
    assert capsys.readouterr().out == "", "Ray tells of the node, and standard output is the report's"
    assert len(nodes_of(run.ran)) == 2
    assert files(tmp_path / "shared" / "claims") == 0


def kill_at(pid: int, folder: Path, results: int) -> None:
    """Kill a node once there are so many results and the tasks on both nodes have a worker."""
    until_s = time.monotonic() + 60
    while (files(folder) < results or len(workers()) < 2) and time.monotonic() < until_s:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_an_interrupted_run_keeps_what_it_found_and_holds_nothing(address: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    with running([host]):
        host.see(*(problem(i) for i in range(60)))
        killer = threading.Thread(target=interrupt_at, args=(tmp_path / "shared" / "results", 3))
        killer.start()
        run = Run(host, address, 1, planted(tmp_path, 0.1))
        killer.join()
        solved = len(run.verdicts)
        assert run.ran.code == 130 and 3 <= solved < 60
        assert files(tmp_path / "shared" / "results") == solved and files(tmp_path / "shared" / "claims") == 0
        assert {why for _, why in run.ran.left} == {"interrupted"} and len(run.ran.left) == 60 - solved
        until(lambda: not workers())

        again = Run(host, address, 1, planted(tmp_path, 0.002))  # the next run does the rest
        assert len(again.verdicts) == 60 - solved and len(again.shelf.there) == solved


def interrupt_at(folder: Path, results: int) -> None:
    until_s = time.monotonic() + 60
    while files(folder) < results and time.monotonic() < until_s:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def workers() -> list[int]:
    """Workers of ours that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            if b"gemmtuned.daemon.child.worker_main" in text and b"planted_slower" in text:
                found.append(int(path.parent.name))
    return found


def until(holds: Any, seconds: float = 20.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.1)


def test_a_dry_run_says_what_would_run_where_and_starts_nothing(address: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", (tmp_path / "shared").as_uri())
    with cluster(address) as ray:
        (node,) = look_around(ray)
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
