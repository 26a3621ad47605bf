"""Other people's programs, without the hook, counted by it, and routed by it; see foreign_running.py for what they are.

    python tests/support/foreign_programs.py OUT TURNS

Two forks of one process run all programs one after the other.  The first has no hook and runs them twice: what a first
call builds may choose another path than the second.  The hook of the second fork counts, and then has a route for
every problem that it counted; it goes through them TURNS times, each time with the next backend for each problem.
With TURNS 0 both leave out the dear ones, which compile or start interpreters, and the first fork runs the others once.
What the second gives once it has routes tells then of the routes: there is nothing to compare its results with.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import foreign_graphs  # noqa: F401  the programs
import foreign_models  # noqa: F401
import foreign_surroundings  # noqa: F401
import torch
from foreign_running import PROGRAMS, TABLE, arrive, outcome
from hooked import published

import gemmtuned
from gemmtuned.configs.problem import Problem
from gemmtuned.db import queries
from gemmtuned.hooks import activate
from gemmtuned.hooks.dispatch import SERVED
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import FAMILIES
from gemmtuned.kernels.families.error import Spread, limits, measure_error

DEAR = (  # 4 s of CPU time each time that the first runs, a second and its share of torch's compiler for the others
    "server_that_forks_its_workers", "compiled_training", "compiled_graphs_and_no_recompilation",
    "export_and_decompose", "make_fx_of_every_kind", "operator_of_a_users_own",
)  # fmt: skip
ROUTES = ("torch_swap", "onednn", "torch_mv")
HEAVY = ("torch._dynamo", "torch.export", "torch.ao.quantization.quantize_fx", "torchao.quantization")


def everything(out: Path, *, on: bool, turns: int) -> None:
    torch.set_num_threads(2)
    said: dict[str, Any] = {"wrong": [], "routes": 0, "products": 0}
    if on:
        gemmtuned.enable()
    said["first"] = all_of_them(but=() if turns else DEAR)
    if not on and turns:
        said["second"] = all_of_them()
    elif on:
        said["counted"] = calls("miss")
        for turn in range(max(turns, 1)):
            said["routes"] += plant(turn)
            said[f"routed {turn}"] = all_of_them(but=() if turns else DEAR)
            before = calls("exact")
            said["wrong"] += [str(row.problem) + " by " + row.backend for row in TABLE if not right(row.problem)]
            said["products"] += calls("exact") - before
        said["served"], said["failed"] = calls("exact"), activate.current().tables.failed  # type: ignore[union-attr]
    torch.save(said, out)


def all_of_them(but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: outcome(program.run) for name, program in PROGRAMS.items() if name not in but}


def plant(turn: int) -> int:
    """Publish and take up a route for each problem that was counted; how many. Which one goes by problem and turn."""
    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.flusher.flush()
    sql = "SELECT DISTINCT p.text FROM every_sighting s JOIN problem p ON p.id = s.problem_id ORDER BY p.text"
    problems = [Problem.parse(row["text"]) for row in queries.ask(hook.settings.db, sql)]
    TABLE.clear()
    for problem in problems:
        takes = [b for b in ROUTES if tuple(BACKENDS[b].candidates(problem))]
        if problem.family in SERVED and takes:
            # by the problem alone: the place in the list would change with what a worker had time to count
            TABLE.append(published(problem, takes[(problem.m + problem.n + problem.k + turn) % len(takes)]))
    arrive()
    return len(TABLE)


def right(problem: Problem) -> bool:
    """One product by the route is as near to the exact one as adding and rounding allow: kernels/families/error.py.

    The limits are those of the daemon's own gate beside a kernel that only rounds, which none can be better than: what
    the gate grants where torch's kernel is worse is not granted here.
    """
    torch.set_num_threads(problem.threads)
    family, cpu = FAMILIES[problem.family], torch.device("cpu")
    inputs = family.make(problem, kind="randn", seed=7, device=cpu)
    sample = family.sample(problem, seed=7, device=cpu)
    y = inputs.run(family.default(problem))
    torch.set_num_threads(2)
    exact = family.reference(problem, inputs, sample)
    rounded = measure_error(exact.to(y.dtype), exact)
    spread = Spread.of(exact, family.x_rows(problem, inputs, sample))
    return measure_error(sample.of(y), exact).within(limits(problem, rounded, spread))


def calls(outcome: str) -> int:
    """Calls that the database has of one outcome."""
    hook = activate.current()
    assert hook is not None
    hook.flusher.flush()
    sql = "SELECT sum(calls) AS calls FROM every_sighting WHERE outcome = :outcome"
    (row,) = queries.ask(hook.settings.db, sql, {"outcome": outcome})
    return row["calls"] or 0


def main() -> None:
    for module in HEAVY:
        with suppress(ImportError):
            importlib.import_module(module)
    for name in ("off", "on"):  # not side by side: their threads would take turns on the same processors
        pid = os.fork()
        if pid == 0:
            everything(Path(sys.argv[1]) / name, on=name == "on", turns=int(sys.argv[2]))
            return
        status = os.waitpid(pid, 0)[1]
        if status:
            print(f"{name} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)


if __name__ == "__main__":
    main()
