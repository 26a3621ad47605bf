"""How much faster do two tasks on a Ray cluster tune than one, and do they find what a daemon finds?

    python -m benchmarks fleet_ray                       40 CPU problems on this host: 1 task, 2 tasks, a daemon (twice)
    python -m benchmarks fleet_ray --gpu --problems 24   on a host with two GPUs: 1 task against 2
    python -m benchmarks fleet_ray --kill                a second node is killed at work: its problem is done elsewhere
    python -m benchmarks fleet_ray --planted             a search that sleeps, for a machine that others use

Starts a Ray cluster of its own (`ray start --head`) and ends it.  Each run begins with an empty home and an empty URL.
Rates are results a minute, counted from the first result of each run, so that the start of torch is left out, and over
the whole run.  Verdicts agree when the same backend is in use; where two of them are as fast as each other, two daemons
do not always agree either, so the daemon runs twice.  With --planted a search is tests/planted_search.py, which takes a
second and always finds the same; workers, stores, claims, Ray and the daemon are as ever.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import record

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.device.devices import find_monitors
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service.check import ready
from gemmtuned.db.store import Store
from gemmtuned.fleet.layout import RESULTS

PORT = 6391
TESTS = Path(__file__).resolve().parents[1] / "tests"
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
# N and K of Qwen3-0.6B's and 1.7B's layers, and of heads
SIZES = ((2048, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (2048, 2048), (6144, 2048), (2048, 6144), (1024, 1024))
ROWS = (1, 8, 16, 32, 64)  # at most three sizes of a bucket: each is tuned for itself


def problems(count: int, gpu: bool) -> list[Problem]:
    """The first `count` of these sizes: bf16, on a CPU with one thread each."""
    threads = 0 if gpu else 1
    return [Problem(m=m, n=n, k=k, threads=threads) for m in ROWS for n, k in SIZES][:count]


def planted(folder: Path) -> str:
    """The planted search, which sleeps for a second in all."""
    path = folder / "planted_slower.py"
    text = (TESTS / "planted_search.py").read_text()
    path.write_text(text.replace("pause_s = 0.002", "pause_s = 0.25"))
    return f"{path}:tune"


def environment_of(gpu: bool, search: str) -> Environment:
    """What a worker says of this host's first device of that kind."""
    monitor = next(m for m in find_monitors() if (m.device.kind != "cpu") == gpu)
    worker = ready(Worker(monitor.id, nice=0, search=search))
    worker.stop()
    assert worker.environment is not None
    return worker.environment


class Home:
    """A home in which a program called all of these problems, and an empty folder to share results at."""

    def __init__(self, folder: Path, environment: Environment, wanted: Sequence[Problem]) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self.shared.mkdir(parents=True)
        store = Store(folder / "home" / "tune.db", locks=folder / "home" / "locks")
        seen = [Sighting(problem, "miss", 1000) for problem in wanted]
        store.add_sightings("serve", environment, seen, now_s=time.time())
        store.close()

    @property
    def env(self) -> dict[str, str]:
        """For programs that use it."""
        return {**os.environ, **RAY, "GEMMTUNED_HOME": str(self.folder / "home"), "GEMMTUNED_IDLE_S": "0"}

    def results(self) -> list[dict[str, Any]]:
        """What lies at the URL."""
        return [json.loads(path.read_text())["record"] for path in (self.shared / RESULTS).rglob("*.json")]


def gemmtuned(*command: str, env: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gemmtuned", *command], env=env, text=True, stdout=subprocess.PIPE, **more
    )


@contextmanager
def cluster(cpus: int, gpus: int) -> Iterator[None]:
    """For `with`: a Ray cluster of one node on this host."""
    start = [
        "--head",
        f"--port={PORT}",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
        "--include-dashboard=false",
    ]
    ray("start", *start)
    try:
        yield
    finally:
        ray("stop", "--force")


