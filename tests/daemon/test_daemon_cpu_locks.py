"""Daemons of two homes on the same CPUs: real processes, each with a store and workers of its own."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fakes import ENVIRONMENT
from hooked import wait_for

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.device import cpu_locks, device_lock
from gemmtuned.daemon.device.cpu_locks import CpuLocks, with_siblings
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db import queries
from gemmtuned.db.lockfile import LockFile
from gemmtuned.db.store import Store
from gemmtuned.fleet.on_this_host import device_here

DAEMON = Path(__file__).parents[1] / "support" / "daemon_process.py"
COUNT = 12
Start = Callable[..., "Running"]


class Running:
    """A home in which so many problems wait, and a daemon for it."""

    def __init__(self, folder: Path, count: int, *options: str) -> None:
        self.folder, self.count = folder, count
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder)})
        with closing(Store(self.settings.db, locks=self.settings.locks)) as store:
            waiting = [Sighting(Problem(m=8, n=64 * n, k=64), "miss", 10) for n in range(1, count + 1)]
            store.sightings.add("serve", ENVIRONMENT, waiting, now_s=time.time())
        command = [sys.executable, str(DAEMON), str(folder), "--once", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log = ""

    def measured_us(self) -> list[int]:
        return sorted(row["started"] for row in queries.trials(self.settings.db))

    def reason(self) -> str:
        notice = read_notice(self.folder)
        return " ".join(seat["reason"] for seat in notice["seats"]) if notice else ""

    def finish(self) -> None:
        _, self.log = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self.log
        assert len(queries.solutions(self.settings.db)) == self.count


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a daemon of this home on these CPUs."""
    running: list[Running] = []

    def start(name: str, cpus: str, locks: Path = tmp_path / "locks", count: int = COUNT) -> Running:
        running.append(Running(tmp_path / name, count, "--cpus", cpus, "--locks", str(locks)))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def turns(*running: Running) -> int:
    """How often the device went from one of them to another: at each, what one measures could have met the other's."""
    all_of_it = sorted((us, i) for i, one in enumerate(running) for us in one.measured_us())
    return sum(before[1] != after[1] for before, after in itertools.pairwise(all_of_it))


def test_daemons_of_two_homes_never_measure_on_the_same_cpus_at_once(start: Start) -> None:
    one, two = start("one", "0,1"), start("two", "1,2")
    said = set()
    while one.process.poll() is None or two.process.poll() is None:
        said |= {one.reason().partition(": ")[0], two.reason().partition(": ")[0]}
        time.sleep(0.02)
    one.finish()
    two.finish()

    assert turns(one, two) == 1
    assert "another gemmtuned daemon tunes on it" in said


def test_daemons_on_cpus_of_their_own_tune_side_by_side(start: Start) -> None:
    far = max(with_siblings(range(os.cpu_count() or 1))) + 1  # which this machine has not got: no siblings of ours
    one, two = start("one", "0", count=25), start("two", str(far), count=25)  # so many that one begins in time
    one.finish()
    two.finish()

    assert turns(one, two) > 1


def test_the_cpus_of_a_daemon_that_was_killed_are_free_at_once(start: Start) -> None:
    one = start("one", "0,1", count=200)
    wait_for(lambda: len(one.measured_us()) > 3)
    two = start("two", "0,1")
    wait_for(lambda: "another gemmtuned daemon" in two.reason())
    assert two.measured_us() == []
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(10)

    two.finish()
    assert turns(one, two) == 1


def test_a_daemon_tunes_though_it_cannot_lock_and_says_so_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = start("one", "0,1", tmp_path / "file" / "locks")
    one.finish()

    assert one.log.count("CPUs not locked") == 1
    assert str(tmp_path / "file" / "locks") in one.log and "Set GEMMTUNED_DEVICE_LOCKS" in one.log


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CpuLocks]:
    """The locks of these CPUs, of a home of that name; no CPU has siblings."""
    monkeypatch.setattr(cpu_locks, "_TOPOLOGY", str(tmp_path / "cpu{}"))

    def make(name: str, *cpus: int, at_once: bool = False) -> CpuLocks:
        own = DeviceLock(tmp_path / name, "cpu", name, own=True)
        return CpuLocks(own, tmp_path / "locks", cpus, f"home {name}", at_once=at_once)

    return make


def test_who_gets_not_all_keeps_none(locks: Callable[..., CpuLocks]) -> None:
    two, other = locks("two", 1, 2), locks("other", 3, 2, 0)
    assert two.take() == ""
    assert "home two, since" in other.take()
    assert locks("third", 0, 3).take() == "", "the one that waits holds nothing up"
    assert "home two" in locks("two", 9).take() or "two, since" in locks("two", 9).take(), "nor another of the home"
    two.drop()
    assert locks("two", 1, 2).take() == ""


