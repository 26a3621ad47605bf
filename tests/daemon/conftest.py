"""What several files here begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_world import World
from fakes import Clock, FakeMonitor, Life
from store_cases import new_file

from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db.store import Store


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A daemon with one device, its store and fake workers, in an empty home."""
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    clock = Clock()
    store = Store(new_file(settings.db), locks=settings.locks)
    monitor = FakeMonitor()
    life = Life(clock)
    daemon = Daemon(settings, store, [monitor], life.make, now_s=clock.now_s)
    yield World(settings, clock, store, monitor, life, daemon)
    store.close()
