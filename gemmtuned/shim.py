"""`from aiter.tuned_gemm import tgemm` for programs written for AITER, on machines that have no AITER. Opt-in.

    import gemmtuned.shim
    gemmtuned.shim.install()          # before the program imports aiter; gemmtuned.shim.remove() takes it away

It puts modules named `aiter...` into sys.modules that hold our ops under AITER's names, and nothing else: what we do
not have fails to import, as it should.  A real AITER is never shadowed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from gemmtuned.configs.errors import GemmtunedError

_MARK: Final = "__gemmtuned_shim__"


class ShimError(GemmtunedError):
    """A real AITER is installed, or its names are taken."""


def install() -> None:
    """Make AITER's module names importable. Does nothing when it is done already.

    Raises ShimError when AITER itself is installed: then it should be used, and our hook works below it.
    """
    if is_installed():
        return
    if "aiter" in sys.modules or find_spec("aiter") is not None:
        raise ShimError(
            "aiter is installed here: use it as it is, gemmtuned works below it. The shim is for other machines"
        )
    for name, members in _modules().items():
        module = ModuleType(name, "gemmtuned's ops under AITER's names (gemmtuned.shim).")
        setattr(module, _MARK, True)
        for member, value in members.items():
            setattr(module, member, value)
        is_package = any(other.startswith(f"{name}.") for other in _modules())
        if is_package:
            module.__path__ = []
        # without a spec importlib.util.find_spec raises; without an origin it is nobody's AITER (ops/aiter_calls.py)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def remove() -> None:
    """Take the names away again; what was imported from them goes on working."""
    for name in [name for name, module in sys.modules.items() if getattr(module, _MARK, False) is True]:
        del sys.modules[name]


def is_installed() -> bool:
    """Whether `aiter` is ours in this process."""
    return getattr(sys.modules.get("aiter"), _MARK, False) is True


def _fused_moe(*given: Any, **named: Any) -> Any:
    """gemmtuned.ops.fused_moe for programs that expect of it what AITER does: X and H may be quantised."""
    from gemmtuned import ops

    return ops.fused_moe(*given, **{"quantize_activations": True, **named})


def _modules() -> dict[str, dict[str, Any]]:
    """Our modules by AITER's names, parents first, with what each holds.

    Left out are aiter.gemm_a4w4 and the two batched ones, which take shuffled scales and the result as an argument.
    """
    from gemmtuned import ops

    plain, atomic = {"gemm_a16w16": ops.triton_gemm_a16w16}, {"gemm_a16w16_atomic": ops.gemm_a16w16_atomic}
    members = (
        "ActivationType", "QuantType", "gemm_a8w8", "gemm_a8w8_blockscale", "gemm_a8w8_bpreshuffle", "gemm_a16w16",
    )  # fmt: skip
    of_codes = {"gemm_afp4wfp4": ops.gemm_afp4wfp4}
    batched = {name: getattr(ops, name) for name in ("batched_gemm_bf16", "batched_gemm_a8w8")}
    return {
        "aiter": {
            **{name: getattr(ops, name) for name in members}, **{f"{name}_CK": op for name, op in batched.items()},
        },
        "aiter.tuned_gemm": {"TunedGemm": ops.TunedGemm, "gemm_a16w16": ops.gemm_a16w16, "tgemm": ops.tgemm},
        "aiter.fused_moe": {"fused_moe": _fused_moe},
        "aiter.ops": {},
        "aiter.ops.shuffle": {"shuffle_weight": ops.shuffle_weight},
        "aiter.ops.triton": {},
        "aiter.ops.triton.gemm_a16w16": plain,
        "aiter.ops.triton.gemm_a16w16_atomic": atomic,
        "aiter.ops.triton.gemm_afp4wfp4": of_codes,
        **{f"aiter.ops.triton.{name}": {name: op} for name, op in batched.items()},
        "aiter.ops.triton.gemm": {},
        "aiter.ops.triton.gemm.basic": {},
        "aiter.ops.triton.gemm.basic.gemm_a16w16": plain,
        "aiter.ops.triton.gemm.basic.gemm_a16w16_atomic": atomic,
        "aiter.ops.triton.gemm.basic.gemm_afp4wfp4": of_codes,
    }  # fmt: skip