def test_a_lock_that_a_cleaner_removes_is_taken_again(locks: Callable[..., CpuLocks], tmp_path: Path) -> None:
    """systemd-tmpfiles removes what is old in /tmp."""
    files = [tmp_path / "locks" / "gemmtuned-cpu-0.lock", tmp_path / "one" / "gemmtuned-cpu.lock"]
    one, other = locks("one", 0), locks("other", 0)
    assert one.take() == ""
    for file in files:
        os.utime(file, (1, 1))
    assert one.take() == ""
    assert all(time.time() - file.stat().st_mtime < 60 for file in files), "too young to be removed"
    for file in files:
        file.unlink()
    assert one.take() == ""
    assert "home one, since" in other.take()
    files[0].unlink()
    assert other.take() == "", "before one has looked"
    assert "home other, since" in one.take()
    other.drop()
    assert one.take() == ""
    assert "home one, since" in other.take()


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/", os.O_PATH)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_PATH)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_lock_that_cannot_be_asked_for_is_not_lost(
    locks: Callable[..., CpuLocks], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that may open no more files: the worker goes on, and the lock is asked for again."""
    one, other = locks("one", 0), locks("other", 0)
    files = [tmp_path / "locks" / "gemmtuned-cpu-0.lock", tmp_path / "one" / "gemmtuned-cpu.lock"]
    assert one.take() == ""
    for file in files:
        file.unlink()
    with no_more_files(), caplog.at_level(logging.WARNING, "gemmtuned"):
        assert one.lost() == "" == one.lost()
        assert "as many files open as it may" in one.take(), "none is taken anew"
    assert caplog.text.count("asked again") == 1
    assert one.take() == "" and all(file.exists() for file in files)
    files[0].unlink()
    assert other.take() == "" and "home other, since" in one.lost()


def test_a_look_that_fails_once_takes_our_own_lock_for_nobody_elses(
    locks: Callable[..., CpuLocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = locks("one", 0)
    assert one.take() == ""
    monkeypatch.setattr(device_lock, "lies_at", lambda path: None)
    assert one.take() == "" == one.lost()
    monkeypatch.undo()
    assert "home one, since" in locks("other", 0).take()


def test_a_lock_whose_descriptor_and_file_are_gone_is_not_held(tmp_path: Path) -> None:
    lock, again = DeviceLock(tmp_path, "GPU-1", "me"), LockFile(tmp_path / "db.lock")
    assert lock.take() == "" and again.acquire(0)
    again.release()
    for name in ("gemmtuned-gpu-1.lock", "db.lock"):
        (fd,) = (int(fd.name) for fd in Path("/proc/self/fd").iterdir() if _leads_to(fd, tmp_path / name))
        os.close(fd)
        (tmp_path / name).unlink()
    assert lock.take() == "" and (tmp_path / "gemmtuned-gpu-1.lock").exists()
    assert "me, since" in DeviceLock(tmp_path, "GPU-1", "another").take()
    assert again.acquire(0, make=True) and not LockFile(tmp_path / "db.lock").acquire(0)
    again.release()
    lock.drop()
    again.close()


def _leads_to(fd: Path, file: Path) -> bool:
    try:
        return fd.readlink() == file
    except OSError:
        return False


def test_who_wants_it_at_once_keeps_what_can_be_had(locks: Callable[..., CpuLocks]) -> None:
    daemon, person = locks("daemon", 0), locks("person", 0, 1, at_once=True)
    assert daemon.take() == ""
    assert "home daemon" in person.take()
    assert "home person" in locks("another", 1).take()
    person.drop()
    assert locks("another", 1).take() == ""


def test_threads_of_a_core_are_locked_together(locks: Callable[..., CpuLocks], tmp_path: Path) -> None:
    for cpu, said in {0: "0,4\n", 4: "0,4\n", 1: "1-2\n", 2: "1-2\n", 3: "three\n"}.items():
        (tmp_path / f"cpu{cpu}").write_text(said)

    assert with_siblings([0, 1, 3, 7]) == [0, 1, 2, 3, 4, 7]
    assert locks("one", 0).take() == ""
    assert "home one" in locks("two", 4).take()


def test_a_lock_that_is_no_file_keeps_nobody_from_tuning(
    locks: Callable[..., CpuLocks], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "locks").mkdir()
    os.mkfifo(tmp_path / "locks" / "gemmtuned-cpu-1.lock")
    mine = locks("mine", 0, 1, 2)
    with caplog.at_level(logging.WARNING, "gemmtuned"):
        assert mine.take() == "" == mine.take()

    assert len(caplog.records) == 1 and "a pipe lies there; remove it" in caplog.text
    assert "home mine" in locks("other", 2).take(), "the others are held all the same"


def test_a_run_for_a_fleet_has_the_cpus_to_itself(tmp_path: Path) -> None:
    """Of two on the same CPUs the second says who has them, and ends with what a batch system tries again."""
    homes = [
        Settings.from_env({"GEMMTUNED_HOME": str(tmp_path / name), "GEMMTUNED_DEVICE_LOCKS": str(tmp_path / "locks")})
        for name in ("one", "two")
    ]
    monitor, lock = device_here(homes[0], "cpu")
    assert monitor.id == "cpu"
    with pytest.raises(TryLater, match=r"the CPUs are not free for us: .*gemmtuned fleet tune, since .*taskset"):
        device_here(homes[1], "cpu")
    lock.drop()
    device_here(homes[1], "cpu")[1].drop()