def ray(*command: str) -> str:
    """Ray's own command."""
    program = str(Path(sys.executable).parent / "ray")
    done = subprocess.run(
        [program, *command], env={**os.environ, **RAY}, capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def start(home: Home, tasks: int, gpu: bool, search: str) -> subprocess.Popen[str]:
    """`gemmtuned fleet tune`, or the same with a planted search; both print the same report."""
    if search:
        command = [sys.executable, __file__, "--pool", str(tasks), "--search", search]
        return subprocess.Popen(
            command, env={**home.env, "GEMMTUNED_SYNC": home.shared.as_uri()}, text=True, stdout=subprocess.PIPE
        )
    on = "gpu" if gpu else "cpu"
    options = ("--ray", f"127.0.0.1:{PORT}", "--on", on, "--tasks", str(tasks), "--json")
    return gemmtuned("fleet", "tune", home.shared.as_uri(), *options, env=home.env)


def pool(tasks: int, search: str) -> int:
    """What `gemmtuned fleet tune` does, with this search."""
    from gemmtuned.commands import fleet
    from gemmtuned.commands.options import settings
    from gemmtuned.fleet.on_ray import How, Pool
    from gemmtuned.fleet.on_ray import cluster as connected
    from gemmtuned.fleet.opening import open_objects
    from gemmtuned.reports.render import show

    here, began_s = settings(), time.monotonic()
    objects = open_objects(here.sync)
    wanted, _ = fleet._wanted(here, objects)
    shelf = fleet._shelf(here, objects)
    with connected(f"127.0.0.1:{PORT}") as ray:
        how = How(gpu=False, cpus=1, tasks=tasks, search=search)
        ran = Pool(ray, wanted, shelf, how, lambda done, total, doing: None).run()
    show(fleet._report(here.sync, wanted, ran, [], 0, 0, took_s=time.monotonic() - began_s), as_json=True)
    return ran.code


def by_ray(home: Home, tasks: int, gpu: bool, search: str) -> dict[str, Any]:
    """One run; its report, and when each result came."""
    process = start(home, tasks, gpu, search)
    arrivals = watch(process, home)
    said, _ = process.communicate()
    report: dict[str, Any] = json.loads(said)
    span_s = arrivals[-1] - arrivals[0] if len(arrivals) > 1 else float("nan")
    return {
        "tasks": tasks, "exit_code": process.returncode, "solved": report["solved"], "lost": report["lost"],
        "took_s": round(report["took_s"], 1), "per_minute": round(60 * report["solved"] / report["took_s"], 2),
        "first_result_s": round(arrivals[0], 1) if arrivals else None,
        "per_minute_from_first": round(60 * (len(arrivals) - 1) / span_s, 2),
        "search_s": round(sum(row.get("took_s", 0.0) for row in report["rows"]), 1),
        "nodes": sorted({row["node"] for row in report["rows"]}),
        "states": sorted({row["state"] for row in report["rows"]}),
    }  # fmt: skip


def watch(process: subprocess.Popen[str], home: Home) -> list[float]:
    """Seconds from the start at which each result was at the URL, to a tenth of a second."""
    began_s, arrivals = time.monotonic(), []
    while process.poll() is None:
        there = len(list((home.shared / RESULTS).rglob("*.json")))
        arrivals += [time.monotonic() - began_s] * (there - len(arrivals))
        time.sleep(0.1)
    there = len(list((home.shared / RESULTS).rglob("*.json")))
    return arrivals + [time.monotonic() - began_s] * (there - len(arrivals))


def by_daemon(home: Home, search: str) -> dict[str, str]:
    """Verdicts of a daemon that ends when all is done: problem and backend."""
    if search:
        path = search.rpartition(":")[0]
        command = [
            str(TESTS / "fleet_host.py"),
            str(home.folder / "home"),
            home.shared.as_uri(),
            "--once",
            "--search",
            path,
        ]
        subprocess.run([sys.executable, *command], env=home.env, check=True, capture_output=True)
    else:
        gemmtuned("daemon", "--once", "--devices", "cpu", "--log-level", "error", env=home.env).communicate()
    store = Store(home.folder / "home" / "tune.db", locks=home.folder / "home" / "locks")
    try:
        return {str(s.problem): s.backend for s in store.published()[1] if s.mode == "eager"}
    finally:
        store.close()


def verdicts(home: Home) -> dict[str, str]:
    """Verdicts at the URL: problem and backend."""
    from gemmtuned.configs.solution import Solution

    found = [Solution.from_row(row) for one in home.results() for row in one["solutions"]]
    return {str(s.problem): s.backend for s in found if s.mode == "eager"}


def agreement(one: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    """How many problems have the same backend in both, and which do not."""
    both = sorted(one.keys() & other.keys())
    parted = {problem: [one[problem], other[problem]] for problem in both if one[problem] != other[problem]}
    return {"both": len(both), "same_backend": len(both) - len(parted), "parted": parted}


def kill_a_node(make: Any, wanted: Sequence[Problem], search: str) -> dict[str, Any]:
    """Two nodes of one CPU; the process of the second one is killed while it holds a problem."""
    home = make("kill")
    before = {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()}
    ray("start", f"--address=127.0.0.1:{PORT}", "--node-ip-address=127.0.0.2", "--num-cpus=1")
    raylet = next(pid for pid in raylets() if pid not in before)
    process = start(home, 2, False, search)
    while len(home.results()) < min(8, len(wanted) // 3) and process.poll() is None:
        time.sleep(0.05)
    os.kill(raylet, signal.SIGKILL)
    at = len(home.results())
    said, _ = process.communicate()
    report = json.loads(said)
    by_node: dict[str, int] = {}
    for row in report["rows"]:
        by_node[row["node"]] = by_node.get(row["node"], 0) + 1
    searched = [one["solutions"][0] for one in home.results()]
    return {
        "problems": len(wanted), "results_when_killed": at, "solved": report["solved"], "lost": report["lost"],
        "exit_code": process.returncode, "by_node": by_node, "results": len(searched), "took_s": report["took_s"],
    }  # fmt: skip


def raylets() -> list[int]:
    """Processes of Ray that hold a node."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if name.endswith(b"/raylet"):
            found.append(int(path.parent.name))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--pool", type=int, default=0, help="(the run itself, with --search)")
    parser.add_argument("--search", default="", help="(for --pool)")
    args = parser.parse_args(argv)
    if args.pool:
        return pool(args.pool, args.search)
    import ray as library

    with tempfile.TemporaryDirectory(prefix="fleet-ray-") as folder:
        return measure(args, Path(folder), library.__version__)


def measure(args: Any, folder: Path, version: str) -> int:
    """One measurement, into a file of results."""
    search = planted(folder) if args.planted else ""
    environment = environment_of(args.gpu, search)
    wanted = problems(args.problems, args.gpu)
    result: dict[str, Any] = {
        "ray": version, "environment": environment.key, "problems": len(wanted),
        "system": platform.platform(),
    }  # fmt: skip
    made = iter(range(100))

    def make(name: str) -> Home:
        return Home(folder / f"{name}{next(made)}", environment, wanted)

    if args.kill:
        with cluster(1, 0):
            result["kill"] = kill_a_node(make, wanted, search)
    else:
        tune_both(result, make, args.gpu, search)
    kind = "".join(f"{name}-" for name in ("kill", "planted") if getattr(args, name))
    device = environment.device.key if args.gpu else "cpu"
    path = record.save(f"fleet_ray-{kind}{device}-{time.strftime('%Y-%m-%d')}", result, args.out)
    print(json.dumps(result, indent=1))
    print(path)
    return 0


def tune_both(result: dict[str, Any], make: Any, gpu: bool, search: str) -> None:
    """One task, two tasks, one again; then a daemon twice, where it is a matter of minutes."""
    homes: dict[str, Home] = {}
    with cluster(2, 2 if gpu else 0):
        runs = {}
        for name, tasks in (("one", 1), ("two", 2), ("one again", 1)):
            homes[name] = make(name.replace(" ", "-"))
            runs[name] = by_ray(homes[name], tasks, gpu, search)
            print(name, runs[name], flush=True)
    one = sum(runs[name]["per_minute_from_first"] for name in ("one", "one again")) / 2
    result["runs"] = runs
    result["two_against_one"] = round(runs["two"]["per_minute_from_first"] / one, 2)
    found = {name: verdicts(home) for name, home in homes.items()}
    result["agree"] = {"two and one": agreement(found["two"], found["one"])}
    if not gpu:
        daemons = [by_daemon(make(f"daemon{n}"), search) for n in range(2)]
        result["agree"] |= {
            "two tasks and the daemon": agreement(found["two"], daemons[0]),
            "two daemons": agreement(daemons[0], daemons[1]),
        }


if __name__ == "__main__":
    raise SystemExit(main())
