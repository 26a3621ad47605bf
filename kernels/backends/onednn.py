"""oneDNN's inner product on CPUs, through torch's private `mkldnn` ops.

    onednn          reads the weight as it lies at every call: nothing is kept
    onednn_packed   the weight in oneDNN's own blocked order, packed once; only for weights the user froze

Packed without a batch size, so that one copy serves every M (measured faster than one packed for its M).

Stateless, oneDNN is only good at dense row-major operands.  A weight whose rows are further apart than K (a slice of a
wider matrix) goes to its reference code, right and 1000 times slower: 1 s instead of 0.8 ms at 64x1024x1024.  Strides
are not in the problem, so every call looks at them, and torch takes the calls that oneDNN should not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch_values import checker, of_operands
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import stamps
from gemmtuned.kernels.backends.base import Kernel, Run, StatelessKernel
from gemmtuned.kernels.families.dense import linear

_takes = checker(of_operands("onednn"))


@dataclass(frozen=True, slots=True)
class OneDnn:
    """One of the two; `packed` says which."""

    name: str
    packed: bool
    order: int

    def stamps(self, device: Device) -> dict[str, str]:
        """Torch's version (oneDNN comes with it) and the CPU, whose instruction set decides what oneDNN generates."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """dense on a CPU in layout nt, in the dtypes this CPU has instructions for."""
        if problem.family != "dense" or not problem.threads or problem.layout != "nt":
            return
        if self.packed and problem.weight_state != "packed":
            return
        if problem.dtype == problem.wdtype == problem.out_dtype and _has_dtype(problem.dtype):
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed where candidates() has nothing."""
        if candidate not in tuple(self.candidates(problem)):
            raise CandidateFailed(f"{candidate} does not run {problem}")
        return _PackedKernel() if self.packed else StatelessKernel(_linear)


class _PackedKernel:
    def bind(self, *weights: Tensor) -> Run:
        pack = cast("Callable[[Tensor], Tensor]", torch.ops.mkldnn._reorder_linear_weight)
        packed = pack(weights[0].t().contiguous())
        pointwise = _pointwise()
        return lambda x, bias: pointwise(x, packed, bias, "none", [], "")


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    rows = w.t()
    if _takes({"x": x, "w": rows, "bias": bias}):
        return _pointwise()(x, rows, bias, "none", [], "")
    return linear(x, w, bias)


def _pointwise() -> Callable[..., Tensor]:
    return cast("Callable[..., Tensor]", torch.ops.mkldnn._linear_pointwise.default)


def _has_dtype(dtype: str) -> bool:
    if dtype == "fp32":
        return True
    probe = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}.get(dtype)
    return probe is not None and bool(getattr(torch.ops.mkldnn, probe)())


BACKENDS: Final = (OneDnn("onednn", packed=False, order=30), OneDnn("onednn_packed", packed=True, order=40))
