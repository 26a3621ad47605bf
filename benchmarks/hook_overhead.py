"""What the hook adds to a call: the bare operator against the same call counted, in one run.

    python -m benchmarks hook_overhead [--threads 1 8] [--rounds 15] [--starts 5] [--beside TREE] [--save]

Tiny GEMMs (M=4, N=8, K=16), so that nearly all the time is torch's own dispatch. Each arm is a process, since what is
registered stays; they take turns within every round. Where a process has its code and data in memory is worth up to
100 ns a call for as long as it lives, so each arm is started anew several times. The figure is the median over the
rounds of all starts of (arm - bare of the same round), with the quartiles beside it: CPU time, since others use the
machine too.

    bare       no hook
    passing    the native hook is there and switched off: it passes calls on
    native     counted by the native hook, not routed
    before     the same by an older tree of gemmtuned (--beside)
    off        gemmtuned installed, GEMMTUNED unset: two processes take turns, entry point on and off
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

CALLS = 20_000


def operators() -> dict[str, Callable[[], Any]]:
    import torch

    cases: dict[str, Callable[[], Any]] = {}
    functional = torch.nn.functional
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, w, b = (torch.randn(*s, dtype=dtype) for s in ((4, 16), (8, 16), (8,)))
        w, b = torch.nn.Parameter(w), torch.nn.Parameter(b)  # as nn.Linear calls it
        wt = w.detach().t()
        cases[f"mm {name}"] = lambda x=x, wt=wt: torch.mm(x, wt)
        cases[f"linear {name}"] = lambda x=x, w=w: functional.linear(x, w)
        cases[f"linear+bias {name}"] = lambda x=x, w=w, b=b: functional.linear(x, w, b)
    return cases


def ns_a_call(run: Callable[[], Any], threads: int) -> float:
    """CPU time of a call in ns, over all threads: without what others do on the machine, and waiting for the GIL."""
    import torch

    barrier = threading.Barrier(threads)
    took: list[int] = []

    def work() -> None:
        with torch.inference_mode():
            barrier.wait()
            start = time.thread_time_ns()
            for _ in range(CALLS // threads):
                run()
            took.append(time.thread_time_ns() - start)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for t in pool:
        t.start()
    for t in pool:
        t.join()
    return sum(took) / (CALLS // threads * threads)


def quartiles(values: list[float]) -> dict[str, float]:
    low, mid, high = statistics.quantiles(values, n=4)
    return {"median": round(mid, 1), "q1": round(low, 1), "q3": round(high, 1)}


class Arm:
    """A process that times cases when asked to: `bare` has no hook, `native` counts, of this tree or of another."""

    def __init__(self, arm: str, threads: int, tree: Path | None = None) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
        if tree is not None:
            env |= {"PYTHONPATH": str(tree), "GEMMTUNED_CACHE": str(tree / ".cache")}
        command = [sys.executable, "-P", __file__, "--arm", arm, "--threads", str(threads)]
        self._child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cases: list[str] = self._read()

    def ns(self, case: str) -> float:
        """A call's time."""
        assert self._child.stdin is not None
        self._child.stdin.write(case + "\n")
        self._child.stdin.flush()
        return float(self._read())

    def end(self) -> int:
        """Calls that it counted."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        counted = int(self._read())
        self._child.wait()
        return counted

    def _read(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())


def serve_arm(arm: str, threads: int) -> None:
    """The child's side."""
    import torch

    torch.set_num_threads(1)
    library = None
    if arm != "bare":
        from gemmtuned.configs.settings import Settings
        from gemmtuned.hooks import native
        from gemmtuned.hooks.native.build import build

        library = native.Native(build(Settings.from_env().cache))
        library.install()
        library.set_switches(native.OFF if arm == "passing" else native.CAPTURE | native.DISPATCH)
    cases = operators()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        print(ns_a_call(cases[line.strip()], threads), flush=True)
    print(sum(s.calls for s in library.drain()) if library is not None else 0, flush=True)


Times = dict[str, dict[str, list[float]]]  # ns a call, by arm and case


