"""A disk that takes a second for each fsync holds up the daemon's turns, and nothing that others wait for."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from daemon_home import HERE, Home
from fakes import ENVIRONMENT, solution

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.status_file import read_notice

SLOW_MS = 1000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("library") / "slow_sync.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(HERE / "slow_sync.c"), "-ldl"], check=True
    )
    return built


class Held:
    """A daemon whose worker measures for half a minute, and whose turn publishes at a second for each fsync."""

    def __init__(self, folder: Path, library: Path, patch: pytest.MonkeyPatch) -> None:
        self._slow, self.busy = folder / "ms", folder / "busy"
        self._slow.write_text("0")
        self.signs = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.signs.bind(str(folder / "notify"))
        self.signs.setblocking(False)
        self.home = Home(folder / "home")
        self.home.see(Problem(m=8, n=37, k=64))
        with patch.context() as of_daemon:
            for name, value in (
                ("LD_PRELOAD", library), ("SLOW_SYNC", self._slow), ("NOTIFY_SOCKET", folder / "notify"),
                ("WATCHDOG_USEC", 300_000),
            ):  # fmt: skip
                of_daemon.setenv(name, str(value))
            self.daemon = self.home.start("--busy-file", str(self.busy))
        self.home.until("tuning")
        notice = read_notice(self.home.folder)
        assert notice is not None
        self.worker = psutil.Process(notice["seats"][0]["worker_pid"])
        self._slow.write_text(str(SLOW_MS))
        found = [solution(Problem(m=8, n=8, k=64))]
        self.home.store.solutions.install(None, found, environment=ENVIRONMENT, now_s=time.time())
        self._until(lambda: any(self.home.settings.config_dir.glob(".*.tmp")), 10.0)

    def is_held_up(self) -> bool:
        return read_manifest(self.home.settings.config_dir) is None

    def worker_is_gone(self, within_s: float) -> None:
        self._until(lambda: not self.worker.is_running() or self.worker.status() == psutil.STATUS_ZOMBIE, within_s)

    def _until(self, what: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not what():
            assert time.monotonic() < end
            time.sleep(0.01)

    def be_quick(self) -> None:
        self._slow.write_text("0")

    def beats(self) -> int:
        """Signs of life since the last time."""
        count = 0
        try:
            while True:
                count += self.signs.recv(4096).startswith(b"WATCHDOG=1")
        except BlockingIOError:
            return count

    def close(self) -> None:
        if self.daemon.poll() is None:
            self.daemon.kill()
        self.daemon.communicate()
        self.home.store.close()
        self.signs.close()


@pytest.fixture
def held(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(tmp_path, library, monkeypatch)
    yield held
    held.close()


@pytest.mark.timed
@pytest.mark.parametrize("why", ["busy", "SIGTERM"])
def test_the_worker_leaves_though_its_daemon_waits_for_the_disk(held: Held, why: str) -> None:
    """Meanwhile the service manager gets its signs of life; the lease is given back, and nobody is to blame."""
    assert held.is_held_up()
    held.beats()
    if why == "busy":
        held.busy.touch()
    else:
        held.daemon.send_signal(signal.SIGTERM)
    held.worker_is_gone(0.8)
    time.sleep(0.4)
    assert held.is_held_up(), "the turn ended by itself"
    assert held.beats() >= 2
    held.be_quick()
    if why == "busy":
        held.home.until("waiting")
        held.daemon.send_signal(signal.SIGTERM)
    _, said = held.daemon.communicate(timeout=20)
    assert held.daemon.returncode == 143 and "worker died" not in said, said
    assert held.home.rows("SELECT owner, attempts FROM work") == [(None, 0)]
    assert not held.is_held_up(), "what was begun was published"
