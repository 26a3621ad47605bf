"""What counts as waiting for a CPU, and that a search takes no time from a race in which its threads waited."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import planted_kernels as planted
import pytest
from noise import NoisyClock
from planted_kernels import Planted

from gemmtuned.configs.cpu_wait import CpuWait
from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, Solution, cpu_device
from gemmtuned.daemon.child import cpu_wait, search
from gemmtuned.daemon.child import races as races_module
from gemmtuned.daemon.child.measure import Arm, WallClock
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS

SPIN = "print(flush=True)\nwhile True: pass"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for thread, waited_ns in (("7", 2_000_000_000), ("8", 500_000_000)):
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "schedstat").write_text(f"9000000000 {waited_ns} 12\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    return tmp_path


@pytest.mark.long
def test_the_waiting_of_all_threads_is_added_up_and_one_that_has_ended_is_left_out(proc: Path) -> None:
    (proc / "task" / "9").mkdir()

    assert CpuWait(proc, proc / "none").waited_s() == 2.5


def test_where_the_kernel_does_not_count_nothing_is_known(proc: Path) -> None:
    for thread in ("7", "8"):
        (proc / "task" / thread / "schedstat").unlink()

    assert CpuWait(proc, proc / "none").waited_s() is None
    assert CpuWait(proc / "none", proc / "none").waited_s() is None


@pytest.mark.parametrize(
    ("groups", "stats"),
    [
        (
            "0::/user/job\n",
            {"cpu.stat": "usage_usec 7\n", "user/job/cpu.stat": "nr_throttled 3\nthrottled_usec 400000\n"},
        ),
        (
            "0::/user/job\n",
            {"user/cpu.stat": "throttled_usec 300000\n", "user/job/cpu.stat": "throttled_usec 100000\n"},
        ),
        ("4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct/a/cpu.stat": "throttled_time 400000000\n"}),
        ("1:cpu,cpuacct:/docker/b\n", {"cpu,cpuacct/cpu.stat": "throttled_time 400000000\n"}),  # as in a container
    ],
)
def test_what_a_quota_takes_is_not_waiting(proc: Path, groups: str, stats: dict[str, str]) -> None:
    (proc / "cgroup").write_text(groups)
    for name, text in stats.items():
        (proc / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / "fs" / name).write_text(text)

    assert CpuWait(proc, proc / "fs").waited_s() == pytest.approx(2.1)


@pytest.mark.skipif(CpuWait().waited_s() is None, reason="this kernel does not count waiting")
def test_beside_a_program_on_the_same_cpu_a_thread_waits() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # and so what is started here
    others = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline()
        wait, began_s = CpuWait(), time.monotonic()
        first_s = wait.waited_s()
        while time.monotonic() < began_s + 0.5:
            pass
        last_s, ended_s = wait.waited_s(), time.monotonic()
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.communicate()

    assert first_s is not None and last_s is not None
    assert (last_s - first_s) / (ended_s - began_s) > cpu_wait.most_waited(2)


# --- the search


class Beside(WallClock):
    """Times of NoisyClock; in the first `races` looks at them our threads waited all the time, later never."""

    def __init__(self, races: float) -> None:
        super().__init__()
        self.times = NoisyClock({"fast": 150.0}, jitter=0.01, drift=0.002, burst=0.0, second=0.0)
        self.races = races
        self.total_s = 0.0

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        slice_us = 8000.0 if self.races > 0 else 0.0
        return slice_us + self.times.us(arm, copies)

    def waited_s(self) -> float | None:
        self.races -= 0.5  # asked before and after
        self.total_s += 100.0 if self.races >= 0 else 0.0
        return self.total_s


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The search has torch and one backend more, a faster one; it does not sleep. Of its pauses the long ones."""
    backends = {"torch": BACKENDS["torch"], "fast": Planted("fast", planted.right)}
    slept: list[float] = []
    monkeypatch.setattr(registry, "BACKENDS", backends)
    monkeypatch.setattr(search, "BACKENDS", backends)
    monkeypatch.setattr(races_module.time, "sleep", lambda s: slept.append(s) if s >= 1 else None)
    monkeypatch.setattr(races_module, "SOON_S", 0.0)
    yield slept


def tune(clock: Beside, *, threads: int = 1) -> tuple[Solution, list[Trial]]:
    told: list[Trial] = []
    problem = Problem(m=4, n=16, k=32, dtype="fp32", threads=threads)
    environment = Environment(cpu_device(), dict.fromkeys(search.BACKENDS, "1"))
    found = search.tune_modes(
        (problem,), "exact", problem, environment, mode="eager", skip=(), emit=told.append, clock=clock, seed=1
    )
    return found[0], told


@pytest.mark.long
@pytest.mark.parametrize("races", [0, 1, 2])
def test_a_race_in_which_threads_waited_is_run_again(pauses: list[float], races: int) -> None:
    solution, told = tune(Beside(races))

    assert (solution.backend, solution.baseline_us) == ("fast", pytest.approx(200, rel=0.05))
    assert all(trial.us is None or trial.us < 250 for trial in told)
    assert pauses == [races_module.COOL_S] * races


def test_on_a_cpu_that_stays_in_use_there_is_no_verdict_and_no_time_is_told(pauses: list[float]) -> None:
    told: list[Trial] = []
    problem = Problem(m=4, n=16, k=32, dtype="fp32", threads=1)
    environment = Environment(cpu_device(), dict.fromkeys(search.BACKENDS, "1"))

    with pytest.raises(TryLater, match=r"others use the CPU: our threads waited for it [0-9]+% of the time"):
        search.tune_modes(
            (problem,), "exact", problem, environment, mode="eager", skip=(), emit=told.append, clock=Beside(1e9)
        )

    assert {trial.phase for trial in told} == {"start"}
    assert pauses == [races_module.COOL_S] * 2


def test_more_threads_than_cpus_wait_for_each_other_and_count(pauses: list[float]) -> None:
    solution, _ = tune(Beside(1e9), threads=cpu_wait.cpus() + 1)

    assert solution.baseline_us > 8000 and pauses == []
