"""How much faster do two tasks on a Ray cluster tune than one, and do they find what a daemon finds?

    python -m benchmarks fleet_ray                       40 CPU problems on this host: 1 task, 2 tasks, a daemon (twice)
    python -m benchmarks fleet_ray --gpu --problems 24   on a host with two GPUs: 1 task against 2
    python -m benchmarks fleet_ray --kill                a second node is killed at work: its problem is done elsewhere
    python -m benchmarks fleet_ray --gate                wrong kernels and right ones, for a machine that others use
    python -m benchmarks fleet_ray --planted             a search that sleeps, for rates on such a machine

Starts a Ray cluster of its own (`ray start --head`) and ends it, and no other (support/ray_nodes.py of the tests).
Each run begins with an empty home and an empty URL.  Rates are results a minute, counted from the first result of each
run, so that the start of torch is left out, and over the whole run.  Verdicts agree when the same backend is in use;
where two of them are as fast as each other, two daemons do not always agree either, so the daemon runs twice.  With
--gate the search and its numeric check are real, and times are made up: of 40 kernels that win every race 20 are
wrong, each in another way (planted_worker.py there).  With --planted a search is planted_search.py: it takes a second,
and always finds the same.  Workers, stores, claims, Ray and the daemon are as ever.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import record

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path.append(str(SUPPORT))

from fleets import Host  # noqa: E402
from planted_wrong import WRONG  # noqa: E402
from ray_nodes import RAY, Cluster, Run, once, planted_slower, ray_cluster  # noqa: E402

from gemmtuned.configs.problem import Problem  # noqa: E402
from gemmtuned.configs.solution import Environment, Solution  # noqa: E402
from gemmtuned.daemon.device.devices import find_monitors  # noqa: E402
from gemmtuned.daemon.seats.worker import Worker  # noqa: E402
from gemmtuned.daemon.service.check import ready  # noqa: E402
from gemmtuned.fleet.layout import RESULTS  # noqa: E402

# N and K of Qwen3-0.6B's and 1.7B's layers, and of heads
SIZES = ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (2048, 2048), (6144, 2048), (2048, 6144), (1024, 1024))
ROWS = (1, 8, 16, 32, 64)  # at most three sizes of a bucket: each is tuned for itself
Make = Callable[[str], Host]


def problems(count: int, gpu: bool) -> list[Problem]:
    """The first `count` of these sizes: bf16, on a CPU fp32, too, and with one thread each."""
    if gpu:
        return [Problem(m=m, n=n, k=k) for m in ROWS for n, k in SIZES][:count]
    dtypes = ("fp32", "bf16")
    return [Problem(m=m, n=n, k=k, dtype=d, threads=1) for m in ROWS for n, k in SIZES[:4] for d in dtypes][:count]


def gate_problems(count: int) -> list[Problem]:
    """Half of them have a kernel that is wrong, each in another way, half one that is right."""
    wrong = [one.problems[0] for one in WRONG if len(one.problems) == 1 and one.problems[0].threads == 1]
    right = [Problem(m=9, n=1000 + 4 * number, k=136, dtype="fp32", threads=1) for number in range(count // 2)]
    return [*wrong[:: len(wrong) * 2 // count][: count - len(right)], *right]


def environment_of(gpu: bool, search: str) -> Environment:
    """What a worker says of this host's first device of that kind."""
    monitor = next(m for m in find_monitors() if (m.device.kind != "cpu") == gpu)
    worker = ready(Worker(monitor.id, nice=0, search=search))
    worker.stop()
    assert worker.environment is not None
    return worker.environment


def new_host(folder: Path, environment: Environment, wanted: Sequence[Problem]) -> Host:
    """A host whose programs called all of these problems, and an empty folder to share results at."""
    host = Host(folder / "home", (folder / "shared").as_uri())
    host.see(*wanted, environment=environment, calls=1000)
    return host


def objects_of(host: Host) -> list[Path]:
    """The results at the URL."""
    return list(Path(host.url.removeprefix("file://"), RESULTS).rglob("*.json"))


def gemmtuned(host: Host, *command: str) -> subprocess.CompletedProcess[str]:
    """A command in this host's home."""
    env = {**os.environ, "GEMMTUNED_HOME": str(host.folder), "GEMMTUNED_IDLE_S": "0"}
    command = (sys.executable, "-m", "gemmtuned", *command)
    return subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, check=False)


def by_ray(host: Host, address: str, tasks: int, gpu: bool, search: str) -> dict[str, Any]:
    """One run by `gemmtuned fleet tune`, or by what it calls where the search is planted; when each result came."""
    began_s = time.time()
    if search:
        ran = Run(host, address, tasks, search).run().ran
        rows = [{"node": node, "state": answer.state, "took_s": answer.took_s} for _, answer, node in ran.done]
        lost, code = ran.lost, ran.code
    else:
        options = ("--ray", address, "--on", "gpu" if gpu else "cpu", "--tasks", str(tasks), "--json")
        done = gemmtuned(host, "fleet", "tune", host.url, *options)
        report: dict[str, Any] = json.loads(done.stdout)
        rows, lost, code = report["rows"], report["lost"], done.returncode
    took_s = time.time() - began_s
    arrivals = sorted(path.stat().st_mtime - began_s for path in objects_of(host))
    span_s = arrivals[-1] - arrivals[0] if len(arrivals) > 1 else float("nan")
    solved = sum(row["state"] == "solved" for row in rows)
    return {
        "tasks": tasks, "exit_code": code, "solved": solved, "lost": lost, "took_s": round(took_s, 1),
        "per_minute": round(60 * solved / took_s, 2),
        "first_result_s": round(arrivals[0], 1) if arrivals else None,
        "per_minute_from_first": round(60 * (len(arrivals) - 1) / span_s, 2),
        "search_s": round(sum(row.get("took_s", 0.0) for row in rows), 1),
        "nodes": sorted({row["node"] for row in rows}), "states": sorted({row["state"] for row in rows}),
    }  # fmt: skip


