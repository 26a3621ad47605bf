"""A pool of devices on a Ray cluster: Ray assigns the tasks; this module hands out units and puts results at the URL.

Each task holds one unit at a time.  If a task ends with an error (its node died, its process was killed), its unit goes
to another task, and a new task replaces it.  Ray's own retries are switched off, since they would start a task again
that has done half of its work.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, Final

from gemmtuned import __version__
from gemmtuned.configs.errors import SettingError, TryLater, WorkerFailed
from gemmtuned.fleet import ray_task
from gemmtuned.fleet.bench import Answer
from gemmtuned.fleet.board import OVER, Board, TaskDevice
from gemmtuned.fleet.demand import Wanted
from gemmtuned.fleet.outbox import Outbox
from gemmtuned.fleet.pool_client import PoolClient
from gemmtuned.fleet.ran import Ran, Tell
from gemmtuned.fleet.ray_task import Node

TURN_S: Final = 0.5
LOST: Final = 2  # a unit is given up after so many lost tasks
PUT_OFF: Final = 3  # attempts at a unit whose times cannot be taken
AGAIN_S: Final = 30.0  # between two such attempts
IN_VAIN: Final = 3  # besides one per device, so many tasks in a row may end with an error and without a result
FLUSH_S: Final = 60.0
CANCEL_S: Final = 5.0  # for tasks to end their workers
PROBE_S: Final = 60.0
_HEAD: Final = "node:__internal_head__"  # a resource that only the head has


@dataclass(frozen=True)
class How:
    """What a task has. gpu: one GPU, else `cpus` CPU slots. tasks: the most at a time; 0: one per device.

    search: for tests, as Worker takes it.
    """

    gpu: bool
    cpus: int = 1
    tasks: int = 0
    search: str = ""


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """For `with`: the module ray, connected. Raises SettingError without the extra, TryLater when nothing answers."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as err:
        raise SettingError("the extra is missing. Run: pip install ray obstore") from err
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="gemmtuned")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as err:
        why = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise TryLater(
            f"no Ray cluster answers at {address} ({why}). Start one with: ray start --head. Where it asks for a "
            "token, set RAY_AUTH_MODE=token, or use --ray auto on one of its nodes"
        ) from err
    finally:
        signal.signal(signal.SIGTERM, before)  # undo Ray's handler, which ends with another exit code
    with redirect_stdout(sys.stderr):  # Ray tells there of nodes that died; our own output is for programs, too
        try:
            yield ray
        finally:
            ray.shutdown()


def look_around(ray: Any) -> list[Node]:
    """The devices of each node of the cluster; a node that does not answer is left out."""
    affinity = _affinity()
    look = ray.remote(num_cpus=0, max_retries=0)(ray_task.look)
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    refs = [look.options(scheduling_strategy=affinity(node, soft=False)).remote() for node in alive]
    ray.wait(refs, num_returns=len(refs), timeout=PROBE_S)
    found = []
    for ref in refs:
        with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            found.append(ray.get(ref, timeout=0))
    return found


def tasks_for(ray: Any, how: How, units: int) -> int:
    """How many tasks to start: one for each device of the cluster, but no more than units."""
    there = ray.cluster_resources()
    devices = int(there.get("GPU", 0)) if how.gpu else int(there.get("CPU", 0)) // how.cpus
    return min(how.tasks or devices, units)


