"""Where the tasks of a pool fetch their next unit and hang up what they found: a plain object, an actor under Ray.

Each task holds one unit at a time, so a task that is lost costs one unit: whoever put it up takes it back and puts it
up again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from gemmtuned.fleet.bench import Answer
from gemmtuned.fleet.demand import Wanted

OVER: Final = "nothing is left"


@dataclass(frozen=True)
class TaskDevice:
    """The device of a task, and its node. environment: key of what its worker can reproduce."""

    node: str
    device: str
    environment: str


class Board:
    """See the module. version: of gemmtuned; tasks of another one get nothing. environments: keys of what is wanted."""

    def __init__(self, version: str, environments: Collection[str]) -> None:
        self._version = version
        self._wanted = set(environments)
        self._stock: dict[str, deque[Wanted]] = defaultdict(deque)
        self._held: dict[str, Wanted] = {}
        self._answers: list[tuple[str, Answer]] = []
        self._devices: dict[str, TaskDevice] = {}

    def next(self, task: str, device: TaskDevice, version: str) -> Wanted | str | None:
        """The unit for this task; None: ask again in a moment; text: why it is to end."""
        if version != self._version:
            return f"it has gemmtuned {version}, and {self._version} asks. Install that one on all nodes"
        self._devices[task] = device
        stock = self._stock[device.environment]
        if stock:
            self._held[task] = stock.popleft()
            return self._held[task]
        if device.environment in self._wanted:
            return None
        return OVER

    def answer(self, task: str, answer: Answer) -> None:
        """What this task found for the unit that it holds."""
        if self._held.pop(task, None) is not None:
            self._answers.append((task, answer))

    def trade(
        self, more: Iterable[Wanted] = (), wanted: Collection[str] | None = None
    ) -> tuple[list[tuple[str, Answer]], dict[str, int], dict[str, TaskDevice], dict[str, Wanted]]:
        """Put up more units, and take down what was found.

        wanted: keys of the environments for which more will come, in place of what was said before.  Returns (answers,
        each with its task; how many units wait in each environment; where each task runs; what each one holds).
        """
        for one in more:
            self._stock[one.environment.key].append(one)
        if wanted is not None:
            self._wanted = set(wanted)
        answers, self._answers = self._answers, []
        return answers, {key: len(units) for key, units in self._stock.items()}, dict(self._devices), dict(self._held)

    def take_back(self, task: str) -> Wanted | None:
        """The unit that a lost task held; None when it held none."""
        return self._held.pop(task, None)

    def clear(self) -> list[Wanted]:
        """Take down all units that nobody holds, and tell all who ask that it is over."""
        left = [one for units in self._stock.values() for one in units]
        self._stock.clear()
        self._wanted = set()
        return left