def started(threads: int, rounds: int, beside: Path | None, ns: Times) -> None:
    """Start each arm once, and add its times of so many rounds: they take turns, in another order every round."""
    arms = {"bare": Arm("bare", threads), "passing": Arm("passing", threads), "native": Arm("native", threads)}
    if beside is not None:
        arms["before"] = Arm("native", threads, beside)
    cases = arms["bare"].cases
    for number in range(rounds):
        for case in cases:
            for arm in [*arms][number % len(arms) :] + [*arms][: number % len(arms)]:
                ns.setdefault(arm, {}).setdefault(case, []).append(arms[arm].ns(case))
    counted = {arm: process.end() for arm, process in arms.items()}
    calls = rounds * len(cases) * (CALLS // threads * threads)
    assert all(counted[a] == (calls if a in ("native", "before") else 0) for a in arms), "not every call was counted"


def measure(threads: int, rounds: int, starts: int, beside: Path | None) -> dict[str, Any]:
    """What each arm adds to the bare call of the same round."""
    ns: Times = {}
    for start in range(starts):
        started(threads, rounds * (start + 1) // starts - rounds * start // starts, beside, ns)
    added = {
        arm: {case: quartiles([x - b for x, b in zip(of[case], ns["bare"][case], strict=True)]) for case in of}
        for arm, of in ns.items()
        if arm != "bare"
    }
    bare = {case: quartiles(times) for case, times in ns["bare"].items()}
    return {"threads": threads, "starts": starts, "bare_ns": bare, "added_ns": added}


def measure_off(rounds: int) -> dict[str, Any]:
    """Entry point off against on-but-not-asked-for: fresh processes in turn, one bare figure each."""
    arms: dict[str, list[float]] = {"absent": [], "unset": []}
    for _ in range(rounds):
        for arm, autoload in (("absent", "0"), ("unset", "1")):
            env = {k: v for k, v in os.environ.items() if k not in ("GEMMTUNED", "AITER_TUNE_GEMM")}
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload
            done = subprocess.run(
                [sys.executable, __file__, "--child"], env=env, capture_output=True, text=True, check=True
            )
            arms[arm].append(json.loads(done.stdout)["ns"])
    added = [u - a for u, a in zip(arms["unset"], arms["absent"], strict=True)]
    return {"bare_ns": quartiles(arms["absent"]), "added_ns": quartiles(added)}


def child() -> None:
    import torch

    torch.set_num_threads(1)
    run = operators()["mm fp32"]
    values = [ns_a_call(run, 1) for _ in range(9)]
    dump = torch._C._dispatch_dump("aten::mm")
    assert "c_api.cpp" not in dump, "the hook is installed although it was not asked for"
    print(json.dumps({"ns": statistics.median(values)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8], help="Python threads calling at once")
    parser.add_argument("--rounds", type=int, default=15, help="in all")
    parser.add_argument("--starts", type=int, default=5, help="of each arm; the rounds are dealt out among them")
    parser.add_argument("--no-off", action="store_true", help="leave the processes of the off arm out")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/hook_overhead-<date>.json")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="an older tree of gemmtuned, as the arm `before`")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    if args.arm:
        serve_arm(args.arm, args.threads[0])
        return
    import torch

    torch.set_num_threads(1)
    starts = max(1, min(args.starts, args.rounds))
    results = [measure(threads, args.rounds, starts, args.beside) for threads in args.threads]
    for result in results:
        print(f"\n{result['threads']} thread(s), ns a call: bare, then added (median [quartiles])")
        for case, bare in result["bare_ns"].items():
            line = f"  {case:18} {bare['median']:7.0f}"
            for arm, by in result["added_ns"].items():
                if case in by:
                    q = by[case]
                    line += f"   {arm} {q['median']:+6.0f} [{q['q1']:+.0f}, {q['q3']:+.0f}]"
            print(line)
    out: dict[str, Any] = {"benchmark": "hook_overhead", "results": results}
    if not args.no_off:
        off = out["off"] = measure_off(min(args.rounds, 5))
        print(f"\nswitched off: {off['bare_ns']['median']:.0f} ns bare, {off['added_ns']['median']:+.0f} ns added")
    if args.save:
        facts = record.facts()
        print("saved", record.save(f"hook_overhead-{facts['date'][:10]}", out))


if __name__ == "__main__":
    main()
