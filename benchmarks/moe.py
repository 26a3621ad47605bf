# mypy: disable-error-code="no-untyped-call,no-untyped-def"
"""A mixture of experts: moe_decode.cu and, for many tokens, tiles beside the usual design and torch's ops.

    python benchmarks/moe.py --out FOLDER [--layers dsv3,qwen3-235b,... --tokens 1,8,64 --seconds 240]

Layers as one GPU has them (TP given).  Weights are cold: each launch in a graph has a routing of its own, drawn anew.
All candidates and the floor (bytes of the experts that are really used, at --bandwidth, and 2.7 us) are of one run;
every result is compared with fp64 on dequantised weights first.  `tiles` are moe_tiles.py, `quantised` is
moe_fp8_tiles.py, which multiplies X and H in e4m3 as the usual design does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch
from moe_usual import Usual
from timing import CudaTimer

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels.cuda import moe_compile, nvrtc
from gemmtuned.kernels.cuda import moe_decode as moe
from gemmtuned.kernels.cuda.driver import Kernel
from gemmtuned.kernels.cuda.moe_decode import Experts, Stage
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.triton import moe_fp8_launch, moe_fp8_tiling, moe_launch, moe_tiling

FP8: Final = {"weight": "fp8_e4m3", "scales": "128x128"}
LAYERS: Final = {
    "dsv3": Experts(width=7168, inter=256, experts=256, topk=8, **FP8),  # DeepSeek-V3, TP 8
    "qwen3-235b": Experts(width=4096, inter=384, experts=128, topk=8, **FP8),  # TP 4
    "qwen3-30b": Experts(width=2048, inter=768, experts=128, topk=8),  # bf16, TP 1
    "qwen3-30b-fp8": Experts(width=2048, inter=768, experts=128, topk=8, **FP8),
    "gpt-oss-120b": Experts(
        width=2880, inter=2880, experts=128, topk=4, weight="mxfp4", scales="group", group=32, act="swiglu_clamped"
    ),
    "kimi-k2": Experts(width=7168, inter=256, experts=384, topk=8, weight="int4", scales="group", group=32),  # TP 8
}
ROUTINGS: Final = 24
ARGUMENTS: Final = ("x.ptr",) * 7 + ("x.size0",) * 2  # seven addresses and two numbers
RIGHT: Final = {"fp8_e4m3": 5e-2}  # the usual one quantises X and H, so it is as wrong as that
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make(layer: Experts, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights [experts, rows, k] and their scales, as they lie in memory; results of about 1."""
    e = layer.experts
    if layer.weight == "bf16":
        return (torch.randn(e, rows, k, device="cuda", dtype=torch.bfloat16) * k**-0.5), None
    if layer.weight == "fp8_e4m3":
        w = (torch.randint(0, 256, (e, rows, k), dtype=torch.uint8, device="cuda") & 0xB7).view(torch.float8_e4m3fn)
        return w, (torch.rand(e, -(-rows // 128), -(-k // 128), device="cuda") + 0.5) * k**-0.5 * 4
    w = torch.randint(0, 256, (e, rows, k // 2), dtype=torch.uint8, device="cuda")
    if layer.weight == "int4":
        s = (torch.rand(e, rows, k // layer.group, device="cuda") + 0.5) * k**-0.5 / 4
        return w, s.to(torch.bfloat16)
    return w, torch.randint(119, 123, (e, rows, k // 32), dtype=torch.uint8, device="cuda")


def dequantised(layer: Experts, w: torch.Tensor, s: torch.Tensor | None, expert: int) -> torch.Tensor:
    """[rows, k] of one expert in fp64."""
    w = w[expert]
    if s is None:
        return w.double()
    s = s[expert]
    if layer.weight == "fp8_e4m3":
        return (
            w.double() * s.double().repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
        )
    codes = torch.stack([w & 15, w >> 4], -1).flatten(1).long()
    if layer.weight == "int4":
        return (codes - 8).double() * s.double().repeat_interleave(layer.group, 1)
    values = torch.tensor(E2M1, device=w.device, dtype=torch.float64)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return values * torch.exp2(s.double() - 127).repeat_interleave(32, 1)


def exact(layer: Experts, x, ids, weights, w13, s13, w2, s2) -> torch.Tensor:
    """Y in fp64, H not rounded between."""
    y = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        both = x[token].double() @ dequantised(layer, w13, s13, expert).T
        if layer.act == "swiglu_clamped":
            g, u = both[:, 0::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
            h = g * torch.sigmoid(1.702 * g) * (u + 1)
        else:
            g, u = both.chunk(2, 1)
            h = torch.nn.functional.silu(g) * u
        y.index_add_(0, token, weights[token, slot, None].double() * (h @ dequantised(layer, w2, s2, expert).T))
    return y


class Ours:
    """Both launches with their configurations."""

    def __init__(self, layer: Experts, tokens: int, up: Stage, down: Stage, *, pdl: bool = True) -> None:
        self.layer, self.tokens = layer, tokens
        pairs = tokens * layer.topk
        self.h = torch.empty(pairs, layer.inter, device="cuda", dtype=torch.bfloat16)
        self.y = torch.empty(tokens, layer.width, device="cuda", dtype=torch.bfloat16)
        self.kernels, self.spills = [], 0
        for stage, how, name in ((1, up, moe.UP), (2, down, moe.DOWN)):
            made = nvrtc.compiled(moe.source(layer, stage, how, most_pairs=pairs, early=pdl), moe.TARGET)
            self.spills += made.spill_bytes
            shared = moe.shared_bytes(layer, stage, how, pairs)
            early = pdl and stage == 2
            cluster = moe.cluster(stage, how)
            kernel = Kernel(made.data, name, threads=32 * how.warps, shared=shared, cluster=cluster, early=early)
            self.kernels.append((kernel, moe.grid(layer, stage, how, tokens, cuda_device(0).units)))

    def __call__(self, x, ids, weights, w13, s13, w2, s2):
        stream, pairs = torch.cuda.current_stream().cuda_stream, self.tokens * self.layer.topk
        for (kernel, grid), given, w, s, to, width in zip(
            self.kernels, (x, self.h), (w13, w2), (s13, s2), (self.h, self.y), (self.layer.width,) * 2, strict=True
        ):
            tensors = (given, ids, weights, w, s, None, to)
            pointers = [t.data_ptr() if t is not None else 0 for t in tensors]
            kernel(stream, ARGUMENTS, (*pointers, pairs, width), (*grid, 1))
        return self.y


def through_torch(layer: Experts, tokens: int):
    """transformers' grouped experts: sort pairs, two torch._grouped_mm, activation, weights, sum."""

    def call(x, ids, weights, w13, s13, w2, s2):
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.histc(flat.float(), layer.experts, 0, layer.experts - 1).cumsum(0).to(torch.int32)
        rows = x.repeat_interleave(layer.topk, 0)[order]
        g, u = torch._grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, 1)
        y = torch._grouped_mm(torch.nn.functional.silu(g) * u, w2.transpose(1, 2), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device="cuda")
        return (y[back].view(tokens, layer.topk, -1) * weights.to(y.dtype)[..., None]).sum(1)

    return call


def many(layer: Experts, up: Any, down: Any):
    """The four launches for many tokens, as a call of this program; by moe_fp8_tiles.py for tiles of it."""
    made = moe_fp8_launch if isinstance(up, moe_fp8_tiling.Tile) else moe_launch
    launches = made.Launches(layer, up, down, cuda_device(0).arch)

    def call(x, ids, weights, w13, s13, w2, s2):
        return launches(Operands(x=x, w1=w13, w2=w2, weights=weights, ids=ids, scale1=s13, scale2=s2))

    return call


def usual_configs(layer: Experts, tokens: int):
    """(BM, BN, BK, warps, stages)."""
    if tokens > 64:
        each = tokens * layer.topk / layer.experts
        sides = (16, 32, 64) if each < 24 else (32, 64, 128)
        for bm in sides:
            for bn, warps, stages in ((64, 4, 4), (128, 4, 3), (128, 8, 4)):
                yield bm, bn, 128 if layer.weight == "fp8_e4m3" else 64, warps, stages
        return
    for bk in (128,) if layer.weight == "fp8_e4m3" else (64, 128):
        for bn, warps, stages in ((64, 4, 4), (32, 4, 4), (128, 4, 3), (128, 8, 4)):
            yield 16, bn, bk, warps, stages


def our_stages(layer: Experts, tokens: int, stage: int) -> list[Stage]:
    """What the daemon races, and a few more."""
    return list(itertools.islice(moe_compile.stages_that_fit(layer, stage, tokens), 7))


@torch.inference_mode()
def measure(name: str, layer: Experts, operands: Any, tokens: int, bandwidth: float, until_s: float) -> dict[str, Any]:
    """Ours at its best of separate choices for both launches, the usual one likewise, torch's."""
    w13, s13, w2, s2 = operands
    random = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, layer.width, device="cuda", dtype=torch.bfloat16, generator=random)
    ids = [
        torch.rand(tokens, layer.experts, device="cuda", generator=random)
        .topk(layer.topk, 1)
        .indices.int()
        .contiguous()
        for _ in range(ROUTINGS)
    ]
    weights = torch.rand(tokens, layer.topk, device="cuda", generator=random) / layer.topk
    row: dict[str, Any] = {"layer": name, "tokens": tokens, "wrong": [], "tried": 0}
    expert_bytes = (
        3
        * layer.inter
        * layer.width
        * {"bf16": 2, "fp8_e4m3": 1}.get(layer.weight, 0.53125 if layer.weight == "mxfp4" else 0.5625)
    )
    touched = statistics.mean(len(one.unique()) for one in ids)
    row |= {
        "experts": touched,
        "mib": touched * expert_bytes / 2**20,
        "floor_us": 2.7 + touched * expert_bytes / bandwidth / 1e6,
    }
    right = exact(layer, x, ids[0], weights, w13, s13, w2, s2)

    def error(y: torch.Tensor) -> float:
        return float((y.double() - right).norm() / right.norm())

    timer = CudaTimer()

    def us_of(call, rounds: int = 3) -> float:
        run = timer.prepare(lambda i: call(x, ids[i % ROUTINGS], weights, w13, s13, w2, s2), ROUTINGS)
        return statistics.median(timer.measure([run], rounds)[0]) / ROUTINGS

    def tried(call, what: str) -> float:
        row["tried"] += 1
        seen = error(call(x, ids[0], weights, w13, s13, w2, s2))
        if not seen < RIGHT.get(layer.weight, 1e-2):
            row["wrong"].append((what, seen))
            return math.inf
        row[f"error_{what.split()[0]}"] = round(seen, 5)
        return us_of(call)

    pairs = tokens * layer.topk

    def compiled(one: tuple[int, Stage]) -> None:
        with contextlib.suppress(CandidateFailed):  # does not fit: the search finds that out by itself
            nvrtc.compiled(moe.source(layer, *one, most_pairs=pairs), moe.TARGET)

    stages = (1, 2) if pairs <= moe.MAX_PAIRS else ()
    with ThreadPoolExecutor(16) as pool:  # what the search asks for is there then
        list(pool.map(compiled, [(stage, how) for stage in stages for how in our_stages(layer, tokens, stage)]))
    best: dict[str, Any] = {}

    def search(kind: str, build, *choices) -> None:
        """One launch after the other, from a fair beginning: 2 x n and not n x n."""
        chosen = [choices[0][0], choices[1][0]]
        at = math.inf
        for stage in (0, 1):
            for choice in choices[stage]:
                both = [*chosen]
                both[stage] = choice
                if not stage and kind == "usual":  # whose tokens are dealt out once for both
                    both = [choice, choice]
                if stage and kind == "usual" and both[0][0] != both[1][0]:
                    continue
                try:
                    call = build(*both)
                    us = tried(call, f"{kind} {both}")
                except Exception as err:  # does not compile, or needs too much
                    row["wrong"].append((f"{kind} {both}", str(err)[:100]))
                    continue
                if us < at:
                    at, chosen, best[kind] = us, both, (us, call, str(both))
                if time.monotonic() > until_s:
                    break

    if pairs <= moe.MAX_PAIRS:
        search("ours", lambda a, b: Ours(layer, tokens, a, b), *(our_stages(layer, tokens, i) for i in (1, 2)))
    if tokens > 32:
        tiles = (list(moe_tiling.likely(layer, tokens, cuda_device(0).arch, stage)) for stage in (1, 2))
        search("tiles", lambda a, b: many(layer, a, b), *tiles)
    if pairs >= moe_fp8_tiling.LEAST_PAIRS and moe_fp8_tiling.is_cut(layer):
        tiles = (list(moe_fp8_tiling.likely(layer, tokens, cuda_device(0).arch, stage)) for stage in (1, 2))
        search("quantised", lambda a, b: many(layer, a, b), *tiles)
    if time.monotonic() < until_s:
        search("usual", lambda a, b: Usual(layer, tokens, a, b), *[list(usual_configs(layer, tokens))] * 2)
    if layer.weight == "bf16":
        call = through_torch(layer, tokens)
        best["torch"] = (tried(call, "torch"), call, "")
    if "ours" in best:
        again = Ours(layer, tokens, *eval(best["ours"][2], {"Stage": Stage}), pdl=False)
        best["two plain launches"] = (tried(again, "plain"), again, "")
    runs = [
        timer.prepare(lambda i, c=call: c(x, ids[i % ROUTINGS], weights, w13, s13, w2, s2), ROUTINGS)
        for _, call, _ in best.values()
    ]
    for (kind, (_, _, config)), times in zip(best.items(), timer.measure(runs, 12), strict=True):
        quarter = statistics.quantiles([t / ROUTINGS for t in times[2:]], n=4)
        row[kind] = {
            "us": round(quarter[1], 2),
            "from": round(quarter[0], 2),
            "to": round(quarter[2], 2),
            "config": config,
        }
    row["bitwise"] = {}
    for kind in ("ours", "tiles", "quantised"):
        if kind in best:
            y = [best[kind][1](x, ids[0], weights, w13, s13, w2, s2).clone() for _ in range(20)]
            row["bitwise"][kind] = all(torch.equal(y[0], one) for one in y)
    return row


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--bandwidth", type=float, default=4.4, help="TB/s of the floor")
    parser.add_argument("--seconds", type=float, default=300, help="nothing is begun later")
    parser.add_argument("--each", type=float, default=25, help="seconds of search of one row")
    given = parser.parse_args()
    end_s, rows = time.monotonic() + given.seconds, []
    for name in given.layers.split(","):
        layer = LAYERS[name]
        w13, s13 = make(layer, 2 * layer.inter, layer.width)
        w2, s2 = make(layer, layer.width, layer.inter)
        for tokens in map(int, given.tokens.split(",")):
            if time.monotonic() > end_s:
                break
            row = measure(
                name, layer, (w13, s13, w2, s2), tokens, given.bandwidth, min(end_s, time.monotonic() + given.each)
            )
            rows.append(row)
            shown = {k: v["us"] for k, v in row.items() if isinstance(v, dict) and "us" in v}
            print(
                name,
                tokens,
                "floor",
                round(row["floor_us"], 1),
                shown,
                [row[kind]["config"] for kind in ("ours", "tiles", "quantised", "usual") if kind in row],
                row.get("bitwise"),
                "wrong",
                len(row["wrong"]),
                row["wrong"][:2],
                {k: v for k, v in row.items() if k.startswith("error")},
                flush=True,
            )
        del w13, s13, w2, s2
        torch.cuda.empty_cache()
    print(
        record.save(
            f"moe-{torch.cuda.get_device_name().split()[-1].lower()}-{time.strftime('%Y-%m-%d')}",
            {"benchmark": "moe", "rows": rows},
            given.out,
        )
    )


if __name__ == "__main__":
    main()
