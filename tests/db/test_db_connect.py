"""The file under trouble: forked, deleted, locked, damaged, full, read-only, too new, somebody else's."""

import contextlib
import logging
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_steps import disk_steps
from forked_child import in_child
from store_cases import NEW, add, open_store, problem, saw

from gemmtuned.configs.errors import StoreBusy, StoreError
from gemmtuned.configs.sighting import Session
from gemmtuned.db import connect, handle, migrations, queries
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.lockfile import LockFile
from gemmtuned.db.store import Store, check

T = time.time()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = open_store(tmp_path)
    yield one
    one.close()


def calls(store: Store) -> int:
    return sum(row["calls"] for row in queries.coverage(store.path))


# --- opening ---


@pytest.mark.parametrize("damaged", [False, True])
def test_opening_a_made_database_imports_no_sqlite_utils_and_no_pandas(
    tmp_path: Path, store: Store, damaged: bool
) -> None:
    """Nor does building one anew; what an upgrade needs takes most of a second of CPU time."""
    code = (
        "import sys; from pathlib import Path; from gemmtuned.db import queries; from gemmtuned.db.store import Store; "
        "f = Path(sys.argv[1]); s = Store(f / 'tune.db', locks=f / 'locks'); "
        "s.solutions.generation(); queries.coverage(s.path); "
        "print([m for m in ('sqlite_utils', 'pandas', 'torch') if m in sys.modules])"
    )
    if damaged:
        store.close()
        store.path.write_bytes(bytes(range(256)) * 200)
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)

    assert said.stdout == "[]\n" and (said.stderr == "" or (damaged and "store was damaged" in said.stderr)), (
        said.stderr
    )
    assert any(tmp_path.glob("tune.db.corrupt-*")) == damaged


def test_a_missing_database_is_made_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such database"):
        open_store(tmp_path / "none", create=False)
    assert not (tmp_path / "none" / "tune.db").exists()


def test_the_file_is_shared_with_the_group_only_where_its_folder_is(tmp_path: Path) -> None:
    for name, folder_mode, mode in (("mine", 0o755, 0o600), ("ours", 0o2770, 0o660)):
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(folder_mode)
        store = open_store(folder)
        add(store)
        for file in ("tune.db", "tune.db-wal", "locks/tune.db.lock"):
            if file != "locks/tune.db.lock":
                assert stat.S_IMODE((folder / file).stat().st_mode) == mode, file
        store.close()


def test_a_newer_schema_is_read_but_not_written(tmp_path: Path, store: Store) -> None:
    add(store, 5)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute(f"PRAGMA user_version = {migrations.SCHEMA + 1}")

    with pytest.raises(StoreError, match=rf"schema {migrations.SCHEMA + 1}, this gemmtuned knows .*Upgrade gemmtuned"):
        open_store(tmp_path)
    assert calls(store) == 5


ASKED: dict[str, Callable[[Path], object]] = {
    "solutions": queries.solutions,
    "look_up": lambda path: queries.explain(path, problem()),
    "frame": lambda path: queries.frame(path, "solutions"),
}


@pytest.mark.parametrize("newer", [True, False], ids=["newer", "ours"])
@pytest.mark.parametrize("what", list(ASKED))
def test_a_view_that_is_gone_is_no_damage_in_a_newer_schema(store: Store, what: str, newer: bool) -> None:
    """Its own daemon would have to be upgraded, and not this one be started."""
    add(store, 5)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as conn:
        conn.execute("DROP VIEW solutions")
        conn.execute("DROP VIEW unit")
        conn.execute(f"PRAGMA user_version = {migrations.SCHEMA + newer}")

    with pytest.raises(StoreError) as err:
        ASKED[what](store.path)
    said = str(err.value)
    assert ("Upgrade gemmtuned here" in said) == newer and ("builds the database anew" in said) == (not newer), said
    assert str(store.path) in said and "no such table" in said


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "tune.db")) as conn:
        conn.execute("CREATE TABLE photos (name)")
    before = (tmp_path / "tune.db").read_bytes()

    with pytest.raises(StoreError, match="another program"):
        open_store(tmp_path)
    assert (tmp_path / "tune.db").read_bytes() == before


