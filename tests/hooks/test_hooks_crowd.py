"""Times of calls that were made beside others are left out: of what is worth tuning, and of all shares of time."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hooked import Home
from store_cases import NEW

from gemmtuned.configs.cpu_wait import CpuWait
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.db import queries
from gemmtuned.hooks.crowd import Crowd
from gemmtuned.hooks.flush import Flusher

ONE = Problem.parse("fp32:4x8x16,threads=1")
SPIN = "print(flush=True)\nwhile True: pass"


class Threads:
    """Counters of threads, as /proc has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text("0::/\n")

    def spent(self, thread: int, ran_s: float, waited_s: float) -> None:
        task = self.folder / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 3\n")

    def wait(self, most: int | None = None) -> CpuWait:
        return CpuWait(self.folder, self.folder / "none", most=most)


@pytest.fixture
def threads(tmp_path: Path) -> Threads:
    return Threads(tmp_path / "proc")


def test_others_were_in_the_way_where_threads_waited_since_the_last_look(threads: Threads) -> None:
    crowd = Crowd(threads.wait())
    said = []
    for ran_s, waited_s in ((1.0, 0.02), (2.0, 0.5), (1.0, 0.4), (2.0, 0.5), (2.0, 0.5), (1.0, 0.4), (1.5, 0.6)):
        threads.spent(7, ran_s, waited_s)
        threads.spent(8, 0.0, 0.0)
        said.append(crowd.is_crowded())

    assert said == [False, True, True, False, False, False, True], "a thread has ended at the third and the sixth"


def test_a_moment_too_short_to_tell_is_as_the_one_before_and_counts_with_the_next(threads: Threads) -> None:
    crowd = Crowd(threads.wait())
    said = []
    for ran_s, waited_s in ((1.0, 0.9), (1.001, 0.9), (1.012, 0.904), (1.05, 0.904), (1.055, 0.906)):
        threads.spent(7, ran_s, waited_s)
        said.append(crowd.is_crowded())

    assert said == [True, True, True, False, False]


def test_a_kernel_that_does_not_count_says_nothing_against_times(tmp_path: Path) -> None:
    assert not Crowd(CpuWait(tmp_path / "none", tmp_path / "none")).is_crowded()


class Told:
    """What the kernel says, one after the other; None: it may not be asked."""

    def __init__(self, *spent: tuple[float, float]) -> None:
        self._spent = iter(spent)

    def spent_s(self) -> tuple[float, float]:
        return next(self._spent)


def test_a_quota_that_holds_others_of_the_group_is_no_crowd(tmp_path: Path) -> None:
    crowd = Crowd(Told((1.0, 0.5), (2.0, -2.0), (3.0, -5.0), (4.0, -4.0)))  # type: ignore[arg-type]

    assert [crowd.is_crowded() for _ in range(4)] == [True, False, False, True]


