"""A daemon that was told to stop where it is (SIGSTOP, Ctrl-Z): told by all who wait for it, and it goes on after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from command_line import environment
from fakes import ENVIRONMENT, FakeMonitor
from hooked import wait_for

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.work_queue import owner_name
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service import main
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db import queries
from gemmtuned.db.store import Store

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
DAEMON = Path(__file__).parents[1] / "support" / "daemon_process.py"


class Running:
    """A home with a daemon that has work for a while."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(home)})
        self.store = Store(self.settings.db, locks=self.settings.locks)
        self.see(range(1, 400))
        command = [sys.executable, str(DAEMON), str(home), "--cpus", "0", "--locks", str(home / "device-locks")]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def see(self, sizes: range) -> None:
        waiting = [Sighting(Problem(m=8, n=64 * n, k=64), "miss", 10) for n in sizes]
        self.store.sightings.add("serve", ENVIRONMENT, waiting, now_s=time.time())

    def solved(self) -> int:
        return len(queries.solutions(self.settings.db))

    def says(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemmtuned", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment(self.home), timeout=60)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "home")
    yield running
    running.process.kill()
    running.process.wait(10)
    running.store.close()


def test_a_daemon_that_is_stopped_is_named_by_all_who_wait_for_it_and_goes_on(running: Running) -> None:
    pid = running.process.pid
    wait_for(lambda: running.solved() > 3)
    running.process.send_signal(signal.SIGSTOP)
    advice = f"kill -CONT {pid}"

    assert f"daemon: pid {pid} is stopped (SIGSTOP), last heard of" in (said := running.says("status").stdout)
    assert advice in said
    checks = json.loads(running.says("doctor", "--quick", "--json").stdout)["checks"]
    daemon = next(check for check in checks if check["name"] == "daemon")
    assert daemon["result"] == "WARN" and daemon["fix"].endswith(advice)
    second = subprocess.run(
        [sys.executable, str(DAEMON), str(running.home)], capture_output=True, text=True, timeout=60
    )
    assert advice in second.stderr, second.stderr
    assert advice in DeviceLock(running.home / "device-locks", "cpu-0", "another").take()

    before = running.solved()
    running.process.send_signal(signal.SIGCONT)
    wait_for(lambda: running.solved() > before)
    assert f"pid {pid}, " in running.says("status").stdout


def test_a_daemon_that_does_not_speak_is_told_by_status(running: Running) -> None:
    wait_for(lambda: read_notice(running.home) is not None)
    running.process.kill()
    running.process.wait(10)
    notice = running.home / "daemon.json"
    silent = {"owner": owner_name(), "updated_s": time.time() - 100, "state": "tuning"}  # of this process, which lives
    notice.write_text(json.dumps(json.loads(notice.read_text()) | silent))

    assert "last spoke 1 min ago" in running.says("status").stdout


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["terminal closed", "Ctrl-C", "stopped"],
)
def test_what_a_foreground_run_has_not_reached_is_nobodys_to_tune(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        done = tuned(tmp_path, number)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert done.code == code and len(done.solutions) < 50
    assert queries.untuned(tmp_path / "tune.db") == []


@pytest.mark.usefixtures("forked_workers")
def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = tuned(tmp_path, signal.SIGHUP, problems=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.code == 0 and len(done.solutions) == 2


def tuned(home: Path, number: signal.Signals, problems: int = 50) -> main.Tuned:
    """A run that gets this signal as soon as it tunes."""
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home), "GEMMTUNED_IDLE_S": "0"})
    monitor = FakeMonitor()
    monitor.read(time.time())
    sent: list[str] = []

    def progress(done: int, total: int, doing: str) -> None:
        if "8x" in doing and not sent:
            sent.append(doing)
            os.kill(os.getpid(), number)

    request = Request(problems=[Problem(m=8, n=1000 + n, k=64) for n in range(problems)])
    make = partial(Worker, nice=0, search=SEARCH)
    done = main.tune_now(request, settings, monitors=[monitor], make_worker=make, progress=progress)
    assert sent
    return done
