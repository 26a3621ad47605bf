"""A store whose process forks: no lock, no connection and no count is shared or lost."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_child import in_child
from store_cases import add, open_store

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.sighting import Session
from gemmtuned.db import handle, queries
from gemmtuned.db.store import Store

T = time.time()
ALIVE = Session(host="h", pid=1, started_us=5, run="r", path="native", generation=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = open_store(tmp_path)
    yield one
    one.close()


def calls(store: Store) -> int:
    return sum(row["calls"] for row in queries.coverage(store.path))


# --- fork ---


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_with_a_connection_of_its_own(store: Store) -> None:
    add(store)

    assert [in_child(lambda: add(store, 10)) for _ in range(5)] == [0] * 5
    add(store)
    assert calls(store) == 52
    assert store.check() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("killed", [False, True])
def test_a_forked_child_goes_on_writing_when_its_parent_and_others_have_closed(tmp_path: Path, killed: bool) -> None:
    to_child, from_parent = os.pipe()

    def child(store: Store) -> None:
        add(store)
        os.read(to_child, 1)  # until all others are gone
        add(store)
        store.close()

    def parent() -> None:
        store = open_store(tmp_path)
        add(store)
        pid = os.fork()
        if pid == 0:
            child(store)
            os._exit(0)
        (tmp_path / "child").write_text(str(pid))
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        store.close()

    in_child(parent)
    pid = int((tmp_path / "child").read_text())
    for _ in range(3):
        other = open_store(tmp_path)
        add(other)
        other.close()
    os.write(from_parent, b"x")
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)

    last = open_store(tmp_path)
    assert calls(last) == 6
    assert last.check() == []
    last.close()
    os.close(to_child)
    os.close(from_parent)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_process_has_the_lock_costs_no_counts(tmp_path: Path, store: Store) -> None:
    add(store)
    code = "import sys; from pathlib import Path; from gemmtuned.db.lockfile import LockFile; "
    code += "print(LockFile(Path(sys.argv[1])).acquire(1), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "locks" / "tune.db.lock")]
    to_child, from_parent = os.pipe()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == "True\n"
        pid = os.fork()
        if pid == 0:
            other.stdin.close()
            os.read(to_child, 1)
            with contextlib.suppress(Exception):
                add(store, 10)
                os._exit(0)
            os._exit(1)
    os.write(from_parent, b"x")

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(to_child)
    os.close(from_parent)
    add(store)
    assert calls(store) == 12


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_opens_the_database_keeps_the_child_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path).close()
    opening, forked = threading.Event(), threading.Event()
    real = handle.journal_mode

    def waits(conn: sqlite3.Connection) -> str:
        opening.set()
        forked.wait(20)
        return real(conn)

    monkeypatch.setattr(handle, "journal_mode", waits)
    stores: list[Store] = []
    thread = threading.Thread(target=lambda: stores.append(open_store(tmp_path)))
    thread.start()
    assert opening.wait(20)

    def child() -> None:
        with pytest.raises(StoreError, match="open when this process was forked"):
            open_store(tmp_path)

    try:
        assert in_child(child) == 0
    finally:
        forked.set()
        thread.join()
    add(stores[0])
    assert calls(stores[0]) == 1


def test_a_heartbeat_after_a_fork_names_the_file_it_is_in(store: Store) -> None:
    store.sightings.beat(ALIVE, now_s=T)
    assert in_child(lambda: None) == 0

    store.sightings.beat(ALIVE, now_s=T)

    assert queries.sessions(store.path)[0]["store_ino"] == store.path.stat().st_ino


@pytest.mark.parametrize("uses", ["(store, None)", "(None, store)"])  # the connection there was, and a new one
def test_a_process_forked_behind_pythons_back_leaves_the_database_alone(tmp_path: Path, uses: str) -> None:
    said = forked_by_c(
        tmp_path,
        f"""
        for one in {uses}:
            try:
                t.add(one or t.open_store(folder))
            except Exception as err:
                print(type(err).__name__, 'open when this process was forked' in str(err), flush=True)
        """,
    )

    assert said == "StoreError True\n" * 2
    assert calls(open_store(tmp_path)) == 2


def test_a_process_forked_behind_pythons_back_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    said = forked_by_c(
        tmp_path,
        "store.close()",
        before="assert store._db.lock.acquire(1)",
        after="print(LockFile(folder / 'locks' / 'tune.db.lock').acquire(0.1)); store._db.lock.release()",
    )

    assert said == "False\n"


def forked_by_c(folder: Path, child: str, *, before: str = "", after: str = "") -> str:
    """What a process and its child say, whose Python does not know of the fork; both have `store`, open and used."""
    code = f"""
import ctypes, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import store_cases as t
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.lockfile import LockFile
store = t.open_store(folder)
t.add(store)
{before}
pid = ctypes.CDLL(None).fork()
if pid == 0:
{textwrap.indent(textwrap.dedent(child), "    ")}
    os._exit(0)
os.waitpid(pid, 0)
{after}
t.add(store)
store.close()
"""
    command = [sys.executable, "-c", code, str(folder), str(Path(__file__).parents[1] / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_lock_held_at_fork_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    store = open_store(tmp_path, timeout_s=5)
    read, write = os.pipe()

    def holder() -> None:
        assert store._db.lock.acquire(5)
        grandchild = os.fork()
        if grandchild == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)
        time.sleep(60)

    pid = os.fork()
    if pid == 0:
        holder()
        os._exit(0)
    grandchild = int(os.read(read, 20))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        add(store)
        assert calls(store) == 1
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(read)
        os.close(write)
        store.close()