def test_a_failing_step_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "0003_bad.sql"
    bad.write_text("CREATE TABLE half (a) STRICT;\nCREATE TABLE problem (a INTEGER) STRICT;\n")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, bad))
    with pytest.raises(StoreError):
        open_store(tmp_path)
    monkeypatch.undo()

    store = open_store(tmp_path)
    add(store)
    assert store.check() == []
    store.close()


def test_statements_are_split_at_their_ends_only() -> None:
    table = "-- a; b\nCREATE TABLE t (a TEXT DEFAULT ';');\n"
    script = table + "CREATE TRIGGER g AFTER INSERT ON t BEGIN\n DELETE FROM t;\nEND;\n"

    assert [s.split()[-1] for s in migrations.statements(script)] == ["';');", "END;"]


def test_a_link_to_the_database_is_the_database(tmp_path: Path, store: Store) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "tune.db"
    link.symlink_to(store.path)
    linked = Store(link, locks=tmp_path / "locks")
    add(linked, 3)
    add(store, 4)
    linked.close()

    assert calls(store) == sum(row["calls"] for row in queries.coverage(link)) == 7
    assert sorted(f.name for f in (tmp_path / "links").iterdir()) == ["tune.db"]


# --- locks ---


def test_a_locked_database_is_busy_within_the_timeout_and_the_batch_can_be_given_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, timeout_s=0.25)
    other = LockFile(tmp_path / "locks" / "tune.db.lock")
    assert other.acquire(1)
    start = time.monotonic()
    with pytest.raises(StoreBusy, match=r"locked by another process for 0.25 s"):
        add(store)
    assert time.monotonic() - start < 1
    other.release()
    other.close()

    conn = sqlite3.connect(store.path, isolation_level=None)  # one who knows nothing of the lock file
    conn.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        add(store)
    conn.execute("ROLLBACK")
    conn.close()
    add(store)
    assert calls(store) == 1
    store.close()


