"""No turn of the daemon's loop takes long, whatever the store holds: other devices are to be left in half a second."""

from __future__ import annotations

import time
from pathlib import Path

import large_store
import pytest
from fakes import ENVIRONMENT, Clock, FakeMonitor, Life

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db.store import Store

LONGEST_S = 0.2  # of the loop's own thread: a machine in use lets it wait for its turn on the CPU, too


@pytest.mark.long
def test_no_turn_with_ten_thousand_problems_holds_up_the_look_at_other_devices(tmp_path: Path) -> None:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    clock = Clock(time.time())
    store = Store(settings.db, locks=settings.locks)
    large_store.fill(store, ENVIRONMENT, solved=1500, backend="fast", now_s=clock.now_s)
    life = Life(clock, trial_s=0.05)
    devices = [FakeMonitor(), FakeMonitor(lambda now_s: 1.0, id="other", name="other")]
    daemon = Daemon(settings, store, devices, life.make, now_s=clock.now_s, recheck=True)
    daemon.resume(clock.now_s)

    took: list[float] = []
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        began_s = time.thread_time()
        daemon.turn(clock.now_s)
        took.append(time.thread_time() - began_s)
        clock.pass_s(daemon.pause_s)
        time.sleep(0.001)  # the thread that publishes gets its turn
        seen = read_manifest(settings.config_dir)
        if len(life.found) >= 10 and seen is not None and seen.generation >= 1510:
            break
    daemon.stop(clock.now_s)
    store.close()

    assert max(took) < LONGEST_S
    published = read_manifest(settings.config_dir)
    assert published is not None and published.generation >= 1510
    assert sum(file.rows for file in published.files) == published.generation
