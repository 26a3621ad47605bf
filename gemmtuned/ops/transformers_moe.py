"""Experts of transformers' mixtures by gemmtuned.ops.fused_moe, through the registry that transformers 5 has for them.

Modules that transformers marks with `use_experts_implementation` take their forward from ALL_EXPERTS_FUNCTIONS, by
default under the name grouped_mm.  Ours is registered as `gemmtuned`, for `model.set_experts_implementation`, and put
before grouped_mm and before `eager`, the loops that transformers' own classes bring, which are in no registry: an
unchanged program uses it with either.  What it does not take goes on to transformers' own: training,
weights that lie as [E, K, N] (gpt-oss: there torch._grouped_mm is tuned), gates and activations of a model's own, and
all that somebody looks on at: hooks of the experts or of their activation, modes, transforms, tracers, autocast.
So does what has no verdict yet, counted as one call, and where torch's own is best: the patch costs nothing there.
Experts in FP8 have a registry of their own (transformers_fp8_moe.py).
Results of ours differ from transformers' by rounding: the first product is rounded once, the sum over experts is in
fp32.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules import module as nn_module

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.compiling import is_exporting
from gemmtuned.ops.moe import ActivationType, fused_moe_or
from gemmtuned.ops.plain import PLAIN, nobody_looks_on

# transformers' name of what it runs unless a program says otherwise
DEFAULT: Final = "grouped_mm"
NAME: Final = "gemmtuned"
EAGER: Final = "eager"
_FLAGS: Final = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
# Of later versions than 5.0: where they are not known, it is not done
_LATER: Final = ("has_post_expert_norm", "_is_expert_parallel")
# Versions of transformers whose experts these flags and that gate say all of
KNOWN: Final = (5,)
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
# (experts, hidden states) -> both weights, the activation and the scales where there are any; None: not taken
Taken = Callable[[Any, Tensor], "tuple[Any, ...] | None"]
_now = threading.local()  # the experts whose own form this thread runs


def is_ready(module: ModuleType) -> bool:
    """As Patch.is_ready."""
    # As importlib says it of a module
    return not getattr(module.__spec__, "_initializing", False)


def apply(module: ModuleType) -> Callable[[], None]:
    """As Patch.apply."""
    gate = getattr(module, "_default_apply_gate", None)
    return put_before(module, "ALL_EXPERTS_FUNCTIONS", lambda experts, x: _taken(experts, gate, x))


def put_before(module: ModuleType, registry: str, taken: Taken) -> Callable[[], None]:
    """Our form of what `taken` takes, before this registry's; the result takes it back.

    Raises GemmtunedError for a version that nobody has looked at.
    """
    functions = getattr(module, registry, None)
    if functions is None or not hasattr(functions, "register") or DEFAULT not in functions:
        raise GemmtunedError(
            f"{module.__name__} has no registry of experts with {DEFAULT}: transformers 5 brings it, this is {_said()}"
        )
    if _major() not in KNOWN:
        raise GemmtunedError(
            f"{_said()} is not known to {__name__}, which was written for {', '.join(f'{n}.x' for n in KNOWN)}: leave "
            "out the patch, or install one of those"
        )
    stock: Forward = functions[DEFAULT]
    if getattr(stock, "is_gemmtuned", False):
        return lambda: None
    forward = _before(stock, taken)
    functions.register(NAME, forward)
    functions[DEFAULT] = forward
    usual = functions.get_interface

    def get_interface(name: str, default: Forward) -> Forward:
        found: Forward = usual(name, default)
        return _before(found, taken) if name == EAGER and found is default and _is_theirs(default) else found

    functions.get_interface = get_interface

    def undo() -> None:
        if functions[DEFAULT] is forward:
            functions[DEFAULT] = stock
        if vars(functions).get("get_interface") is get_interface:
            del functions.get_interface

    return undo


def _before(stock: Forward, taken: Taken) -> Forward:
    """A forward of experts that goes on to `stock` with what it does not take."""

    def forward(experts: Any, *given: Tensor, **named: Tensor) -> Tensor:
        def otherwise() -> Tensor:
            if torch.compiler.is_compiling():
                return stock(experts, *given, **named)
            outer, _now.experts = getattr(_now, "experts", None), experts
            try:
                return stock(experts, *given, **named)
            finally:
                _now.experts = outer

        if named or len(given) != 3 or _is_within(experts):  # a loop has names of its own for them
            return otherwise()
        hidden_states, top_k_index, top_k_weights = given
        found = taken(experts, hidden_states) if _is_ours_alone(experts, *given) else None
        if found is None:
            return otherwise()
        w1, w2, activation, *scales = found
        return fused_moe_or(otherwise, hidden_states, w1, w2, top_k_weights, top_k_index, activation, *scales)

    forward.is_gemmtuned = True  # type: ignore[attr-defined]
    return forward


def _is_within(experts: Any) -> bool:
    """Whether this is asked by their own form: of a class that was marked twice both forwards ask the registry."""
    return not torch.compiler.is_compiling() and getattr(_now, "experts", None) is experts


def _is_theirs(forward: Forward) -> bool:
    """Whether a class's own loop is one that transformers ships; a program's may compute another thing."""
    return getattr(forward, "__module__", "").startswith(("transformers.models.", "transformers.integrations."))


def _is_ours_alone(experts: Any, *given: Tensor) -> bool:
    """Whether nobody but the caller sees what happens between the operands and the result."""
    if is_exporting() or not all(type(t) in PLAIN for t in given):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *experts.parameters())):
        return False
    if any(_is_watched(module) for module in (experts, getattr(experts, "act_fn", None))):
        return False
    # Into compiled code goes the operator, which modes and transforms see as one call
    return torch.compiler.is_compiling() or nobody_looks_on(given[0].device.type)


def _is_watched(module: Any) -> bool:
    """Whether a program has its own code run around this module's calls, or around every module's."""
    if any(getattr(nn_module, f"_global{name}", None) for name in _HOOKS):
        return True
    own = getattr(module, "__dict__", {})
    return "forward" in own or any(own.get(name) for name in _HOOKS)


def _taken(experts: Any, gate: Any, x: Tensor) -> tuple[Any, ...] | None:
    """As Taken. gate: transformers' own gating."""
    weights = weights_of(experts, gate)
    if weights is None or x.dtype not in _TYPES or {w.dtype for w in weights} != {x.dtype} or x.dim() != 2:
        return None
    activation = activation_of(experts)
    return None if activation is None else (*weights, activation)


