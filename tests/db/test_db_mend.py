"""A damaged database is built anew: killed or refused by the disk at any step, nothing that could be read is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_steps import disk_steps
from store_cases import NEW, found, look_over, open_store, problem, saw

from gemmtuned._testing import faults
from gemmtuned.configs.errors import StoreError, StoreInterrupted
from gemmtuned.db import mend, upkeep
from gemmtuned.db.files import folder_of_salvage
from gemmtuned.db.store import Store, check

T = time.time()
SHAPES = 120


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database of SHAPES counted and 20 solutions, part of it in its log, one page smashed."""
    folder = tmp_path_factory.mktemp("damaged")
    store = open_store(folder)
    shapes = [problem(1 + i, k=128) for i in range(SHAPES)]
    store.solutions.install(None, [found(p) for p in shapes[:20]], environment=NEW, now_s=T)
    store.sightings.add("r", NEW, [saw(p, 2) for p in shapes], now_s=T)
    store.checkpoint()
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        (page,) = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'session'").fetchone()
    store.sightings.add("r", NEW, [saw(p, 3) for p in shapes], now_s=T)
    shutil.copytree(folder, folder / "copy")  # with its log: closing the last connection would take it in
    store.close()
    with (folder / "copy" / "tune.db").open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)
    (folder / "copy" / "tune.db-shm").unlink()
    return folder / "copy"


@pytest.fixture
def home(damaged: Path, tmp_path: Path) -> Path:
    shutil.copytree(damaged, tmp_path / "home")
    return tmp_path / "home"


def is_whole(folder: Path) -> bool:
    """Whether the database is sound and has every call and solution."""
    store = open_store(folder)
    try:
        with contextlib.closing(sqlite3.connect(store.path)) as conn:
            calls = conn.execute("SELECT sum(calls) FROM sighting").fetchone()[0]
        return store.check() == [] and calls == 5 * SHAPES and len(store.solutions.published()[1]) == 20
    finally:
        store.close()


def repair(folder: Path) -> None:
    store = open_store(folder)
    try:
        look_over(store)
    finally:
        store.close()


def steps(folder: Path) -> int:
    """How many failpoints a salvage passes that goes well."""
    with faults.armed() as passed:
        repair(folder)
    return sum(name.startswith("salvage.") for name in passed)


def test_what_is_damaged_is_said_before_it_is_copied_and_after(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        repair(home)
    before, after = (record.getMessage() for record in caplog.records)
    assert before.startswith("store is damaged") and after.startswith("store was damaged")
    assert "lost_calls=0" in after
    assert is_whole(home)
    assert not folder_of_salvage(home / "tune.db").is_dir()


def test_what_was_salvaged_is_on_the_disk_before_it_takes_the_place_of_what_is_damaged(home: Path) -> None:
    with disk_steps() as steps:
        repair(home)
    ours = folder_of_salvage(home / "tune.db").name
    first = steps.index("synced build.db")
    steps = [step for step in steps[first:] if not step.startswith("tune.db-")]  # but for the damaged one's log

    assert steps[:6] == [
        "synced build.db", "synced report.json", "build.db -> new.db", f"synced {ours}", "new.db -> tune.db",
        "synced home",
    ]  # fmt: skip


def cut(folder: Path, table: str, *, before: bool) -> None:
    """Cut a database of 300 calls off after the first page of this table, or before it."""
    store = open_store(folder)
    store.sightings.add("r", NEW, [saw(problem(), 300)], now_s=T)
    store.checkpoint()
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "tune.db")) as conn:
        (page,) = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    os.truncate(folder / "tune.db", (page - before) * 4096 + 100)


@pytest.mark.parametrize(
    ("table", "before", "left", "said"),
    [
        ("sighting", False, 300, "lost_calls=0"),
        ("sighting", True, 0, "lost_calls=300"),
        ("demand", True, 0, "lost_calls=0 more_lost=unknown"),
    ],
)
def test_what_is_left_of_a_file_that_was_cut_is_read_and_the_rest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str, before: bool, left: int, said: str
) -> None:
    cut(tmp_path, table, before=before)
    with caplog.at_level(logging.WARNING):
        repair(tmp_path)

    assert caplog.messages[-1].endswith(said)
    with contextlib.closing(sqlite3.connect(tmp_path / "tune.db")) as conn:
        assert conn.execute("SELECT total(calls) FROM sighting").fetchone() == (left,)
    assert check(tmp_path / "tune.db") == []


ERRORS = ("EIO", "ENOSPC", "EACCES")


