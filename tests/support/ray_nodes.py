"""A Ray cluster of our own on this host, for tests and benchmarks: its nodes can be killed, and no other is touched.

`ray start` leaves the processes of a node behind (what holds it, Ray calls it a raylet; agents; tasks).  Each node is
started here in a session of its own, as setsid makes one, and its processes are found by that alone.  `ray stop` would
end every cluster of the machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from fleets import Host

from gemmtuned.configs.problem import Problem
from gemmtuned.fleet import demand
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.on_ray import How, Pool, cluster
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.pool_client import PoolClient
from gemmtuned.fleet.ran import Ran

HERE = Path(__file__).parent
# What programs that talk to the cluster need, too
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class Node:
    """What one `ray start` began. folder: for what Ray writes, of a short name, since sockets lie in it."""

    def __init__(self, folder: str, *options: str) -> None:
        command = [str(Path(sys.executable).parent / "ray"), "start", *options]
        starter = subprocess.Popen(
            command, env={**os.environ, **RAY, "RAY_TMPDIR": folder}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._session = starter.pid
        try:
            said, _ = starter.communicate(timeout=120)
        except BaseException:
            self.kill()
            raise
        if starter.returncode:
            self.kill()
            raise RuntimeError(said)

    def processes(self) -> dict[int, str]:
        """The processes of this node that live, by pid, each with its program."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(path.name)) == self._session:
                    found[int(path.name)] = (path / "cmdline").read_bytes().split(b"\0")[0].decode()
        return {pid: program for pid, program in found.items() if program}  # one that has ended names none

    def kill(self) -> None:
        """End it as a machine ends, all at once: a task that lost its raylet alone still hands in what it holds."""
        until_s = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < until_s, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Cluster:
    """A head with so many CPUs and GPUs, and what joined it. address: as Ray takes it."""

    def __init__(self, folder: str, cpus: int, gpus: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._folder, self.address = folder, f"127.0.0.1:{port}"
        head = ("--head", f"--port={port}", f"--num-gpus={gpus}", "--include-dashboard=false")
        self.nodes = [Node(folder, *head, f"--num-cpus={cpus}")]

    def join(self) -> Node:
        """One more node, of one CPU."""
        ip = f"127.0.0.{len(self.nodes) + 1}"
        self.nodes.append(Node(self._folder, f"--address={self.address}", f"--node-ip-address={ip}", "--num-cpus=1"))
        return self.nodes[-1]


@contextmanager
def ray_cluster(cpus: int, gpus: int = 0) -> Iterator[Cluster]:
    """For `with`: a cluster of one node, and of those that join it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(folder, cpus, gpus)
        try:
            yield cluster
        finally:
            for node in reversed(cluster.nodes):
                node.kill()


def planted_slower(folder: Path, pause_s: float) -> str:
    """The planted search with candidates that take so long, as Worker takes a search."""
    path = folder / "planted_slower.py"
    path.write_text((HERE / "planted_search.py").read_text().replace("pause_s = 0.002", f"pause_s = {pause_s}"))
    return f"{path}:tune"


def tuners(node: Node) -> list[int]:
    """The workers of ours that measure on this node: each leads a session of its own, its task starts it."""
    found, tasks = [], set(node.processes())
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"gemmtuned.daemon.child.worker_main" in (path / "cmdline").read_bytes():
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(path.name)] if int(parent) in tasks else []
    return found


@contextmanager
def once(is_time: Callable[[], bool], then: Callable[[], None], seconds: float = 120.0) -> Iterator[None]:
    """For `with`: does this beside what is within, as soon as it is time; what it raised is raised at the end."""

    def wait() -> None:
        until_s = time.monotonic() + seconds
        while not is_time():
            if over.wait(0.02) or time.monotonic() > until_s:
                raise AssertionError("that time did not come")
        then()

    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait)
        try:
            yield
        finally:
            over.set()
        done.result()


class Run:
    """One run of a pool for what this host saw, as `gemmtuned fleet tune` makes it, and with a search of its own.

    done: units that are settled so far; at_work: tasks that hold one.  The variables of RAY must be set.
    """

    def __init__(self, host: Host, address: str, tasks: int, search: str) -> None:
        self.done = self.at_work = 0
        self.took_s = 0.0
        self._address, self._how = address, How(gpu=False, tasks=tasks, search=search)
        self._wanted = demand.wanted(demand.of_store(host.store, "seer-00000000", now_s=time.time()), now_s=time.time())
        self.client = PoolClient(open_objects(host.url), "pool-00000000", Trust())
        self.ran = Ran()

    def run(self) -> Run:
        """Until all is done."""
        began_s = time.monotonic()
        with cluster(self._address) as ray:
            self.ran = Pool(ray, self._wanted, self.client, self._how, self._tell).run()
        self.took_s = time.monotonic() - began_s
        return self

    def _tell(self, done: int, total: int, doing: str) -> None:
        self.done = done
        self.at_work = int(doing.partition(" at work")[0]) if " at work" in doing else 0

    @property
    def verdicts(self) -> dict[Problem, tuple[str, float, str]]:
        """What was found: backend, microseconds, state."""
        return {s.problem: (s.backend, s.us, s.state) for _, answer, _ in self.ran.done for s in answer.solutions}
