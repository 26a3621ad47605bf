"""What gemmtuned costs a process that is not ours: off and on in turn, in fresh processes, one figure each.

    python -m benchmarks guest [--rounds 9] [--save]

    import_exit_cpu_ms   CPU time, all threads, of a process that imports torch, makes one product and ends:
                         median of five starts of each arm, in turns
    rss_mib              resident memory after the first flush and a look at the tables
    threads, descriptors, modules   at that moment; modules: names in sys.modules
    fork_ms              os.fork to the end of a child that does nothing, median of 40
    flush_ms_s           CPU time a second of all threads but the main one, in a program that repeats 20 problems
    loader_s             an epoch of a DataLoader with two worker processes, 64 batches, median of 3 epochs

Before forking, the program collects its garbage once.  Without that, a forked child may have to: a full collection
copies every page that it shares with its parent (90 ms of CPU here), and whether it is due in the children of the one
arm or the other hangs on how many objects the program happens to have made.  Bytecode is kept, as pip keeps it.

The home has a database and an empty folder for tables, and the native hook is built.  Figures are medians over the
rounds with their quartiles; "added" is the median of (on - off) of the same round.  Budget: one thread, 40 ms, 6 MiB,
2 ms a fork, 2 ms a second, 15 % an epoch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

SHORT = "import torch; torch.mm(torch.ones(4, 16), torch.ones(16, 8))"
BUDGET = {"threads": 1, "import_exit_cpu_ms": 40.0, "rss_mib": 6.0, "fork_ms": 2.0, "flush_ms_s": 2.0}
SHORT_RUNS = 5  # starts of one program differ by a tenth, which is more than what is looked for
REPEATED_S = 10.0  # two rounds of flushes of what is known
LOADER_SHARE = 0.15


def look() -> dict[str, float]:
    """Run in the measured process."""
    import torch

    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    time.sleep(2.5)
    gc.collect()
    status = Path("/proc/self/status").read_text()
    kib = int(status.split("VmRSS:")[1].split()[0])
    found = {
        "rss_mib": kib / 1024,
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # noqa: PTH208
        "modules": len(sys.modules),
        "fork_ms": statistics.median(fork_ms() for _ in range(40)),
    }
    dataset = torch.utils.data.TensorDataset(torch.randn(512, 64))

    def epoch_s() -> float:
        began_s = time.perf_counter()
        for _ in torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context="fork"):
            pass
        return time.perf_counter() - began_s

    epoch_s()
    found["loader_s"] = statistics.median(epoch_s() for _ in range(3))
    found["flush_ms_s"] = flush_ms_s()  # last: what it leaves is not in the other figures
    return found


def flush_ms_s() -> float:
    import torch

    pairs = [(torch.ones(4, 16 * i), torch.ones(16 * i, 8)) for i in range(1, 21)]

    def work_for(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for x, w in pairs:
                torch.mm(x, w)
            time.sleep(0.1)

    def ran_ns() -> int:
        threads = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in threads)

    work_for(2.5)  # they are new
    before_ns = ran_ns()
    work_for(REPEATED_S)
    return (ran_ns() - before_ns) / 1e6 / REPEATED_S


def fork_ms() -> float:
    began_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return (time.perf_counter() - began_s) * 1e3


def cpu_ms(env: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-c", SHORT], env=env, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def one(env: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--child"], env=env, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def arms(home: Path) -> dict[str, dict[str, str]]:
    """The environment of a program without the hook (off) and with it (on)."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER"))}
    base.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles our modules, which pip has done for a user
    base["PYTHONPYCACHEPREFIX"] = str(home / "bytecode")
    base |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {"off": base, "on": {**base, "GEMMTUNED": "1", "GEMMTUNED_HOME": str(home), "GEMMTUNED_QUIET": "1"}}


def build_library() -> None:
    """Build the native hook, unless it is there, and bring the file of our modules' code up to date."""
    from gemmtuned.configs.settings import Settings
    from gemmtuned.hooks.native.build import build

    build(Settings.from_env().cache)


def measure(rounds: int, home: Path) -> dict[str, Any]:
    envs = arms(home)
    for env in envs.values():  # warm: files are in memory, the home has been used
        one(env)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in envs}
    for turn in range(rounds):
        order = ("off", "on") if turn % 2 == 0 else ("on", "off")
        starts: dict[str, list[float]] = {arm: [] for arm in envs}
        for arm in order * SHORT_RUNS:  # in turns: what slows the machine for seconds slows both
            starts[arm].append(cpu_ms(envs[arm]))
        for arm in order:
            found[arm].append({"import_exit_cpu_ms": statistics.median(starts[arm]), **one(envs[arm])})
    names = list(found["off"][0])
    added = {n: [on[n] - off[n] for off, on in zip(found["off"], found["on"], strict=True)] for n in names}
    result: dict[str, Any] = {
        arm: {n: quartiles([row[n] for row in rows]) for n in names} for arm, rows in found.items()
    }
    result["added"] = {n: quartiles(values) for n, values in added.items()}
    return result


def quartiles(values: list[float]) -> dict[str, float]:
    low, mid, high = statistics.quantiles(values, n=4)
    return {"median": round(mid, 3), "q1": round(low, 3), "q3": round(high, 3)}


def within_budget(result: dict[str, Any]) -> dict[str, bool]:
    added = {name: q["median"] for name, q in result["added"].items()}
    kept = {name: added[name] <= limit for name, limit in BUDGET.items()}
    kept["loader_s"] = added["loader_s"] <= LOADER_SHARE * result["off"]["loader_s"]["median"]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/guest-<date>.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(look()))
        return
    build_library()
    with tempfile.TemporaryDirectory(prefix="gemmtuned-guest-") as home:
        (Path(home) / "configs").mkdir()
        result = measure(args.rounds, Path(home))
    kept = within_budget(result)
    for name, q in result["added"].items():
        off, on = (result[arm][name]["median"] for arm in ("off", "on"))
        verdict = "" if name not in kept else "  within the budget" if kept[name] else "  OVER THE BUDGET"
        spread = f"[{q['q1']:+.3f}, {q['q3']:+.3f}]"
        print(f"{name:20} off {off:9.3f}  on {on:9.3f}  added {q['median']:+8.3f} {spread}{verdict}")
    if args.save:
        facts = record.facts()
        out = {"benchmark": "guest", **result, "within_budget": kept, "load_average": os.getloadavg()}
        print("saved", record.save(f"guest-{facts['date'][:10]}", out))


if __name__ == "__main__":
    main()
