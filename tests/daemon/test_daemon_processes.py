"""Real daemon processes with a real store and real workers, killed and stopped at any moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from daemon_home import HERE, Home
from fakes import ENVIRONMENT, NEWER, FakeMonitor

from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Solution
from gemmtuned.daemon.seats.work_queue import HOLD_S
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service.main import run_daemon
from gemmtuned.daemon.status_file import read_notice

SEARCH = f"{HERE / 'planted_search.py'}:tune"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    for process in home.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    home.store.close()


class Reader:
    """A program that reads the published tables all the time, and minds what it gets."""

    def __init__(self, folder: Path) -> None:
        self.complaints: list[str] = []
        self.reads = 0
        self._folder = folder
        self._generation = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.002):
            manifest = None
            try:
                manifest = read_manifest(self._folder)
                if manifest is None:
                    continue
                if manifest.generation < self._generation:
                    self.complaints.append(f"generation fell to {manifest.generation} from {self._generation}")
                self._generation = manifest.generation
                for file in manifest.files:
                    solutions, complaints = read_table(self._folder, file)
                    self.complaints += complaints
                    if len(solutions) != file.rows:
                        self.complaints.append(f"{file.name}: {len(solutions)} of {file.rows} rows")
                self.reads += 1
            except TableError as err:
                again = read_manifest(self._folder)
                if manifest is None or again == manifest:  # else it was replaced twice while we read it
                    self.complaints.append(str(err))


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def storm(home: Home, kills: int, seed: int) -> None:
    """Kill the daemon, or its worker, at random moments; then let one finish."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    wanted = [problem(1000 + i) for i in range(20 * kills)]
    home.see(*wanted)
    with Reader(home.settings.config_dir) as reader:
        usual_s = 0.0
        for number in range(kills):
            began = time.monotonic()
            daemon = home.start()
            if number == 0:  # how long this machine takes to start one today
                home.until("tuning")
                usual_s = time.monotonic() - began
            elif number % 4 == 0:  # on a machine that is slower by now the others may all be killed while they start
                home.until("tuning")
                time.sleep(rng.uniform(0, 0.2))
            else:
                time.sleep(rng.uniform(0.3, 1.0) * usual_s + rng.uniform(0, 0.2))
            notice = read_notice(home.folder) or {"seats": []}
            workers = [seat["worker_pid"] for seat in notice["seats"] if seat["worker_pid"]]
            if workers and rng.random() < 0.3:
                try:
                    os.kill(workers[0], signal.SIGKILL)
                except ProcessLookupError:
                    pass
                time.sleep(rng.uniform(0, 0.2))
            daemon.kill()
            daemon.communicate()
            held = home.rows("SELECT lease_until_us FROM work WHERE owner IS NOT NULL")
            assert all(until <= (time.time() + HOLD_S + 1) * 1e6 for (until,) in held), "held beyond its time"
            end = time.monotonic() + 2
            while any(is_running(pid) for pid in workers):
                assert time.monotonic() < end, "the worker outlived its daemon"
                time.sleep(0.01)
        assert home.store.check() == []
        before = len(home.store.solutions.published()[1])
        home.store.resume.retry_now(
            wanted
        )  # a worker killed while it tried the default makes its problem wait for minutes
        began = time.monotonic()
        last = home.start("--once")
        home.until("tuning")
        assert time.monotonic() - began < max(2.0, 3 * usual_s)
        _, said = last.communicate(timeout=300)
        assert last.returncode == 0, said
    assert reader.complaints == []
    assert reader.reads > kills / 2
    assert 0 < before < len(wanted), "the storm was over before it began, or never let anything finish"
    solved = [s.problem for s in home.store.solutions.published()[1]]
    assert sorted(map(str, solved)) == sorted(map(str, wanted))
    assert home.rows("SELECT count(*) FROM solution") == [(len(wanted),)], "something finished was tuned again"
    assert home.store.check() == []
    manifest = read_manifest(home.settings.config_dir)
    assert manifest is not None
    assert manifest.generation == home.store.solutions.generation()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_daemon_killed_eight_times_leaves_no_torn_table_and_tunes_nothing_twice(home: Home) -> None:
    storm(home, 8, seed=8)


