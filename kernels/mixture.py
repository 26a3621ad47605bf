"""A mixture of experts by torch's own calls: the reference for all kernels, and what runs without one of them.

    H[pair] = act(X[token] W1[e]^T + b1[e])         for each pair of a token and one of its experts e, rounded as X is
    Y[token] = sum over its pairs of weight[pair] (H[pair] W2[e]^T + b2[e])

A pair whose expert is not in 0 .. E - 1 adds nothing; a token without experts gets zeros, and experts without tokens
are not read.  No sum uses atomics, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.kernels.dequantise import PAIRS, dequantised
from gemmtuned.kernels.dtypes import bits

MOST_DEQUANTISED: Final = 1 << 32  # bytes of one dequantised weight of all experts, which a CUDA graph would keep
LIMIT, ALPHA = 7.0, 1.702  # gpt-oss's swiglu has these


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a mixture computes.

    act: silu, gelu or swiglu.  gated: the first product has gate and up halves; interleaved: they alternate by row.
    weighted: the routing weights multiply the first product instead of the second.
    quant: how the weights are kept: as they are (none); in 8 bits with one scale per expert (tensor), per row (row) or
    per block (128x128); as e2m1 with an e8m0 scale per 32 of them (mxfp4); as int4.
    activations: how X and H may be quantised by a kernel that gains from it: not at all (none), or to e4m3 with a scale
    for each 128 of a row (1x128).  What is in this file never does.
    """

    act: str = "silu"
    gated: bool = True
    interleaved: bool = False
    weighted: bool = False
    quant: str = "none"
    activations: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """x [T, D], w1 [E, 2 I or I, D], w2 [E, D, I], weights, ids [T, topk], scales [E, ...], biases [E, N].

    weights: in fp32.  Weights of 4 bits are packed two per byte, the lower bits first, along the last side.
    """

    x: Tensor
    w1: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor
    scale1: Tensor | None = None
    scale2: Tensor | None = None
    bias1: Tensor | None = None
    bias2: Tensor | None = None


def run(o: Operands, how: How) -> Tensor:
    """Y [T, D] in X's type, by the grouped form if it can run here, else expert after expert.

    In a CUDA graph the visited experts are not known.  There few pairs run one by one, and more of them by the grouped
    form, which dequantises every expert, if that does not take too much memory.
    """
    plain = how.quant == "none"
    if not _is_captured(o.x):
        return grouped(o, how) if plain and grouped_runs(o) else by_expert(o, how)
    few = o.ids.numel() <= len(o.w1)
    if grouped_runs(o) and (plain or (not few and _dequantised_bytes(o, how) <= MOST_DEQUANTISED)):
        return grouped(o, how)
    return every_pair(o, how) if few else every_expert(o, how)


