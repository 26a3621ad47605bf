"""Experts of transformers' mixtures in FP8 by gemmtuned.ops.fused_moe, through transformers' registry of them.

FP8Experts, into which transformers makes the experts of a checkpoint with fine-grained FP8 (DeepSeek-V3, Qwen3 ...),
take their forward from ALL_FP8_EXPERTS_FUNCTIONS.  They quantise X and H in groups of 128 before each product, so that
our kernels may, too.  All else is as transformers_moe.py says: what is not taken, and what has no verdict, goes on to
transformers' own, which takes its kernels from the hub.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.ops.plain import PLAIN
from gemmtuned.ops.transformers_moe import activation_of, is_ready, put_before, weights_of

__all__ = ["apply", "is_ready"]
BLOCK: Final = (128, 128)
_CHANGED: Final = ("gate_softcap", "up_softcap", "swiglu_alpha", "swiglu_limit", "limit")  # gates of some models
_OF_GATE: Final = {  # all that the gate asks for in the versions that this was written for
    *_CHANGED, "act_fn", "chunk", "clamp", "dtype", "float", "sigmoid", "tanh", "to", "torch",
}  # fmt: skip
_TYPES: Final = (torch.bfloat16, torch.float16)


def apply(module: ModuleType) -> Callable[[], None]:
    """As Patch.apply."""
    gate = getattr(getattr(module, "FP8Experts", None), "_apply_gate", None)
    others = set(getattr(getattr(gate, "__code__", None), "co_names", ())) - _OF_GATE
    if others:
        raise GemmtunedError(
            f"{module.__name__}: the gate of FP8Experts asks for {', '.join(sorted(others))}, which this patch "
            "does not know: leave it out, or install a transformers of before"
        )
    return put_before(module, "ALL_FP8_EXPERTS_FUNCTIONS", lambda experts, x: _taken(experts, gate, x))


def _taken(experts: Any, gate: Any, x: Tensor) -> tuple[Any, ...] | None:
    """As transformers_moe.Taken. gate: transformers' own, which is a plain one unless one of _CHANGED is set."""
    if getattr(experts, "activation_scheme", None) != "dynamic" or x.dtype not in _TYPES or x.dim() != 2:
        return None
    if tuple(getattr(experts, "block_size", None) or ()) != BLOCK:
        return None
    if any(getattr(experts, name, None) is not None for name in _CHANGED):
        return None
    weights, activation = weights_of(experts, gate), activation_of(experts)
    if weights is None or activation is None or {w.dtype for w in weights} != {torch.float8_e4m3fn}:
        return None
    scales: list[Any] = [getattr(experts, f"{name}_scale_inv", None) for name in ("gate_up_proj", "down_proj")]
    for w, scale in zip(weights, scales, strict=True):
        blocks = (len(w), -(-w.shape[1] // 128), -(-w.shape[2] // 128))
        if type(scale) not in PLAIN or scale.dtype != torch.float32 or tuple(scale.shape) != blocks:
            return None
    return (*weights, activation, *(scale.detach() for scale in scales))
