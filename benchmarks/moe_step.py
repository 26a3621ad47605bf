"""A decode step of transformers' mixtures of experts: four layers of a large model's sizes, in a CUDA graph.

    python benchmarks/moe_step.py --out FOLDER [--models qwen3-235b,gpt-oss-120b --batches 1,8,64 --seconds 200]

Arms take turns in one process, each block in a graph captured for it:
    grouped_mm, batched_mm    transformers' own forms, our operators out of torch; the faster one is the baseline
    again                     the baseline once more: what the same work differs by
    hooked                    the program unchanged, with the table that was tuned from its traffic
    patched                   gemmtuned.patch("transformers.moe") besides, where the layer lies as the patch takes it
Every sequence begins with another token: equal ones would visit the same few experts at every step, which no traffic
does.  `experts_visited` tells how many of a layer's experts the last step visited, layer by layer.
batched_mm copies the weights of every pair of a token and an expert: it is left out where these are beyond 4 GB.
Tuning is `gemmtuned tune` on what both hooked arms were seen to call, experts first; it may be cut short (--tune-s).
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
import end_to_end_model as whole
import record
import torch
from paused import Paused

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks.activate import current
from gemmtuned.reports.comparison import ratio

STOCK: Final = ("grouped_mm", "batched_mm")
EXPERTS: Final = ("moe", "grouped")
COPIED: Final = 4e9  # bytes
WARM: Final = 3
SIZES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3-235b": (
        "qwen3_moe",
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
         "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936},
    ),
    "gpt-oss-120b": (
        "gpt_oss",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088},
    ),
    "tiny": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64},
    ),
    "tiny-oss": (
        "gpt_oss",
        {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64},
    ),
}  # fmt: skip


def mask_for_graphs(*, dtype: torch.dtype = torch.float32, allow_is_causal_skip: bool = True, **named: Any) -> Any:
    """What transformers' eager attention adds to its scores: its own form copies a number from the CPU, which no
    capture allows.  allow_is_causal_skip: not for this attention, which has no other way to know.
    """
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(**named, allow_is_causal_skip=False)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def build(name: str, layers: int, device: str, dtype: torch.dtype) -> Any:
    """The model with random weights, drawn where they lie."""
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    AttentionMaskInterface.register("eager", mask_for_graphs)
    kind, sizes = SIZES[name]
    config = CONFIG_MAPPING[kind](**sizes, num_hidden_layers=layers)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.normal_(std=p.shape[-1] ** -0.5)
        elif "norm" not in name:
            p.zero_()
    return model


def expert_bytes(model: Any) -> int:
    """Of one expert of one layer."""
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "num_experts"))
    return sum(w[0].numel() * w.element_size() for w in (experts.gate_up_proj, experts.down_proj))


class Arms:
    """The hook, the patch and transformers' own choice, set for one arm at a time."""

    def __init__(self, model: Any, switch: whole.Switch) -> None:
        self.model, self.switch = model, switch

    @contextlib.contextmanager
    def as_in(self, arm: str, stock: str) -> Iterator[None]:
        """stock: the implementation of `again`."""
        of_transformers = arm in STOCK or arm == "again"
        self.model.set_experts_implementation(arm if arm in STOCK else stock if arm == "again" else STOCK[0])
        self.switch.to("stock" if of_transformers else "tuned")
        undo = gemmtuned.patch("transformers.moe") if arm == "patched" else lambda: None
        try:
            yield
        finally:
            undo()


