from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from cases import LAUNCH, LIBRARY_LAUNCH
from disk_steps import disk_steps
from fakes import ENVIRONMENT, solution
from store_cases import new_file

from gemmtuned.configs import manifest as manifest_module
from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.configs.formats import bundle
from gemmtuned.configs.manifest import MANIFEST, read_binary, read_manifest, read_table, write_binary, write_whole
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.daemon.publishing import publish as publish_module
from gemmtuned.daemon.publishing.publish import publish, tables
from gemmtuned.db.solutions import Solutions
from gemmtuned.db.store import Store

NOW = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(new_file(tmp_path / "tune.db"), locks=tmp_path / "locks")
    yield store
    store.close()


def problem(n: int = 64, family: str = "dense") -> Problem:
    return Problem(m=8, n=n, k=64, family=family)


def install(store: Store, *problems: Problem) -> int:
    return store.solutions.install(None, [solution(p) for p in problems], environment=ENVIRONMENT, now_s=NOW)


def published(folder: Path) -> list[Solution]:
    manifest = read_manifest(folder)
    assert manifest is not None
    found = []
    for file in manifest.files:
        rows, complaints = read_table(folder, file)
        assert complaints == []
        found += rows
    return found


def test_nothing_is_written_before_there_is_something_to_publish(store: Store, tmp_path: Path) -> None:
    assert publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW) is None
    assert not (tmp_path / "configs" / MANIFEST).exists()


def test_a_table_that_would_be_too_large_to_be_read_is_published_as_several_files(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no program could take up a single row, from the one on that is too many."""
    monkeypatch.setattr(manifest_module, "MAX_BYTES", 8192)
    folder, locks = tmp_path / "configs", tmp_path / "locks"
    for sizes in (range(64, 84), range(84, 94)):
        install(store, *(problem(n) for n in sizes))
        publish(store, folder, locks, now_s=NOW)
    assert {s.problem.n for s in published(folder)} == set(range(64, 94))
    before = read_manifest(folder)
    assert before is not None and len(before.files) > 3
    assert publish(store, folder, locks, now_s=NOW) == before, "it is whole, and not written again and again"

    exported, left = bundle.write(tmp_path / "bundle", published(folder), generation=1, binaries=tmp_path)
    assert not left and len(exported.files) == len(before.files)
    assert {s.problem.n for s in published(tmp_path / "bundle")} == set(range(64, 94))

    (folder / MANIFEST).unlink()
    (tmp_path / "tune.db").unlink()
    publish(store, folder, locks, now_s=NOW)
    assert {s.problem.n for s in published(folder)} == set(range(64, 94)), "the tables are the second copy"


def test_a_verdict_that_comes_while_a_table_is_written_anew_is_published_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation must not be the number of the table without it: that table would be taken for the newest."""
    folder, locks = tmp_path / "configs", tmp_path / "locks"
    install(store, problem())
    publish(store, folder, locks, now_s=NOW)
    next(folder.glob("*.jsonl")).unlink()
    skip_to = Solutions.skip_to

    def meanwhile(self: Solutions, generation: int, *, after: int, now_s: float) -> bool:
        if store.solutions.generation() == 1:
            store.solutions.install(None, [replace(solution(problem()), us=1.5)], environment=ENVIRONMENT, now_s=NOW)
        return skip_to(self, generation, after=after, now_s=now_s)

    monkeypatch.setattr(Solutions, "skip_to", meanwhile)
    publish(store, folder, locks, now_s=NOW)

    assert [s.us for s in published(folder)] == [1.5] == [s.us for s in store.solutions.published()[1]]


def test_what_the_store_holds_is_what_programs_read(store: Store, tmp_path: Path) -> None:
    generation = install(store, problem(64), problem(65), problem(64, "batched"))
    manifest = publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert manifest is not None
    assert manifest.generation == generation
    assert sorted(f.name.rsplit("-", 1)[0] for f in manifest.files) == ["batched-cpu-planted", "dense-cpu-planted"]
    assert tables(published(tmp_path / "configs")) == tables(store.solutions.published()[1])


def test_publishing_twice_writes_once(store: Store, tmp_path: Path) -> None:
    install(store, problem())
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    before = (tmp_path / "configs" / MANIFEST).stat()
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW + 1)
    after = (tmp_path / "configs" / MANIFEST).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_withdrawn_solution_is_gone_from_the_tables(store: Store, tmp_path: Path) -> None:
    install(store, problem(64), problem(65))
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    store.solutions.withdraw([problem(64)], reason="test", now_s=NOW)
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert [s.problem.n for s in published(tmp_path / "configs")] == [65]


def test_a_crash_between_commit_and_rename_is_healed(store: Store, tmp_path: Path) -> None:
    install(store, problem(64))
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    generation = install(store, problem(65))  # and here the daemon dies
    manifest = publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert manifest is not None
    assert manifest.generation == generation
    assert {s.problem.n for s in published(tmp_path / "configs")} == {64, 65}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).write_text('{"schema": 99}'),
        lambda folder: next(folder.glob("*.jsonl")).unlink(),
        lambda folder: next(folder.glob("*.jsonl")).write_text("{}\n"),
        lambda folder: os.truncate(next(folder.glob("*.jsonl")), 10),
    ],
    ids=["no manifest", "broken manifest", "manifest of the future", "no table", "wrong table", "cut table"],
)
def test_damaged_tables_are_written_anew(store: Store, tmp_path: Path, damage: object) -> None:
    install(store, problem())
    folder = tmp_path / "configs"
    publish(store, folder, tmp_path / "locks", now_s=NOW)
    assert callable(damage)
    damage(folder)
    manifest = publish(store, folder, tmp_path / "locks", now_s=NOW)
    assert [s.problem for s in published(folder)] == [problem()]
    assert manifest is not None and manifest.generation == store.solutions.generation()


