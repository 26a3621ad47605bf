"""`fused_moe`: a mixture of experts in AITER's two stages, with AITER's names and flags.

Small batches on sm_90 run as two launches (kernels/cuda/moe_decode.cu), large ones of coded weights in tiles
(kernels/triton/moe_tiles.py), everything else by torch's own calls (kernels/mixture.py).  Activations are quantised
only for a caller who allows it (kernels/triton/moe_fp8_tiles.py), so results are as exact as weights allow.  Inside
torch.compile, for tracers and for tensors without values it is the operator gemmtuned::fused_moe, which has no
derivative: compiled code that wants one calls eager code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND
from gemmtuned.configs.tunable import may_be_quantised
from gemmtuned.hooks import activate
from gemmtuned.hooks.hook import own_op
from gemmtuned.kernels.catalog import has_compiler
from gemmtuned.kernels.compiling import asked_once, is_exporting
from gemmtuned.kernels.cuda.moe_compile import most_tokens
from gemmtuned.kernels.cuda.moe_decode import MAX_PAIRS
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.mixture import How, Operands, grouped_runs, of_no_tokens, run, without_others
from gemmtuned.ops.blame import FAILURES, is_to_blame
from gemmtuned.ops.moe_arguments import check_others, how_of, operands_of
from gemmtuned.ops.moe_problem import problem_of
from gemmtuned.ops.moe_table import MISS, Serving, give_up, serving
from gemmtuned.ops.plain import PLAIN, nobody_looks_on
from gemmtuned.ops.plans import place_of
from gemmtuned.ops.quantised_arguments import wants_derivatives
from gemmtuned.ops.tensors import tensor

log = logging.getLogger("gemmtuned.ops")


class ActivationType(IntEnum):
    """AITER's, with its numbers; its own members and names in text do as well."""

    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(IntEnum):
    """AITER's, with its numbers, and per_Group: int4 (code - 8) with a scale for so many of K as the sizes say."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
    per_Group = 100


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: Any = ActivationType.Silu,
    quant_type: Any = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    splitk: int = 0,
    *,
    interleaved: bool = False,
    quantize_activations: bool = False,
) -> Tensor:
    """Y[T, D]: for each token the sum over its experts e of weight * (act(X W1[e]^T + bias1) W2[e]^T + bias2).

    hidden_states: [T, D], bf16, fp16 or fp32; in fp8 with a1_scale [1], [T, 1] or [T, D / 128], and dtype.
    w1: [E, 2 I, D], gate above up, or [E, I, D] without a gate.  w2: [E, D, I].  Weights of 4 bits: uint8 (or torch's
    float4) with half as many columns, the lower half of a byte first.
    topk_weight: [T, topk], used in fp32.  topk_ids: [T, topk], int32 or int64; -1, or any number that is no expert,
    adds nothing, and no weight is read for it.  A shared expert is one more id in each row.
    expert_mask: for each expert of all ranks, which topk_ids count, 1 if it lies here, or its number here, else -1.
    activation: Silu, Gelu (exact), Swiglu (gpt-oss's, clamped to 7).  interleaved: rows of gate and up take turns, as
    in gpt-oss's checkpoints.
    doweight_stage1: topk_weight multiplies the first product, before bias1, instead of the second.
    quant_type and w1_scale, w2_scale, which multiply: per_Tensor [E], per_Token [E, rows], per_1x128 and per_128x128
    [E, rows / 128, columns / 128], per_1x32 (MXFP4) e8m0 [E, rows, columns / 32], per_Group [E, rows, columns / group].
    quantize_activations: X and H may be quantised to e4m3, as AITER does, where a kernel gains: on GPUs, weights of
    e4m3 with per_1x128 or per_128x128.  Results are then some 0.05 of their size from exact ones, and else 0.003.
    num_local_tokens: how many rows are real; the others become zeros.  dtype: of Y, hidden_states' unless given.
    a2_scale, block_size_M, moe_sorting_dispatch_policy, splitk choose among AITER's kernels: taken and not used.

    Raises GemmtunedError for sizes, types and devices that do not fit, shuffled weights, hidden_pad, intermediate_pad.
    """
    if hidden_pad or intermediate_pad:
        raise GemmtunedError("hidden_pad and intermediate_pad are not done here: hand weights of the real sizes")
    flags = {"weighted": doweight_stage1, "interleaved": interleaved, "quantised": quantize_activations}
    how = how_of(activation, quant_type, w1, w2, **flags)
    given = (
        hidden_states, w1, w2, topk_weight, topk_ids, w1_scale, w2_scale, a1_scale, bias1, bias2, how, expert_mask,
        num_local_tokens, dtype,
    )  # fmt: skip
    if torch.compiler.is_compiling() and not is_exporting() and wants_derivatives(*given[:10]):
        return _beside_the_graph(*given) if _has_way_beside() else _eager(*given)
    if torch.compiler.is_compiling() or _is_traced(tensor("hidden_states", hidden_states)):
        return _through_operator(*given)
    return _eager(*given)


def _eager(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, scale1: Tensor | None, scale2: Tensor | None,
    scale_x: Tensor | None, bias1: Tensor | None, bias2: Tensor | None, how: How, mask: Tensor | None,
    tokens: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    found = operands_of(x, w1, w2, weights, ids, scale1, scale2, scale_x, bias1, bias2, how=how, dtype=dtype)
    return _run(found, how, mask, tokens).to(dtype or found.x.dtype)


def _through_operator(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, scale1: Tensor | None, scale2: Tensor | None,
    scale_x: Tensor | None, bias1: Tensor | None, bias2: Tensor | None, how: How, mask: Tensor | None,
    tokens: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    found: Tensor = _operator(
        x, w1, w2, weights, ids, mask, how.act, how.gated, how.interleaved, how.weighted, how.quant, scale1, scale2,
        scale_x, tokens, dtype, bias1, bias2, how.activations,
    )  # fmt: skip
    return found


_beside_the_graph: Callable[..., Tensor] = _eager


@asked_once
def _has_way_beside() -> bool:
    """Make _beside_the_graph, which a compiler does not enter, while one asks: torch imports its compiler for that."""
    global _beside_the_graph
    reason = "fused_moe has derivatives outside of compiled code alone: no_grad() or detached operands need none"
    if _beside_the_graph is _eager:
        _beside_the_graph = torch.compiler.disable(_eager, reason=reason)  # type: ignore[no-untyped-call]
    return True


def _is_traced(x: Tensor) -> bool:
    """Whether operands have no values, or are taken for any: which experts are visited must not become part of it."""
    modes = torch._C._TorchDispatchModeKey
    return (
        x.is_meta
        or isinstance(x, torch._subclasses.FakeTensor)
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
    )


def fused_moe_or(
    otherwise: Callable[[], Tensor], x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: Any,
    scale1: Tensor | None = None, scale2: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fused_moe by the kernel that the table has for the call; where it has none, what `otherwise` gives.

    otherwise: a layer's own form of the same.  x, w1, w2, weights, ids, activation: as for fused_moe.  scale1, scale2:
    none, or of 128x128, by a layer that quantises X and H itself.  A call without a verdict is counted as fused_moe's;
    where torch's own is the best, the layer's form runs as it would without us, its products counted one by one.
    """
    quant = QuantType.No if scale1 is None else QuantType.per_128x128
    if torch.compiler.is_compiling():
        # Of weights in 16 bits both forms are alike where nothing is tuned, and the operator is one node of a graph
        return fused_moe(x, w1, w2, weights, ids, activation=activation) if scale1 is None else otherwise()
    hook: Any = activate.current()
    if hook is None:
        return otherwise()
    how = how_of(activation, quant, w1, w2, weighted=False, interleaved=False, quantised=True)
    given = Operands(x=x, w1=w1, w2=w2, weights=weights, ids=ids, scale1=scale1, scale2=scale2)
    problem = problem_of(given, how) if len(x) and ids.dim() == 2 else None
    if problem is None:
        return otherwise()
    found = _found(hook, problem, given)
    if found.solution is not None and found.solution.backend == DEFAULT_BACKEND:
        return otherwise()

    def operands() -> Operands:
        return operands_of(x, w1, w2, weights, ids, scale1, scale2, None, None, None, how=how, dtype=None)

    return _counted(hook, problem, found, place_of(x.device), operands, otherwise)


def _run(o: Operands, how: How, mask: Tensor | None, tokens: Tensor | None) -> Tensor:
    check_others(mask, tokens, o)
    if not len(o.x):
        return of_no_tokens(o, how)
    o = without_others(o, mask, tokens)
    hook: Any = activate.current()
    problem = problem_of(o, how) if hook is not None else None
    if problem is None:
        return _usual(o, how)
    found = _found_or_exact(hook, problem, o)
    return _counted(hook, problem, found, place_of(o.x.device), lambda: o, lambda: _usual(o, how))


def _found(hook: Any, problem: Problem, o: Operands) -> Serving:
    """What the table in use has for a call."""
    if not _is_plain(o):
        return MISS
    return serving(hook, problem, place_of(o.x.device), captured=_is_captured(o.x))


def _found_or_exact(hook: Any, problem: Problem, o: Operands) -> Serving:
    """The same; where X and H may be quantised and nothing is known of that, a kernel that quantises nothing.

    That is right as well, and the call stays one that nobody has tuned.  torch's own is no such kernel: before anything
    is tuned there are better ones.
    """
    found = _found(hook, problem, o)
    if found.solution is not None or not may_be_quantised(problem):
        return found
    exact = _found(hook, replace(problem, scale="none", scale_dtype=""), o)
    known = exact.solution is not None and exact.solution.backend != DEFAULT_BACKEND
    return replace(exact, outcome=MISS.outcome) if known else found


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _counted(
    hook: Any, problem: Problem, found: Serving, place: str, operands: Callable[[], Operands],
    otherwise: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """Y by the kernel that was found, else by `otherwise`; counted as one call, without the products inside of it."""
    served = None
    with own_op(hook, "" if found.call is None else place):
        if found.call is not None and found.solution is not None:
            try:
                served = found.call(operands())
            except FAILURES as err:
                if is_to_blame(err):
                    give_up(hook, found.solution, err)
        y = otherwise() if served is None else served
    hook.count_op(problem, place, (MISS if served is None else found).outcome, graph=_is_captured(y))
    return y


def _usual(o: Operands, how: How) -> Tensor:
    """What serves where nothing is tuned."""
    y = None
    if o.x.is_cuda and o.ids.numel() and _is_plain(o):
        y = _launched(o, how) if o.ids.numel() <= MAX_PAIRS else _tiled(o, how)
    return run(o, how) if y is None else y


def _launched(o: Operands, how: How) -> Tensor | None:
    """Y by the two launches of moe_decode; None where they cannot run this layer."""
    from gemmtuned.kernels.cuda import moe_run

    if not moe_run.runs_here(o.x.device):
        return None
    o = replace(o, x=o.x.contiguous())
    layer = moe_run.layer_of(o, how)
    if layer is None:
        return None
    launches = None
    try:
        most = most_tokens(len(o.x), layer.topk)
        launches = moe_run.loaded(layer, most, None, o.x.get_device(), kept=_waits_for_daemon(o, how))
        return launches(o) if launches is not None else None
    except FAILURES as err:
        if is_to_blame(err) and launches is not None:
            moe_run.refuse(launches)
            log.warning("launch failed layer=%s served=torch reason=%s", layer, err)
    return None


def _tiled(o: Operands, how: How) -> Tensor | None:
    """Many tokens by coded weights, for which torch has no form without a wait; None where tiles do not take them."""
    if how.quant == "none" or not has_compiler("triton", cuda_device(o.x.get_device())):
        return None
    from gemmtuned.kernels.triton import moe_launch, moe_loaded

    o = replace(o, x=o.x.contiguous())
    layer = moe_launch.layer_of(o, how, o.x.get_device())
    launches = None
    try:
        if layer is not None:
            quantised = how.activations != "none"
            launches = moe_loaded.likeliest(layer, len(o.x), o.x.get_device(), quantised=quantised)
        return launches(o) if launches is not None else None
    except FAILURES as err:
        if is_to_blame(err) and launches is not None:
            moe_loaded.refuse(launches)
            log.warning("launch failed layer=%s served=torch reason=%s", layer, err)
    return None


def _waits_for_daemon(o: Operands, how: How) -> bool:
    """Whether a call must not compile, which takes seconds: the daemon does it, and torch has a good form meanwhile."""
    return activate.current() is not None and how.quant == "none" and grouped_runs(o)


def _is_plain(o: Operands) -> bool:
    """Whether kernels that are not torch's may serve: no derivative, autocast, subclass, mode, transform or tracer."""
    wanted = torch.is_grad_enabled()
    for t in (o.x, o.w1, o.w2, o.weights, o.ids, o.scale1, o.scale2, o.bias1, o.bias2):
        if t is not None and (type(t) not in PLAIN or (wanted and t.requires_grad)):
            return False
    return nobody_looks_on(o.x.device.type)


@torch.library.custom_op("gemmtuned::fused_moe", mutates_args=())
def _operator(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    act: str,
    gated: bool,
    interleaved: bool,
    weighted: bool,
    quant: str,
    scale1: Tensor | None,
    scale2: Tensor | None,
    scale_x: Tensor | None,
    tokens: Tensor | None,
    dtype: torch.dtype | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    activations: str = "none",
) -> Tensor:
    how = How(
        act=act, gated=gated, interleaved=interleaved, weighted=weighted, quant=quant, activations=activations
    )  # fmt: skip
    return _eager(x, w1, w2, weights, ids, scale1, scale2, scale_x, bias1, bias2, how, mask, tokens, dtype)


@_operator.register_fake
def _fake(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, mask: Tensor | None, act: str, gated: bool,
    interleaved: bool, weighted: bool, quant: str, scale1: Tensor | None, scale2: Tensor | None,
    scale_x: Tensor | None, tokens: Tensor | None, dtype: torch.dtype | None, bias1: Tensor | None,
    bias2: Tensor | None, activations: str = "none",
) -> Tensor:  # fmt: skip
    for name, t in (("w1", w1), ("w2", w2), ("topk_weight", weights), ("topk_ids", ids)):
        if t.device != x.device:
            raise GemmtunedError(f"{name} is on {t.device}, hidden_states on {x.device}")
    return x.new_empty((x.shape[0], w2.shape[1]), dtype=dtype or x.dtype)
