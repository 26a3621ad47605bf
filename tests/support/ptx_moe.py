"""moe_decode's launches on the CPU, as PTX, and what they should give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ptx_cuda
import torch
from ptx_warps import Warps

from gemmtuned.kernels.cuda import moe_decode as moe
from gemmtuned.kernels.cuda.moe_decode import Experts, Stage

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the lower first."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def weights_of(layer: Experts, rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(as they lie in memory, scales, the values in fp64) of [experts, rows, k]; whole numbers times powers of two."""
    random = torch.Generator().manual_seed(seed)
    shape = (layer.experts, rows, k)

    def powers(*size: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-5, -1, size, generator=random).double())

    if layer.weight in TYPES:
        w = torch.randint(-2, 3, shape, generator=random).double() / 8
        return w.to(TYPES[layer.weight]), None, w
    if layer.weight == "fp8_e4m3":
        w = torch.randint(-3, 4, shape, generator=random).double()
        if layer.scales == "tensor":
            s = powers(layer.experts, 1, 1)
            return w.to(torch.float8_e4m3fn), s.float(), w * s
        if layer.scales == "row":
            s = powers(layer.experts, rows, 1)
            return w.to(torch.float8_e4m3fn), s.float(), w * s
        s = powers(layer.experts, -(-rows // 128), -(-k // 128))
        spread = s.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :k]
        return w.to(torch.float8_e4m3fn), s.float(), w * spread
    codes = torch.randint(0, 16, shape, generator=random)
    s = powers(layer.experts, rows, k // layer.group)
    spread = s.repeat_interleave(layer.group, 2)
    if layer.weight == "int4":
        return packed(codes), s.to(TYPES[layer.dtype]), (codes - 8).double() * spread
    values = E2M1[codes & 7].double() * torch.where(codes > 7, -1.0, 1.0)
    return packed(codes), (torch.log2(s) + 127).to(torch.uint8), values * spread


def activated(layer: Experts, both: torch.Tensor) -> torch.Tensor:
    """H of [.., 2 inter] sums."""
    if layer.act == "swiglu_clamped":
        gate, up = both[..., 0::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = both.chunk(2, -1)
    if layer.act == "gelu":
        return torch.nn.functional.gelu(gate) * up
    return torch.nn.functional.silu(gate) * up


def run(
    layer: Experts,
    ids: torch.Tensor,
    up: Stage,
    down: Stage,
    *,
    change: tuple[str, str] = ("", ""),
    of_x: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **turns: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(H, what it should be, Y, what it should be of that H); ids [T, topk]; change: of the source; of_x: changes X."""
    random = torch.Generator().manual_seed(7)
    tokens, pairs = ids.shape[0], ids.numel()
    dtype = TYPES[layer.dtype]
    x = of_x(torch.randint(-2, 3, (tokens, layer.width), generator=random).to(dtype))
    weights = torch.exp2(torch.randint(-2, 1, (tokens, layer.topk), generator=random).float())
    w13, s13, exact13 = weights_of(layer, 2 * layer.inter, layer.width, 1)
    w2, s2, exact2 = weights_of(layer, layer.width, layer.inter, 2)
    b13, b2 = (
        torch.randint(-4, 5, (layer.experts, n), generator=random).to(dtype) for n in (2 * layer.inter, layer.width)
    )
    h = torch.full((pairs, layer.inter), math.nan, dtype=dtype)
    y = torch.full((tokens, layer.width), math.nan, dtype=dtype)
    chosen = ids.to(torch.int64 if layer.long_ids else torch.int32).contiguous()
    for stage, how, given, w, s, bias, to, ld in (
        (1, up, x, w13, s13, b13, h, layer.width), (2, down, h, w2, s2, b2, y, layer.width),
    ):  # fmt: skip
        text = moe.source(layer, stage, how, most_pairs=max(pairs, layer.topk), early=False).replace(*change)
        (wide, high), cluster = moe.grid(layer, stage, how, tokens, 3), moe.cluster(stage, how)
        shared = moe.shared_bytes(layer, stage, how, pairs)
        launch = ptx_cuda.Launch((wide * cluster, high), 32 * how.warps, shared, cluster)
        scales = s if s is not None else torch.zeros(1)
        arguments = [given, chosen, weights, w.view(torch.uint8), scales, bias, to, pairs, ld]
        ptx_cuda.run(ptx_cuda.compiled(text, moe.TARGET), launch, arguments, kind=Warps, **turns)
    exact_h = torch.zeros(pairs, layer.inter, dtype=torch.float64)
    exact_y = torch.zeros(tokens, layer.width, dtype=torch.float64)
    for pair in range(pairs):
        token, expert = pair // layer.topk, int(ids.flatten()[pair])
        if not 0 <= expert < layer.experts:
            continue
        weight = float(weights.flatten()[pair])
        both = exact13[expert] @ x[token].double()
        if layer.weight_first:
            both = both * weight
        both = both + (b13[expert].double() if layer.bias else 0)
        exact_h[pair] = activated(layer, both)
        result = exact2[expert] @ h[pair].double() + (b2[expert].double() if layer.bias else 0)
        exact_y[token] += result * (1.0 if layer.weight_first else weight)
    return h, exact_h, y, exact_y


def is_right(layer: Experts, ids: torch.Tensor, up: Stage, down: Stage, **how: Any) -> bool:
    h, exact_h, y, exact_y = run(layer, ids, up, down, **how)
    used = ((ids >= 0) & (ids < layer.experts)).flatten()
    close = {"rtol": 2.0**-7 if layer.dtype == "bf16" else 2.0**-9, "atol": 1e-2}
    return torch.allclose(h[used].double(), exact_h[used], **close) and torch.allclose(y.double(), exact_y, **close)
