"""The measuring half of decode.py: compile ahead, check, screen, compare.  Started by it as a process of its own."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from timing import CudaTimer, HostTimer, Timer, floor_launches, summary_line

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton import python_launch
from gemmtuned.kernels.triton.shortlist import MODULES, shortlist

POOL_BYTES = 200 << 20  # weights in rotation: more than three times the L2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Key = tuple[str, str]


class Log:
    """trials.jsonl: appended and flushed line by line, so that a crash tells which candidate it was."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.done: dict[str, dict[str, Any]] = {}  # finished shapes
        self.bad: set[Key] = set()  # candidates that began and never ended
        begun: set[Key] = set()
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["kind"] == "begin":
                begun.add((row["shape"], row["what"]))
            elif row["kind"] == "end":
                begun.discard((row["shape"], row["what"]))
            elif row["kind"] == "crash":
                self.bad |= begun
                begun = set()
            elif row["kind"] == "shape":
                self.done[row["shape"]] = row

    def write(self, kind: str, **values: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")
        self.file.flush()


class TimeUp(Exception):
    """--seconds have passed in the middle of a shape."""


def silence() -> None:
    """In a compiling process, first of all: it must not hold our output, and a failed assertion prints pages."""
    os.nice(5)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.close(devnull)


def compile_one(kernel: str, config: dict[str, int], problem: Problem, arch: str) -> dict[str, Any]:
    """In a compiling process: resources of a candidate, or why it failed. The binary stays in Triton's cache."""
    from gemmtuned.kernels.compile import compile_record

    try:
        binary = compile_record(MODULES[kernel].launch_record(config, problem), arch, max_spill_bytes=64)
    except CandidateFailed as err:
        return {"failed": str(err)[:200]}
    return {"regs": binary.registers, "spill": binary.spill_bytes, "shared": binary.shared_bytes}


def candidates(options: argparse.Namespace, m: int, n: int, k: int, units: int, arch: str) -> list[Any]:
    """What the daemon would try, and with --explore a sample of the rest: it shows where the estimate is wrong."""
    found = shortlist(m, n, k, units, arch=arch, limit=options.limit)
    rest = [
        (name, config)
        for name, module in MODULES.items()
        for _, config in module.scored(m, n, k, units, arch=arch)
        if (name, config) not in found
    ]
    dice = random.Random(n * k)  # not m: shapes that differ in m alone share their compilations
    return found + dice.sample(rest, min(len(rest), options.explore))


def compile_ahead(
    options: argparse.Namespace, pool: ProcessPoolExecutor | None, jobs: list[Any], units: int, arch: str
) -> Iterator[tuple[Any, list[tuple[str, dict[str, int], Future[dict[str, Any]]]]]]:
    """Each job with its candidates and their compilations; equal kernels (M is no constant) are compiled once."""
    submitted: dict[str, Future[dict[str, Any]]] = {}
    queued = []
    for m, n, k in jobs:
        rows = []
        problem = Problem(m=m, n=n, k=k, dtype=options.dtype)
        for kernel, config in candidates(options, m, n, k, units, arch):
            key = json.dumps([kernel, config, n, k], sort_keys=True)
            if key not in submitted:
                if pool is None:
                    submitted[key] = Future()
                    submitted[key].set_result({})
                else:
                    submitted[key] = pool.submit(compile_one, kernel, config, problem, arch)
            rows.append((kernel, config, submitted[key]))
        queued.append(((m, n, k), rows))
    yield from queued


def measure_all(options: argparse.Namespace) -> int:
    log = Log(options.out / "trials.jsonl")
    on_gpu = not (options.dry_run or options.compile_only)
    arch = python_launch.device_arch() if on_gpu else "sm_90"
    units = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 132
    facts = {
        "device": torch.cuda.get_device_name(0) if on_gpu else platform.processor() or "cpu",
        "arch": arch,
        "units": units,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
    }
    print(json.dumps(facts), flush=True)
    if options.replay_stress or options.stress_only:
        from replay_stress import stress

        facts["stress"] = stress(options.replay_stress or 100_000, "cpu" if options.dry_run else "cuda")
        log.write("stress", **facts["stress"])
        write_result(options, facts, log)
        if options.stress_only:
            return 0
    jobs = [(m, n, k) for m in options.m for n, k in options.shapes if f"{m}x{n}x{k}" not in log.done]
    context = multiprocessing.get_context("spawn")
    pool = None if options.dry_run else ProcessPoolExecutor(options.workers, context, silence)
    timer: Timer = CudaTimer() if on_gpu else HostTimer()
    began = options.started or time.time()
    for (m, n, k), rows in compile_ahead(options, pool, jobs, units, arch):
        if time.time() - began > options.seconds:
            print("time is up", flush=True)
            break
        if options.compile_only:
            report_compiled(log, (m, n, k), rows)
            continue
        try:
            result = measure(options, timer, log, (m, n, k), rows, until_s=began + options.seconds + 5)
        except (TimeUp, TimeoutError):
            print(f"time is up within {m}x{n}x{k}", flush=True)
            break
        log.write("shape", **result)
        log.done[result["shape"]] = result
        write_result(options, facts, log)
        print(summary_line(result, time.time() - began), flush=True)
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)
    if not options.compile_only:
        print_geomeans(log)
    log.file.flush()
    sys.stdout.flush()
    os._exit(0)  # do not wait for compilations nobody needs


