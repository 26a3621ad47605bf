"""Publishing in a thread: whatever it ends with is said, so that the daemon waits before it tries again."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_cases import CPU, NEW, OLD, open_store, problem, saw

from gemmtuned.configs.errors import StoreError, TableError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing import beside_the_loop as publishing
from gemmtuned.daemon.publishing.publish import publishing as publishing_lock
from gemmtuned.daemon.service.lookout import Lookout
from gemmtuned.daemon.service.upkeep import Upkeep
from gemmtuned.daemon.watch.server import Watch
from gemmtuned.db.upkeep import Examination

MINE = replace(CPU, key="cpu-of-mine")


def test_an_error_that_nobody_foresaw_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(publishing, "publish", fails)
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    beside.begin(1000.0)
    beside.wait()

    with pytest.raises(TableError, match="RuntimeError: can't start new thread"):
        beside.result()
    store.close()


def test_what_was_published_of_another_file_says_nothing_about_the_one_that_lies_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is built anew while a thread publishes: rows that it lost are taken back by the next publication."""
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    beside.forget()
    beside.begin(1000.0)
    beside.wait()
    beside.forget()
    assert beside.result() is None
    beside.begin(1000.0)
    beside.wait()
    assert beside.result() == store.solutions.generation()
    store.close()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library gives memory back by itself")
def test_memory_that_a_publication_took_goes_back_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves lies among what is free, so the C library would keep that for good."""
    kept = []

    def takes(*args: object, **options: object) -> None:
        rows = [bytes(2000) for _ in range(30_000)]
        kept.extend(rows[::1000])

    monkeypatch.setattr(publishing, "publish", takes)
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    before = resident_kib()
    beside.begin(1000.0)
    beside.wait()
    assert beside.result() == store.solutions.generation()
    assert resident_kib() - before < 16 << 10
    store.close()


def resident_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def test_the_loop_does_not_wait_for_the_thread_that_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lock of the tables and most of the interpreter: what can wait for its end does."""
    go = threading.Event()

    def publishes(*args: object, **options: object) -> None:
        with publishing_lock(tmp_path / "locks"):
            started.set()
            go.wait(20)

    started = threading.Event()
    monkeypatch.setattr(publishing, "publish", publishes)
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    upkeep = Upkeep(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}), quiet=False)
    switch_s = sys.getswitchinterval()
    began_s = time.monotonic()
    upkeep.look(1000.0, at_once=True, rests=True, ours={})
    assert started.wait(10)
    assert sys.getswitchinterval() < switch_s  # else the loop waits for 5 ms at each call of SQLite
    upkeep.look(100_000.0, at_once=True, rests=True, ours={})
    assert (upkeep.trouble, time.monotonic() - began_s < 0.9) == (
        "",
        True,
    )  # of the second that it may wait for the lock
    go.set()
    upkeep.publishing.wait()
    upkeep.look(200_000.0, at_once=True, rests=True, ours={})
    assert (upkeep.trouble, upkeep.generation) == ("", store.solutions.generation())
    assert sys.getswitchinterval() == switch_s
    store.close()


@pytest.mark.parametrize("in_the_foreground", [False, True])
def test_a_service_alone_says_that_problems_wait_for_a_daemon_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, in_the_foreground: bool
) -> None:
    """`gemmtuned tune` runs for one kind of device after another: those of the next were told to start a daemon."""
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=1000.0)
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    upkeep = Upkeep(store, settings, quiet=in_the_foreground)
    upkeep.look(1000.0, at_once=True, rests=True, ours={"cpu-of-mine": replace(NEW, device=MINE)})
    upkeep.publishing.wait()
    store.close()
    assert ("not ours to tune problems=1" in caplog.text) is not in_the_foreground


@pytest.mark.parametrize("spoken", [False, True])
def test_problems_of_a_device_whose_worker_has_not_spoken_are_not_said_to_be_for_another_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, spoken: bool
) -> None:
    """A GPU's worker had said its versions, the CPU's was to start: the log told to start a daemon for the CPU."""
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=1000.0)
    upkeep = Upkeep(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}), quiet=False)
    here = {"cpu-of-mine": replace(NEW, device=MINE), NEW.device.key: OLD if spoken else None}
    upkeep.look(1000.0, at_once=True, rests=True, ours=here)
    upkeep.publishing.wait()
    store.close()
    assert ("not ours to tune" in caplog.text) == spoken and bool(upkeep.elsewhere) == spoken


def test_after_a_slow_publication_the_loop_does_not_make_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes long for an fsync, and few solutions."""
    threads = []

    def publishes(*args: object, **options: object) -> None:
        threads.append(threading.current_thread())
        time.sleep(0.3 if len(threads) == 1 else 0.0)

    monkeypatch.setattr(publishing, "publish", publishes)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    for _ in range(3):
        beside.begin(1000.0)
        beside.wait()
        assert beside.result() == store.solutions.generation()
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False, True], "the second one was quick"
    store.close()


def test_without_a_thread_to_be_had_the_loop_does_it_itself_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TasksMax= of a service, pids.max of a container: the daemon ended with a traceback."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    with monkeypatch.context() as none, caplog.at_level("WARNING", "gemmtuned"):
        none.setattr(threading.Thread, "start", start)
        beside.begin(1000.0)
        with pytest.raises(StoreError, match="no thread to be had"):
            Examination(store.path).result()
        watch = Watch(tmp_path, store.path)
        with Lookout(SimpleNamespace(has_workers=False), SimpleNamespace()) as lookout, lookout.turn():  # type: ignore[arg-type]
            pass
        watch.close()
    assert beside.result() == store.solutions.generation()
    assert caplog.text.count("no thread to be had") == 5
    store.close()