@pytest.mark.soak
def test_a_daemon_killed_two_hundred_times_leaves_no_torn_table_and_tunes_nothing_twice(home: Home) -> None:
    storm(home, 200, seed=random.randrange(10**6))


@pytest.mark.timed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_daemon_told_to_stop_is_gone_within_two_seconds_in_the_middle_of_a_trial(
    home: Home, number: signal.Signals, code: int
) -> None:
    home.see(problem(37))
    daemon = home.start()
    home.until("tuning")
    time.sleep(0.3)
    notice = read_notice(home.folder)
    assert notice is not None
    began = time.monotonic()
    daemon.send_signal(number)
    out, said = daemon.communicate(timeout=10)
    assert time.monotonic() - began < 2.0
    assert daemon.returncode == code, said
    assert "Traceback" not in said and "worker died" not in said
    assert home.rows("SELECT outcome FROM trials WHERE backend = 'bad' AND outcome != 'ok'") == [], (
        "it was not at fault"
    )
    assert "imported in the parent: []" in out
    assert not is_running(notice["seats"][0]["worker_pid"])
    assert home.rows("SELECT owner, attempts FROM work") == [(None, 0)]
    stopped = read_notice(home.folder)
    assert stopped is not None
    assert (stopped["state"], stopped["running"]) == ("stopped", False)


@pytest.mark.timed
def test_a_busy_device_is_free_again_within_half_a_second(home: Home) -> None:
    home.see(problem(37))
    busy_since: list[float] = []
    freed: list[float] = []
    monitor = FakeMonitor(lambda now_s: 1.0 if busy_since else 0.0)

    class Watched(Worker):
        def tune(self, order):  # type: ignore[no-untyped-def]
            super().tune(order)
            timer = threading.Timer(0.37, lambda: busy_since.append(time.monotonic()))
            timer.daemon = True
            timer.start()

        def stop(self) -> bool:
            done = super().stop()
            if not is_running(self.pid):
                freed.append(time.monotonic())
            return done

    with pytest.raises(TryLater, match="no device was idle for 1 s"):
        run_daemon(
            home.settings,
            once=True,
            wait_s=1.0,
            monitors=[monitor],
            make_worker=lambda d: Watched(d, nice=0, search=SEARCH),
        )
    assert freed[0] - busy_since[0] < 0.5
    assert home.rows("SELECT owner, attempts FROM work") == [(None, 0)]
    assert {row[0] for row in home.rows("SELECT backend FROM trials")} == {"torch", "slow"}


@pytest.mark.long
def test_the_second_daemon_says_so_and_leaves(home: Home) -> None:
    home.see(problem(37))
    first = home.start()
    home.until("tuning")
    second = home.start()
    _, said = second.communicate(timeout=10)
    assert second.returncode == 0
    assert f"pid {first.pid}" in said
    third = home.start("--once")
    _, said = third.communicate(timeout=10)
    assert third.returncode == 75
    assert f"pid {first.pid}" in said
    first.kill()
    first.communicate()
    home.store.solutions.withdraw([problem(37)], reason="", now_s=time.time())
    heir = home.start()
    home.until("tuning")
    heir.terminate()
    heir.communicate(timeout=10)


@pytest.mark.long
def test_of_a_home_that_was_removed_under_its_daemon_there_is_still_one(home: Home) -> None:
    """The lock went with the home: the daemon takes the new one, or leaves where another was faster."""
    first = home.start()
    home.until("ready")
    shutil.rmtree(home.settings.home)
    home.until("ready")
    second = home.start()
    _, said = second.communicate(timeout=10)
    assert second.returncode == 0 and f"pid {first.pid}" in said
    first.send_signal(signal.SIGSTOP)
    shutil.rmtree(home.settings.home)
    third = home.start()
    home.until("ready")
    first.send_signal(signal.SIGCONT)
    _, said = first.communicate(timeout=10)
    assert first.returncode == 0
    assert (
        "the home was removed or replaced" in said and f"another daemon runs for {home.folder}: pid {third.pid}" in said
    )


