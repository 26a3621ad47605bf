"""What a running program tells the store: sightings of problems, and the state of its hook."""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.value_class import value_class

OUTCOMES: Final = ("miss", "exact", "padded")  # index = code in the native table


@value_class
class Sighting:
    """This process called this problem `calls` times since it last said so.

    outcome: what the look-up gave at the call.  graph: the call was recorded into a CUDA graph.
    sampled_calls, sampled_us: calls whose duration was taken on the way (CPU only), and their sum.
    place: the device of this process it ran on, `cpu` or `cuda:0`.
    phase: what part of the program's life it was, such as `warm-up`; "" for the traffic of its users.
    """

    problem: Problem
    outcome: str
    calls: int
    graph: bool = False
    sampled_calls: int = 0
    sampled_us: float = 0.0
    place: str = "cpu"
    phase: str = ""


@value_class(kw_only=True)
class Session:
    """One hooked process, as `gemmtuned status` shows it.

    path: `native`, `off`.  generation: of the table in use, active_us: since when (UTC
    microseconds, 0 before the first).
    note: why it is not native, or why dispatch is off; empty when all is well.
    rank: which of several ranks it is; None when it is not one of several, or does not know yet.
    namespace: within which pid is unique (processes.pid_namespace); None where that cannot be known.
    role: what it does for a serving engine, such as `worker`; empty for a program of one process.
    operators: an engine's paths to products (hooks/foreign.py: known); "" where it has none.
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