def test_a_table_written_anew_takes_the_stores_count_along(store: Store, tmp_path: Path) -> None:
    folder, locks = tmp_path / "configs", tmp_path / "locks"
    install(store, problem(64))
    install(store, problem(65))
    publish(store, folder, locks, now_s=NOW)
    next(folder.glob("*.jsonl")).write_text("garbage\n")
    anew = publish(store, folder, locks, now_s=NOW)
    assert anew is not None and (anew.generation, store.solutions.generation()) == (3, 3)
    assert [s.problem.n for s in published(folder)] == [64, 65]
    assert install(store, problem(66)) == 4
    after = publish(store, folder, locks, now_s=NOW)
    assert after is not None and after.generation == 4
    back = store.curation.roll_back(3, now_s=NOW)
    assert [s.problem.n for s in back.gone] == [66] and not back.back


def test_a_stuck_publisher_is_not_waited_for_long(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module, "WAIT_S", 0.1)
    install(store, problem())
    (tmp_path / "locks").mkdir(exist_ok=True)
    with open(tmp_path / "locks" / "publish.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TryLater, match="another process has been publishing"):
            publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)


def test_two_never_publish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module, "WAIT_S", 0.1)
    with (
        publish_module.publishing(tmp_path / "locks"),
        pytest.raises(TryLater, match="another process has been publishing"),
        publish_module.publishing(tmp_path / "locks"),
    ):
        pass


def test_a_published_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    with disk_steps() as steps:
        write_whole(tmp_path / "t.jsonl", b"a row")

    assert steps == ["synced .tmp", ".tmp -> t.jsonl", f"synced {tmp_path.name}"]


def test_a_disk_that_refuses_is_an_error_of_ours_and_the_old_tables_stay(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(store, problem(64))
    folder = tmp_path / "configs"
    publish(store, folder, tmp_path / "locks", now_s=NOW)
    install(store, problem(65))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TableError, match="No space left"):
            publish(store, folder, tmp_path / "locks", now_s=NOW)
    assert [s.problem.n for s in published(folder)] == [64]
    assert list(folder.glob(".*.tmp")) == []


def test_order_of_rows_does_not_depend_on_the_order_of_solving() -> None:
    many = [replace(solution(problem(n)), generation=n) for n in (70, 64, 66)]
    assert tables(many) == tables(many[::-1])


def test_publishing_says_so_once(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(store, problem())
    with caplog.at_level(logging.INFO, "gemmtuned.daemon"):
        publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
        publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert [r.getMessage() for r in caplog.records] == ["published generation=1 files=1 solutions=1"]


def with_kernel(data: bytes, n: int = 64) -> Solution:
    launch = {**LAUNCH, "binary": sha256(data).hexdigest()}
    return replace(solution(problem(n)), launch=json.dumps(launch))


def test_kernels_are_beside_the_tables_before_a_manifest_names_them(store: Store, tmp_path: Path) -> None:
    write_binary(tmp_path, b"kernel")
    store.solutions.install(None, [with_kernel(b"kernel")], environment=ENVIRONMENT, now_s=NOW)

    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)

    (found,) = published(tmp_path / "configs")
    digest = json.loads(found.launch)["binary"]
    assert read_binary(tmp_path / "configs", digest) == b"kernel"
    os.unlink(tmp_path / "bin" / digest)  # from here on the published copy is enough
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    assert len(published(tmp_path / "configs")) == 1


def test_a_librarys_algorithm_is_published_by_its_record_alone(store: Store, tmp_path: Path) -> None:
    record = json.dumps(LIBRARY_LAUNCH)
    chosen = replace(solution(problem()), backend="cublaslt", launch=record)
    store.solutions.install(None, [chosen], environment=ENVIRONMENT, now_s=NOW)

    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)

    assert [s.launch for s in published(tmp_path / "configs")] == [record]
    assert not (tmp_path / "configs" / "bin").exists()


@pytest.mark.parametrize("data", [None, b"not the kernel"])
def test_a_solution_whose_kernel_is_missing_or_spoilt_is_left_out_and_the_rest_published(
    store: Store, tmp_path: Path, data: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    digest = write_binary(tmp_path, b"kernel")
    (tmp_path / "bin" / digest).unlink()
    if data is not None:
        (tmp_path / "bin" / digest).write_bytes(data)
    store.solutions.install(None, [with_kernel(b"kernel"), solution(problem(65))], environment=ENVIRONMENT, now_s=NOW)

    with caplog.at_level(logging.WARNING):
        publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)

    assert [s.problem.n for s in published(tmp_path / "configs")] == [65]
    assert "left out" in caplog.text


def test_a_published_kernel_that_was_spoilt_is_replaced(store: Store, tmp_path: Path) -> None:
    digest = write_binary(tmp_path, b"kernel")
    store.solutions.install(None, [with_kernel(b"kernel")], environment=ENVIRONMENT, now_s=NOW)
    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)
    (tmp_path / "configs" / "bin" / digest).write_bytes(b"spoilt")

    publish(store, tmp_path / "configs", tmp_path / "locks", now_s=NOW)

    assert read_binary(tmp_path / "configs", digest) == b"kernel"


def test_a_folder_that_is_a_link_to_none_is_named_so(store: Store, tmp_path: Path) -> None:
    store.solutions.install(None, [solution(Problem(m=8, n=64, k=64))], environment=ENVIRONMENT, now_s=1.0)
    (tmp_path / "configs").symlink_to(tmp_path / "gone")
    with pytest.raises(TableError, match=r"cannot publish \(.*configs is a link to .*gone, which is no folder\)"):
        publish(store, tmp_path / "configs", tmp_path / "locks", now_s=2.0)
