"""What may lie where a member's file is: no file, another database, values that cannot be."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from member_files import edit
from other_users import Two
from store_cases import DAY, NEW, found, problem, saw

from gemmtuned.configs.errors import GemmtunedError, StoreError
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.solution import Environment
from gemmtuned.db import members_file, members_limits
from gemmtuned.db.row_ids import PROBLEM_COLUMNS

T = 1_800_000_000.0


def total(two: Two) -> int:
    """All calls in our own tables, of which both hold the same."""
    (counted,), (asked,) = two.rows("SELECT total(calls) FROM sighting"), two.rows("SELECT total(calls) FROM demand")
    assert counted == asked
    return int(counted[0])  # type: ignore[call-overload]


# --- what lies there


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        one.bind(os.path.relpath(path))


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("end", ["", "-wal"])
@pytest.mark.parametrize("make", [_fifo, _socket, _link, _folder])
def test_what_is_no_file_is_not_opened(
    two: Two, tmp_path: Path, make: Callable[[Path], None], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two.theirs.close()
    for one in ("", "-wal", "-shm") if not end else (end,):
        Path(f"{two.path}{one}").unlink(missing_ok=True)
    make(Path(f"{two.path}{end}"))
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"ingest\.db.*Remove it"):
        two.take()
    assert time.monotonic() - began < 1.0


def test_our_own_database_under_their_name_does_not_feed_itself(two: Two) -> None:
    two.ours.sightings.add("mine", NEW, [saw(problem(), 10)], now_s=T)
    two.theirs.close()
    for end in ("", "-wal", "-shm"):
        Path(f"{two.path}{end}").unlink(missing_ok=True)
    os.link(two.ours.path, two.path)
    with pytest.raises(StoreError, match="same file"):
        two.take()
    assert total(two) == 10


_COLUMNS = "problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us"
_ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)"
STRANGE = {
    "a view without an end": (
        "DROP TABLE sighting",
        f"CREATE VIEW sighting AS {_ENDLESS} SELECT x AS problem_id, 1 AS environment_id, 1 AS run_id, 1 AS hour, "
        "'miss' AS outcome, 0 AS graph, 1 AS calls, 0 AS sampled_calls, 0.0 AS sampled_us, x AS last_seen_us FROM r",
    ),
    "stamps as a view": (
        "DROP TABLE environment_stamp",
        f"CREATE VIEW environment_stamp AS {_ENDLESS} SELECT 1 AS environment_id, 'b' || x AS backend, 's' AS stamp "
        "FROM r",
    ),
    "a virtual table": ("DROP TABLE run", "CREATE VIRTUAL TABLE run USING fts5(id, name)"),
    "a computed column": (
        "ALTER TABLE session ADD COLUMN extra TEXT AS (hex(zeroblob(1000000000))) VIRTUAL",
    ),
    "no types": ("DROP TABLE run", "CREATE TABLE run (id INTEGER PRIMARY KEY, name TEXT)"),
    "any type": ("DROP TABLE run", "CREATE TABLE run (id INTEGER PRIMARY KEY, name ANY) STRICT"),
    "a table that is gone": ("DROP TABLE device",),
    "a column that is gone": ("DROP TABLE run", "CREATE TABLE run (id INTEGER PRIMARY KEY) STRICT"),
}  # fmt: skip


@pytest.mark.parametrize("statements", STRANGE.values(), ids=STRANGE)
def test_tables_that_no_gemmtuned_made_are_refused_at_once(two: Two, statements: tuple[str, ...]) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    edit(two, "PRAGMA foreign_keys = OFF", *statements)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"ingest\.db: holds what no gemmtuned wrote"):
        two.take()
    assert time.monotonic() - began < 2 and total(two) == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot limit the length of a text in SQLite")
def test_a_huge_text_is_not_read(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    edit(
        two,
        "PRAGMA ignore_check_constraints = ON",
        "UPDATE run SET name = replace(hex(zeroblob(5000000)), '00', 'long')",
    )
    with pytest.raises(StoreError, match="a text that is too long"):
        two.take()


def test_triggers_and_views_of_a_member_do_nothing(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    edit(two, "CREATE TRIGGER t AFTER UPDATE ON sighting BEGIN DELETE FROM run; END", "CREATE VIEW mine AS SELECT 1")
    assert two.take() == 10


def test_values_that_cannot_be_are_left_out_and_the_rest_is_taken(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(n=64 + i), 10) for i in range(9)], now_s=T)
    edit(
        two,
        "PRAGMA ignore_check_constraints = ON",
        "UPDATE sighting SET sampled_us = 9e999 WHERE problem_id = 1",
        "UPDATE sighting SET sampled_us = -9e999 WHERE problem_id = 2",
        "UPDATE sighting SET hour = -5 WHERE problem_id = 3",
        "UPDATE sighting SET hour = 900000000 WHERE problem_id = 4",
        "UPDATE sighting SET calls = 9223372036854775807 WHERE problem_id = 5",
        "UPDATE sighting SET calls = -7 WHERE problem_id = 6",
        "UPDATE sighting SET outcome = 'what' WHERE problem_id = 7",
        "UPDATE sighting SET last_seen_us = -9223372036854775808 WHERE problem_id = 8",
    )
    assert two.take() == 20
    assert two.rows("SELECT min(last_seen_us), max(last_seen_us) FROM sighting") == [(0, int(T * 1e6))]
    assert two.take(T + 1) == 0


def test_names_environments_runs_and_sessions_have_a_limit_a_day(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_limits, "MORE_A_DAY", {"environment": 3, "run": 5, "session": 4, "report": 2})
    for i in range(20):
        two.theirs.sightings.add(f"job {i} " + "x" * 400, NEW, [saw(problem(), 1)], now_s=T)
        session = Session(host=f"h{i}", pid=7, started_us=1, run="r", path="native", generation=1, note="n" * 9000)
        two.theirs.sightings.beat(session, now_s=T)
    assert two.take() == 20, "the calls of further runs are counted under one name"
    assert two.rows("SELECT count(*), max(length(name)) FROM run") == [(6, 200)]
    assert ("(further runs)",) in two.rows("SELECT name FROM run")
    assert two.rows("SELECT count(*), max(length(note)) FROM session") == [(4, 4096)]
    for i in range(10):
        other = Environment(NEW.device, {"torch": f"9.{i}", "onednn": "1"})
        two.theirs.sightings.add("job 1", other, [saw(problem(), 1)], now_s=T + 2)
    two.take(T + 3)
    assert two.rows("SELECT count(*) FROM environment")[0][0] == 3
    two.take(T + DAY)
    assert two.rows("SELECT count(*) FROM environment")[0][0] == 6, "the others come with the next days"


def test_a_session_of_the_future_is_none_and_does_not_live_for_ever(two: Two) -> None:
    two.theirs.sightings.beat(
        Session(host="a", pid=7, started_us=1, run="r", path="native", generation=1), now_s=T + 1e6
    )
    two.theirs.sightings.beat(Session(host="b", pid=7, started_us=1, run="r", path="native", generation=1), now_s=T)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=T)
    two.take(T)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=T + 400)
    two.take(T + 400)
    assert two.rows("SELECT host, beat_us FROM session") == [("b", int(T * 1e6))]


def test_reports_on_what_was_never_published_are_not_kept(two: Two) -> None:
    two.ours.sightings.add("mine", NEW, [saw(problem())], now_s=T)
    for i in range(5):
        two.theirs.sightings.add_quarantine(found(problem(), config=f'{{"n": {i}}}'), "boom" * 5000, run="x", now_s=T)
    two.take()
    assert two.rows("SELECT count(*) FROM quarantine") == [(0,)]


def test_a_question_without_an_end_has_one(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_file, "ANSWER_S", 0.2)
    monkeypatch.setattr(members_file, "_PAGE", f"{_ENDLESS} SELECT count(*), ?, ?, ?, ?, ?, ?, ?, ? FROM r")
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=T)
    began = time.monotonic()
    with pytest.raises(StoreError, match="not read within"):
        two.take()
    assert time.monotonic() - began < 5


def test_a_damaged_file_set_aside_is_kept_and_does_not_stop_what_comes(two: Two, tmp_path: Path) -> None:
    aside = two.ours.path.with_name("ingest-aside.db")
    aside.write_bytes(b"SQLite format 3\0" + b"\xff" * 8000)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 3)], now_s=T)
    with pytest.raises(StoreError, match="damaged") as first:  # which a read that the disk refuses once is, too
        two.take()
    assert "ingest-refused" not in str(first.value) and aside.exists()
    with pytest.raises(StoreError, match="ingest-refused"):
        two.take(T + 1)
    assert two.take(T + 2) == 3 and not aside.exists()


def test_a_program_does_not_hang_where_a_pipe_lies_in_its_place(two: Two) -> None:
    two.theirs.close()
    for end in ("", "-wal", "-shm"):
        Path(f"{two.path}{end}").unlink(missing_ok=True)
    os.mkfifo(two.path)
    began = time.monotonic()
    with pytest.raises(GemmtunedError, match="a pipe"):
        two.theirs.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=T)
    assert time.monotonic() - began < 2


def test_the_columns_that_are_read_are_those_of_a_problem() -> None:
    assert set(members_file._READ["problem"]) == {name.removeprefix("p.") for name in PROBLEM_COLUMNS.split(", ")}
