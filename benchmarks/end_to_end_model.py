"""The measuring half of end_to_end.py: one model, its arms in turn in this process.

Un-hooked means here: our operators and wrappers taken out of torch, and our flush thread held.  One process for all
arms, because a program that takes the GPU over from another one runs its first graphs at another speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fp8_linear
import record
import torch
from paused import Paused

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import native
from gemmtuned.hooks.activate import current
from gemmtuned.hooks.hook import Hook
from gemmtuned.kernels import catalog
from gemmtuned.kernels.triton.source import kernel_hashes
from gemmtuned.reports.comparison import ratio

HERE = Path(__file__).resolve().parent
example: Any = SourceFileLoader("example_decode", str(HERE.parent / "docs/examples/decode.py")).load_module()
example.SIZES["tiny"] = (128, 256, 2, 2, 1)
ARMS = ("stock", "again", "untuned", "tuned")
WARM = 3  # steps before a block
MIN_ROUNDS = 5  # below that the interval claims nothing
COMPILE_S, TUNE_S, LAST_S = (
    70.0,
    45.0,
    15.0,
)  # time kept free: for a compilation before one was timed, to tune, to profile
# Kernels that multiply matrices, of torch and of ours; attention's own kernels have split-K in their names too
OURS = "|".join((*kernel_hashes(), *catalog.kernels("cuda")))
GEMMS = re.compile(rf"gemm|gemv|nvjet|cutlass|xmma|cublas|split_?k|dot_kernel|triton_tem|^({OURS})$", re.I)
NO_GEMMS = re.compile(r"fmha|flash|attention|softmax|^triton_(?!tem)", re.I)
CPU_GEMMS = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "mkldnn::_linear_pointwise"}
)


STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


class Switch:
    """Puts the hook of this process into the state of an arm."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.held: Paused | None = None

    def to(self, arm: str) -> None:
        assert self.hook.native is not None
        graphs = self.hook.patches.graphs
        if arm in ("stock", "again"):
            self.hook.native.set_switches(native.OFF)  # its operators stay, and pass calls on
            if graphs is not None:
                graphs.remove()
            self.held = self.held or Paused(self.hook)
            return
        self.hook.native.set_switches(native.CAPTURE | (native.DISPATCH if arm == "tuned" else 0))
        if graphs is not None:
            graphs.install()
        if self.held is not None:
            self.held.resume()
            self.held = None

    def count(self, step: Any) -> Counter[Problem]:
        """Problem -> calls of one step in the untuned arm; they do not reach the store."""
        self.to("untuned")
        paused = Paused(self.hook)
        list(self.hook.drain())
        step()
        calls: Counter[Problem] = Counter()
        for sighting in self.hook.drain():
            calls[sighting.problem] += sighting.calls
        paused.resume()
        return calls


