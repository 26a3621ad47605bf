"""What serves a call of fused_moe in a program with the hook: the solution of the table in use, kept by problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES
from gemmtuned.configs.solution import Solution
from gemmtuned.kernels.mixture import Operands

REMEMBERED: Final = 4096  # problems
MODES: Final = ("graph", "eager")
Call = Callable[[Operands], "Tensor | None"]  # None: it does not take these operands


@dataclass(frozen=True, slots=True)
class Serving:
    """outcome: of the look-up, as calls are counted.  call: None where nothing is known to be better than usual."""

    outcome: str
    call: Call | None = None
    solution: Solution | None = None


MISS: Final = Serving(OUTCOMES[0])
_known: dict[tuple[Problem, str, bool], tuple[Any, Serving]] = {}  # with the table that it was found in
_failed: set[Solution] = set()


def serving(hook: Any, problem: Problem, place: str, *, captured: bool) -> Serving:
    """What serves this problem by the hook's table. captured: in a CUDA graph, where other solutions may be best."""
    if not hook.patches.dispatches:
        return MISS
    key, table = (problem, place, captured), hook.table
    known = _known.get(key)
    if known is not None and known[0] is table:
        return known[1]
    try:
        found = {mode: _look_up(hook, table, problem, place, captured=mode) for mode in _loaded_now(place, captured)}
    except Declined:  # nothing can be loaded now: the next call looks again
        return MISS
    if len(_known) >= REMEMBERED:
        _known.clear()
    for mode, one in found.items():
        _known[problem, place, mode] = table, one
    return found[captured]


def give_up(hook: Any, solution: Solution, err: Exception) -> None:
    """Never use this solution again in this process, and report it to the daemon."""
    if solution not in _failed:
        _failed.add(solution)
        _known.clear()
        hook.account.fail_op(solution, str(err))  # the next flush reports it to the daemon


def _loaded_now(place: str, captured: bool) -> tuple[bool, ...]:
    """Captures that are looked up at this call: before a graph is captured what it will use is loaded, too."""
    return (captured,) if captured or place == "cpu" else (False, True)


def _look_up(hook: Any, table: Any, problem: Problem, place: str, *, captured: bool) -> Serving:
    for mode in MODES if captured else MODES[1:]:
        outcome, solution = table.find(problem, mode, place)
        if solution is None or solution in _failed:
            continue
        try:
            return Serving(outcome, _call_of(solution, place), solution)
        except Declined:
            raise
        except CandidateFailed as err:
            give_up(hook, solution, err)
    return MISS


def _call_of(solution: Solution, place: str) -> Call:
    from gemmtuned.kernels.backends import BACKENDS

    backend = BACKENDS[solution.backend]
    if place == "cpu":
        kernel: Any = backend.prepare(solution.candidate, solution.problem)
    else:
        with torch.cuda.device(place):
            kernel = backend.prepare(solution.candidate, solution.problem)
    call: Call = kernel.served
    return call