def by_expert(o: Operands, how: How) -> Tensor:
    """Expert after expert, each with the rows that visit it; this waits for the GPU to know which."""
    flat, topk = o.ids.flatten(), o.ids.shape[1]
    parts = o.x.new_zeros(len(flat), o.w2.shape[1])
    weights = o.weights.flatten()
    visited = [e for e in torch.unique(flat).tolist() if 0 <= e < len(o.w1)]
    for e in visited or [0]:  # without any, one expert on no rows: derivatives are then zeros, not missing
        pairs = (flat == e).nonzero()[:, 0]
        parts = _with(parts, pairs, _expert(o, how, e, o.x[pairs // topk], weights[pairs]))
    return _added(o, how, parts)


def of_no_tokens(o: Operands, how: How) -> Tensor:
    """Y [0, D], differentiable: all derivatives are zeros."""
    return _added(o, how, _expert(o, how, 0, o.x, o.weights.flatten()))


def every_expert(o: Operands, how: How) -> Tensor:
    """Each expert on all rows: slow, but it never waits for the GPU and runs everywhere; for CUDA graphs."""
    flat = o.ids.flatten()
    rows = o.x.repeat_interleave(o.ids.shape[1], 0)
    parts = o.x.new_zeros(len(flat), o.w2.shape[1])
    for e in range(len(o.w1)):
        found = _expert(o, how, e, rows, o.weights.flatten())
        parts = torch.where((flat == e)[:, None], found, parts)
    return _added(o, how, parts)


def every_pair(o: Operands, how: How) -> Tensor:
    """Pair after pair, with a copy of its expert's weights: no wait for the GPU; for few pairs of many experts."""
    flat, topk, weights = o.ids.flatten(), o.ids.shape[1], o.weights.flatten()
    here = (flat >= 0) & (flat < len(o.w1))
    e = torch.where(here, flat, 0).long()
    names = ("w1", "w2", "scale1", "scale2", "bias1", "bias2")
    given = {name: t for name in names if (t := getattr(o, name)) is not None}
    parts = [o.x.new_zeros(0, o.w2.shape[1])]
    for pair in range(len(flat)):
        at = slice(pair, pair + 1)
        alone = replace(o, **{name: _picked(t, e[at]) for name, t in given.items()})
        parts.append(_expert(alone, how, 0, o.x[pair // topk][None], weights[at]))
    with as_they_are(o.x):
        found = torch.cat(parts)
    return _added(o, how, torch.where(here[:, None], found, 0))


def _picked(t: Tensor, index: Tensor) -> Tensor:
    """t[index], as bits where torch has no index_select for the type; such types have no gradients."""
    plain = bits(t)
    return t.index_select(0, index) if plain is t else plain.index_select(0, index).view(t.dtype)


def grouped_runs(o: Operands) -> bool:
    """Whether torch's grouped product takes these operands: bf16, and sizes that are multiples of 8."""
    if o.x.dtype != torch.bfloat16 or o.x.shape[1] % 8 or o.w2.shape[2] % 8 or not o.x.shape[0]:
        return False
    if not (o.w1.is_contiguous() and o.w2.is_contiguous()):
        return False
    return o.x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(o.x.device) >= (9, 0)


def grouped(o: Operands, how: How) -> Tensor:
    """Sort pairs by expert and call torch._grouped_mm twice; a quantised weight is dequantised before its call."""
    flat, topk, experts = o.ids.flatten(), o.ids.shape[1], len(o.w1)
    e = torch.where((flat >= 0) & (flat < experts), flat, experts)  # pairs without an expert come last
    order = e.argsort(stable=True)
    at = e[order]
    ends = torch.searchsorted(at, torch.arange(experts, device=at.device, dtype=at.dtype), right=True).int()
    mine = at.clamp(max=experts - 1).long()
    sums = torch._grouped_mm(o.x[order // topk], _values(o.w1, o.scale1, how, o.x.dtype).mT, offs=ends)
    h = hidden(how, sums, o.weights.flatten()[order], None if o.bias1 is None else o.bias1[mine]).to(o.x.dtype)
    y = torch._grouped_mm(h, _values(o.w2, o.scale2, how, o.x.dtype).mT, offs=ends)
    if o.bias2 is not None:
        y = y + o.bias2[mine]
    parts = torch.where((at < experts)[:, None], y, 0)  # rows behind the last group were not written
    return _added(o, how, _with(torch.empty_like(parts), order, parts))


def visited(o: Operands, how: How) -> tuple[Operands, How]:
    """The same with only the visited experts, their weights dequantised; this waits for the GPU to know which."""
    here = (o.ids >= 0) & (o.ids < len(o.w1))
    found = torch.unique(o.ids[here]).long()
    found = found if len(found) else found.new_zeros(1)  # torch has no grouped product of no experts
    ids = torch.where(here, torch.searchsorted(found, o.ids.long()), -1)
    few = found.tolist()
    w1, w2 = (_values(w, s, how, o.x.dtype, few) for w, s in ((o.w1, o.scale1), (o.w2, o.scale2)))
    bias1, bias2 = (None if b is None else b[found] for b in (o.bias1, o.bias2))
    alone = replace(o, w1=w1, w2=w2, ids=ids, scale1=None, scale2=None, bias1=bias1, bias2=bias2)
    return alone, replace(how, quant="none")


def hidden(how: How, sums: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """The activation of the first product's rows [P, N], in fp32 (fp64 for fp64); weights [P], bias [N] or [P, N]."""
    sums = sums if sums.dtype == torch.float64 else sums.float()
    if how.weighted:
        sums = sums * weights[:, None]
    if bias is not None:
        sums = sums + bias
    if not how.gated:
        return F.silu(sums) if how.act == "silu" else F.gelu(sums)
    gate, up = (sums[:, 0::2], sums[:, 1::2]) if how.interleaved else sums.chunk(2, -1)
    if how.act == "swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    return (F.silu(gate) if how.act == "silu" else F.gelu(gate)) * up


def _values(w: Tensor, scale: Tensor | None, how: How, dtype: torch.dtype, few: Sequence[int] = ()) -> Tensor:
    """The dequantised weights of these experts, one after the other, since the temporaries take more memory."""
    if how.quant == "none" or scale is None:
        return w[list(few)] if few else w
    experts = few or range(len(w))
    values = torch.empty(
        len(experts), w.shape[1], w.shape[2] * (2 if how.quant in PAIRS else 1), dtype=dtype, device=w.device
    )
    for to, e in zip(values, experts, strict=True):
        to.copy_(dequantised(w[e], scale[e], how.quant, dtype))
    return values


def _dequantised_bytes(o: Operands, how: How) -> int:
    return o.w1.numel() * (2 if how.quant in PAIRS else 1) * o.x.element_size()


def without_others(o: Operands, mask: Tensor | None, tokens: Tensor | None) -> Operands:
    """The same ids as local numbers of experts, -1 for those on other ranks.

    mask: for each global expert 1 if it is here and 0 if not; or its local number, and -1 if it is elsewhere.  Any
    number besides 0 and 1 shows that it is the latter, without a wait for the GPU.  tokens: how many rows are real.
    """
    ids = o.ids
    if mask is not None:
        given = mask.flatten().long()
        here = given > 0
        local = torch.where(((given < 0) | (given > 1)).any(), given, torch.where(here, here.cumsum(0) - 1, -1))
        known = (ids >= 0) & (ids < len(given))
        ids = torch.where(known, local[torch.where(known, ids, 0).long()], -1).to(ids.dtype)
    if tokens is not None:
        rows = torch.arange(len(ids), device=ids.device)
        ids = torch.where((rows < tokens.reshape(()))[:, None], ids, -1)
    return replace(o, ids=ids)


def as_they_are(parts: Tensor) -> AbstractContextManager[object]:
    """No autocast while tensors are joined: a CPU's autocast refuses 16-bit floats of another type than its own."""
    kind = parts.device.type
    if kind == "meta":  # torch knows no autocast for it
        return nullcontext()
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _expert(o: Operands, how: How, e: int, rows: Tensor, weights: Tensor) -> Tensor:
    scale1, scale2 = (s[e] if s is not None else None for s in (o.scale1, o.scale2))
    sums = rows @ dequantised(o.w1[e], scale1, how.quant, rows.dtype).t()
    h = hidden(how, sums, weights, None if o.bias1 is None else o.bias1[e]).to(rows.dtype)
    y = h @ dequantised(o.w2[e], scale2, how.quant, rows.dtype).t()
    return (y if o.bias2 is None else y + o.bias2[e]).to(rows.dtype)  # Y has another type under autocast


def _with(parts: Tensor, rows: Tensor, found: Tensor) -> Tensor:
    """parts with these rows, not in place, for the sake of derivatives."""
    with as_they_are(parts):
        return parts.index_copy(0, rows, found)


def _added(o: Operands, how: How, parts: Tensor) -> Tensor:
    tokens, topk = o.ids.shape
    wide = parts.to(torch.float64 if parts.dtype == torch.float64 else torch.float32).view(tokens, topk, parts.shape[1])
    if not how.weighted:
        here = ((o.ids >= 0) & (o.ids < len(o.w1)))[..., None]
        wide = torch.where(here, wide * o.weights[..., None], 0)
    return wide.sum(1).to(parts.dtype)


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