class Case:
    """One mode at one batch: a decoder, its graphs by arm, and what was measured."""

    def __init__(self, model: Any, mode: str, batch: int, steps: int, switch: Switch) -> None:
        self.mode, self.batch, self.switch = mode, batch, switch
        self.device = model.device.type
        self.in_graph = mode != "eager" and self.device == "cuda"
        self.steps = steps if self.in_graph or self.device == "cpu" else max(4, steps // 8)
        forward = torch.compile(model, dynamic=False) if mode == "compiled" else None
        began = time.monotonic()
        self.decoder = example.Decoder(model, batch, steps + 2 * WARM + 8, False, forward)
        self.graphs: dict[str, Any] = {}
        self.tokens_per_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
        switch.to("untuned")
        for _ in range(WARM):
            self.decoder.step()
        self.first_s = time.monotonic() - began  # of the first steps: compiling, mostly
        self.problems = switch.count(self.decoder.step)
        began = time.monotonic()
        self.block("untuned")  # traffic for the store to know
        self.round_s = len(ARMS) * (time.monotonic() - began)

    def capture(self, arm: str) -> None:
        self.switch.to(arm)
        if self.in_graph:
            self.decoder.reset()
            self.graphs[arm] = self.decoder.capture()

    def take(self, arm: str) -> None:
        self.switch.to(arm)
        self.decoder.graph = self.graphs.get(arm)
        self.decoder.reset()
        for _ in range(WARM):
            self.decoder.step()
        self.wait()

    def block(self, arm: str) -> float:
        """Tokens/s of one block of steps, in a graph captured for it: two captures of the same work, and nothing else
        different, were seen to differ by up to 3 %, which belongs into the spread."""
        self.capture(arm)
        self.take(arm)
        start = time.perf_counter()
        for _ in range(self.steps):
            self.decoder.step()
        self.wait()
        return self.batch * self.steps / (time.perf_counter() - start)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def kernels(self, arm: str, steps: int = 3) -> dict[str, Any]:
        """Of one step: us in GEMM kernels and in others, launches, and the GEMM kernels by name."""
        from torch.profiler import ProfilerActivity, profile

        self.take(arm)
        cuda = self.device == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                self.decoder.step()
            self.wait()
        found: dict[str, list[float]] = {}
        for event in seen.events() or ():
            on_device = event.device_type == torch.autograd.DeviceType.CUDA
            if on_device == cuda:
                row = found.setdefault(event.name[:100], [0.0, 0.0])
                row[0] += 1 / steps
                row[1] += (event.device_time_total if cuda else event.self_cpu_time_total) / steps
        gemms = {n: r for n, r in found.items() if is_gemm(n, cuda)}
        return {
            "gemm_us": sum(us for _, us in gemms.values()),
            "other_us": sum(us for name, (_, us) in found.items() if name not in gemms),
            "launches": sum(count for count, _ in found.values()),
            "gemms": {n: [round(c, 2), round(us, 2)] for n, (c, us) in sorted(gemms.items(), key=lambda i: -i[1][1])},
        }

    def promise(self) -> dict[str, float]:
        """GEMM time of a step in us by the races: torch's own, and with what is published for this mode."""
        place = "cuda:0" if self.device == "cuda" else "cpu"
        mode = "graph" if self.in_graph else "eager"
        before = after = calls = missed = 0.0
        for problem, n in self.problems.items():
            calls += n
            _, solution = self.switch.hook.table.find(problem, mode, place)
            if solution is None:
                missed += n
                continue
            before += n * solution.baseline_us
            after += n * solution.us
        return {"before_us": before, "after_us": after, "calls": calls, "without_verdict": missed}

    def result(self) -> dict[str, Any]:
        stock, tuned = self.kernels("stock"), self.kernels("tuned")
        races = self.promise()
        medians = {arm: statistics.median(values) for arm, values in self.tokens_per_s.items()}
        step_us = {arm: 1e6 * self.batch / value for arm, value in medians.items()}
        share = min(stock["gemm_us"] / step_us["stock"], 1.0)
        gain = races["before_us"] / races["after_us"] if races["after_us"] else 1.0
        arms = {}
        for arm in ARMS[1:]:
            r = ratio(self.tokens_per_s["stock"], self.tokens_per_s[arm], higher_is_better=True)
            arms[arm] = {"ratio": r.median, "low": r.low, "high": r.high, "confidence": r.confidence}
        return {
            "mode": self.mode, "batch": self.batch, "steps": self.steps, "in_graph": self.in_graph,
            "first_steps_s": self.first_s,
            "stock_tokens_per_s": medians["stock"], "step_us": step_us, "arms": arms, "tokens_per_s": self.tokens_per_s,
            "gemm": {
                "share": share,
                "gain_races": gain,
                "gain_in_model": stock["gemm_us"] / tuned["gemm_us"] if tuned["gemm_us"] else 1.0,
                "promised": 1 / (1 - share + share / gain),
                "races": races,
            },
            # what the step's time is made of; the rest of it is the host, or gaps between kernels
            "kernels": {"stock": stock, "tuned": tuned},
            "rest_us": {
                "stock": step_us["stock"] - stock["gemm_us"] - stock["other_us"],
                "tuned": step_us["tuned"] - tuned["gemm_us"] - tuned["other_us"],
            },
            "problems": {str(p): n for p, n in sorted(self.problems.items(), key=lambda item: -item[1])},
        }  # fmt: skip


def is_gemm(name: str, cuda: bool) -> bool:
    return bool(GEMMS.search(name)) and not NO_GEMMS.search(name) if cuda else name in CPU_GEMMS


def tune(cases: list[Case], limit_s: float, log: Path) -> dict[str, Any]:
    """One idle pass: the daemon on a GPU, and in the foreground on a CPU that others may use."""
    if cases[0].device == "cuda":
        return command_for(["daemon", "--once", "--share-resident", "--idle-s", "1"], limit_s, log)
    return command_for(
        ["tune", *sorted({str(p) for c in cases for p in c.problems if p.family == "dense"})], limit_s, log
    )


def command_for(arguments: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """A command of ours for so many seconds at most, not hooked itself."""
    env = {**os.environ, "AITER_TUNE_GEMM": "0"}
    command = [sys.executable, "-P", "-m", "gemmtuned", *arguments]
    began = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(20)
    return {"seconds": time.monotonic() - began, "code": code, "said": log.read_text().splitlines()[-4:]}


def coverage() -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "gemmtuned", "coverage", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "AITER_TUNE_GEMM": "0"}, capture_output=True, text=True, timeout=60
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=example.SIZES, required=True)
    parser.add_argument("--part", type=Path, required=True, help="where the result goes")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--weights", choices=("plain", "fp8"), default="plain")
    parser.add_argument("--modes", nargs="+", required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tune-s", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    until = STARTED + args.seconds
    gemmtuned.enable()
    hook = current()
    assert hook is not None and hook.path == "native", hook and hook.note
    switch = Switch(hook)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.size == "tiny":
        torch.set_num_threads(1)
    result: dict[str, Any] = {**record.facts(), "size": args.size, "done": False, "cases": []}
    model = example.build(args.size, args.layers, device, torch.bfloat16 if device == "cuda" else torch.float32)
    if args.weights == "fp8":
        say(f"{fp8_linear.quantise(model)} linear layers in fp8, one scale a row")
    result |= {"weights": args.weights, "layers": args.layers}
    cases = []
    compile_s = COMPILE_S if device == "cuda" else 20.0
    for mode, batch in ((mode, batch) for mode in args.modes for batch in args.batches):
        needed_s = sum(c.round_s for c in cases) * (MIN_ROUNDS + 1) + TUNE_S + LAST_S
        if mode == "compiled" and until - time.monotonic() < compile_s + needed_s:
            say(f"{mode} batch {batch}: too little time to compile, left out")
            result["cases"].append({"mode": mode, "batch": batch, "left_out": "no time to compile"})
            continue
        try:
            cases.append(Case(model, mode, batch, args.steps, switch))
        except Exception as err:  # a compiler's, say: the other cases are worth having
            say(f"{mode} batch {batch}: {err!r}")
            result["cases"].append({"mode": mode, "batch": batch, "left_out": repr(err)[:500]})
            continue
        compile_s = cases[-1].first_s if mode == "compiled" else compile_s
        say(f"{mode} batch {batch}: {cases[-1].problems.total()} GEMMs a step, first steps {cases[-1].first_s:.0f} s")
    switch.to("untuned")
    hook.flusher.flush()
    needed_s = sum(c.round_s for c in cases) * MIN_ROUNDS + LAST_S
    limit_s = max(TUNE_S / 2, min(args.tune_s, until - time.monotonic() - needed_s))
    result["tuning"] = tune(cases, limit_s, args.part.with_suffix(".tuning.log"))
    hook.reload()
    say(f"tuned: {result['tuning']}; generation {hook.table.generation}, {len(hook.table)} rows")
    for number in range(args.rounds):
        if number >= MIN_ROUNDS and time.monotonic() > until - LAST_S:
            break
        for case in cases:
            for i in range(len(ARMS)):
                arm = ARMS[(number + i) % len(ARMS)]
                case.tokens_per_s[arm].append(case.block(arm))
    say(f"{len(cases[0].tokens_per_s['stock'])} rounds")
    raw = [{"mode": case.mode, "batch": case.batch, "tokens_per_s": case.tokens_per_s} for case in cases]
    args.part.write_text(json.dumps({**result, "raw": raw}, indent=1) + "\n")  # profiling is yet to come
    for case in cases:
        result["cases"].append(case.result())
        last = result["cases"][-1]
        say(f"{case.mode} batch {case.batch}: {last['stock_tokens_per_s']:.1f} tokens/s, {json.dumps(last['arms'])}")
        args.part.write_text(json.dumps(result, indent=1) + "\n")
    switch.to("untuned")
    hook.flusher.flush()
    result |= {"coverage": coverage(), "done": True}
    args.part.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
