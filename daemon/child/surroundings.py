"""CHILD side: checks of what surrounds a call: where operands lie to each other, and torch's switches.

The gate runs in inference mode and on operands in memory of their own.  Programs also call with gradients on or off,
under autocast and with another default dtype, on tensors whose edits torch counts (and edits that it does not count:
those by way of .data, or of another kernel), on parameters that share one buffer, and on X that is a part of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.checks import Bound, Case, check_near
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families.edits import called
from gemmtuned.kernels.families.operand import Inputs, negate_

MOST_COPIED: Final = 1 << 24  # elements of W; larger ones are not copied for this
_ALIGNED: Final = 256  # bytes: where operands begin in a buffer that they share
_NARROW: Final = {"bf16": torch.float32, "fp16": torch.bfloat16}  # as default dtype; bf16 for all others

Switch = Callable[[], AbstractContextManager[object]]


def surroundings(problem: Problem, default: Kernel, case: Case) -> Iterator[Callable[[Kernel], None]]:
    """The checks, one at a time: some edit operands for as long as theirs is the turn."""
    inputs = case.inputs
    if sum(t.numel() for t in inputs.weights) <= MOST_COPIED:
        with torch.inference_mode(False):
            own = in_one_storage(inputs)
        bound = Bound(own.weights)
        for what, switch in _switches(problem, inputs["x"].device):
            yield partial(_check, own, case.stock, case.apart, bound, what, switch)
        for operand, t in own:
            if not operand.line_axis or (operand.weight and problem.weight_state != "plain"):
                continue
            if not operand.can_be_negated(t):
                continue
            with _negated_uncounted(t):
                stock = own.run(default)
                what = f"{called(operand)} edited by way of .data"
                yield partial(_check, own, stock, case.apart, bound, what, nullcontext)
    if _can_be_a_part(problem, inputs):
        part = inputs.having(x=inputs["w"].mT[: problem.m])
        stock, what = part.run(default), "X is a part of the weight"
        unit = stock.abs().double().clamp(min=1.0) if problem.scale != "none" else None  # that of W is not that of X
        yield partial(_check, part, stock, case.apart, Bound(part.weights), what, torch.inference_mode, unit=unit)


def _can_be_a_part(problem: Problem, inputs: Inputs) -> bool:
    """Squares are added up: of one sign, which shorter sums of scaled products are not judged by."""
    weight = inputs.tensors.get("w")
    alike = problem.layout == "nt" and problem.dtype == problem.wdtype and weight is not None and weight.dim() == 2
    shorter = problem.scale != "none" and problem.math_mode == "reduced"
    return alike and problem.m <= problem.n and not shorter


def in_one_storage(inputs: Inputs) -> Inputs:
    """Copies with the same strides, one behind the other in one buffer."""
    tensors = dict(inputs.tensors)
    spans = [
        1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) for t in tensors.values()
    ]
    rooms = [-(-span * t.itemsize // _ALIGNED) * _ALIGNED for span, t in zip(spans, tensors.values(), strict=True)]
    buffer = torch.zeros(sum(rooms), dtype=torch.uint8, device=inputs["x"].device)
    first = 0
    for (name, t), room in zip(inputs.tensors.items(), rooms, strict=True):
        part = buffer[first : first + room].view(t.dtype)
        tensors[name] = part.as_strided(t.shape, t.stride()).copy_(t)
        first += room
    return replace(inputs, tensors=tensors, buffers=(buffer,))


def _check(
    inputs: Inputs, stock: Tensor, apart: float, bound: Bound, what: str, switch: Switch, kernel: Kernel,
    *, unit: Tensor | None = None,
) -> None:  # fmt: skip
    with torch.inference_mode(False), switch():
        y = bound.run(kernel)(*inputs.activations)
    check_near(y, stock, apart, what, unit)


def _switches(problem: Problem, device: torch.device) -> Iterator[tuple[str, Switch]]:
    yield "with gradients on", torch.enable_grad
    yield "with gradients off", torch.no_grad
    yield "with another default dtype", partial(_default_dtype, _NARROW.get(problem.dtype, torch.bfloat16))
    if problem.dtype in _NARROW:  # with other dtypes autocast itself makes another problem
        yield "under autocast", partial(torch.autocast, device.type, dtype=torch_dtype(problem.dtype))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _negated_uncounted(operand: Tensor) -> Iterator[None]:
    """torch's count of edits of this tensor stays as it is."""
    with torch.inference_mode(False):
        negate_(operand.data)
    try:
        yield
    finally:
        with torch.inference_mode(False):
            negate_(operand.data)