@pytest.mark.long
def test_of_many_daemons_started_at_once_one_stays(home: Home) -> None:
    started = [home.start() for _ in range(4)]
    home.until("ready")
    end = time.monotonic() + 20
    while sum(p.poll() is None for p in started) > 1:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert sorted(str(p.poll()) for p in started) == ["0", "0", "0", "None"]


@pytest.mark.long
def test_once_ends_when_everything_has_a_verdict_or_failed(home: Home) -> None:
    home.see(*(problem(n) for n in (8, 17, 19, 31, 47)))
    home.see(problem(9), environment=NEWER)
    daemon = home.start("--once")
    _, said = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, said
    assert {s.problem.n for s in home.store.solutions.published()[1]} == {8, 17, 19, 31, 47}
    ends = home.rows("SELECT n, outcome FROM trials WHERE backend = 'bad' AND outcome != 'ok' ORDER BY n")
    assert ends == [(17, "crash"), (19, "killed"), (31, "crash"), (47, "slower")]
    assert said.count("worker died") == 5, "of these, the killed one twice, and none that we ended ourselves"
    assert said.count("a new worker races each candidate with torch's own kernel alone") == 1, "and none is to blame"
    assert "not ours to tune problems=1" in said


def test_once_with_nothing_to_do_ends_at_once(home: Home) -> None:
    began = time.monotonic()
    daemon = home.start("--once")
    _, said = daemon.communicate(timeout=20)
    assert daemon.returncode == 0, said
    assert time.monotonic() - began < 5


def test_a_misspelled_variable_is_named_in_the_daemons_log(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNED_IDLES", "1")
    daemon = home.start("--once")
    _, said = daemon.communicate(timeout=20)
    assert daemon.returncode == 0, said
    assert "WARNING unknown variable name=GEMMTUNED_IDLES meant=GEMMTUNED_IDLE_S" in said


def test_once_says_try_later_when_no_device_becomes_idle(home: Home) -> None:
    home.see(problem(8))
    daemon = home.start("--once", "--busy", "--wait-s", "0.5")
    _, said = daemon.communicate(timeout=20)
    assert daemon.returncode == 75
    assert "no device was idle for 0.5 s (cpu: others use 100 %)" in said
    assert "stopped exit_code=75" in said


def test_a_killed_publisher_is_healed_at_the_next_start(home: Home) -> None:
    home.store.solutions.install(None, [_planted(problem(8))], environment=ENVIRONMENT, now_s=time.time())
    daemon = home.start("--once")
    daemon.communicate(timeout=20)
    manifest = read_manifest(home.settings.config_dir)
    assert manifest is not None
    assert manifest.generation == 1


def test_a_run_that_cannot_publish_ends_and_says_why(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found stays in the database, and the next run publishes it."""
    monkeypatch.setattr("gemmtuned.daemon.service.main.WAIT_S", 1.0)
    home.see(problem(8))
    tables = home.settings.config_dir
    shutil.rmtree(tables, ignore_errors=True)
    tables.parent.mkdir(parents=True, exist_ok=True)
    tables.write_text("in the way")

    def run() -> int:
        monitors = [FakeMonitor(lambda now_s: 0.0)]
        return run_daemon(
            home.settings, once=True, monitors=monitors, make_worker=lambda d: Worker(d, nice=0, search=SEARCH)
        )

    with pytest.raises(TryLater, match=str(tables)):
        run()
    assert home.rows("SELECT owner, attempts FROM work") == []
    tables.unlink()
    assert run() == 0
    manifest = read_manifest(tables)
    assert manifest is not None and len(manifest.environments) == 1


def test_a_home_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    home = Settings.from_env({"GEMMTUNED_HOME": str(blocked / "home")})
    with pytest.raises(TableError, match="GEMMTUNED_HOME"):
        run_daemon(home, once=True)


def _planted(p: Problem) -> Solution:
    from fakes import solution

    return solution(p)