class Pool:
    """One run. wanted: worth most first. Results are at the URL as soon as they are found: a run that is ended loses
    what is at work, and the next run does the rest."""

    def __init__(self, ray: Any, wanted: Sequence[Wanted], client: PoolClient, how: How, tell: Tell) -> None:
        self._ray, self._client, self._how, self._tell = ray, client, how, tell
        self.ran = Ran()
        self._queues: dict[str, deque[Wanted]] = {}
        for one in wanted:
            self._queues.setdefault(one.environment.key, deque()).append(one)
        self._units = {one.key: one for one in wanted}
        self._total = len(wanted)
        self._tasks: dict[Any, str] = {}
        self._number = 0
        self._devices: dict[str, TaskDevice] = {}
        self._held: dict[str, Wanted] = {}
        self._stock: dict[str, int] = {}
        self._outbox = Outbox(client, self.ran, flush_s=FLUSH_S)
        self._losses: Counter[tuple[str, str]] = Counter()
        self._put_off: Counter[tuple[str, str]] = Counter()
        self._later: deque[tuple[float, Wanted]] = deque()  # (when to try again, unit), for units that were put off
        self._in_vain = 0
        self._most_in_vain = IN_VAIN + tasks_for(ray, how, len(wanted))  # a node may have many devices
        self._trouble, self._over = "", False
        self._serve = ray.remote(max_retries=0, **({"num_gpus": 1} if how.gpu else {"num_cpus": how.cpus}))(
            ray_task.serve
        )
        self._board = _board(ray, list(self._queues))

    def run(self) -> Ran:
        """Run until nothing is left that a node can do, or a signal comes.

        Raises WorkerFailed when tasks fail one after another, TryLater when the cluster goes away.
        """
        try:
            with self._signals():
                self._submit(tasks_for(self._ray, self._how, self._total))
                while self._tasks and not self.ran.code:
                    self._turn()
                    if not self._tasks and not self.ran.code and (again := self._can_go_on()):
                        self._submit(tasks_for(self._ray, self._how, again))
        except self._ray.exceptions.RayActorError as err:
            raise TryLater(f"the cluster lost the node of this run; what was found is at the URL ({err})") from err
        finally:
            self._end()
        self._tell_left()
        return self.ran

    # --- tasks

    def _submit(self, count: int) -> None:
        for _ in range(count):
            self._number += 1
            task = f"gemmtuned {self._number}"
            ref = self._serve.options(name=task).remote(self._board, task, self._how.gpu, self._how.search)
            self._tasks[ref] = task

    def _turn(self) -> None:
        self._trouble = ""
        more = self._supply()
        wanted = {key for key, queue in self._queues.items() if queue}
        wanted |= {one.environment.key for _, one in self._later}
        self._take(self._ray.get(self._board.trade.remote(more, list(wanted))))
        try:
            self._outbox.bring()
        except TryLater as err:
            self._trouble = str(err)
        ended, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=TURN_S)
        for ref in ended:
            self._ended(ref, self._tasks.pop(ref))
        self._tell(self._count(), self._total, self._doing())

    def _ended(self, ref: Any, task: str) -> None:
        """Handle the end of a task, which found nothing left to do or was lost with its unit."""
        self._take(self._ray.get(self._board.trade.remote()))
        try:
            why = self._ray.get(ref)
        except self._ray.exceptions.RayError as err:
            why = _first(err)
            back = self._ray.get(self._board.take_back.remote(task))
            device = self._devices.get(task)
            held = f", at {back.unit.problem}" if back is not None else ""
            self.ran.lost.append(f"{task} on {device.node if device else 'a node'}{held}: {why}")
            self._in_vain += 1
            if self._in_vain > self._most_in_vain:
                raise WorkerFailed(f"{self._in_vain} tasks in a row found nothing, the last one: {why}") from err
            if back is not None:
                self._put_back(back, why)
            if self._later or any(self._queues.values()) or any(self._stock.values()):
                self._submit(1)
            return
        if why != OVER:
            self.ran.lost.append(f"{task}: {why}")

    def _put_back(self, unit: Wanted, why: str) -> None:
        self._losses[unit.key] += 1
        if self._losses[unit.key] < LOST:
            self._take(self._ray.get(self._board.trade.remote([unit])))
            return
        self._outbox.add(unit, Answer(unit.name, "failed", f"lost {LOST} tasks with it: {why}"), "")

    def _can_go_on(self) -> int:
        """The units left for environments that some node has."""
        self._take(self._ray.get(self._board.trade.remote()))
        seen = {device.environment for device in self._devices.values()}
        return len(self._later) + sum(self._stock.get(key, 0) + len(self._queues.get(key, ())) for key in seen)

    # --- units and answers

    def _supply(self) -> list[Wanted]:
        """Claim as many units as the tasks of each environment will soon need."""
        at_work = Counter(self._devices[t].environment for t in self._tasks.values() if t in self._devices)
        more: list[Wanted] = []
        while self._later and self._later[0][0] <= time.monotonic():
            more.append(self._later.popleft()[1])
        for key, tasks in at_work.items():
            queue = self._queues.get(key)
            short = 2 * tasks - self._stock.get(key, 0)
            if not queue or short < tasks:
                continue
            try:
                won, rest = self._client.claim(list(queue), short)
            except TryLater as err:
                self._trouble = str(err)
                continue
            self._queues[key] = deque(rest)
            more += won
        return more

    def _take(
        self, traded: tuple[list[tuple[str, Answer]], dict[str, int], dict[str, TaskDevice], dict[str, Wanted]]
    ) -> None:
        answers, self._stock, self._devices, self._held = traded
        for task, answer in answers:
            self._in_vain = 0
            self._answered(self._devices[task], answer)

    def _answered(self, device: TaskDevice, answer: Answer) -> None:
        unit = self._units[device.environment, answer.name]
        if answer.state == "put off" and self._put_off[unit.key] + 1 < PUT_OFF and not self._over:
            self._put_off[unit.key] += 1
            self._later.append((time.monotonic() + AGAIN_S, unit))
        else:
            self._outbox.add(unit, answer, device.node)

    # --- the end

    def _end(self) -> None:
        """Tell all tasks to end their workers, publish their last answers, and give back units not yet begun."""
        self._over = True
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._board.clear.remote(), timeout=CANCEL_S)
        for force in (False, True):
            for ref in self._tasks:
                with suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.cancel(ref, force=force)
            if self._tasks:
                _, left = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=CANCEL_S)
                self._tasks = {ref: self._tasks[ref] for ref in left}
        with suppress(self._ray.exceptions.RayError):
            self._take(self._ray.get(self._board.trade.remote(), timeout=CANCEL_S))
        self._outbox.end()
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._board)

    def _tell_left(self) -> None:
        """Report the units without an answer, with the reason."""
        seen = {device.environment for device in self._devices.values()}
        known = {one.key for one, _, _ in self.ran.done} | self._client.passed_over
        for key, one in self._units.items():
            if key not in known:
                why = "interrupted" if self.ran.code else "not done" if key[0] in seen else f"no task came to {key[0]}"
                self.ran.left.append((one, why))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run in good order, the second at once."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]

        def handle(number: int, frame: object) -> None:
            if self.ran.code:
                raise KeyboardInterrupt
            self.ran.code = 128 + number

        for number in numbers:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _count(self) -> int:
        return len(self.ran.done) + len(self._client.passed_over)

    def _doing(self) -> str:
        if self._trouble:
            return self._trouble
        if not self._held:
            return "waiting for Ray to start tasks" if not self._devices else "claiming"
        task, unit = next(iter(self._held.items()))
        return f"{len(self._held)} at work, {unit.unit.problem} on {self._devices[task].node}"


def _board(ray: Any, environments: Sequence[str]) -> Any:
    """A board that answers: on the cluster's head, which lives as long as the cluster, else beside the driver."""
    beside = _affinity()(ray.get_runtime_context().get_node_id(), soft=True)
    where: tuple[dict[str, Any], ...] = ({"resources": {_HEAD: 0.001}}, {"scheduling_strategy": beside})
    for number, options in enumerate(where):
        board = ray.remote(num_cpus=0, max_restarts=0)(Board).options(**options)
        found = board.remote(__version__, list(environments))
        try:
            ray.get(found.trade.remote(), timeout=PROBE_S)
            return found
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as err:
            ray.kill(found)
            if number == len(where) - 1:
                raise TryLater(f"no node of the cluster keeps a process alive ({_first(err)})") from err


def _affinity() -> Any:
    return importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy


def _first(err: Exception) -> str:
    """Why a task ended, in a line; Ray gives the cause after a traceback."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(err) else next(iter(lines), type(err).__name__))[:400]
