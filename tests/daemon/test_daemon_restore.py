"""A store that was lost, damaged or replaced by an older one: what is published stays, and comes back into it."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import DEVICE, ENVIRONMENT, NEWER, solution
from store_cases import new_file

from gemmtuned._testing import faults
from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.manifest import MANIFEST, read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store

NOW = 1_800_000_000.0
BESIDE = text_of({"vllm_cutlass": Peer("0.32.0", 1.1)})


class Home:
    """A store, its published tables, and a clock that goes on by a minute with every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder, self.locks, self.db = path / "configs", path / "locks", path / "tune.db"
        self.now_s = NOW
        self.store = self.open()

    def open(self) -> Store:
        self.store = Store(new_file(self.db), locks=self.locks)
        return self.store

    def tick(self) -> float:
        self.now_s += 60.0
        return self.now_s

    def install(self, *sizes: int, environment: Environment = ENVIRONMENT, **columns: object) -> None:
        found = [replace(solution(problem(n), environment), **columns) for n in sizes]  # type: ignore[arg-type]
        self.store.solutions.install(None, found, environment=environment, now_s=self.tick())

    def publish(self, **options: bool) -> int:
        manifest = publish(self.store, self.folder, self.locks, now_s=self.tick(), **options)
        assert manifest is not None
        return manifest.generation

    def in_use(self) -> list[int]:
        return sorted(s.problem.n for s in self.published())

    def published(self) -> list[Solution]:
        manifest = read_manifest(self.folder)
        assert manifest is not None
        return [s for file in manifest.files for s in read_table(self.folder, file)[0]]

    def in_store(self) -> list[int]:
        return sorted(s.problem.n for s in self.store.solutions.published()[1])

    def lose(self) -> None:
        """What `rm tune.db*` does."""
        self.store.close()
        for path in self.path.glob("tune.db*"):
            path.unlink()
        self.open()

    def replace(self, copy: Path) -> None:
        self.store.close()
        for end in ("-wal", "-shm"):
            (self.path / f"tune.db{end}").unlink(missing_ok=True)
        shutil.copyfile(copy, self.db)
        self.open()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.store.close()