def weights_of(experts: Any, gate: Any) -> tuple[Tensor, Tensor] | None:
    """Both weights of experts that are gated so, in three dimensions; None where the module is of another kind."""
    if any(getattr(experts, flag, None) is not wanted for flag, wanted in _FLAGS.items()):
        return None
    if any(getattr(experts, flag, False) is not False for flag in _LATER):
        return None
    if gate is None or getattr(type(experts), "_apply_gate", None) is not gate:
        return None
    w1: Any = getattr(experts, "gate_up_proj", None)
    w2: Any = getattr(experts, "down_proj", None)
    if not all(type(w) in PLAIN and w.dim() == 3 for w in (w1, w2)):
        return None
    return w1.detach(), w2.detach()


def activation_of(experts: Any) -> ActivationType | None:
    """The activation of a module where fused_moe computes it as the module would."""
    act = getattr(experts, "act_fn", None)
    theirs = sys.modules.get("transformers.activations")
    if type(act) in (torch.nn.SiLU, getattr(theirs, "SiLUActivation", None)):
        return ActivationType.Silu
    exact = type(act) is torch.nn.GELU and act.approximate == "none"
    of_theirs = type(act) is getattr(theirs, "GELUActivation", None)
    if exact or (of_theirs and getattr(act, "act", None) is torch.nn.functional.gelu):
        return ActivationType.Gelu
    return None


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", ""))


def _major() -> int | None:
    first = _version().partition(".")[0]
    return int(first) if first.isdecimal() else None


def _said() -> str:
    return f"transformers {_version()}" if _version() else "another version"
