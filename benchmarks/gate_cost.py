"""What the numeric gate costs a search on a CPU, before a revision and now, and how often it finds rare faults.

    python -m benchmarks gate_cost                    # about 6 minutes
    python -m benchmarks gate_cost --before b8de2c0   # the revision that is compared with, as git knows it

Both revisions search the same problems in turns, each in a process of its own.  `gate_s` is the time of one search in
verifying and, now, in the last check of a winner; `search_s` all of it; `gate_cpu_s` what it took of the CPU, which
other programs on the machine change less.  Each problem is searched twice: as it is, and
with the times of all candidates halved, so that there is a winner: the dearest case for the gate.

The odds: kernels that are wrong in one of N calls, by chance, verified as winners are; how many of them are found.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

HERE = Path(__file__).resolve()
PROBLEMS = (
    "fp32:1x1024x1024,threads=1",
    "fp32:1x4096x1024,threads=1",
    "fp32:8x1024x1024,threads=1",
    "fp32:8x2048x1024+bias,threads=1",
    "fp32:16x1024x4096,threads=1",
    "fp32:32x1024x1024+bias,threads=1",
    "fp32:64x1024x1024,threads=1",
    "fp32:256x512x512+bias,threads=1",
    "bf16:8x1024x1024,threads=1",
    "bf16:32x512x2048+bias,threads=1",
    "fp32:256x2048x1024,threads=1",
)
# (problem, wrong in one of so many calls, kernels): at 1 MFLOP, 1 and 10 GFLOP
ODDS = (
    ("fp32:8x256x256,threads=1", 50, 20),
    ("fp32:8x256x256,threads=1", 1000, 20),
    ("fp32:128x2048x2048,threads=1", 50, 10),
    ("fp32:128x2048x2048,threads=1", 1000, 10),
    ("fp32:256x4096x4864,threads=1", 50, 2),
    ("fp32:256x4096x4864,threads=1", 1000, 2),
)


def search_each(now: bool) -> None:
    """The role of one revision: problems as JSON lines in, times out. now: it must have a last check of winners."""
    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.solution import cpu_device
    from gemmtuned.kernels.backends import environment

    try:
        from gemmtuned.daemon.child import measure, search
    except ImportError:  # the revision that is compared with had these files elsewhere
        from gemmtuned.daemon import measure, search  # type: ignore[attr-defined, no-redef]

    spent, called = [0.0, 0.0], set[str]()

    def timed(name: str) -> None:
        inner = getattr(search, name, None)
        if inner is None:
            return

        def call(*args: Any, **options: Any) -> Any:
            called.add(name)
            began, used = time.perf_counter(), time.process_time()
            try:
                return inner(*args, **options)
            finally:
                spent[0] += time.perf_counter() - began
                spent[1] += time.process_time() - used

        setattr(search, name, call)

    timed("verify")
    timed("last_check")
    measure.CpuWait.waited_s = lambda self: None  # type: ignore[attr-defined, method-assign]
    plain_us = measure.WallClock.us
    win = [False]

    def us(self: measure.WallClock, arm: measure.Arm, copies: Any) -> float:
        return plain_us(self, arm, copies) * (0.5 if win[0] and arm.name != "torch" else 1.0)

    measure.WallClock.us = us  # type: ignore[method-assign]
    here = environment(cpu_device())
    for line in sys.stdin:
        text, win[0] = json.loads(line)
        problem, spent[:] = Problem.parse(text), [0.0, 0.0]
        called.clear()
        began = time.perf_counter()
        found, *_ = search.tune_modes(
            (problem,), "exact", problem, here, mode="eager", skip=(), emit=lambda trial: None, seed=1
        )
        needed = {"verify", "last_check"} if now and found.backend != "torch" else {"verify"}
        if missed := needed - called:
            sys.exit(f"search.py calls no {' and no '.join(sorted(missed))} by that name: its time would be missing")
        answer = {
            "search_s": time.perf_counter() - began,
            "gate_s": spent[0],
            "gate_cpu_s": spent[1],
            "backend": found.backend,
        }
        print(json.dumps(answer), flush=True)


def odds() -> list[dict[str, Any]]:
    import torch

    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.solution import Candidate
    from gemmtuned.daemon.child import last_check
    from gemmtuned.daemon.child.measure import Bench
    from gemmtuned.daemon.protocol.options import DEFAULTS
    from gemmtuned.kernels.backends import BACKENDS
    from gemmtuned.kernels.backends.base import Kernel, StatelessKernel
    from gemmtuned.kernels.torch_flags import as_called

    class Now:
        """A backend of one kernel, wrong in one element in one of `count` calls."""

        name = "planted"

        def __init__(self, count: int) -> None:
            draw = random.Random()

            def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                y = torch.mm(a, b)
                if draw.random() < 1 / count:
                    y[-1, -1] += 1.0
                return y

            self.kernel = StatelessKernel(call)

        def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
            return self.kernel

    cpu, rows = torch.device("cpu"), []
    for text, count, kernels in ODDS:
        problem = Problem.parse(text)
        found, calls, small, seconds = 0, [], [], []
        with as_called(problem):
            default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
            bench = Bench(problem, cpu)
            inputs = bench.inputs(problem)
            call_us = _call_us(default, inputs)
            for number in range(kernels + 1):
                backend: Any = Now(count if number else 1 << 60)  # the first is right: how many calls there are
                asked = last_check.Winner(
                    problem, problem, "exact", Candidate("planted"), backend, backend.kernel, default,
                    bench.arm("planted", backend.kernel, problem), inputs, bench.weights,
                )  # fmt: skip
                began = time.perf_counter()
                try:
                    proved = last_check.last_check(asked, device=cpu, call_us=call_us, options=DEFAULTS)
                    calls.append(proved.calls)
                    small.append(proved.small_calls)
                except last_check.Wrong:
                    found += 1
                if number == 0:
                    seconds.append(time.perf_counter() - began)
        compared = calls[0] + small[0]
        rows.append({
            "problem": text, "gflop": problem.flops / 1e9, "wrong_one_in": count, "kernels": kernels, "found": found,
            "calls": calls[0], "small_calls": small[0], "last_check_s": seconds[0],
            "computed": 1 - (1 - 1 / count) ** compared,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _call_us(kernel: Any, inputs: Any) -> float:
    run, times = kernel.bind(*inputs.weights), []
    for _ in range(5):
        began = time.perf_counter()
        run(*inputs.activations)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def revision(folder: Path, name: str) -> Path:
    """The tree of a revision, in that folder."""
    archive = subprocess.run(["git", "archive", name], cwd=HERE.parent.parent, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    return folder


def role(name: str, tree: Path) -> subprocess.Popen[str]:
    import os

    return subprocess.Popen(
        [sys.executable, str(HERE), "--role", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip


def ask(process: subprocess.Popen[str], text: str, win: bool) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([text, win]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit("a revision ended without an answer; what it said is above")
    return dict(json.loads(answer))


def compare(before: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "before": role("before", revision(Path(folder), before)),
            "now": role("now", HERE.parent.parent),
        }
        for win in (False, True):
            for text in PROBLEMS:
                seen: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
                for number in range(rounds):
                    for arm in sorted(arms, reverse=bool(number % 2)):
                        seen[arm].append(ask(arms[arm], text, win))
                row: dict[str, Any] = {"problem": text, "always_a_winner": win}
                for arm, answers in seen.items():
                    row |= {
                        f"{arm}_{key}": statistics.median(a[key] for a in answers)
                        for key in ("search_s", "gate_s", "gate_cpu_s")
                    }
                    row[f"{arm}_backend"] = answers[-1]["backend"]
                rows.append(row)
                print(row, flush=True)
        for process in arms.values():
            process.kill()
            process.wait()
    return rows


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--before", default="b8de2c0", help="revision to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=("before", "now"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        search_each(now=args.role == "now")
        return
    rows = compare(args.before, args.rounds)
    summary = {}
    for win in (False, True):
        chosen = [row for row in rows if row["always_a_winner"] == win]
        summary["with a winner" if win else "as it is"] = {
            key: statistics.median(row[key] for row in chosen)
            for key in (
                "before_gate_s",
                "now_gate_s",
                "before_gate_cpu_s",
                "now_gate_cpu_s",
                "before_search_s",
                "now_search_s",
            )
        } | {
            f"median_more_{key}": statistics.median(
                row[f"now_gate_{key}"] - row[f"before_gate_{key}"] for row in chosen
            )
            for key in ("s", "cpu_s")
        }
    print(json.dumps(summary, indent=1))
    found = odds()
    date = time.strftime("%Y-%m-%d")
    result = {"before": args.before, "summary": summary, "problems": rows, "odds": found}
    print(record.save(f"gate_cost-cpu-{date}", result, args.out))


if __name__ == "__main__":
    main()
