"""What somebody does to the published tables under a running daemon is mended by it, and told by the reports."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, Clock, FakeMonitor, Life, solution

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import MANIFEST, read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db.store import Store
from gemmtuned.reports.published import standing


def table(folder: Path) -> Path:
    manifest = read_manifest(folder)
    assert manifest is not None
    return folder / manifest.files[0].name


def one_row_less(folder: Path) -> None:
    raw = json.loads((folder / MANIFEST).read_text())
    raw["files"][0]["rows"] -= 1
    (folder / MANIFEST).write_text(json.dumps(raw))


def older(folder: Path) -> None:
    """The manifest of a backup, whose tables went meanwhile."""
    for path in folder.glob("*.jsonl"):
        path.unlink()
    shutil.copy(folder.parent / "backup.json", folder / MANIFEST)


DONE: dict[str, Callable[[Path], object]] = {
    "table removed": lambda folder: table(folder).unlink(),
    "table cut": lambda folder: os.truncate(table(folder), 100),
    "table open to all": lambda folder: table(folder).chmod(0o666),
    "table of another content": lambda folder: table(folder).write_text("{}\n"),
    "manifest removed": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut": lambda folder: os.truncate(folder / MANIFEST, 150),
    "manifest of another number of rows": one_row_less,
    "manifest of a backup": older,
    "all removed": shutil.rmtree,
}


class World:
    """A daemon at rest, in faked time, with 20 solutions published."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(home)})
        self.folder, self.clock = self.settings.config_dir, Clock()
        self.store = Store(self.settings.db, locks=self.settings.locks)
        found = [solution(Problem(m=8, n=64 * n, k=64)) for n in range(1, 21)]
        self.store.solutions.install(None, found[:10], environment=ENVIRONMENT, now_s=self.clock.now_s)
        self.daemon = Daemon(self.settings, self.store, [FakeMonitor()], Life(self.clock).make, now_s=self.clock.now_s)
        self.run(10)
        shutil.copy(self.folder / MANIFEST, home / "backup.json")
        self.store.solutions.install(None, found[10:], environment=ENVIRONMENT, now_s=self.clock.now_s)
        self.run(10)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.daemon.turn(self.clock.pass_s(0.5))

    def published(self) -> int:
        manifest = read_manifest(self.folder)
        assert manifest is not None and manifest.generation == self.store.solutions.generation()
        return sum(len(read_table(self.folder, file)[0]) for file in manifest.files)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    assert world.published() == 20 and standing(world.settings) is None
    yield world
    world.store.close()


@pytest.mark.parametrize("done", DONE.values(), ids=DONE)
def test_what_is_done_to_the_tables_is_told_and_mended_within_seconds(
    world: World, done: Callable[[Path], object]
) -> None:
    time.sleep(0.02)  # a file that is written within a tick of the clock has the time that it had
    done(world.folder)
    told = standing(world.settings)
    assert told is not None and "gemmtuned db publish" in told.fix

    world.run(12)
    generation = world.store.solutions.generation()
    assert world.published() == 20 and standing(world.settings) is None
    assert not world.daemon.trouble

    world.run(60)
    assert world.store.solutions.generation() == generation, "it is mended once"


def test_a_folder_that_others_may_write_is_told_and_published_into_again_when_it_is_closed(world: World) -> None:
    generation = world.store.solutions.generation()
    world.folder.chmod(0o777)
    with pytest.raises(TableError):
        world.published()
    told = standing(world.settings)
    assert told is not None and told.fix == "the command in the line" and "chmod go-w" in told.found
    world.run(60)
    assert "chmod go-w" in world.daemon.trouble
    assert world.store.solutions.generation() == generation

    world.folder.chmod(0o755)
    world.run(12)
    assert world.published() == 20 and not world.daemon.trouble


def test_a_look_at_what_lies_there_is_cheap(world: World) -> None:
    world.run(10)
    began_s = time.process_time()
    for _ in range(100):
        world.daemon.upkeep._published_folder.changed()
    assert (time.process_time() - began_s) / 100 < 2e-3