def test_how_much_longer_it_ran_is_what_each_of_its_threads_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread alone, then two at a time, then nobody in the way, then a thread that has ended with what it spent."""
    now_s = [0.0]
    monkeypatch.setattr("gemmtuned.hooks.crowd.clock", SimpleNamespace(monotonic=lambda: now_s[0]))
    crowd = Crowd(Told((1.0, 3.0), (3.0, 9.0), (4.0, 9.0), (1.0, 2.0)))  # type: ignore[arg-type]
    longer_s = []
    for now_s[0] in (10.0, 14.0, 15.0, 16.0):
        crowd.is_crowded()
        longer_s.append(crowd.longer_s)

    assert longer_s == [3.0, 6.0, 6.0, 6.0]


def test_of_many_threads_the_oldest_are_looked_at(threads: Threads) -> None:
    for thread in (9, 10, 100):
        threads.spent(thread, 1.0, float(thread))

    assert threads.wait(most=2).spent_s() == (2.0, 19.0)
    assert threads.wait().spent_s() == (3.0, 119.0)


def test_counts_of_a_crowded_second_are_kept_and_its_times_are_not(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Sighting] = []

    def drain() -> list[Sighting]:
        taken = list(waiting)
        waiting.clear()
        return taken

    settings = Settings(
        cache=tmp_path / "cache", run="test", capture=True, home=tmp_path, db=tmp_path / "tune.db",
        config_dir=tmp_path / "configs",
    )  # fmt: skip
    flusher = Flusher(
        settings, drain=drain, set_aside=lambda ends: None, environment=lambda place: NEW, tick=lambda: None, keep=True,
        session=lambda: Session(
            host="h", pid=1, started_us=1, run="test", path="native", generation=0, calls=0, waited_us=flusher.waited_us
        ),
    )  # fmt: skip
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("gemmtuned.hooks.crowd.clock", SimpleNamespace(monotonic=lambda: next(hours)))
    flusher._crowd = Crowd(threads.wait())
    for ran_s, waited_s, took_us in ((1.0, 0.0, 100.0), (2.0, 6.0, 8000.0), (3.0, 6.0, 100.0)):
        threads.spent(7, ran_s, waited_s)
        waiting.append(Sighting(ONE, "miss", 64, sampled_calls=1, sampled_us=took_us))
        flusher.flush()
    threads.spent(7, 4.0, 7.0)  # after the last call that was timed
    flusher.stop()

    (session,) = queries.sessions(settings.db)
    assert session["waited_us"] == 7_000_000
    (row,) = queries.untuned(settings.db)
    assert (row["calls"], row["est_time_us"]) == (192, pytest.approx(192 * 100.0))


@pytest.mark.long
@pytest.mark.skipif(CpuWait().spent_s() is None, reason="this kernel does not count waiting")
def test_a_program_that_shares_its_cpu_keeps_its_counts_alone(home: Home) -> None:
    cpu = min(os.sched_getaffinity(0))
    spins = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for spin in spins:
            assert spin.stdout is not None and spin.stdout.readline()
            os.sched_setaffinity(spin.pid, {cpu})
        home.run(
            f"""
            import os, time, torch
            os.sched_setaffinity(0, {{{cpu}}})
            torch.set_num_threads(1)
            x, w = torch.randn(8, 256), torch.randn(256, 256)
            alone = time.process_time() + 0.1  # what it ran before, with a CPU to itself, is a small part from now on
            while time.process_time() < alone:
                pass
            end = time.process_time() + 0.3
            while time.process_time() < end:
                torch.nn.functional.linear(x, w)
            """
        )
    finally:
        for spin in spins:
            spin.kill()
            spin.wait()
            spin.stdout.close()  # type: ignore[union-attr]
    assert home.calls() > 64
    with closing(sqlite3.connect(home.path / "tune.db")) as db:
        assert db.execute("SELECT sum(sampled_calls) FROM demand").fetchall() == [(0,)]


def test_a_call_in_which_the_program_was_stopped_is_counted_and_has_no_time(home: Home) -> None:
    """The daemon itself says of a program that is in its way: kill -STOP."""
    done = home.run(
        """
        import json, os, signal, time, torch
        from gemmtuned.hooks.activate import current
        torch.set_num_threads(1)

        def twice(size, stop, dtype=torch.float64):  # the second call of a problem is timed
            a = torch.ones(size, size, dtype=dtype)
            a @ a
            begins, tell = os.pipe()
            child = os.fork()
            if not child:
                os.read(begins, 1)
                if stop:
                    time.sleep(0.05 if dtype is torch.float64 else 0.002)
                    os.kill(os.getppid(), signal.SIGSTOP)
                    time.sleep(4 if dtype is torch.float64 else 2)
                    os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.write(tell, b"now")
            a @ a
            os.waitpid(child, 0)
            (seen,) = current().native.drain()
            return seen.calls, seen.sampled_calls

        short = range(360, 365)  # of some milliseconds: some may be over before they are stopped
        said = [any(twice(n, True, torch.float16) == (2, 0) for n in short), twice(365, False, torch.float16)]
        print(json.dumps([*said, twice(2400, False), twice(2401, True)]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )

    assert done.said == [True, [2, 1], [2, 1], [2, 0]]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="torch 2.9 has no way to the kernel beneath"
)
def test_an_engines_product_in_which_the_program_was_stopped_has_no_time_either(home: Home) -> None:
    """Its size is known only afterwards: of so large a one, five seconds would be what a slow CPU takes."""
    done = home.run(
        """
        import json, threading, time, torch
        from torch.library import Library
        from gemmtuned.hooks.activate import current
        torch.set_num_threads(1)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        engine, waits, y = Library("_C", "FRAGMENT"), [], torch.ones(1024, 1024)
        engine.define("int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
                      "ScalarType out_dtype, bool is_vnni) -> Tensor")

        def product(mat1, mat2, scales2, bias, out_dtype, is_vnni):
            time.sleep(waits.pop() if waits else 0)
            return y

        engine.impl("int8_scaled_mm_with_quant", product, "CPU")
        current().patches.look_for_foreign()
        list(current().native.drain())
        x, scale = torch.ones(1024, 256).to(torch.float8_e4m3fn), torch.ones(1)

        def calls():
            for _ in range(40):  # of a thread's first 40 calls the 34th is timed
                torch.ops._C.int8_scaled_mm_with_quant(x, x, scale, None, torch.float, False)

        def seen(wait_s):
            waits[:] = [wait_s, *[0] * 33]
            thread = threading.Thread(target=calls)
            thread.start(), thread.join()
            (one,) = current().native.drain()
            return one.calls, one.sampled_calls

        print(json.dumps([seen(0), seen(0.6)]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )

    assert done.said == [[40, 1], [40, 0]]
