from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from gemmtuned.configs.solution import cpu_device
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.devices import CpuMonitor, CpuSample, find_monitors


class Counters:
    """CPU counters that a test advances."""

    def __init__(self) -> None:
        self.clock_s = self.busy_s = self.own_s = 0.0

    def advance(self, seconds: float, *, busy: float, own: float = 0.0) -> None:
        self.clock_s += seconds
        self.busy_s += busy
        self.own_s += own

    def __call__(self) -> CpuSample:
        return CpuSample(self.clock_s, self.busy_s, self.own_s, 8 << 30)


def test_others_use_is_all_use_less_our_own() -> None:
    counters = Counters()
    monitor = CpuMonitor(counters, cores=2)
    monitor.read(0.0)
    counters.advance(1.0, busy=1.5, own=1.0)
    reading = monitor.read(1.0)
    assert reading.others == pytest.approx(0.25)
    assert (reading.since_s, reading.at_s) == (0.0, 1.0)


def test_the_first_look_is_not_known() -> None:
    assert CpuMonitor(Counters(), cores=2).read(0.0).others is None


def test_looks_too_close_together_give_the_reading_before() -> None:
    counters = Counters()
    monitor = CpuMonitor(counters, cores=2)
    monitor.read(0.0)
    counters.advance(1.0, busy=1.0)
    first = monitor.read(1.0)
    counters.advance(0.01, busy=0.02)
    assert monitor.read(1.01) is first
    counters.advance(0.99, busy=0.0)
    assert monitor.read(2.0).others == pytest.approx(0.01)


def test_intervals_join_so_that_nothing_goes_unwatched() -> None:
    counters = Counters()
    monitor = CpuMonitor(counters, cores=1)
    monitor.read(100.0)
    ends = []
    for now_s in (100.5, 101.1, 101.6):
        counters.advance(now_s - 100 - counters.clock_s, busy=0.0)
        ends.append(monitor.read(now_s))
    assert [r.since_s for r in ends[1:]] == [r.at_s for r in ends[:-1]]


def test_time_of_ours_that_vanished_counts_as_foreign_and_not_as_negative() -> None:
    counters = Counters()
    monitor = CpuMonitor(counters, cores=1)
    counters.advance(0.0, busy=50, own=50)
    monitor.read(0.0)
    counters.advance(1.0, busy=0.5, own=-20)
    assert monitor.read(1.0).others == pytest.approx(0.5)


def test_counters_that_cannot_be_read_mean_busy() -> None:
    def broken() -> CpuSample:
        raise psutil.AccessDenied(1)

    reading = CpuMonitor(broken, cores=2).read(0.0)
    assert reading.others is None
    assert "cannot be read" in reading.note


def test_one_busy_thread_of_a_server_is_seen_on_large_machines_too() -> None:
    for cores in (1, 2, 8, 64):
        limits = CpuMonitor(Counters(), cores=cores).limits
        assert limits.clear < limits.busy
        assert limits.clear * cores < 1.0


def test_a_child_of_ours_is_not_foreign_and_stays_so_after_its_death() -> None:
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.4: pass"
    child = subprocess.Popen([sys.executable, "-c", burn])
    monitor = CpuMonitor()
    monitor.read(time.time(), OwnUse(child.pid))
    sample = monitor._sample
    before = sample()
    assert child.wait(20) == 0
    assert sample().own_s - before.own_s > 0.2


def test_this_machine_has_a_cpu_to_tune_on() -> None:
    monitors = find_monitors()
    assert [m.id for m in monitors] == ["cpu"]
    assert monitors[0].device == cpu_device()
    monitors[0].read(time.time())
    time.sleep(0.1)
    reading = monitors[0].read(time.time())
    assert reading.others is not None
    assert 0.0 <= reading.others <= 1.0
    assert reading.free_bytes