@pytest.mark.parametrize(
    ("error", "first", "every"),
    [*((error, 1 + i, 3) for i, error in enumerate(ERRORS))]
    + [pytest.param(error, 1, 1, marks=pytest.mark.soak) for error in ERRORS],
)
def test_each_step_may_fail_and_the_next_try_ends_it(
    damaged: Path, tmp_path: Path, error: str, first: int, every: int
) -> None:
    shutil.copytree(damaged, tmp_path / "well")
    count = steps(tmp_path / "well")
    assert count >= 12
    for number in range(first, count + 1, every):
        folder = tmp_path / f"{number}"
        shutil.copytree(damaged, folder)
        with faults.armed(f"salvage.*={number}:{error}"), contextlib.suppress(StoreError):
            repair(folder)
        repair(folder)
        assert is_whole(folder), number
        assert not folder_of_salvage(folder / "tune.db").is_dir()
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_each_step_loses_nothing(damaged: Path, tmp_path: Path) -> None:
    shutil.copytree(damaged, tmp_path / "well")
    count = steps(tmp_path / "well")
    for number in range(1, count + 1):
        folder = tmp_path / f"{number}"
        shutil.copytree(damaged, folder)
        killed(folder, f"salvage.*={number}:kill")
        assert (folder / "tune.db").exists() or folder_of_salvage(folder / "tune.db").is_dir()
        repair(folder)
        assert is_whole(folder), number
        store = open_store(folder)
        assert store.was_cut_short() is False or look_over(store) == []
        store.close()
        shutil.rmtree(folder)


def killed(folder: Path, rules: str) -> None:
    pid = os.fork()
    if pid == 0:
        with faults.armed(rules):
            repair(folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_was_written_since_a_kill_is_not_thrown_away_for_what_was_built_before(home: Path) -> None:
    killed(home, "salvage.rename_log=kill")
    assert (home / ".salvage-tune.db" / "new.db").exists()
    with (home / "tune.db-wal").open("ab") as file:
        file.write(b"more")

    repair(home)
    assert is_whole(home)


def test_no_room_is_said_before_anything_is_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mend, "free_bytes", lambda folder: 1 << 10)
        with pytest.raises(StoreError, match=r"disk full.*Free space"):
            repair(home)
    assert {p.name for p in home.iterdir()} <= {"locks", "tune.db", "tune.db-wal", "tune.db-shm"}
    repair(home)
    assert is_whole(home)


def test_told_to_stop_it_ends_at_once_and_leaves_the_file(home: Path) -> None:
    def stop() -> None:
        raise StoreInterrupted("told to stop")

    store = Store(home / "tune.db", locks=home / "locks", beat=stop)
    with pytest.raises(StoreInterrupted):
        look_over(store)
    store.close()
    assert not folder_of_salvage(home / "tune.db").is_dir()
    repair(home)
    assert is_whole(home)


def test_files_set_aside_are_bounded(home: Path, damaged: Path) -> None:
    for _ in range(mend.KEEP + 2):
        shutil.copy(damaged / "tune.db", home / "tune.db")
        (home / "tune.db-wal").unlink(missing_ok=True)
        repair(home)
    kept = [one for one in mend.leftovers(home / "tune.db") if one.kind == mend.SET_ASIDE]
    assert len(kept) == mend.KEEP
    assert all(one.size_bytes > 0 for one in kept)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE VIEW my_report AS SELECT * FROM problem",
        "CREATE INDEX mine ON sighting (calls)",
        "CREATE TRIGGER mine AFTER INSERT ON problem BEGIN SELECT 1; END",
        "CREATE TABLE mine (a)",
        "CREATE TABLE mine (a); ANALYZE",
    ],
)
def test_what_an_operator_adds_is_no_damage(tmp_path: Path, sql: str) -> None:
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.executescript(sql)
    assert store.check() == [] and look_over(store) == []
    assert look_over(store) == []
    store.close()
    assert list(tmp_path.glob("*corrupt*")) == []


def test_a_table_of_an_operators_that_needs_his_own_functions_and_modules_is_no_damage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.create_function("his", 1, lambda x: x, deterministic=True)
        conn.executescript("CREATE TABLE mine (a CHECK (his(a))); INSERT INTO mine VALUES (1)")
    assert look_over(store) == []
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        (page,) = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sighting'").fetchone()
    store.checkpoint()
    store.close()
    with (tmp_path / "tune.db").open("r+b") as file:  # what is ours is looked at all the same
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)
    assert look_over(store) != []
    assert store.check() == []
    store.close()