def by_daemon(host: Host, search: str) -> dict[str, str]:
    """Verdicts of a daemon that ends when all is done: problem and backend. It is told that nobody uses the machine."""
    device = () if "planted_slower" in search else ("--real-device",)
    host.start("--once", "--search", search.rpartition(":")[0], *device)
    assert host.process is not None
    assert host.process.wait() == 0, host.log.read_text()
    return {str(s.problem): s.backend for s in host.store.solutions.published()[1] if s.mode == "eager"}


def verdicts(host: Host) -> dict[str, str]:
    """Verdicts at the URL: problem and backend."""
    rows = [row for path in objects_of(host) for row in json.loads(path.read_text())["record"]["solutions"]]
    found = map(Solution.from_row, rows)
    return {str(s.problem): s.backend for s in found if s.mode == "eager"}


def agreement(one: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    """How many problems have the same backend in both, and which do not."""
    both = sorted(one.keys() & other.keys())
    parted = {problem: [one[problem], other[problem]] for problem in both if one[problem] != other[problem]}
    backends = dict(Counter(one[problem] for problem in both))
    return {"both": len(both), "same_backend": len(both) - len(parted), "backends": backends, "parted": parted}


def kill_a_node(cluster: Cluster, make: Make, search: str) -> dict[str, Any]:
    """Two nodes of one CPU; the processes of the second one are killed while it holds a problem."""
    host, node = make("kill"), cluster.join()
    run = Run(host, cluster.address, 2, search)
    at: list[int] = []

    def is_time() -> bool:
        return run.done >= 8 and run.at_work == 2

    def kill() -> None:
        at.append(len(objects_of(host)))
        node.kill()

    with once(is_time, kill):
        run.run()
    held = [found[1] for line in run.ran.lost if (found := re.search(r", at (\S+): ", line))]
    where = {str(unit.unit.problem): node for unit, answer, node in run.ran.done if answer.state == "solved"}
    return {
        "results_when_killed": at[-1], "solved": len(where),
        "lost": [line.partition(". Node IP")[0] for line in run.ran.lost],
        "held_by_the_dead_node": {problem: f"done on {where.get(problem, 'no node')}" for problem in held},
        "exit_code": run.ran.code, "by_node": Counter(where.values()), "results": len(objects_of(host)),
        "took_s": round(run.took_s, 1), "verdicts": verdicts(host),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--planted", action="store_true")
    args = parser.parse_args(argv)
    os.environ.update(RAY)
    with tempfile.TemporaryDirectory(prefix="fleet-ray-") as folder:
        return measure(args, Path(folder))


def measure(args: Any, folder: Path) -> int:
    """One measurement, into a file of results."""
    search = f"{SUPPORT / 'planted_worker.py'}:tune" if args.gate else ""
    search = planted_slower(folder, 0.25) if args.planted else search
    environment = environment_of(args.gpu, search)
    wanted = gate_problems(args.problems) if args.gate else problems(args.problems, args.gpu)
    result: dict[str, Any] = {
        "ray": metadata.version("ray"), "environment": environment.key, "problems": len(wanted),
        "system": platform.platform(), "load": os.getloadavg(),
    }  # fmt: skip

    def make(name: str) -> Host:
        return new_host(folder / name, environment, wanted)

    if args.kill:
        with ray_cluster(1) as cluster:
            result["kill"] = kill_a_node(cluster, make, search)
        found = result["kill"].pop("verdicts")
        result["agree"] = {"with a node killed and the daemon": agreement(found, by_daemon(make("daemon"), search))}
    else:
        tune_both(result, make, args.gpu, search)
    kind = "".join(f"{name}-" for name in ("kill", "gate", "planted") if getattr(args, name))
    device = environment.device.key if args.gpu else "cpu"
    path = record.save(f"fleet_ray-{kind}{device}-{time.strftime('%Y-%m-%d')}", result, args.out)
    print(json.dumps(result, indent=1))
    print(path)
    return 0


def tune_both(result: dict[str, Any], make: Make, gpu: bool, search: str) -> None:
    """One task, two tasks, one again; then a daemon twice, where it is a matter of minutes."""
    hosts: dict[str, Host] = {}
    with ray_cluster(2, 2 if gpu else 0) as cluster:
        runs = {}
        for name, tasks in (("one", 1), ("two", 2), ("one again", 1)):
            hosts[name] = make(name.replace(" ", "-"))
            runs[name] = by_ray(hosts[name], cluster.address, tasks, gpu, search)
            print(name, runs[name], flush=True)
    one = sum(runs[name]["per_minute_from_first"] for name in ("one", "one again")) / 2
    result["runs"] = runs
    result["two_against_one"] = round(runs["two"]["per_minute_from_first"] / one, 2)
    found = {name: verdicts(host) for name, host in hosts.items()}
    result["agree"] = {"two and one": agreement(found["two"], found["one"])}
    if not gpu:
        daemons = [by_daemon(make(f"daemon-{n}"), search) for n in range(2)]
        result["agree"] |= {
            "two tasks and the daemon": agreement(found["two"], daemons[0]),
            "two daemons": agreement(daemons[0], daemons[1]),
        }


if __name__ == "__main__":
    raise SystemExit(main())
