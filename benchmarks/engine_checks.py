"""What must hold of an engine that serves with the hook on, whichever engine it is: each answer is a yes or a no."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_server import Server, until

from gemmtuned.configs.manifest import write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.kernels.backends import environment

Texts = Callable[[], list[str]]  # asks the server and gives its greedy texts


def publish(
    server: Server,
    texts: Texts,
    right: list[str],
    chosen: Sequence[Problem],
    hits: int,
    worker: str = "1",
    meanwhile: Callable[[], Any] | None = None,
) -> dict[str, bool]:
    """A table of these problems comes while it serves; the process that runs (`worker`, in SQL) takes it up.

    meanwhile: what must go on for that.
    """
    write_tables(server.home / "configs", {"planted": [_planted(problem) for problem in chosen]}, generation=1)
    generation = f"SELECT MIN(generation) FROM sessions WHERE {worker}"

    def has_taken() -> bool:
        if meanwhile:
            meanwhile()
        return bool(server.rows(generation)[0][0] >= 1)

    taken = until(has_taken, 30.0 if meanwhile is None else 120.0)
    server.settled()
    before = _hits(server)
    same = texts() == right
    server.settled()
    exact = _hits(server) - before == hits
    return {"publish taken up": taken, "hits are exact": exact, "routed: same text": same}


def disable(server: Server, texts: Texts, right: list[str]) -> dict[str, bool]:
    """The file sends all calls to the engine's own and counts nothing; without it all is as before."""
    mark = server.home / "disabled"

    def counted() -> int:
        before = sum(server.settled().values())
        texts()
        return sum(server.settled().values()) - before

    mark.touch()
    noticed = until(lambda: not counted(), 60.0)
    same, nothing = texts() == right, not counted()
    mark.unlink()
    return {
        "disabled: same text": same,
        "disabled: nothing counted": noticed and nothing,
        "on again": until(counted, 60.0),
    }


def kill(server: Server, worker: str = "1") -> dict[str, bool]:
    """The process that runs dies; what was counted stays and the store is whole."""
    before = sum(server.calls().values())
    (pid,) = server.rows(f"SELECT pid FROM sessions WHERE {worker}")[0]
    os.kill(pid, signal.SIGKILL)
    time.sleep(2)
    server.gemmtuned("db", "check")
    return {"killed: store whole": sum(server.calls().values()) >= before}


def line_of(log: str) -> str:
    """A line of ours in an engine's log, without what differs from run to run."""
    return log[log.index("gemmtuned ") :].partition(", home")[0]


def all_hold(served: Sequence[dict[str, Any]]) -> bool:
    """Whether every `must` does."""
    return all(value for one in served for value in one["must"].values())


def _planted(problem: Problem) -> Solution:
    """A solution of this machine's, as the daemon publishes one: torch's product of the transposed."""
    here = environment(cpu_device())
    return Solution(
        problem=problem, device=here.device.key, covers="exact", mode="eager", backend="torch_swap", config="{}",
        stamp=here.stamps["torch_swap"], us=1.0, baseline_us=2.0, gain_low=1.5, err=0.0, baseline_err=0.0,
        state="published",
    )  # fmt: skip


def _hits(server: Server) -> int:
    return int(server.rows("SELECT coalesce(SUM(exact_calls + padded_calls), 0) FROM coverage_by_problem")[0][0])