def report_compiled(log: Log, job: tuple[int, int, int], rows: list[Any]) -> None:
    done = [(kernel, config, future.result()) for kernel, config, future in rows]
    failed = [(kernel, config, row["failed"]) for kernel, config, row in done if "failed" in row]
    log.write("compiled", shape="x".join(map(str, job)), rows=done)
    print(job, f"{len(done)} compiled, {len(failed)} refused", failed[:1], flush=True)


def measure(
    options: argparse.Namespace, timer: Timer, log: Log, job: tuple[int, int, int], rows: Any, *, until_s: float
) -> Any:
    """Check and screen every candidate of one shape, then compare the best with F.linear in turns.

    Raises TimeUp or TimeoutError when the screening is not done at until_s (of time.time()).
    """
    m, n, k = job
    shape = f"{m}x{n}x{k}"
    dtype = DTYPES[options.dtype]
    torch.manual_seed(m + n + k)
    copies = max(3, min(64, math.ceil(POOL_BYTES / (2 * n * k)))) if timer.device == "cuda" else 2
    launches = copies * math.ceil(30 / copies) if timer.device == "cuda" else 2
    weights = torch.randn(copies, n, k, device=timer.device, dtype=dtype)
    x = torch.randn(m, k, device=timer.device, dtype=dtype)
    x[:, -128:] *= 4  # a lost tail of K must show
    want = x.double() @ weights[0].double().t()
    rms = want.square().mean().sqrt()
    default = ((F.linear(x, weights[0]).double() - want).square().mean().sqrt() / rms).item()
    y = torch.empty(m, n, device=timer.device, dtype=dtype)
    problem = Problem(m=m, n=n, k=k, dtype=options.dtype)

    def call_linear(i: int) -> None:
        F.linear(x, weights[i % copies])

    baseline = timer.prepare(call_linear, launches)
    screened: list[dict[str, Any]] = []
    prepared: dict[int, Any] = {}
    best = math.inf
    drift = []
    for number, (kernel, config, future) in enumerate(rows):
        if time.time() > until_s:
            raise TimeUp
        what = json.dumps([kernel, config])
        row: dict[str, Any] = {"kernel": kernel, "config": config, **future.result(max(until_s - time.time(), 0.1))}
        screened.append(row)
        if (shape, what) in log.bad:
            row["failed"] = "crashed or hung in an earlier process"
        if "failed" in row:
            continue
        log.write("begin", shape=shape, what=what)
        try:
            record = MODULES[kernel].launch_record(config, problem)
            launch = python_launch.launcher(MODULES[kernel].KERNEL, record)
            space = python_launch.new_workspace(record, timer.device)
            y.fill_(math.nan)
            launch(x, weights[0], None, y, space)
            row["err"] = ((y.double() - want).square().mean().sqrt() / rms).item()
            left = space is not None and bool(space[: record.counters_bytes].any())
            allowed = (3 if options.dry_run else 1.25) * default + 1e-6
            if not row["err"] <= allowed or left:
                row["failed"] = f"wrong: error {row['err']:.2e}, F.linear has {default:.2e}, counters left {left}"
            else:
                call = bind(launch, x, weights, y, space)
                run = timer.prepare(call, launches)
                row["us"] = statistics.median(timer.measure([run], 4)[0][1:]) / launches
                best = min(best, row["us"])
                if row["us"] < 1.3 * best:
                    prepared[number] = run
        except CandidateFailed as err:
            row["failed"] = str(err)[:200]
        log.write("end", shape=shape, what=what, **row)
        if number % 40 == 0:
            drift.append(timer.measure([baseline], 3)[0][-1] / launches)
    finalists = pick([(row["us"], number) for number, row in enumerate(screened) if number in prepared], screened)
    for number in [number for number in prepared if number not in finalists]:
        del prepared[number]
    streams = floor_launches(timer, weights, launches)
    runs = [baseline, *(prepared[number] for number in finalists), *(run for _, run in streams)]
    times = timer.measure(runs, options.rounds)
    us = [[t / launches for t in series] for series in times]
    base = us[0]
    confirmed = []
    last = x.double() @ weights[(launches - 1) % copies].double().t()
    for number, series in zip(finalists, us[1 : 1 + len(finalists)], strict=True):
        if timer.device == "cuda":  # what was timed is still right after the race
            y.fill_(math.nan)
            prepared[number].replay()
            torch.cuda.synchronize()
            screened[number]["err_after"] = ((y.double() - last).square().mean().sqrt() / rms).item()
            if not screened[number]["err_after"] <= 1.5 * default + 1e-6:
                screened[number]["failed"] = f"wrong after the race: error {screened[number]['err_after']:.2e}"
                continue
        ratios = sorted(b / s for b, s in zip(base, series, strict=True))
        low = ratios[max(0, int(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))]  # 95 % bound of the median
        confirmed.append(
            {
                **screened[number],
                "us": statistics.median(series),
                "spread": spread(series),
                "gain": statistics.median(ratios),
                "gain_low": low,
            }
        )
    confirmed.sort(key=lambda row: row["us"])
    floors = {name: statistics.median(s) for (name, _), s in zip(streams, us[1 + len(finalists) :], strict=True)}
    return {
        "shape": shape, "m": m, "n": n, "k": k, "dtype": options.dtype, "copies": copies, "launches": launches,
        "linear_us": statistics.median(base), "linear_spread": spread(base), "linear_err": default, "drift": drift,
        "floor_us": min(floors.values()), "floors": floors, "confirmed": confirmed, "screened": screened,
    }  # fmt: skip


