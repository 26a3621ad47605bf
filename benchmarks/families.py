"""Scaled (FP8, int8) products on one GPU: what the daemon's search finds, beside torch, cuBLASLt's best and the floor.

    python -m benchmarks families --out FOLDER [--kinds row,tensor,block --m 1,16,64,256,2048 --shapes short|all|NxK,...
                                                --budget-s 480 --resume families.jsonl]
    python -m benchmarks families --dry-run            # on this CPU, with small sizes: does the program itself work?

For each problem the search runs as in the daemon's worker.  Then torch's own call, the cuBLASLt algorithm and the
kernel of ours that screened best, what was published, and kernels that only read the weight (the floor) take turns in
one run, in CUDA graphs with cold weights.  A problem where torch stays counts 1.00.  Kinds: one scale a `row` or
`tensor`, sums in fp32 every 128 of K (torch's use_fast_accum=False), `row_fast` and `tensor_fast` with the tensor
core's own sums, `block`, scales of 1x128 by 128x128 (where M is no multiple of 4 torch refuses it: beside torch's
product of copies made ahead, `copied`; `torch` makes them at every call), `block_row`, with X's scales row after row,
as gemm_a8w8_blockscale has them, which torch refuses at every M, `int8`, with one scale a row, beside `_int_mm` alone
(`int_mm`, with no scales and X of 17 rows and more made ahead) and with one compiled kernel for scales behind it
(`int_mm_fused`: the best that torch has), `int8_zero`, the same with a zero point for each row of X, and
`int8_zero_tensor`, with one and one scale for all of X, `int8_shuffled` and `row_shuffled`, `int8` and `row` of W in
AITER's order (torch turns it back at every call), `grouped` and `grouped_nn`, bf16 products of --groups weights
with M rows in all (torch._grouped_mm), whose floor reads the weights that have rows, `grouped_row` and
`grouped_row_fast`, the same of fp8 with one scale a row (torch._scaled_grouped_mm), and `batched` and `batched_nn`,
torch.bmm of --groups matrices in bf16 (the attention of DeepSeek-V3: 16 of 512x128 and 128x512).  Every problem is a
line of families.jsonl as it is done.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import block_forms
import dense
import int8_forms
import record
import torch
from timing import CudaTimer, floor_launches

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, cpu_device
from gemmtuned.daemon.child import search
from gemmtuned.daemon.child.measure import Arm, Bench, WallClock
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.kernel import Kernel
from gemmtuned.kernels.torch_flags import as_called

FAST = {"math_mode": "reduced"}
OF_GROUPS = ("grouped_row", "grouped_row_fast")
GROUPED = ("grouped", "grouped_nn", *OF_GROUPS)
ON_GPUS_ALONE = ("block", "block_row", *OF_GROUPS)
BATCHED = ("batched", "batched_nn")
KINDS: dict[str, dict[str, str]] = {
    "row": {"scale": "row"}, "row_fast": {"scale": "row"} | FAST, "tensor": {"scale": "tensor"},
    "tensor_fast": {"scale": "tensor"} | FAST, "block": {"scale": "1x128"}, "block_row": {"scale": "1x128"},
    "int8": {"scale": "row", "dtype": "i8"},  # as the operator of gemm_a8w8 has it
    "int8_zero": {"scale": "row+zero", "dtype": "i8"},
    "int8_zero_tensor": {"scale": "tensor+zero", "wscale": "row", "dtype": "i8"},
    "int8_shuffled": {"scale": "row", "dtype": "i8", "weight_state": "shuffled"},
    "row_shuffled": {"scale": "row", "weight_state": "shuffled"},
}  # fmt: skip
SHORT = ((2112, 7168), (7168, 2048), (4096, 7168), (24576, 1536), (7168, 16384), (4096, 4096))
MORE = (
    (576, 7168), (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (2560, 8192), (8192, 2048), (14336, 8192),
    (8192, 7168), (9216, 4096),
)  # fmt: skip
DRY = ((64, 256), (48, 384))
OURS = ("cuda", "triton")
FORMS: dict[str, Callable[[Problem], Kernel]] = {**int8_forms.FORMS, **block_forms.FORMS}  # of torch's, of no backend
Tune = Callable[[Problem, Environment], dict[str, Any]]
Turns = Callable[[Problem, Sequence[Candidate]], tuple[list[list[float]], float]]


def problem_of(kind: str, m: int, n: int, k: int, *, threads: int = 0, groups: int = 1) -> Problem:
    """The problem as the hook keys the call; block scales lie as ATen/native/cuda/ScaledBlas.cpp asks for them."""
    if kind in OF_GROUPS:
        fast = FAST if kind.endswith("fast") else {}
        return Problem(
            family="grouped", batch=groups, m=m, n=n, k=k, dtype="fp8_e4m3", out_dtype="bf16", scale="row",
            threads=threads, **fast,
        )  # type: ignore[arg-type]  # fmt: skip
    if kind in (*GROUPED, *BATCHED):
        family, _, layout = kind.partition("_")
        return Problem(
            family=family, batch=groups, m=m, n=n, k=k, dtype="bf16", layout=layout or "nt",
            threads=threads, math_mode="ieee" if threads else "reduced",
        )  # fmt: skip
    lies = {}
    if kind == "block":
        depth = -(-k // 128)
        lies = {"scale_layout": "col" if m > 1 else "row", "wscale_layout": "row_padded" if depth % 4 else "row"}
    return Problem(
        family="scaled",
        m=m,
        n=n,
        k=k,
        threads=threads,
        **{"dtype": "fp8_e4m3", "out_dtype": "bf16"} | KINDS[kind] | lies,
    )  # type: ignore[arg-type]


def best_of(trials: Iterable[Trial], backends: Sequence[str]) -> Candidate | None:
    """The candidate of these backends that screened fastest."""
    seen = [t for t in trials if t.phase == "screen" and t.us is not None and t.candidate.backend in backends]
    return min(seen, key=lambda t: t.us or math.inf).candidate if seen else None


def measure(
    problem: Problem, here: Environment, tune: Tune, turns: Turns, also: Mapping[str, Candidate] = MappingProxyType({})
) -> dict[str, Any]:
    """One row: the verdict, what it cost, and all that took turns. also: more that do, by the names of their times."""
    row: dict[str, Any] = {"problem": str(problem), "m": problem.m, "n": problem.n, "k": problem.k}
    try:
        found = tune(problem, here)
    except GemmtunedError as err:  # what torch itself refuses is nothing that a program calls
        return {**row, "failed": str(err)[:300]}
    solution, trials = found.pop("solution"), found.pop("trials")
    published = solution.state == "published"
    named = {"torch": dense.DEFAULT, "cublaslt": best_of(trials, ("cublaslt",)), "ours": best_of(trials, OURS)}
    if published:
        named["published"] = solution.candidate
    forms = int8_forms.FORMS if problem.dtype == "i8" else block_forms.FORMS if block_forms.is_refused(problem) else ()
    named |= {name: Candidate(name) for name in forms} | dict(also)
    taking = {name: c for name, c in named.items() if c is not None}
    try:
        series, floor_us = turns(problem, list(taking.values()))
    except (GemmtunedError, RuntimeError) as err:
        return {**row, "failed": f"in the last race: {err}"[:300]}
    us = dict(zip(taking, series, strict=True))
    row |= {f"{name}_us": statistics.median(times) for name, times in us.items()} | {"floor_us": floor_us, **found}
    row |= {"published": published, "backend": solution.backend, "config": solution.config, "err": solution.err}
    if published:
        row |= dense.ratio("", us["torch"], us["published"])
    row["counts"] = row["ratio"] if published else 1.0
    row["torch_err"], row["won_by"] = solution.baseline_err, solution.gain_low
    refused = [(str(t.candidate), t.outcome, t.note[:200]) for t in trials if t.outcome in ("refused", "wrong")]
    row["not_ok"] = refused[:12]
    return {name: round(v, 4) if isinstance(v, float) and "err" not in name else v for name, v in row.items()}


@torch.inference_mode()
def turns_on_gpu(problem: Problem, candidates: Sequence[Candidate]) -> tuple[list[list[float]], float]:
    """(us of each round of each candidate, the floor's median), weights cold, all taking turns in one run."""
    timer = CudaTimer()
    with as_called(problem):
        bench = Bench(problem, torch.device("cuda"))
        launches = len(bench.weights) * math.ceil(dense.LAUNCHES / len(bench.weights))
        runs = []
        for candidate in candidates:
            kernel = kernel_of(candidate, problem)
            calls = bench.arm(str(candidate), kernel, problem).calls
            runs.append(timer.prepare(lambda i, calls=calls: calls[i % len(calls)](), launches))  # type: ignore[misc]
        floors = floor_launches(timer, _read_of(problem, bench), launches)
        times = timer.measure([*runs, *floors], dense.ROUNDS + 2)
    us = [[t / launches for t in series[2:]] for series in times]
    return us[: len(candidates)], min(statistics.median(series) for series in us[len(candidates) :])


def kernel_of(candidate: Candidate, problem: Problem) -> Kernel:
    """Of a backend, or one of torch's forms that no backend has."""
    if candidate.backend in FORMS:
        return FORMS[candidate.backend](problem)
    return BACKENDS[candidate.backend].prepare(candidate, problem)


def _read_of(problem: Problem, bench: Bench) -> list[torch.Tensor]:
    """What of each copy of the weights is read: all of it, or as many groups as have rows.

    Large copies lie over each other, one group further each: other groups of each, so that none has just been read.
    """
    weights = [w for w, *_ in bench.weights]
    if problem.family == "scaled":
        return [w.t().view(torch.bfloat16) for w in weights]
    whole = [w.mT if problem.layout[1] == "t" else w for w in weights]
    if problem.family == "batched":
        return whole
    offs = bench.inputs(problem)["offs"].long()
    used = torch.unique(torch.searchsorted(offs, torch.arange(problem.m, device=offs.device), right=True)).numel()
    starts = [i * used % (problem.batch - used + 1) for i in range(len(whole))]
    read = [w[start : start + used] for w, start in zip(whole, starts, strict=True)]
    return [w.view(torch.bfloat16) if w.element_size() == 1 else w for w in read]


def tune_on_cpu(problem: Problem, here: Environment) -> dict[str, Any]:
    """As dense.tune, by the wall clock."""
    trials: list[Trial] = []
    began = time.monotonic()
    solution, *_ = search.tune_modes((problem,), "exact", problem, here, mode="eager", skip=(), emit=trials.append)
    return {"solution": solution, "trials": trials, "wall_s": time.monotonic() - began, "gpu_s": 0.0, "timed": 0}


@torch.inference_mode()
def turns_on_cpu(problem: Problem, candidates: Sequence[Candidate]) -> tuple[list[list[float]], float]:
    """As turns_on_gpu; the floor is a sum over the weight's bytes."""
    clock, rounds = WallClock(), 5
    with as_called(problem):
        bench = Bench(problem, torch.device("cpu"))
        arms = [bench.arm(str(c), kernel_of(c, problem), problem) for c in candidates]
        read = [w.contiguous().view(torch.uint8) for w in _read_of(problem, bench)]
        arms.append(Arm("floor", [lambda w=w: w.sum() for w in read]))  # type: ignore[misc]
        us = [[clock.us(arm, (i % len(arm.calls),)) for i in range(rounds)] for arm in arms]
    return us[:-1], statistics.median(us[-1])


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind and M: geometric means of the gain over torch, of cuBLASLt's best and ours, and over the floor."""
    lines = []
    for kind in (*KINDS, *GROUPED, *BATCHED):
        for m in sorted({row["m"] for row in rows if row["kind"] == kind}):
            some = [row for row in rows if (row["kind"], row["m"]) == (kind, m)]
            good = [row for row in some if "failed" not in row]
            line: dict[str, Any] = {"kind": kind, "m": m, "problems": len(good), "failed": len(some) - len(good)}
            if good:
                line["published"] = sum(row["published"] for row in good)
                line["counts"] = dense.geomean([row["counts"] for row in good])
                line["worst"] = min(row["counts"] for row in good)
                for name in ("torch", "cublaslt", *FORMS, "ours", "published"):
                    both = [row for row in good if f"{name}_us" in row]
                    if both:
                        line[f"{name}_over_floor"] = dense.geomean([r[f"{name}_us"] / r["floor_us"] for r in both])
                        line[f"torch_over_{name}"] = dense.geomean([r["torch_us"] / r[f"{name}_us"] for r in both])
                for best in ("int_mm_fused", "copied"):  # of torch's; where nothing is published torch's own stays
                    beside = [row for row in good if f"{best}_us" in row]
                    if beside:
                        gains = [r[f"{best}_us"] / r["published_us"] if r["published"] else 1.0 for r in beside]
                        line[f"over_{best}"] = dense.geomean(gains)
                line["gpu_s"] = statistics.median(row["gpu_s"] for row in good)
                line["wall_s"] = statistics.median(row["wall_s"] for row in good)
            lines.append({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()})
    return lines


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--name", default="families", help="of the result")
    parser.add_argument("--kinds", default="row,tensor,block", help=f"of {','.join((*KINDS, *GROUPED, *BATCHED))}")
    parser.add_argument("--m", default="1,16,64,256,2048", help="rows of X, in this order")
    parser.add_argument("--shapes", default="short", help="short, all, or NxK,NxK,...")
    parser.add_argument("--groups", type=int, default=128, help="of grouped products, or matrices of batched ones")
    parser.add_argument("--budget-s", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--resume", type=Path, help="the .jsonl of an earlier run on the same device")
    parser.add_argument("--dry-run", action="store_true", help="on this CPU, small sizes, kinds that torch has there")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    kinds, ms = args.kinds.split(","), [int(m) for m in args.m.split(",")]
    sizes = {"short": SHORT, "all": SHORT + MORE}.get(args.shapes) or record.sizes(args.shapes)
    tune: Tune = dense.tune
    turns: Turns = turns_on_gpu
    threads = 0
    if args.dry_run:
        kinds, ms, sizes, threads = [k for k in kinds if k not in ON_GPUS_ALONE], [m for m in ms if m <= 16], DRY, 1
        tune, turns = tune_on_cpu, turns_on_cpu
        if args.out == record.RESULTS:  # nothing that a page could cite
            args.out = Path(tempfile.mkdtemp(prefix="gemmtuned-families-"))
    here = environment(cpu_device() if args.dry_run else cuda_device(0))
    rows = dense.read_lines(args.resume)
    done = {(row["kind"], row["m"], row["n"], row["k"]) for row in rows}
    wanted = [
        (kind, problem_of(kind, m, n, k, threads=threads, groups=args.groups))
        for n, k in sizes for m in ms for kind in kinds if (kind, m, n, k) not in done
    ]  # fmt: skip
    ahead = None if args.dry_run else dense.Ahead([problem for _, problem in wanted], here)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"{args.name}.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        for kind, problem in dense.in_time(wanted, ahead, until_s):
            row = {"kind": kind, **measure(problem, here, tune, turns)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({name: row[name] for name in row if name not in ("not_ok", "config")}, flush=True)
    lines = summary(rows)
    for line in lines:
        print(line, flush=True)
    result = {"benchmark": "families", "stamps": here.stamps, "summary": lines, "rows": rows}
    print("saved", record.save(args.name, result, args.out), flush=True)
    sys.stdout.flush()
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
