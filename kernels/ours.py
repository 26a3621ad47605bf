"""What all kernels of our own have in common: the problems they run, and what a config of one looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem

Config = Mapping[str, int]

OUR_TYPES: Final = ("bf16", "fp16")
POINTER_ALIGN: Final = 16  # bytes; the widest load of a thread


def check_problem(problem: Problem) -> None:
    """Raise CandidateFailed when the problem is not one these kernels are written for."""
    if problem.family != "dense" or problem.layout != "nt" or problem.weight_state != "plain":
        raise CandidateFailed(f"{problem}: kernels of ours run dense problems of layout nt with plain weights")
    if problem.dtype not in OUR_TYPES or not problem.dtype == problem.wdtype == problem.out_dtype:
        raise CandidateFailed(f"{problem}: kernels of ours run {' and '.join(OUR_TYPES)}, all operands alike")


def is_ours(problem: Problem) -> bool:
    """Whether candidates of ours are tried for it: what `check_problem` passes, without scales, and no CPU's."""
    try:
        check_problem(problem)
    except CandidateFailed:
        return False
    return not problem.threads and problem.scale == "none"


def check_config(config: Config, keys: tuple[str, ...], kernel: str) -> None:
    """Raise CandidateFailed when a config is not one of this kernel's: keys missing, unknown, or not positive."""
    if set(config) != set(keys):
        raise CandidateFailed(f"{kernel}: config has {', '.join(sorted(config))}, expected {', '.join(sorted(keys))}")
    for name, value in config.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 20:
            raise CandidateFailed(f"{kernel}: {name} is {value!r}, expected an integer from 0 to {1 << 20}")