def bind(launch: Any, x: Any, weights: Any, y: Any, space: Any) -> Callable[[int], None]:
    views = list(weights.unbind(0))

    def call(i: int) -> None:
        launch(x, views[i % len(views)], None, y, space)

    return call


def pick(timed: list[tuple[float, int]], rows: list[dict[str, Any]]) -> list[int]:
    """Numbers of the candidates worth confirming: the six fastest, and the three fastest of each kernel."""
    timed.sort()
    chosen = [number for _, number in timed[:6]]
    for kernel in MODULES:
        chosen += [number for _, number in timed if rows[number]["kernel"] == kernel][:3]
    return list(dict.fromkeys(chosen))


def spread(series: list[float]) -> list[float]:
    """Lower and upper quartile."""
    low, _, high = statistics.quantiles(series, n=4)
    return [low, high]


def write_result(options: argparse.Namespace, facts: dict[str, Any], log: Log) -> None:
    text = json.dumps({**facts, "shapes": list(log.done.values())}, separators=(",", ":"))
    part = options.out / "decode.json.part"
    part.write_text(text + "\n")
    part.replace(options.out / "decode.json")


def print_geomeans(log: Log) -> None:
    random.seed(0)
    for m in sorted({row["m"] for row in log.done.values()}):
        rows = [row for row in log.done.values() if row["m"] == m and row["confirmed"]]
        if not rows:
            continue
        line = f"M={m}: {len(rows)} shapes, geomean over F.linear"
        for kernel in ("best", *MODULES):
            gains = []
            for row in rows:
                own = [c["gain"] for c in row["confirmed"] if kernel in ("best", c["kernel"])]
                gains += [max(own)] if own else []
            if len(gains) == len(rows):
                line += f"  {kernel} {math.exp(sum(math.log(g) for g in gains) / len(gains)):.3f}"
        floor = math.exp(sum(math.log(row["linear_us"] / row["floor_us"]) for row in rows) / len(rows))
        print(line + f"  (floor {floor:.3f})", flush=True)
