"""A home of version 0.1.0 (tests/data/home-0.1.0) under the current code: what it held, it holds."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store_cases import look_over

from gemmtuned.configs import old_stamps
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.manifest import read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db import files, handle, migrations, queries
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.migrations import whole
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import build_table

FIXTURE = Path(__file__).parents[1] / "data/home-0.1.0"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
NOW_S = EXPECTED["now_s"]
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
CPU = Device("cpu-test-0", "cpu", "Test CPU", "x86_64", 8)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "tune.db") as conn:
        conn.executescript((FIXTURE / "tune.sql").read_text())
    conn.close()
    shutil.copytree(FIXTURE / "configs", tmp_path / "configs")
    return tmp_path


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    store = Store(home / "tune.db", locks=home / "locks")
    store.solutions.generation()  # migrates
    yield store
    store.close()


def test_the_log_of_an_upgrade_is_not_left_for_the_next_write(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(home / "tune.db") as conn:
        conn.execute("PRAGMA journal_mode = WAL")
    conn.close()
    monkeypatch.setattr(handle, "MAX_WAL_BYTES", 20_000)
    store = Store(home / "tune.db", locks=home / "locks")
    assert (home / "tune.db-wal").stat().st_size == 0
    store.close()


def test_an_upgrade_says_what_it_does_and_how_much_is_left(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        store = Store(home / "tune.db", locks=home / "locks")
        before = store.rollup.left_of_0_1_0()
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" path=")[0] for line in said if "upgrad" in line] == ["upgrading", "upgraded"], said
    assert 0 < before <= 1
    assert store.rollup.roll_up(now_s=NOW_S) and store.rollup.left_of_0_1_0() == 0
    store.close()


def test_freed_pages_are_not_written_to_the_log(tmp_path: Path) -> None:
    """Where SQLite overwrites what is deleted (Debian's does), an upgrade wrote a third of the file to the log."""
    store = Store(tmp_path / "tune.db", locks=tmp_path / "locks")
    store.solutions.generation()
    rows = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 9999) INSERT INTO t SELECT "
    with closing(files.connect(tmp_path / "tune.db", 1.0)) as conn:
        conn.execute("CREATE TABLE t (x)")
        conn.execute(f"{rows} randomblob(500) FROM n")  # 5 MB
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        conn.execute("DROP TABLE t")
        assert (tmp_path / "tune.db-wal").stat().st_size < 500_000
    store.close()


def places() -> dict[str, Environment]:
    """What a program of that GPU and of that CPU has, with the kernels of version 0.1.0."""
    stamps = dict(EXPECTED["stamps"]["cuda:0"])
    version, arch, _ = stamps.pop("triton").split("/")
    nvrtc, _, _ = stamps.pop("cuda").split("/")
    for (backend, kernel), source in old_stamps._OF_EACH.items():
        of = f"{version}/{arch}" if backend == "triton" else f"{nvrtc}/{arch}"
        stamps[f"{backend}.{kernel}"] = f"{kernel}/{of}/{source}"
    return {"cuda:0": Environment(H200, stamps), "cpu": Environment(CPU, EXPECTED["stamps"]["cpu"])}


def coverage(home: Path) -> list[list[Any]]:
    rows = queries.coverage(home / "tune.db", now_s=NOW_S, since_s=48 * 3600.0)
    return sorted(([row[name] for name in EXPECTED["coverage_columns"]] for row in rows), key=str)


def expected_coverage() -> list[list[Any]]:
    """As version 0.1.0 said, but for 300 calls of a problem that has been tuned since a kernel was edited.

    There the calls of before were another environment's, which nobody would ever have tuned.
    """
    rows = [list(row) for row in EXPECTED["coverage"]]
    (on_gpu,) = (row for row in rows if row[:2] == ["dense", H200.key])
    on_gpu[EXPECTED["coverage_columns"].index("covered_calls")] += 300
    return rows


def test_coverage_is_the_same(home: Path, store: Store) -> None:
    assert coverage(home) == expected_coverage()


def test_gains_are_the_same(home: Path, store: Store) -> None:
    found = queries.solutions(home / "tune.db", live=False)

    names = [f"{r['problem']} {r['backend']} {r['config']} {r['generation']}" for r in found]
    values = [[r["state"], r["hit_calls"], r["saved_us"]] for r in found]
    assert dict(zip(names, values, strict=True)) == EXPECTED["gains"]


def test_programs_are_served_the_same(home: Path, store: Store) -> None:
    generation, live = store.solutions.published()

    table = build_table(live, places(), generation=generation, failed=frozenset())

    served = [[place, str(s.problem), s.covers, s.backend, s.config] for place, _, s in table.items()]
    assert sorted(served) == EXPECTED["served"] and generation == EXPECTED["generation"]


def test_calls_add_up(home: Path, store: Store) -> None:
    found = queries.ask(
        home / "tune.db",
        """
        SELECT p.text || ' ' || h.key AS name, sum(d.calls) AS calls FROM demand d
        JOIN problem p ON p.id = d.problem_id JOIN environment e ON e.id = d.environment_id
        JOIN device h ON h.id = e.device_id GROUP BY 1
        """,
    )

    assert {row["name"]: row["calls"] for row in found} == EXPECTED["demand"]
    assert not store.check()


