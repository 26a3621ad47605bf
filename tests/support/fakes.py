"""Stand-ins for what takes a daemon real time: a clock, a device, a worker. The store is always the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gemmtuned.configs.errors import WorkerDied, WorkerHung
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.idle import Limits, Reading
from gemmtuned.daemon.protocol.wire import Failed, Found, Hello, Message, Order, Trial

DEVICE = Device(key="cpu-planted", kind="cpu", name="planted", arch="x86_64", units=2)
ENVIRONMENT = Environment(DEVICE, {"torch": "1", "slow": "1", "fast": "1", "bad": "1"})
NEWER = Environment(DEVICE, {"torch": "2", "slow": "2", "fast": "2", "bad": "2"})
CANDIDATES = tuple(Candidate(name) for name in ("torch", "slow", "bad", "fast"))


@dataclass
class Clock:
    """UTC seconds that pass only when told to."""

    now_s: float = 1_800_000_000.0

    def pass_s(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


class FakeMonitor:
    """A device whose use by others is a function of time; None is "not known"."""

    device = DEVICE
    conditions = ""
    pids: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    limits = Limits(clear=0.1, busy=0.25)

    def __init__(
        self, others: Callable[[float], float | None] = lambda now_s: 0.0, *, id: str = "cpu", name: str = "cpu"
    ) -> None:
        self.others = others
        self.id, self.name = id, name
        self._last_s: float | None = None

    def read(self, now_s: float, own: OwnUse | None = None) -> Reading:
        since_s, self._last_s = self._last_s, now_s
        if since_s is None or since_s >= now_s:
            return Reading(now_s, now_s, None, None, "first look")
        return Reading(since_s, now_s, self.others(now_s))


@dataclass
class Life:
    """What the workers of one test did, and how they are to behave."""

    clock: Clock
    environment: Environment = ENVIRONMENT
    hello_s: float = 3.0
    trial_s: float = 0.2
    hangs: Callable[[Problem, Candidate], bool] = lambda problem, candidate: False
    crashes: Callable[[Problem, Candidate], bool] = lambda problem, candidate: False
    death: WorkerDied = field(default_factory=lambda: WorkerDied("worker killed by SIGSEGV"))
    refuses: Callable[[Problem], str] = lambda problem: ""
    not_now: Callable[[Problem], bool] = lambda problem: False
    slower_now: Callable[[Problem], bool] = lambda problem: False
    starts_dead: bool = False
    unkillable_s: float = 0.0
    alive: list[FakeWorker] = field(default_factory=list)
    started: int = 0
    ends: list[str] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    found: list[Problem] = field(default_factory=list)

    def make(self, device: str) -> FakeWorker:
        self.started += 1
        worker = FakeWorker(self, 10_000 + self.started)
        self.alive.append(worker)
        return worker


class FakeWorker:
    """Says hello after a while, then answers each order with a trial for each candidate, all in the clock's time."""

    def __init__(self, life: Life, pid: int) -> None:
        self.pid = pid
        self.environment: Environment | None = None
        self.memory_bytes: int | None = None
        self._life = life
        self._due: list[tuple[float, Message | Exception]] = []
        self._stopped_s: float | None = None
        hello: Message | Exception = WorkerDied("ended at once") if life.starts_dead else Hello(life.environment)
        self._say(life.hello_s, hello)

    @property
    def is_at_work(self) -> bool:
        """Whether it has yet to say something."""
        return bool(self._due)

    def fileno(self) -> int:
        raise AssertionError("nothing to wait on in faked time")

    def tune(self, order: Order) -> None:
        life = self._life
        life.orders.append(order)
        problem = order.members[len(order.members) // 2]
        if life.not_now(problem):
            self._say(0.5, Failed("the device is slowed down", later=True))
            return
        refusal = life.refuses(problem)
        if refusal:
            self._say(0.0, Failed(refusal))
            return
        at_s = 0.0
        for candidate in CANDIDATES:
            if candidate in order.skip:
                continue
            self._say(at_s, Trial(problem, candidate, "start", None, None, "ok", "", 1))
            if life.hangs(problem, candidate):
                self._say(at_s + 30, WorkerHung("no word past the deadline"))
                return
            if life.crashes(problem, candidate):
                self._say(at_s + 0.1, life.death)
                return
            at_s += life.trial_s
            us = 50.0 if candidate.backend == "fast" else 100.0
            self._say(at_s, Trial(problem, candidate, "screen", us, 1e-7, "ok", "", 1))
        found = solution(order.target, life.environment, covers=order.covers, mode=order.mode)
        if life.slower_now(order.target):
            stamp = life.environment.stamps["torch"]
            found = replace(
                found, backend="torch", stamp=stamp, us=found.baseline_us, gain_low=1.0, state="default_best"
            )
        self._say(at_s, Found(found))

    def poll(self) -> list[Message]:
        assert self._stopped_s is None, "asked after it was stopped"
        messages: list[Message] = []
        while self._due and self._due[0][0] <= self._life.clock.now_s:
            what = self._due[0][1]
            if isinstance(what, Exception):
                if messages:
                    break
                raise what
            self._due.pop(0)
            messages.append(what)
            if isinstance(what, Hello):
                self.environment = what.environment
            if isinstance(what, Found):
                self._life.found.append(what.solution.problem)
        return messages

    def terminate(self) -> None:
        self._life.ends.append("told")

    def stop(self) -> bool:
        now_s = self._life.clock.now_s
        if self._stopped_s is None:
            self._stopped_s = now_s
            self._life.ends.append("waited for")
            self._life.alive.remove(self)
        return now_s - self._stopped_s >= self._life.unkillable_s

    def _say(self, after_s: float, what: Message | Exception) -> None:
        self._due.append((self._life.clock.now_s + after_s, what))


def solution(
    problem: Problem, environment: Environment = ENVIRONMENT, *, covers: str = "exact", mode: str = "eager"
) -> Solution:
    """A verdict that the planted backend `fast` wins."""
    return Solution(
        problem=problem, device=environment.device.key, mode=mode, covers=covers, backend="fast", config="{}",
        stamp=environment.stamps["fast"], us=50.0, baseline_us=100.0, gain_low=1.9, err=1e-7, baseline_err=1e-7,
        state="published",
    )  # fmt: skip
