"""What a call of F.linear on the CPU is: its problem, and whether anything stands between the caller and the kernel.

The Python twin of `describe` in hooks/native/call.h, for `gemmtuned.ops`, which decides before it calls torch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.compiling import asked_once, is_exporting
from gemmtuned.kernels.dtypes import SHORT

# Subclasses, proxies and fakes are torch's business
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_LINEAR: Final = frozenset({"fp16", "bf16", "fp32", "fp64", "c64", "c128", "i8", "i32", "i64"})


def plain_call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    """True when nothing stands between the caller and the CPU kernel: no autograd, autocast, transform or subclass."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)):
        return False
    return (
        type(x) in PLAIN
        and type(w) in PLAIN
        and x.device.type == "cpu"
        and w.dtype is x.dtype
        and w.is_contiguous()
        and x.is_contiguous()
        and (b is None or (type(b) in PLAIN and b.dtype is x.dtype and b.shape == w.shape[:1] and b.is_contiguous()))
        and nobody_looks_on("cpu")
    )


def nobody_looks_on(kind: str) -> bool:
    """Whether no mode, transform or tracer takes torch's calls on devices of this kind for what they are."""
    return not torch.is_autocast_enabled(kind) and nobody_transforms()


def nobody_transforms() -> bool:
    """The same but for autocast, which leaves products of integers alone."""
    return (
        torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
        and _only_default_devices()
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
    )


def _only_default_devices() -> bool:
    """Whether function modes do nothing but say where new tensors lie, as torch.set_default_device does."""
    count = torch._C._len_torch_function_stack()
    return not count or all(type(torch._C._get_function_stack_at(i)) is DeviceContext for i in range(count))


def has_few_rows(rows: int, most: int) -> bool:
    """Whether a product has at most so many rows, as far as that may be asked.

    The answer becomes a condition of compiled code.  A program that has said for which sizes its code is (torch.export,
    torch._dynamo.mark_dynamic with bounds) would fail by it: there only a size that is known at once counts, and in
    exported code, which runs without us, none.  A size that follows from values (a mask, say) cannot be asked for: who
    asks more of rows does it after this.  Nor does a size count inside of torch.func's transforms, which the compiler
    takes apart: our operators have no rules for them.
    """
    if not torch.compiler.is_compiling():
        return rows <= most
    if is_exporting() or _is_transformed():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true  # a compiler has loaded it

    return statically_known_true(rows <= most) if _has_bounds() else guard_or_false(rows <= most)


@asked_once
def _is_transformed() -> bool:
    """Whether what is being compiled is inside of vmap, grad or their like here."""
    return torch._C._functorch.maybe_current_level() is not None


@asked_once
def _has_bounds() -> bool:
    """Whether the program has set bounds for a size of what is being compiled."""
    context = torch._guards.TracingContext.try_get()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    said = (
        getattr(fake.symbolic_context, "constraint_sizes", None) for fake in getattr(shapes, "tracked_fakes", ()) or ()
    )
    return any(hasattr(one, "vr") for sizes in said for one in sizes or ())


def describe(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Problem:
    """The problem of F.linear(x, w, bias) as the CPU kernel will see it. Raises ProblemError for what is none."""
    if torch._C._get_tracing_state() or torch._C._functorch.maybe_current_level() is not None:
        raise ProblemError("sizes are not what they will be")
    if x.device.type != "cpu" or w.dim() != 2 or x.dim() < 2:
        raise ProblemError("not a plain linear on CPU")
    n, k = (int(d) for d in w.shape)
    if x.shape[-1] != k or (bias is not None and bias.shape != (n,)):
        raise ProblemError("torch refuses it, or broadcasts the bias")
    if x.dim() > 2 and not x.is_contiguous():
        raise ProblemError("torch decides by the strides what GEMM this becomes")
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu") and dtype in (torch.float32, torch.bfloat16, torch.float16):
        dtype = torch.get_autocast_dtype("cpu")
    name = SHORT.get(dtype, "")
    if name not in _LINEAR:
        raise ProblemError(f"dtype {dtype} has no short name")
    return Problem(
        m=int(x.numel()) // k,
        n=n,
        k=k,
        bias=bias is not None,
        dtype=name,
        layout=_side(x.reshape(-1, k), prefer_t=False) + _side(w.t(), prefer_t=True),
        math_mode=_math_mode(name),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        threads=torch.get_num_threads(),
    )


def _side(t: torch.Tensor, *, prefer_t: bool) -> str:
    """As `side` in native/call.h."""
    n, c = t.stride(1) == 1 or t.shape[1] == 1, t.stride(0) == 1 or t.shape[0] == 1
    if prefer_t and c and (not n or t.shape[1] == 1):
        return "t"
    return "n" if n else "t" if c else "s"


def _math_mode(dtype: str) -> str:
    if dtype != "fp32":
        return "ieee"
    mode = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return mode if mode in ("tf32", "bf16") else "ieee"