def test_every_problem_has_the_row_that_it_would_get_now(home: Path, store: Store) -> None:
    for row in queries.ask(home / "tune.db", "SELECT * FROM problem"):
        problem = Problem.parse(row["text"])
        assert row["rest"] == problem.rest and Problem.from_rest(row["rest"], row["m"]) == problem
        assert {name: row[name] for name in problem.row()} == problem.row()
        assert (row["flops"], row["bytes"], row["operands"]) == (problem.flops, problem.bytes, problem.operands)


def test_what_a_person_decided_still_stands(home: Path, store: Store) -> None:
    by_cause = {r["cause"]: r["reason"] for r in queries.ask(home / "tune.db", "SELECT cause, reason FROM work")}
    queued = {row["problem"]: row for row in queries.untuned(home / "tune.db")}

    assert by_cause["withdrawn"] == "withdrawn: slow in serving" and by_cause["put_off"].startswith("put off: others")
    assert queued["bf16:8x4096x7168,math=reduced"]["state"] == "failed"
    assert [r["state"] for r in queries.solutions(home / "tune.db") if r["backend"] == "onednn"] == ["pinned"]


def test_it_can_be_read_before_anybody_has_migrated_it(home: Path) -> None:
    before = (home / "tune.db").read_bytes()

    assert coverage(home) == expected_coverage()
    assert queries.explain(home / "tune.db", Problem.parse("fp32:1x512x256,threads=2"))[0]["backend"] == "torch_mv"
    assert (home / "tune.db").read_bytes() == before


@pytest.mark.parametrize("what", ["a table", "the header"])
def test_a_damaged_one_is_built_anew_and_holds_what_can_be_read(home: Path, what: str) -> None:
    """Rows are read as the version meant them that wrote them, and then brought up to ours."""
    with sqlite3.connect(home / "tune.db") as conn:
        conn.execute("PRAGMA journal_mode = DELETE").fetchall()
        (page,) = conn.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trial'").fetchone()
        (size,) = conn.execute("PRAGMA page_size").fetchone()
    conn.close()
    with (home / "tune.db").open("r+b") as file:
        file.seek((page - 1) * size if what == "a table" else 0)
        file.write(bytes(size if what == "a table" else 100))

    store = Store(home / "tune.db", locks=home / "locks")
    look_over(store)
    table = build_table(store.solutions.published()[1], places(), generation=1, failed=frozenset())

    assert list(home.glob("tune.db.corrupt-*Z")) and not store.check()
    assert coverage(home) == expected_coverage()
    served = [[place, str(s.problem), s.covers, s.backend, s.config] for place, _, s in table.items()]
    assert sorted(served) == EXPECTED["served"]
    store.close()


def test_a_key_that_names_what_we_do_not_know_is_no_problem_of_ours(home: Path, store: Store) -> None:
    with sqlite3.connect(home / "tune.db") as conn:
        conn.execute("UPDATE problem SET rest = rest || ',sparsity=2x4' WHERE text LIKE 'fp32:1x512x256%'")
    conn.close()

    served = {str(solution.problem) for solution in store.solutions.published()[1]}

    assert "fp32:1x512x256,threads=2" not in served and len(served) == len(EXPECTED["served"]) - 1
    with pytest.raises(ProblemError, match="'sparsity'"):
        Problem.from_row({**Problem(m=1, n=2, k=3).row(), "sparsity": "2x4"})


def test_its_tables_are_published_anew_with_the_same_rows_and_then_stay(home: Path, store: Store) -> None:
    for path in (home, home / "configs", *(home / "configs").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    manifest = publish(store, home / "configs", home / "locks", now_s=NOW_S + 100)
    again = publish(store, home / "configs", home / "locks", now_s=NOW_S + 200)

    assert manifest is not None and again is not None
    assert again.generation == manifest.generation == EXPECTED["generation"] + 1
    read = [read_table(home / "configs", file) for file in manifest.files]
    assert not any(complaints for _, complaints in read)
    rows = [solution for solutions, _ in read for solution in solutions]
    table = build_table(rows, places(), generation=1, failed=frozenset())
    served = [[place, str(s.problem), s.covers, s.backend, s.config] for place, _, s in table.items()]
    assert sorted(served) == EXPECTED["served"]


@pytest.mark.long
def test_a_program_that_is_started_by_run_adds_its_counts(home: Path, native_cache: Path) -> None:
    """A program never changes the schema; what its line advises must help."""
    code = "import torch; torch.mm(torch.ones(3, 4), torch.ones(4, 5))"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER", "TORCH_DEVICE"))}
    env |= {"GEMMTUNED_HOME": str(home), "GEMMTUNED_CACHE": str(native_cache)}
    own = subprocess.run(
        [sys.executable, "-c", code], env=env | {"GEMMTUNED": "1"}, capture_output=True, text=True, timeout=120
    )
    run = [sys.executable, "-m", "gemmtuned", "run", "--", sys.executable, "-c", code]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120)

    assert "calls=1" in own.stderr and "Bring it up to date: gemmtuned run" in own.stderr
    assert done.returncode == 0 and "counts" not in done.stderr, done.stderr
    found = queries.ask(
        home / "tune.db", "SELECT sum(d.calls) AS n FROM demand d JOIN problem p ON p.id = d.problem_id WHERE p.m = 3"
    )
    assert found[0]["n"] == 1