def test_threads_of_one_program_share_a_store(store: Store) -> None:
    threads = [threading.Thread(target=lambda: [add(store) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert calls(store) == 400


def test_a_large_log_is_cut_by_its_writer_and_by_a_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wal = store.path.with_name("tune.db-wal")
    add(store)
    assert wal.stat().st_size > 0
    store.checkpoint()
    assert wal.stat().st_size == 0

    monkeypatch.setattr(handle, "MAX_WAL_BYTES", 200_000)
    for _ in range(200):
        add(store)
        assert wal.stat().st_size < 250_000


def test_a_reader_in_the_way_of_a_checkpoint_is_not_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store)
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sighting").fetchall()
    monkeypatch.setattr(handle, "MAX_WAL_BYTES", 0)

    start = time.monotonic()
    add(store)
    assert time.monotonic() - start < 1
    reader.close()


def test_a_reader_that_stays_does_not_let_programs_fill_the_disk(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their counts stay in memory above a length of the log; the daemon, which writes little, goes on and says why."""
    monkeypatch.setattr(handle, "MAX_WAL_BYTES", 0)
    monkeypatch.setattr(handle, "LONG_LOG_BYTES", 256 << 10)
    guest = GuestStore(store.path, locks=tmp_path / "locks", timeout_s=1.0)
    add(guest)
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sighting").fetchall()
    log, written = store.path.with_name("tune.db-wal"), 1
    with pytest.raises(StoreBusy, match=r"tune.db-wal: more than 0 MiB, for a program has been reading"):
        while written < 1000:
            add(guest, m=8 * written)
            written += 1
    assert 256 << 10 < log.stat().st_size < 1 << 20
    with caplog.at_level(logging.WARNING):
        add(store)
        add(store)
    assert [r.getMessage().split(" path=")[0] for r in caplog.records] == ["log grows"]
    guest.at_end()
    add(guest)
    reader.close()
    guest.close_between_uses()
    add(GuestStore(store.path, locks=tmp_path / "locks", timeout_s=1.0))
    assert calls(store) == written + 4
    assert not log.exists() or log.stat().st_size < 256 << 10


@pytest.mark.parametrize("room", [True, False])
def test_what_a_program_counted_last_is_written_however_long_the_log_is_while_the_disk_has_room(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr(handle, "MAX_WAL_BYTES", 0)
    monkeypatch.setattr(connect, "LAST_LOG_BYTES", 1)
    monkeypatch.setattr(handle, "LAST_ROOM_BYTES", 0 if room else 1 << 62)
    add(store)
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sighting").fetchall()
    add(store)
    guest = GuestStore(store.path, locks=tmp_path / "locks", timeout_s=1.0)
    guest.at_end()
    if room:
        add(guest)
    else:
        with pytest.raises(StoreBusy, match="more than 0 MiB"):
            add(guest)
    reader.close()
    guest.close_between_uses()

    assert calls(store) == (3 if room else 2)


# --- the file goes away ---


def test_a_database_deleted_or_replaced_under_its_writer_is_opened_anew(tmp_path: Path, store: Store) -> None:
    for _ in range(10):
        add(store, 3)
        for end in ("", "-wal", "-shm"):
            store.path.with_name(f"tune.db{end}").unlink()
    add(store, 7)
    assert calls(store) == 7

    other = open_store(tmp_path / "other")
    add(other, 100)
    other.close()
    store.checkpoint()
    (tmp_path / "other" / "tune.db").replace(store.path)
    for end in ("-wal", "-shm"):
        store.path.with_name(f"tune.db{end}").unlink(missing_ok=True)
    add(store, 1)
    assert calls(store) == 101
    assert store.check() == []


# --- no room, no right ---


@pytest.mark.long
def test_a_full_disk_is_said_and_writing_goes_on_once_there_is_room(small_disk: Path) -> None:
    store = open_store(small_disk)
    add(store, 5)
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(4096))
    big = [saw(problem(1 + i % 500, k=64 * (1 + i // 500))) for i in range(5000)]
    for _ in range(3):
        with pytest.raises(StoreError, match=r"disk full .* Free space"):
            store.sightings.add("r", NEW, big, now_s=T)
    assert calls(store) == 5

    ballast.unlink()
    add(store, 2)
    assert calls(store) == 7
    assert store.check() == []
    store.close()


@pytest.mark.long
def test_a_file_that_may_not_grow_is_a_store_error_and_no_crash(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from store_cases import NEW, look_over, open_store, problem, saw
from gemmtuned.configs.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
big = [saw(problem(1 + i % 500, k=64 * (1 + i // 500))) for i in range(5000)]
for _ in range(2):
    try:
        store.sightings.add("r", NEW, big, now_s=1e9)
    except StoreError as err:
        print("refused" if "disk" in str(err) else err)
store.sightings.add("r", NEW, [saw(problem())], now_s=1e9)
store.close()
"""
    here = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", f"import sys; sys.path.append({here!r})\n{code}", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (said.stdout, said.stderr) == ("refused\nrefused\n", "")
    assert check(tmp_path / "tune.db") == []


@pytest.fixture
def foreign_home() -> Iterator[Path]:
    """A home with a database, that the process of `as_stranger` may read and not write."""
    with tempfile.TemporaryDirectory(prefix="gemmtuned-home-") as name:
        home = Path(name)
        store = open_store(home)
        add(store, 4)
        store.close()
        home.chmod(0o555)
        for file in ("tune.db", "locks", "locks/tune.db.lock"):
            (home / file).chmod(0o555 if file == "locks" else 0o444)
        try:
            yield home
        finally:
            home.chmod(0o755)
            (home / "locks").chmod(0o755)


def as_stranger(work: Callable[[], object]) -> list[str]:
    """What work prints when run by one who may not write: as nobody when we are root, who may write everywhere."""
    read, write = os.pipe()

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        os.write(write, str(work()).encode())

    status = in_child(child)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert status == 0
    return said.splitlines()


def refusal(folder: Path) -> str:
    try:
        add(open_store(folder))
    except StoreError as err:
        return str(err)
    return "no error"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_read_only_home_is_said_with_the_way_out_and_can_still_be_read(foreign_home: Path) -> None:
    database = foreign_home / "tune.db"

    def read() -> str:
        return f"{queries.coverage(database)[0]['calls']}\n{queries.published(database)}"

    error, count, published = as_stranger(lambda: f"{refusal(foreign_home)}\n{read()}")

    assert "cannot be opened for writing by uid" in error
    assert "set GEMMTUNED_HOME" in error
    assert (count, published) == ("4", "(0, [])")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_home_that_cannot_be_made_is_said(foreign_home: Path) -> None:
    (error,) = as_stranger(lambda: refusal(foreign_home / "new"))

    assert "cannot be opened for writing" in error


# --- copies ---


def test_a_backup_is_whole_while_others_write_and_can_be_opened(tmp_path: Path, store: Store) -> None:
    stop = threading.Event()
    other = open_store(tmp_path)

    def write() -> None:
        while not stop.is_set():
            other.sightings.add("r", NEW, [saw(problem(m)) for m in range(1, 50)], now_s=T)

    writer = threading.Thread(target=write)
    add(store)
    writer.start()
    try:
        made = [store.backup(tmp_path / "copies" / f"{i}.db") for i in range(5)]
    finally:
        stop.set()
        writer.join()
    other.close()

    assert [check(path) for path in made] == [[]] * 5
    assert store.backup(tmp_path / "copies").name.startswith("tune-")
    assert len(list((tmp_path / "copies").iterdir())) == 6
    copy = Store(made[0], locks=tmp_path / "locks")
    add(copy)
    copy.close()


def test_a_backup_is_on_the_disk_before_it_has_its_name(tmp_path: Path, store: Store) -> None:
    (tmp_path / "copies").mkdir()
    with disk_steps() as steps:
        store.backup(tmp_path / "copies" / "one.db")

    assert steps == ["synced .tmp", ".tmp -> one.db", "synced copies"]


def test_check_tells_a_ledger_that_does_not_agree(store: Store) -> None:
    add(store, 5)
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as conn:
        conn.execute("UPDATE demand SET calls = 4")

    assert store.check() == ["1 problems whose calls differ from the sum of their sightings"]


@pytest.mark.skipif(not hasattr(sqlite3.Connection, "setconfig"), reason="needs the sqlite3 of Python 3.12")
def test_a_guest_leaves_its_log_to_others_when_it_closes_last(tmp_path: Path) -> None:
    path = tmp_path / "tune.db"
    guest = GuestStore(path, locks=tmp_path / "locks", timeout_s=1.0)
    guest.sightings.beat(Session(host="h", pid=1, started_us=1, run="r", path="native", generation=0), now_s=1.0)
    guest.close_between_uses()

    assert path.with_name("tune.db-wal").stat().st_size > 0
    assert queries.ask(path, "SELECT count(*) AS n FROM session") == [{"n": 1}]
    Store(path, locks=tmp_path / "locks").close()
    assert not path.with_name("tune.db-wal").exists()


def test_a_file_that_another_process_makes_while_we_ask_whose_it_is_is_ours(tmp_path: Path) -> None:
    class Slow(sqlite3.Connection):
        """Somebody is faster than its second question."""

        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            if sql == "PRAGMA application_id" and not (tmp_path / "made").exists():
                (tmp_path / "made").touch()
                (answer,) = super().execute(sql).fetchall()  # to its end, so that it holds no lock
                open_store(tmp_path).close()
                return super().execute("SELECT ?", answer)
            return super().execute(sql, *args)

    with contextlib.closing(sqlite3.connect(tmp_path / "tune.db", factory=Slow)) as conn:
        assert not migrations.pending(conn, tmp_path / "tune.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as conn:
        conn.execute("CREATE TABLE theirs (x)")
        with pytest.raises(StoreError, match="database of another program"):
            migrations.pending(conn, tmp_path / "other.db")