class Case:
    """One model at one batch."""

    def __init__(self, arms: Arms, batch: int, steps: int) -> None:
        self.arms, self.batch, self.steps = arms, batch, steps
        self.cuda = arms.model.device.type == "cuda"
        self.decoder = whole.example.Decoder(arms.model, batch, steps + 3 * WARM + 8, False)
        topk = arms.model.config.num_experts_per_tok
        too_large = batch * topk * expert_bytes(arms.model) > COPIED
        self.names = [a for a in (*STOCK, "again", "hooked", "patched") if a != "batched_mm" or not too_large]
        self.stock = STOCK[0]
        self.tokens_per_s: dict[str, list[float]] = {}
        self.seen: dict[str, Counter[Problem]] = {}
        for arm in ("hooked", "patched"):
            with arms.as_in(arm, self.stock):
                for _ in range(WARM):
                    self.decoder.step()
                self.seen[arm] = self.count()
        served = any(p.family == "moe" for p in self.seen["patched"])
        self.names = [arm for arm in self.names if arm != "patched" or served]

    def count(self) -> Counter[Problem]:
        """Problem -> calls of one step."""
        hook = self.arms.switch.hook
        paused = Paused(hook)
        list(hook.drain())
        self.decoder.step()
        calls: Counter[Problem] = Counter()
        for sighting in hook.drain():
            calls[sighting.problem] += sighting.calls
        paused.resume()
        return calls

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def ready(self) -> None:
        """A graph with the kernels that are in use now, at the first token."""
        self.decoder.graph = None
        self.begin()
        if self.cuda:
            self.decoder.graph = self.decoder.capture()
            self.begin()
        for _ in range(WARM):
            self.decoder.step()
        self.wait()

    def begin(self) -> None:
        """Back to the first tokens, each another one."""
        self.decoder.reset()
        vocabulary = self.arms.model.config.vocab_size
        self.decoder.token.copy_(
            (torch.arange(self.batch, device=self.decoder.token.device)[:, None] * 61) % vocabulary
        )

    def visited(self) -> list[int]:
        """How many experts a step after some others visits, by layer."""
        found: list[int] = []

        def look(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            ids = next(
                t for t in (*given, *named.values()) if isinstance(t, torch.Tensor) and not t.is_floating_point()
            )
            found.append(ids.unique().numel())

        experts = [m for m in self.arms.model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "num_experts")]
        with self.arms.as_in(self.stock, self.stock):
            self.decoder.graph = None
            self.begin()
            for _ in range(2 * WARM):
                self.decoder._step()
            handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in experts]
            self.decoder._step()
        for handle in handles:
            handle.remove()
        return found

    def block(self, arm: str) -> None:
        """Tokens/s of one block of steps."""
        with self.arms.as_in(arm, self.stock):
            self.ready()
            start = time.perf_counter()
            for _ in range(self.steps):
                self.decoder.step()
            self.wait()
            seconds = time.perf_counter() - start
        self.tokens_per_s.setdefault(arm, []).append(self.batch * self.steps / seconds)

    def logits(self, arm: str) -> torch.Tensor:
        """Of the same tokens in every arm: how far results are apart is told, not hidden."""
        with self.arms.as_in(arm, self.stock):
            self.decoder.graph = None
            self.begin()
            self.decoder.step()
            return self.decoder.logits.float().clone()

    def kernels(self, arm: str) -> dict[str, list[float]]:
        """Name -> [launches of a step, us of a step], the longest ones."""
        from torch.profiler import ProfilerActivity, profile

        found: dict[str, list[float]] = {}
        with self.arms.as_in(arm, self.stock):
            self.ready()
            with profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]) as seen:
                self.decoder.step()
                self.wait()
        for event in seen.events() or ():
            if (event.device_type == torch.autograd.DeviceType.CUDA) == self.cuda:
                row = found.setdefault(event.name[:100], [0.0, 0.0])
                row[0] += 1
                row[1] += event.device_time_total if self.cuda else event.self_cpu_time_total
        return {name: [n, round(us, 2)] for name, (n, us) in sorted(found.items(), key=lambda i: -i[1][1])[:24]}

    def result(self) -> dict[str, Any]:
        base = self.tokens_per_s[self.stock]
        arms = {}
        for arm in self.names:
            if arm != self.stock:
                r = ratio(base, self.tokens_per_s[arm], higher_is_better=True)
                arms[arm] = {"ratio": r.median, "low": r.low, "high": r.high, "confidence": r.confidence}
        right = self.logits(self.stock)
        apart = {a: float((self.logits(a) - right).norm() / right.norm()) for a in ("hooked", self.names[-1])}
        hook = self.arms.switch.hook
        place, mode = ("cuda:0", "graph") if self.cuda else ("cpu", "eager")
        served = {}
        for arm, calls in self.seen.items():
            for problem, n in calls.items():
                solution = hook.table.find(problem, mode, place)[1] if problem.family in EXPERTS else None
                if problem.family in EXPERTS:
                    of = None if solution is None else [str(solution.candidate), solution.baseline_us, solution.us]
                    served[f"{arm} {problem}"] = {"calls": n, "by": of}
        return {
            "batch": self.batch, "steps": self.steps, "baseline": self.stock, "experts_visited": self.visited(),
            "tokens_per_s": {arm: statistics.median(v) for arm, v in self.tokens_per_s.items()},
            "arms": arms, "apart": apart, "experts": served, "raw": self.tokens_per_s,
            "kernels": {arm: self.kernels(arm) for arm in (self.stock, *self.names[-2:]) if arm != "again"},
        }  # fmt: skip


