"""Compiling what the kernels of our own offer, each by its compiler; without torch and without a GPU."""

from __future__ import annotations

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import moe_compile
from gemmtuned.kernels.triton import moe_fp8_tiling, moe_tiling


def compile_candidate(candidate: Candidate, problem: Problem, device: Device) -> None:
    """Into its compiler's cache; nothing to do for one that is not compiled. Raises CandidateFailed with the reason."""
    if candidate.backend == moe_compile.NAME:
        moe_compile.compile_candidate(candidate, problem)
    if candidate.backend == moe_tiling.NAME:
        moe_tiling.compile_candidate(candidate, problem, device.arch)
    if candidate.backend == moe_fp8_tiling.NAME:
        moe_fp8_tiling.compile_candidate(candidate, problem, device.arch)
    if candidate.backend not in catalog.FOLDERS:
        return
    kernel, record = catalog.record_of(candidate, problem)
    if candidate.backend == "cuda":
        kernel.compile(record)
    else:
        from gemmtuned.kernels.compile import compile_record

        compile_record(record, device.arch)
