"""What the processes that compile need of our own kernels: candidates and compilers, without torch.

Triton is imported only when there is something for it to do.
"""

from __future__ import annotations

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.cuda import offered as cuda
from gemmtuned.kernels.triton import launch as triton


def offered(problem: Problem, device: Device) -> list[Candidate]:
    """All candidates of ours for the problem on this device that a compiler is here for."""
    found = []
    if triton.has_kernels(device):
        from gemmtuned.kernels.triton.shortlist import offered as of_triton

        found += of_triton(problem, device)
    if cuda.has_kernels(device):
        found += cuda.offered(problem, device)
    return found


def compile_candidate(candidate: Candidate, problem: Problem, device: Device) -> None:
    """Into its compiler's cache; nothing to do for one that is not compiled. Raises CandidateFailed with the reason."""
    if candidate.backend == triton.BACKEND:
        from gemmtuned.kernels.compile import compile_record
        from gemmtuned.kernels.triton.shortlist import record_of

        compile_record(record_of(candidate.config, problem)[1], device.arch)
    elif candidate.backend == cuda.BACKEND:
        cuda.compile_config(cuda.read_config(candidate.config, problem))