def wanted(cases: list[Case]) -> list[str]:
    """Problems to tune: experts first, the most often called first."""
    calls: Counter[Problem] = Counter()
    for case in cases:
        for seen in case.seen.values():
            calls.update(seen)
    return [str(p) for p in sorted(calls, key=lambda p: (p.family not in EXPERTS, p.family != "moe", -calls[p], p.m))]


def tune(problems: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """In the foreground beside this process, whose GPU is idle meanwhile."""
    return whole.command_for(["tune", *problems], limit_s, log)


def of_model(name: str, given: Any, until_s: float, switch: whole.Switch) -> dict[str, Any]:
    """All batches of one model."""
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = build(name, given.layers, "cuda" if cuda else "cpu", dtype)
    arms = Arms(model, switch)
    cases = [Case(arms, batch, given.steps) for batch in map(int, given.batches.split(","))]
    problems = wanted(cases)
    whole.say(f"{name}: {len(problems)} problems, tuned for up to {given.tune_s:.0f} s")
    torch.cuda.empty_cache()
    log = given.out / f"moe_step-{name}.tuning.log"
    result: dict[str, Any] = {"model": name, "layers": given.layers, "problems": problems}
    result["tuning"] = tune(problems, given.tune_s, log)
    switch.hook.reload()
    whole.say(f"{name}: {result['tuning']['seconds']:.0f} s, {len(switch.hook.table)} rows in the table")
    for case in cases:  # which of transformers' own forms is the baseline
        for arm in case.names:
            if arm in STOCK:
                case.block(arm)
        case.stock = max(case.tokens_per_s, key=lambda arm: case.tokens_per_s[arm][0])
        case.tokens_per_s.clear()
    for number in range(given.rounds):
        if number >= whole.MIN_ROUNDS and time.monotonic() > until_s:
            break
        for case in cases:
            for i in range(len(case.names)):
                case.block(case.names[(number + i) % len(case.names)])
    result["cases"] = []
    for case in cases:
        result["cases"].append(case.result())
        last = result["cases"][-1]
        whole.say(f"{name} batch {case.batch}: {json.dumps(last['tokens_per_s'])} {json.dumps(last['arms'])}")
    return result


@torch.inference_mode()
def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--models", default="qwen3-235b,gpt-oss-120b")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tune-s", type=float, default=45, help="of one model")
    parser.add_argument("--seconds", type=float, default=200, help="no round beyond the fifth begins later")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    gemmtuned.enable()
    hook = current()
    assert hook is not None and hook.path == "native", hook and hook.note
    switch = whole.Switch(hook)
    names, began, models = given.models.split(","), time.monotonic(), []
    device = torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"
    for number, name in enumerate(names, 1):
        models.append(of_model(name, given, began + given.seconds * number / len(names), switch))
        gc.collect()
        torch.cuda.empty_cache()
        switch.to("untuned")
        hook.flusher.flush()
        coverage = [row for row in whole.coverage() if row["family"] in EXPERTS]
        result = {"benchmark": "moe_step", "models": models, "coverage": coverage}
        path = record.save(f"moe_step-{device}-{time.strftime('%Y-%m-%d')}", result, given.out)
    print(path)


if __name__ == "__main__":
    main()