def test_a_rule_of_ours_that_a_flipped_byte_broke_is_damage(tmp_path: Path) -> None:
    """SQLite calls it an unknown function, the caller's mistake: neither corrupt nor anything else of the file's."""
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    store.checkpoint()
    store.close()
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute("VACUUM")  # else the first such text may be of a page that is free
    data = bytearray((tmp_path / "tune.db").read_bytes())
    data[data.index(b"length(text) <= 512")] = ord("k")
    (tmp_path / "tune.db").write_bytes(bytes(data))

    assert look_over(store) == ["its tables or views are not as gemmtuned made them"]
    assert store.check() == []
    store.sightings.add("r", NEW, [saw(problem(16))], now_s=T)
    store.close()


def test_one_value_of_the_wrong_type_costs_that_value(tmp_path: Path) -> None:
    """A byte says of which type a value is; all counts of a device refer to its one row."""
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem(), 7)], now_s=T)
    store.checkpoint()
    store.close()
    data = bytearray((tmp_path / "tune.db").read_bytes())
    at = data.index(b"cpu-testcpuTest CPUx86_64\x04")
    data[at - 1] = 0x0F  # of `units`: a text of one byte, not a number of one byte
    (tmp_path / "tune.db").write_bytes(bytes(data))

    assert look_over(store) != []
    assert store.check() == []
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        assert conn.execute("SELECT sum(calls) FROM demand").fetchone() == (7,)
        assert conn.execute("SELECT key, units FROM device").fetchone() == ("cpu-test", 0)
    store.sightings.add("r", NEW, [saw(problem(), 7)], now_s=T)
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        assert conn.execute("SELECT key, units FROM device").fetchall() == [("cpu-test", 4)]
    store.close()


@pytest.mark.parametrize("sql", ["DROP VIEW trials", "DROP INDEX hint_by_problem", "DROP TABLE session"])
def test_what_is_missing_of_ours_is_damage(tmp_path: Path, sql: str) -> None:
    store = open_store(tmp_path)
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute(sql)
    assert look_over(store) == ["its tables or views are not as gemmtuned made them"]
    assert store.check() == []
    store.close()


ERRORS: dict[str, Callable[[], BaseException]] = {
    "I/O": lambda: _coded("disk I/O error", sqlite3.SQLITE_IOERR),
    "cannot open": lambda: _coded("unable to open database file", sqlite3.SQLITE_CANTOPEN),
    "no memory": MemoryError,
}


def _coded(text: str, code: int) -> sqlite3.OperationalError:
    err = sqlite3.OperationalError(text)
    err.sqlite_errorcode = code
    return err


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_a_disk_that_does_not_answer_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> None:
    store = open_store(tmp_path)
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)

    def fails(*args: object, **more: object) -> None:
        raise error()

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_decode", fails)
        with pytest.raises(StoreError, match="cannot be looked at now"):
            look_over(store)
        assert "cannot be looked at now" in check(store.path)[0]
    assert look_over(store) == []
    store.close()
    assert list(tmp_path.glob("*corrupt*")) == []


def test_what_was_wrong_in_one_look_alone_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = open_store(tmp_path), upkeep.findings
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    unread, page = ["Page 41: unable to get the page. error code=8458"], ["Page 7: x"]
    said = [unread, page, page, ["Page 9: x"], ["malformed"]]

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "findings", lambda conn: said.pop(0) if said else real(conn))
        with pytest.raises(StoreError, match="the disk refused a page"):
            upkeep.damage(store.path)
        assert upkeep.damage(store.path) == ["Page 7: x"], "told twice"
        with pytest.raises(StoreError, match="two looks differ"):
            upkeep.damage(store.path)
        said[:] = [["damaged: database disk image is malformed"]]
        assert look_over(store) == []
    store.close()
    assert list(tmp_path.glob("*corrupt*")) == []


def test_one_read_that_the_disk_refuses_sets_nothing_aside(tmp_path: Path) -> None:
    store, told = open_store(tmp_path), [_coded("database disk image is malformed", sqlite3.SQLITE_CORRUPT)]

    def work(conn: sqlite3.Connection) -> int:
        if told:
            raise told.pop()
        return int(conn.execute("SELECT 7").fetchone()[0])

    assert store._db.read(work) == 7
    store.close()
    assert list(tmp_path.glob("*corrupt*")) == []


def test_a_look_at_every_page_ends_when_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def forever(conn: sqlite3.Connection, stop: object) -> None:
        began.set()
        conn.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n").fetchall()

    repair(home)
    monkeypatch.setattr(upkeep, "_decode", forever)
    examination = upkeep.Examination(home / "tune.db")
    assert began.wait(20) and examination.result() is None
    start = time.monotonic()
    examination.stop()
    assert time.monotonic() - start < 1.0
    with pytest.raises(StoreError, match="not looked at to the end"):
        examination.result()


@pytest.fixture(autouse=True)
def no_child_survives() -> Iterator[None]:
    yield
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
