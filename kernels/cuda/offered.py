"""Which of our CUDA C++ kernels are tried for a problem, and compiling them. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.cuda import nvrtc, one_shot
from gemmtuned.kernels.ours import is_ours

BACKEND: Final = "cuda"  # whose candidates our kernels are: kernels/backends/cuda_.py
_LIMITS: Final = ((16, 6), (256, 8))  # (largest M, candidates at most)
_FEW_ROWS: Final = 64  # of X; with more, where there is so much of Y for each unit, the library's large tiles lead
_MOST_OF_Y: Final = 4096


def has_kernels(device: Device) -> bool:
    """Whether our kernels can be compiled for it: it is of their architecture, and a compiler is there."""
    return device.kind == "cuda" and device.arch == one_shot.ARCH and nvrtc.version() is not None


def offered(problem: Problem, device: Device) -> list[Candidate]:
    """The shortlist, the fastest by estimate first."""
    if problem.m > _FEW_ROWS and problem.m * problem.n > _MOST_OF_Y * device.units:
        return []
    limit = next((limit for most, limit in _LIMITS if problem.m <= most), 0)
    return space(problem, device)[:limit]


def space(problem: Problem, device: Device) -> list[Candidate]:
    """All that the shortlist is chosen from, the fastest by estimate first."""
    m, n, k = problem.m, problem.n, problem.k
    if device.arch != one_shot.ARCH or m < one_shot.MIN_M or not is_ours(problem) or not one_shot.runs(m, n, k):
        return []
    found = one_shot.scored(m, n, k, device.units)
    return [Candidate.of(BACKEND, kernel=one_shot.NAME, **config) for _, config in found]


def read_config(config: str, problem: Problem) -> one_shot.OneShot:
    """How a candidate's config runs the problem: JSON, the kernel's name and its parameters.

    Raises CandidateFailed for what is no config of ours, or cannot run the problem.
    """
    try:
        values = json.loads(config)
        if values.pop("kernel") != one_shot.NAME:
            raise KeyError("kernel")
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{BACKEND} {config}: its config names no kernel of ours ({one_shot.NAME})") from err
    return one_shot.one_shot(values, problem)


def compile_config(found: one_shot.OneShot) -> nvrtc.Compiled:
    """Its binary. Raises CandidateFailed when it does not compile, or keeps values of a thread in memory."""
    made = nvrtc.compiled(found.source(), one_shot.TARGET)
    if made.spill_bytes:
        raise CandidateFailed(f"{found} on {one_shot.ARCH}: spills {made.spill_bytes} bytes a thread")
    return made