def problem(n: int = 64) -> Problem:
    return Problem(m=8, n=n, k=64)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_store_that_was_deleted_gets_all_back_and_nothing_is_published_anew(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(64, 69):
        home.install(n)
    home.install(69, beside=BESIDE)
    home.install(64, environment=NEWER)
    generation = home.publish()
    before = files(home.folder)
    home.lose()

    with caplog.at_level(logging.INFO):
        assert home.publish() == generation

    assert files(home.folder) == before
    assert "taken back from published tables" in caplog.text and "solutions=7" in caplog.text
    assert home.in_store() == [64, 64, 65, 66, 67, 68, 69]
    assert [s.problem.n for s in home.store.solutions.published()[1] if s.beside == BESIDE] == [69]
    assert home.store.solutions.generation() == generation
    assert home.store.check() == []
    with sqlite3.connect(home.db) as conn:  # with its device and environments as they were
        assert conn.execute("SELECT key, name, units FROM device").fetchall() == [(DEVICE.key, "planted", 2)]
        assert {key for (key,) in conn.execute("SELECT key FROM environment")} == {ENVIRONMENT.key, NEWER.key}


def test_what_a_new_store_found_meanwhile_is_kept_beside_and_wins(home: Home) -> None:
    home.install(64, 65, 66)
    generation = home.publish()
    home.lose()
    home.install(65, us=10.0)
    home.install(70)

    assert home.publish() > generation
    assert home.in_use() == [64, 65, 66, 70]
    assert next(s.us for s in home.published() if s.problem.n == 65) == 10.0


def test_an_older_copy_takes_back_what_came_and_lets_go_what_went_since(home: Home) -> None:
    home.install(64)
    home.install(65)
    home.publish()
    copy = home.store.backup(home.path / "copy.db")
    home.install(66)
    home.store.solutions.withdraw([problem(64)], reason="wrong", now_s=home.tick())
    home.store.curation.pin([problem(65)], now_s=home.tick())
    generation = home.publish()
    home.replace(copy)

    assert home.publish() == generation
    assert home.in_use() == home.in_store() == [65, 66]
    assert {s.problem.n: s.state for s in home.published()} == {65: "pinned", 66: "published"}


def test_an_older_copy_that_has_gone_on_counting_is_noticed(home: Home) -> None:
    """Its own count reached that of the tables, which it does not know."""
    home.install(64)
    home.publish()
    copy = home.store.backup(home.path / "copy.db")
    for n in (65, 66):
        home.install(n)
    home.store.solutions.withdraw([problem(64)], reason="wrong", now_s=home.tick())
    generation = home.publish()
    home.replace(copy)
    for n in (70, 71, 72, 73):
        home.install(n)

    assert home.store.solutions.generation() >= generation
    after = home.publish()
    assert after > generation
    assert home.in_use() == home.in_store() == [65, 66, 70, 71, 72, 73]
    assert home.publish() == after


def test_rows_that_salvage_lost_come_back(home: Home) -> None:
    home.install(64, 65, 66)
    home.install(67)
    generation = home.publish()
    with sqlite3.connect(home.db) as conn:
        conn.execute("DELETE FROM solution WHERE id IN (1, 3)")

    assert home.publish() == generation
    assert home.in_use() == home.in_store() == [64, 65, 66, 67]


def test_what_the_store_retired_by_itself_stays_retired(home: Home) -> None:
    home.install(64, 65, 66, 67)
    home.publish()
    home.store.solutions.withdraw([problem(64)], reason="wrong", now_s=home.tick())
    home.store.curation.forget([problem(65)], now_s=home.tick())
    home.install(66, us=20.0)
    home.publish()
    assert home.in_use() == [66, 67]


def test_environments_that_cannot_be_told_cost_no_solution(home: Home) -> None:
    """Tables of a version before this one name none; two builds of one backend live side by side."""
    home.install(64, backend="fast", stamp="1")
    home.install(64, backend="torch", stamp="2", state="default_best", environment=NEWER)
    home.publish()
    path = home.folder / MANIFEST
    raw = json.loads(path.read_text())
    del raw["environments"], raw["store_us"]
    path.write_text(json.dumps(raw))
    home.lose()

    home.publish()
    assert home.in_use() == home.in_store() == [64, 64]


def test_tables_that_cannot_be_read_of_a_lost_store_stop_publishing(home: Home) -> None:
    home.install(64, 65)
    generation = home.publish()
    next(home.folder.glob("*.jsonl")).write_text("{}\n")
    before = files(home.folder)
    home.lose()
    home.install(66)

    for _ in range(2):
        with pytest.raises(TableError, match=r"2 solutions of generation 1 cannot be read .* --give-up"):
            home.publish()
    assert files(home.folder) == before

    assert home.publish(give_up=True) == generation + 1
    assert home.in_use() == [66]
    home.install(67)
    home.publish()
    assert home.in_use() == [66, 67]


def test_without_a_manifest_that_can_be_read_the_tables_themselves_are_taken(home: Home) -> None:
    for n in (64, 65, 66):
        home.install(n)
        generation = home.publish()
    (home.folder / MANIFEST).write_text((home.folder / MANIFEST).read_text()[:-10])
    home.lose()

    assert home.publish() > generation
    assert home.in_use() == home.in_store() == [64, 65, 66]


@pytest.mark.parametrize("number", [2**63, 2**53 + 1, -1, True, 1.5, "7"])
def test_a_manifest_with_a_number_that_cannot_be_is_written_anew(home: Home, number: object) -> None:
    home.install(64)
    home.publish()
    raw = json.loads((home.folder / MANIFEST).read_text())
    (home.folder / MANIFEST).write_text(json.dumps({**raw, "generation": number}))
    with pytest.raises(TableError, match="expected an integer of 0 to"):
        read_manifest(home.folder)

    home.publish()
    assert home.in_use() == [64]
    assert home.store.solutions.generation() < 2**53


def test_a_row_that_is_none_of_ours_costs_that_row(home: Home) -> None:
    home.install(64, 65)
    home.publish()
    manifest = read_manifest(home.folder)
    assert manifest is not None
    from gemmtuned.configs.manifest import table_file

    text = (home.folder / manifest.files[0].name).read_text().replace('"us":50.0', '"us":0', 1)
    file = table_file("dense-cpu-planted", text.encode())
    (home.folder / file.name).write_text(text)
    raw = json.loads((home.folder / MANIFEST).read_text())
    raw["files"] = [{"name": file.name, "sha256": file.sha256, "rows": file.rows}]
    (home.folder / MANIFEST).write_text(json.dumps(raw))
    home.lose()

    home.publish()
    assert home.in_use() == home.in_store() and len(home.in_use()) == 1


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_publishing_that_fails_at_any_step_leaves_a_table_and_mends_itself(home: Home, error: str) -> None:
    home.install(64)
    home.publish()
    home.install(65)
    fails = 0
    for number in range(1, 40):
        home.install(66 + number)
        with faults.armed(f"*={number}:{error}") as passed:
            try:
                home.publish()
            except GemmtunedError:
                fails += 1
        assert home.in_use() in (home.in_store(), home.in_store()[:-1])
        home.publish()
        assert home.in_use() == home.in_store()
        if len(passed) < number:
            break
    assert fails >= 8 and len(passed) < number
    assert list(home.folder.glob(".*.tmp")) == []


@pytest.mark.parametrize("field", ["rows", "sha256"])
def test_a_table_that_is_whole_is_taken_whatever_its_manifest_says_of_it(home: Home, field: str) -> None:
    home.install(64, 65)
    generation = home.publish()
    raw = json.loads((home.folder / MANIFEST).read_text())
    raw["files"][0][field] = {"rows": 3, "sha256": "0" * 64}[field]
    (home.folder / MANIFEST).write_text(json.dumps(raw))
    home.lose()

    assert home.publish() > generation
    assert home.in_use() == home.in_store() == [64, 65]


def test_tables_whose_manifest_is_gone_come_back_into_a_lost_store(home: Home) -> None:
    home.install(64, 65)
    home.publish()
    (home.folder / MANIFEST).unlink()
    home.lose()
    home.install(66)

    home.publish()
    assert home.in_use() == home.in_store() == [64, 65, 66]


@pytest.mark.parametrize("place", ["", "bin"])
def test_nothing_is_published_where_no_program_would_read_it(home: Home, place: str) -> None:
    home.install(64)
    generation = home.publish()
    (home.folder / place).mkdir(exist_ok=True)
    (home.folder / place).chmod(0o777)
    home.install(65)
    for _ in range(3):
        with pytest.raises(TableError, match="can be written by others"):
            home.publish()
    assert home.store.solutions.generation() == generation + 1, "and no number is used up by it"
    (home.folder / place).chmod(0o755)

    assert home.publish() == generation + 1
    assert home.in_use() == [64, 65]
