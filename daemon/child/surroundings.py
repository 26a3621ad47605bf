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
from gemmtuned.kernels.families.base import Inputs

MOST_COPIED: Final = 1 << 24  # elements of W; larger ones are not copied for this
_ALIGNED: Final = 64  # elements: where operands begin in a buffer that they share
_NARROW: Final = {"bf16": torch.float32, "fp16": torch.bfloat16}  # as default dtype; bf16 for all others

Switch = Callable[[], AbstractContextManager[object]]


def surroundings(problem: Problem, default: Kernel, case: Case) -> Iterator[Callable[[Kernel], None]]:
    """The checks, one at a time: some edit operands for as long as theirs is the turn."""
    inputs = case.inputs
    if inputs.b.numel() <= MOST_COPIED:
        with torch.inference_mode(False):
            own = in_one_storage(inputs)
        bound = Bound(own.b)
        for what, switch in _switches(problem, inputs.a.device):
            yield partial(_check, own, case.stock, case.apart, bound, what, switch)
        for name, operand in (("X", own.a), ("bias", own.bias), ("weight", own.b)):
            if operand is None or (name == "weight" and problem.weight_state != "plain"):
                continue
            with _negated_uncounted(operand):
                stock = default.bind(own.b)(own.a, own.bias)
                yield partial(_check, own, stock, case.apart, bound, f"{name} edited by way of .data", nullcontext)
    if problem.layout == "nt" and problem.m <= problem.n and inputs.b.dim() == 2:
        part = replace(inputs, a=inputs.b.mT[: problem.m])
        stock = default.bind(part.b)(part.a, part.bias)
        yield partial(_check, part, stock, case.apart, Bound(part.b), "X is a part of the weight", torch.inference_mode)


def in_one_storage(inputs: Inputs) -> Inputs:
    """Copies with the same strides, one behind the other in one buffer."""
    operands = [t for t in (inputs.a, inputs.b, inputs.bias) if t is not None]
    spans = [1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)) for t in operands]
    rooms = [-(-span // _ALIGNED) * _ALIGNED for span in spans]
    buffer = torch.zeros(sum(rooms), dtype=inputs.a.dtype, device=inputs.a.device)
    copies = []
    for number, t in enumerate(operands):
        copies.append(buffer.as_strided(t.shape, t.stride(), sum(rooms[:number])).copy_(t))
    return replace(inputs, a=copies[0], b=copies[1], bias=copies[2] if len(copies) > 2 else None, buffers=(buffer,))


def _check(
    inputs: Inputs, stock: Tensor, apart: float, bound: Bound, what: str, switch: Switch, kernel: Kernel
) -> None:
    with torch.inference_mode(False), switch():
        y = bound.run(kernel)(inputs.a, inputs.bias)
    check_near(y, stock, apart, what)


def _switches(problem: Problem, device: torch.device) -> Iterator[tuple[str, Switch]]:
    yield "with gradients on", torch.enable_grad
    yield "with gradients off", torch.no_grad
    yield "with another default dtype", partial(_default_dtype, _NARROW.get(problem.dtype, torch.bfloat16))
    if problem.dtype in _NARROW:  # of other dtypes, autocast itself makes another problem
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
        operand.data.neg_()
    try:
        yield
    finally:
        with torch.inference_mode(False):
            operand.data.neg_()
