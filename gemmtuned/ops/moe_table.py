"""What serves a call of fused_moe in a program with the hook: the solution of the table in use, kept by problem."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES
from gemmtuned.configs.solution import Solution
from gemmtuned.kernels.mixture import Operands

log = logging.getLogger("gemmtuned.ops")
REMEMBERED: Final = 4096  # problems
Call = Callable[[Operands], Tensor]


@dataclass(frozen=True, slots=True)
class Serving:
    """outcome: of the look-up, as calls are counted.  call: None where nothing is known to be better than usual."""

    outcome: str
    call: Call | None = None
    solution: Solution | None = None


_MISS: Final = Serving(OUTCOMES[0])
_known: dict[tuple[Problem, str, bool], tuple[Any, Serving]] = {}  # with the table that it was found in
_failed: set[Solution] = set()


def serving(hook: Any, problem: Problem, place: str, *, captured: bool) -> Serving:
    """By the table of this hook; captured: a CUDA graph is, for which other solutions may be best."""
    if not hook.patches.dispatches:
        return _MISS
    key, table = (problem, place, captured), hook.table
    known = _known.get(key)
    if known is not None and known[0] is table:
        return known[1]
    found = _look_up(table, problem, place, captured=captured)
    if found is None:  # while a graph is captured nothing can be loaded: the next call looks again
        return _MISS
    if len(_known) >= REMEMBERED:
        _known.clear()
    _known[key] = table, found
    return found


def give_up(serving: Serving, err: Exception) -> None:
    """Never use this solution again in this process; says so once."""
    assert serving.solution is not None
    _failed.add(serving.solution)
    _known.clear()
    log.warning(
        "route failed problem=%s backend=%s served=torch reason=%r",
        serving.solution.problem,
        serving.solution.backend,
        str(err),
    )


def _look_up(table: Any, problem: Problem, place: str, *, captured: bool) -> Serving | None:
    for mode in ("graph", "eager") if captured else ("eager",):
        outcome, solution = table.find(problem, mode, place)
        if solution is None or solution in _failed:
            continue
        try:
            return Serving(outcome, _call_of(solution, place), solution)
        except CandidateFailed as err:
            if captured:
                return None
            give_up(Serving(outcome, None, solution), err)
    return _MISS


def _call_of(solution: Solution, place: str) -> Call:
    from gemmtuned.kernels.backends import BACKENDS

    backend = BACKENDS[solution.backend]
    if place == "cpu":
        kernel: Any = backend.prepare(solution.candidate, solution.problem)
    else:
        with torch.cuda.device(place):
            kernel = backend.prepare(solution.candidate, solution.problem)
    call: Call = kernel.call
    return call
