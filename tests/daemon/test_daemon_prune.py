"""What nothing names is removed, and what any generation names is kept; doctor shows what is kept with its size."""

from __future__ import annotations

import json
import os
import signal
import time
from hashlib import sha256
from pathlib import Path

import pytest
from cases import LAUNCH
from store_cases import NEW, found, open_store, problem

from gemmtuned.configs.manifest import read_binary, write_binary
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.temporary import put, temporary_path
from gemmtuned.daemon.publishing import prune as prune_module
from gemmtuned.daemon.publishing.prune import YOUNG_S, prune
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store
from gemmtuned.reports import checks_room

OLD_S = time.time() - YOUNG_S - 60


def kernel(home: Path, name: str, *, old: bool = True) -> str:
    """A compiled kernel that a worker left."""
    digest = write_binary(home, name.encode())
    if old:
        os.utime(home / "bin" / digest, (OLD_S, OLD_S))
    return digest


def install(store: Store, home: Path, digest: str) -> None:
    solution = found(problem(), backend="triton", launch=json.dumps({**LAUNCH, "binary": digest}))
    store.solutions.install(None, [solution], environment=NEW, now_s=1e9)
    publish(store, home / "configs", home / "locks", now_s=1e9)


def there(folder: Path) -> set[str]:
    return {path.name for path in (folder / "bin").iterdir()}


def test_only_what_no_generation_ever_named_is_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = [kernel(tmp_path, name) for name in ("first", "second", "third")]
    lost, young = kernel(tmp_path, "lost the race"), kernel(tmp_path, "of a worker", old=False)
    for name in names:
        install(store, tmp_path, name)
    temporary = temporary_path(tmp_path / "bin" / lost)
    temporary.write_bytes(b"half")
    os.utime(temporary, (OLD_S, OLD_S))
    (tmp_path / "bin" / "README").write_text("not ours")
    stray = tmp_path / "configs" / "bin" / sha256(b"stray").hexdigest()
    stray.write_bytes(b"stray")
    os.utime(stray, (OLD_S, OLD_S))
    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == len(b"lost the race") + 4 + 5
    assert there(tmp_path) == {*names, young, "README"}
    assert there(tmp_path / "configs") == set(names)
    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 0
    store.curation.roll_back(1, now_s=1e9)
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=1e9)
    assert read_binary(tmp_path / "configs", names[0]) == b"first"
    store.close()


@pytest.mark.parametrize("name", ["tune-20260101.db", "configs/manifest.json", "daemon.json", "checked/one.json"])
def test_what_a_killed_process_had_half_written_goes_after_a_week(tmp_path: Path, name: str) -> None:
    """A backup of a year's counts has some hundred MiB, and nobody sees a name that begins with a dot."""
    store = open_store(tmp_path)
    install(store, tmp_path, kernel(tmp_path, "one"))
    (tmp_path / "checked").mkdir()
    (tmp_path / ".mine.tmp").write_text("not ours")
    before = everything(tmp_path)
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        put(tmp_path / name, b"half")
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    (left,) = everything(tmp_path) - before

    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 0, "another may be at it now"
    os.utime(left, (OLD_S, OLD_S))
    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 4
    assert everything(tmp_path) == before
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_that_is_closed_to_the_daemon_ends_nothing(tmp_path: Path) -> None:
    """A member's program has made it in a shared home."""
    (tmp_path / "checked").mkdir(mode=0o700)
    pid = os.fork()
    if pid == 0:
        os.seteuid(65534)
        os._exit(prune_module._prune(tmp_path / "checked", prune_module._HALF, set(), OLD_S))
    assert os.waitpid(pid, 0)[1] == 0


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.name.startswith("tune.db")}


def test_a_kernel_that_a_worker_leaves_again_is_young_again(tmp_path: Path) -> None:
    """It lost weeks ago, and wins now: between the worker and the verdict nothing names it."""
    store = open_store(tmp_path)
    install(store, tmp_path, kernel(tmp_path, "another"))
    again = kernel(tmp_path, "lost once")
    assert kernel(tmp_path, "lost once", old=False) == again

    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 0
    assert again in there(tmp_path)
    store.close()


def test_what_is_published_is_kept_though_the_store_was_lost(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = kernel(tmp_path, "first")
    install(store, tmp_path, name)
    store.close()
    (tmp_path / "tune.db").unlink()
    store = open_store(tmp_path)
    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 0
    table = next((tmp_path / "configs").glob("*.jsonl"))
    table.write_text("half a li")
    kernel(tmp_path, "unnamed")
    assert prune(store, tmp_path, tmp_path / "configs", tmp_path / "locks") == 0, "while a table cannot be read"
    assert name in there(tmp_path)
    store.close()


def test_doctor_shows_what_is_kept_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path), "GEMMTUNED_CACHE": str(tmp_path / "cache")})
    assert list(checks_room.checks(here)) == []
    store = open_store(tmp_path)
    install(store, tmp_path, kernel(tmp_path, "x" * 5000))
    store.close()
    (tmp_path / "cache" / "hook").mkdir(parents=True)
    (tmp_path / "cache" / "hook" / "a.so").write_bytes(b"1" * 3000)
    (tmp_path / "ingest").mkdir()
    (tmp_path / "ingest" / "ingest.db").write_bytes(b"1" * 2000)
    (tmp_path / "ingest-refused.db").write_bytes(b"1" * 1000)
    said = [check.found for check in checks_room.checks(here)]
    assert any(line.startswith("kernels: 2 files, 9.77 KiB") for line in said), said
    assert any(line.startswith("caches: 1 file, 2.93 KiB") for line in said), said
    assert any(line.startswith("tables: 2 files") for line in said), said
    assert any("counts of other users: 1.95 KiB" in line for line in said), said
    assert any("is kept to be looked at: 1000 B" in line for line in said), said
    monkeypatch.setattr(checks_room, "MANY_RUNS", 0)
    monkeypatch.setattr(checks_room.queries, "count_runs", lambda path: 5)
    warned = [check.found for check in checks_room.checks(here) if check.result == "WARN"]
    assert any(line.startswith("5 run labels") for line in warned), warned
