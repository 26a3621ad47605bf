"""CUDA graphs that are lists of calls, which a machine without a GPU can replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class ListedGraphs:
    """A graph is its calls; a replay runs them and takes `us` a call (by what `name_of` makes of the last output)."""

    def __init__(self, us: Callable[[Tensor], float] = lambda last: 10.0, *, skips: bool = False) -> None:
        self.us, self.skips = us, skips
        self.recorded: list[int] = []
        self.replays = 0
        self.kept_busy: list[tuple[int, float]] = []
        self.conditions: list[tuple[int | None, int | None]] = []  # then the usual one

    def record(self, calls: Sequence[Callable[[], object]]) -> tuple[Any, Tensor]:
        self.recorded.append(len(calls))
        last = calls[-1]()
        assert isinstance(last, Tensor)
        return (calls, last), last

    def replay_us(self, graph: Any) -> float:
        calls, last = graph
        self.replays += 1
        if not self.skips:
            last.copy_(calls[-1]())
        return self.us(last) * len(calls)

    def replay_for(self, graphs: Sequence[Any], seconds: float) -> None:
        self.kept_busy += [(len(graphs), seconds)]

    def synchronize(self) -> None: ...

    def condition(self) -> tuple[int | None, int | None]:
        return self.conditions.pop(0) if self.conditions else (1980, 0x4)
