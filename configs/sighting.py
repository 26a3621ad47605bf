"""What a running program writes to the store: sightings of problems, and the state of its hook."""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.unpatched import builtins
from gemmtuned.configs.value_class import value_class

__builtins__ = builtins

OUTCOMES: Final = ("miss", "exact", "padded")  # index = code in the native table


@value_class
class Sighting:
    """A process called this problem `calls` times since its last sighting of it.

    outcome: the result of the look-up at the call.  graph: the call was captured into a CUDA graph.
    sampled_calls, sampled_us: how many of the calls were timed (CPU only), and their total time.
    place: the process's device that it ran on, `cpu` or `cuda:0`.
    phase: the part of the program's life, such as `warm-up`; "" for the traffic of its users.
    unserved: engines' operators, a bit each, whose calls wait for a race beside their own kernel (hooks/unserved.py).
    """

    problem: Problem
    outcome: str
    calls: int
    graph: bool = False
    sampled_calls: int = 0
    sampled_us: float = 0.0
    place: str = "cpu"
    phase: str = ""
    unserved: int = 0


@value_class(kw_only=True)
class Session:
    """One hooked process, as `gemmtuned status` shows it.

    path: `native`, `off`.  generation: of the table in use; active_us: since when it is in use (UTC microseconds, 0
    before the first table).
    note: why it is not native, or why dispatch is off; "" when all is well.
    rank: its number among several ranks; None when there are not several, or it does not know yet.
    namespace: the PID namespace, within which pid is unique (processes.pid_namespace); None if it is not known.
    role: what it does for a serving engine, such as `worker`; "" for a program of one process.
    operators: an engine's ways to products (`known` of hooks/foreign.py); "" if it has none.
    waited_us: how much longer it ran because its threads waited for CPUs that others used (hooks/crowd.py).
    """

    host: str
    pid: int
    started_us: int
    run: str
    path: str
    generation: int
    active_us: int = 0
    calls: int = 0
    dropped: int = 0
    errors: int = 0
    reload_failures: int = 0
    note: str = ""
    rank: int | None = None
    namespace: str | None = None
    role: str = ""
    operators: str = ""
    waited_us: int = 0
