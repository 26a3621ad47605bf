"""Torch's global switches, set as the program that made the call had them.

A problem's threads, math mode and determinism decide which kernel torch picks and what it rounds, so a candidate
is measured and checked under the same ones.  They are global to the process: only the tuning worker sets them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch

from gemmtuned.configs.problem import Problem

# The name torch.set_float32_matmul_precision has for a problem's math mode; `reduced` is about 16-bit inputs.
_PRECISION: Final = {"ieee": "highest", "tf32": "high", "bf16": "medium", "reduced": "highest"}


@contextmanager
def as_called(problem: Problem) -> Iterator[None]:
    """Inside: inference mode and the problem's threads, math mode and determinism. Restored on leaving."""
    cuda = torch.backends.cuda.matmul
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    reduced = (cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction)
    private = cast("Any", torch._C)  # has no public name yet
    reduced_cpu = private._get_cpu_allow_fp16_reduced_precision_reduction()
    with torch.inference_mode(), deterministic(problem.deterministic):
        try:
            if problem.threads:
                torch.set_num_threads(problem.threads)
            torch.set_float32_matmul_precision(_PRECISION[problem.math_mode])
            reduce = problem.math_mode == "reduced" and problem.scale == "none"  # for scaled products the call says it
            cuda.allow_fp16_reduced_precision_reduction = reduce
            cuda.allow_bf16_reduced_precision_reduction = reduce
            if problem.threads:  # a CPU without fp16 arithmetic refuses to have it switched on, for other devices too
                private._set_cpu_allow_fp16_reduced_precision_reduction(reduce)
            yield
        finally:
            if problem.threads:
                private._set_cpu_allow_fp16_reduced_precision_reduction(reduced_cpu)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction = reduced


@contextmanager
def deterministic(on: bool, *, poison: bool = False) -> Iterator[None]:
    """Inside: torch's deterministic algorithms on or off (a warning, not an error, where one is missing).

    poison: torch.empty also fills what it allocates with NaN, so that an output nobody wrote shows.
    """
    before = torch.are_deterministic_algorithms_enabled()
    filling = cast("Any", torch.utils.deterministic)  # a module whose one switch is a property: not in its types
    use: Any = torch.use_deterministic_algorithms
    if not (on or before or "torch._inductor.config" in sys.modules):
        use = cast("Any", torch._C)._set_deterministic_algorithms  # the other imports torch's compiler: two seconds
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = filling.fill_uninitialized_memory
    try:
        use(on or poison, warn_only=True)
        filling.fill_uninitialized_memory = poison
        yield
    finally:
        use(before, warn_only=warn_only)
        filling.fill_uninitialized_memory = fill