def test_a_members_file_of_then_makes_room_for_one_of_now(home: Path) -> None:
    """The daemon owns the folder; a program of now adds nothing to a file of then."""
    (home / "ingest").mkdir()
    members = home / "ingest" / "ingest.db"
    (home / "tune.db").rename(members)
    store = Store(home / "tune.db", locks=home / "locks")

    taken = [store.ingest.take_from(members, now_s=NOW_S + 2 * i) for i in range(3)]

    store.close()
    assert taken == [sum(EXPECTED["demand"].values()), 0, 0]
    GuestStore(members, locks=home / "ingest", timeout_s=1.0).close_between_uses()


def test_a_program_of_now_reads_the_tables_of_then(home: Path) -> None:
    manifest = json.loads((home / "configs/manifest.json").read_text())
    texts = [(home / "configs" / file["name"]).read_text() for file in manifest["files"]]
    rows = [Solution.from_row(json.loads(line)) for text in texts for line in text.splitlines()]

    table = build_table(rows, places(), generation=1, failed=frozenset())

    served = [[place, str(s.problem), s.covers, s.backend, s.config] for place, _, s in table.items()]
    assert sorted(served) == EXPECTED["served"]


def test_steps_are_numbered_one_by_one() -> None:
    assert [int(step.name[:4]) for step in migrations.STEPS] == list(range(1, len(migrations.STEPS) + 1))


# What databases of every commit so far have recorded as done: a step that is renamed or merged with another runs again
RECORDED = [
    "0001_initial",
    "0002_views",
    "0003_launch",
    "0004_compiled",
    "0005_rank",
    "0006_recheck",
    "0007_asked",
    "0008_hint",
    "0009_ingest",
    "0010_frozen",
    "0011_namespace",
    "0012_others",
    "0013_ingest_once",
    "0014_problem_key",
    "0015_reported",
    "0016_summaries",
    "0017_identity",
    "0018_no_index_of_before",
    "0019_invariant",
    "0020_phases",
    "0021_programs_of_0_1_0",
    "0022_readable",
    "0023_fleet",
    "0024_role",
    "0025_operators",
    "0026_bytes_of_groups",
    "0027_waited",
]


def test_a_database_made_after_any_step_comes_up_to_date_and_runs_none_twice() -> None:
    assert [step.stem for step in migrations.STEPS[: len(RECORDED)]] == RECORDED
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        migrations.apply(conn)
        fresh = migrations._schema(conn)
    for had in (12, *range(19, len(RECORDED))):  # 0.1.0 had 12 steps, 0.2.0 had 19
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
            migrations.make_by_steps(conn, to=had)
            conn.execute(f"PRAGMA application_id = {migrations.APPLICATION_ID}")
            conn.execute(f"PRAGMA user_version = {had}")
            migrations.apply(conn)
            assert migrations._schema(conn) == fresh and migrations.steps_of(conn) == migrations.SCHEMA, had


def test_a_new_file_is_what_all_steps_leave() -> None:
    assert whole.FILE.read_text("utf-8") == whole.text(), "run: python -m gemmtuned.db.migrations.whole"
    held = []
    for make in (migrations.make_by_steps, migrations.make):
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
            make(conn)
            objects = conn.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid").fetchall()
            steps = conn.execute("SELECT migration_set, name FROM _sqlite_migrations ORDER BY id").fetchall()
            held.append((objects, steps, conn.execute("SELECT * FROM roofline").fetchall()))
    assert held[0] == held[1]


def test_each_of_our_tables_is_looked_at() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        migrations.apply(conn)
        made = [name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
    ours = sorted(name for name in made if not name.startswith(("sqlite_", "_sqlite_")))
    for _ in range(2):  # what was made for the first answer serves the second
        assert sorted(migrations.tables()) == ours and len(ours) > 20


def test_a_database_that_knows_steps_by_their_old_names_runs_none_twice(tmp_path: Path) -> None:
    """Two steps had the number 0015 for a while, so they and the one after them have new names."""
    path = tmp_path / "tune.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        steps = migrations.STEPS[:17]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(migrations, "STEPS", steps)
            patch.setattr(migrations, "SCHEMA", len(steps))
            migrations.apply(conn)
        for old, new in migrations._RENAMED:
            done = conn.execute("UPDATE _sqlite_migrations SET name = ? WHERE name = ?", (old, new))
            assert done.rowcount == 1
        migrations.apply(conn, path)
        names = [name for (name,) in conn.execute("SELECT name FROM _sqlite_migrations ORDER BY id")]
        assert names == [step.stem for step in migrations.STEPS]
        assert not migrations.altered(conn)
