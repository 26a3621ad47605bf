"""Experts of transformers' mixtures by gemmtuned.ops.fused_moe, through the registry that transformers 5 has for them.

Modules that transformers marks with `use_experts_implementation` take their forward from ALL_EXPERTS_FUNCTIONS, by
default under the name grouped_mm.  Ours is registered as `gemmtuned`, for `model.set_experts_implementation`, and put
before grouped_mm, so that an unchanged program uses it.  What it does not take goes on to transformers' own: training,
weights that lie as [E, K, N] (gpt-oss: there torch._grouped_mm is tuned), gates and activations of a model's own.
Results differ from transformers' by rounding: the first product is rounded once and the sum over experts is in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.ops.moe import ActivationType, fused_moe

DEFAULT: Final = "grouped_mm"  # transformers' name of what it runs unless a program says otherwise
NAME: Final = "gemmtuned"
_FLAGS: Final = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
                 "has_post_expert_norm": False, "_is_expert_parallel": False}  # fmt: skip
_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def is_ready(module: ModuleType) -> bool:
    """As Patch.is_ready."""
    return not getattr(module.__spec__, "_initializing", False)  # as importlib says it of a module


def apply(module: ModuleType) -> Callable[[], None]:
    """As Patch.apply."""
    functions = getattr(module, "ALL_EXPERTS_FUNCTIONS", None)
    if functions is None or not hasattr(functions, "register") or DEFAULT not in functions:
        raise GemmtunedError(
            f"{module.__name__} has no registry of experts with {DEFAULT}: transformers 5 brings it, this is "
            f"{_version()}"
        )
    stock: Forward = functions[DEFAULT]
    if getattr(stock, "is_gemmtuned", False):
        return lambda: None
    gate = getattr(module, "_default_apply_gate", None)

    def forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        activation = None if top_k_weights.requires_grad else _activation(experts, gate, hidden_states)
        if activation is None:
            return stock(experts, hidden_states, top_k_index, top_k_weights)
        w1, w2 = experts.gate_up_proj.detach(), experts.down_proj.detach()
        return fused_moe(hidden_states, w1, w2, top_k_weights, top_k_index, activation=activation)

    forward.is_gemmtuned = True  # type: ignore[attr-defined]
    functions.register(NAME, forward)
    functions[DEFAULT] = forward

    def undo() -> None:
        if functions[DEFAULT] is forward:
            functions[DEFAULT] = stock

    return undo


def _activation(experts: Any, gate: Any, x: Tensor) -> ActivationType | None:
    """The activation of a module that fused_moe computes as the module would; None where it would not."""
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in experts.parameters())):
        return None
    if any(getattr(experts, flag, None) is not wanted for flag, wanted in _FLAGS.items()):
        return None
    if gate is None or getattr(type(experts), "_apply_gate", None) is not gate:
        return None
    w1, w2 = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not all(isinstance(w, Tensor) and type(w.data) is Tensor and w.dim() == 3 for w in (w1, w2)):
        return None
    if x.dtype not in _TYPES or {w1.dtype, w2.dtype} != {x.dtype} or x.dim() != 2:  # type: ignore[union-attr]
        return None
    act = getattr(experts, "act_fn", None)
    if isinstance(act, torch.nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return ActivationType.Silu
    exact = isinstance(act, torch.nn.GELU) and act.approximate == "none"
    if exact or (type(act).__name__ == "GELUActivation" and getattr(act, "act", None) is torch.nn.functional.gelu):
        return ActivationType.Gelu
    return None


def _version() -> str:
    try:
        from importlib.metadata import version

        return f"transformers {version('transformers')}"
    except Exception:  # no metadata
        return "another version"
