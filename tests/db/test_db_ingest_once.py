"""Counts of other users' programs are taken exactly once, for ever, and what lies in their folder cannot hurt us."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from member_files import edit
from other_users import Two
from store_cases import DAY, HOUR, NEW, found, open_store, problem, saw

from gemmtuned._testing import faults
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.sighting import Session
from gemmtuned.db import ingest, members_progress
from gemmtuned.db.members_rows import Named

T = 1_800_000_000.0


def total(two: Two) -> int:
    """All calls in our own tables, of which both hold the same."""
    (counted,), (asked,) = two.rows("SELECT total(calls) FROM sighting"), two.rows("SELECT total(calls) FROM demand")
    assert counted == asked
    return int(counted[0])  # type: ignore[call-overload]


def live(two: Two, days: int, labels: int, shapes: int, seed: int) -> None:
    """Programs of many labels flush within a minute, and pause; what we have is what they had, at every step."""
    at, step, expected, draw = T, 0, 0, random.Random(seed)
    while at - T < days * DAY:
        step += 1
        few = step % 5 != 1  # all of them every fifth time
        for label in range(3 if few else labels):
            many = [saw(problem(n=64 + i), draw.randrange(1, 9), us=5) for i in range(5 if few else shapes)]
            expected += sum(s.calls for s in many)
            two.theirs.sightings.add(f"job {label}", NEW, many, now_s=at + label * 60 / labels)
        at += 60
        while (
            two.ours.ingest.take_from(two.path, now_s=at, limit_s=draw.choice([0.0, 0.001, 60.0]))
            or total(two) < expected
        ):
            at += 2
        assert total(two) == expected
        assert two.take(at + 1) == 0
        at += draw.choice([1.0, 59.0, HOUR, 5 * HOUR, DAY, 3 * DAY, 17 * DAY, 40 * DAY])
        assert two.take(at) == 0, "after any pause nothing is counted again"
        assert total(two) == expected
        if draw.random() < 0.3:
            two.ours.rollup.roll_up(now_s=at)
    assert two.ours.check() == []


@pytest.mark.long
def test_any_pause_counts_nothing_twice(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "AT_ONCE", 7)
    live(two, days=400, labels=5, shapes=6, seed=28)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_400_days_of_a_hundred_labels(two: Two) -> None:
    live(two, days=400, labels=100, shapes=300, seed=28)


@pytest.mark.long
def test_more_rows_in_one_minute_than_a_page_holds(two: Two) -> None:
    for label in range(100):
        two.theirs.sightings.add(
            f"job {label}", NEW, [saw(problem(n=64 + i), 3) for i in range(300)], now_s=T + label / 2
        )
    assert two.take(T + 60) == 90_000 == total(two)
    two.theirs.sightings.add("an hour later", NEW, [saw(problem(), 5)], now_s=T + HOUR)
    assert two.take(T + HOUR) == 5
    assert two.take(T + 20 * DAY) == 0 == two.take(T + 400 * DAY)


def test_a_new_database_beside_an_old_file_takes_all_of_it_once(two: Two, tmp_path: Path) -> None:
    for day in range(40):
        two.theirs.sightings.add("serve", NEW, [saw(problem(m), 10) for m in range(1, 8)], now_s=T + day * DAY)
    two.ours.close()
    for file in (tmp_path / "ours").iterdir():
        if file.is_file():
            file.unlink()
    two.ours = open_store(tmp_path / "ours")
    assert two.take(T + 100 * DAY) == 2800
    assert two.take(T + 100 * DAY + 2) == two.take(T + 200 * DAY) == 0


@pytest.mark.long
def test_a_large_file_is_moved_out_under_its_writers_and_each_count_kept(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "ROTATE_BYTES", 300_000)
    expected, draw, moves = 0, random.Random(1), []
    real = ingest.set_aside
    monkeypatch.setattr(ingest, "set_aside", lambda *paths: moves.append(1) or real(*paths))
    for step in range(60):
        many = [saw(problem(n=64 + draw.randrange(500)), 2) for _ in range(40)]
        expected += 80
        two.theirs.sightings.add(f"job {step}", NEW, many, now_s=T + step)
        if step % 3 == 0:
            assert two.take(T + step) and total(two) == expected
            assert not two.path.exists() or two.path.stat().st_size < 600_000
    two.take(T + 100)
    assert total(two) == expected
    assert moves and not (two.ours.path.parent / "ingest-aside.db").exists()
    assert two.rows("SELECT count(*) FROM ingest_file")[0][0] in (0, 1)
    assert two.ours.check() == []


def test_a_file_is_moved_out_once_a_day_and_then_clocks_that_jumped_do_not_matter(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    assert two.take(T) == 10
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 3)], now_s=T - 600)  # the clock is set back
    assert two.take(T - 599) == 3
    two.theirs.sightings.add("serve", NEW, [saw(problem(9), 4)], now_s=T - 500)
    two.theirs.sightings.add("serve", NEW, [saw(problem(10), 1)], now_s=T + 900)  # and forth again, before we look
    two.take(T + 900)
    two.theirs.sightings.add("serve", NEW, [saw(problem(10), 1)], now_s=T + 2 * DAY)
    two.take(T + 2 * DAY)
    assert total(two) == 19
    assert not two.path.exists()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_cases import NEW, problem, saw
from gemmtuned.db.store import Store
path = Path(sys.argv[1])
store = Store(path, locks=path.parent, timeout_s=30)
for step in range(50):
    many = [saw(problem(n=64 + 20 * step + i), 1) for i in range(20)]
    store.sightings.add(sys.argv[3], NEW, many, now_s=1_800_000_000 + step)
store.close()
"""


@pytest.mark.long
def test_programs_that_write_while_files_are_moved_out_lose_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "ROTATE_BYTES", 220_000)
    command = [sys.executable, "-c", WRITER, str(two.path), str(Path(__file__).parents[1] / "support")]
    writers = [subprocess.Popen([*command, f"job {n}"]) for n in range(3)]
    seen = 0
    with faults.armed() as passed:
        while any(writer.poll() is None for writer in writers):
            seen += two.ours.ingest.take_from(two.path, now_s=T + 1000, limit_s=0.05)
            time.sleep(0.02)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    seen += two.take(T + 2000)
    assert seen == total(two) == 3 * 50 * 20
    assert two.ours.check() == []
    assert "ingest.moved" in passed


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from store_cases import open_store
from gemmtuned.db import ingest
ingest.ROTATE_BYTES, ingest.AT_ONCE = 1, 5
ours = open_store(Path(sys.argv[1]) / "ours")
ours.ingest.take_from(Path(sys.argv[1]) / "ingest" / "ingest.db", now_s=float(sys.argv[3]))
"""


@pytest.mark.parametrize("place", ["ingest.set_aside", "ingest.moved", "ingest.done"])
def test_a_kill_at_any_place_of_a_move_counts_once(two: Two, tmp_path: Path, place: str) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(m), 10) for m in range(1, 30)], now_s=T)
    two.theirs.sightings.beat(Session(host="h", pid=7, started_us=1, run="r", path="native", generation=1), now_s=T)
    two.ours.close()
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parents[1] / "support"), str(T)]
    env = {**os.environ, "GEMMTUNED_FAILPOINTS": f"{place}=kill"}
    assert subprocess.run(command, env=env, check=False).returncode == -9
    two.theirs.sightings.add("serve", NEW, [saw(problem(m), 1) for m in range(1, 30)], now_s=T + 5)  # the same handle
    assert two.theirs.check() == []
    two.take(T + 6)
    assert total(two) == 29 * 11
    assert two.take(T + 3 * DAY) == 0 and total(two) == 29 * 11


def test_the_disk_refuses_to_move_it_and_counts_go_on(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "ROTATE_BYTES", 1)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    with faults.armed("ingest.set_aside=ENOSPC"), pytest.raises(StoreError, match="disk full"):
        two.take(T)
    assert total(two) == 10
    assert two.take(T + 1) == 0 and total(two) == 10


def say(two: Two, at: float) -> None:
    """A program of theirs counts, says that it is there, and reports a route that failed."""
    two.theirs.sightings.add("serve", NEW, [saw(problem(m), 10) for m in range(1, 10)], now_s=at)
    two.theirs.sightings.beat(
        Session(host="h", pid=7, started_us=1, run="theirs", path="native", generation=1), now_s=at
    )
    two.theirs.sightings.add_quarantine(found(problem()), "boom", run="theirs", now_s=at)


@pytest.mark.parametrize("commit", range(1, 5))
def test_a_write_that_fails_loses_no_program_and_no_report(
    two: Two, monkeypatch: pytest.MonkeyPatch, commit: int
) -> None:
    monkeypatch.setattr(ingest, "AT_ONCE", 4)  # three pages
    two.ours.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    say(two, T)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T + 100)  # beyond what passes overlap
    with faults.armed(f"store.commit={commit}:ENOSPC"), pytest.raises(StoreError):
        two.take(T + 100)
    two.take(T + 400)
    assert total(two) == 100
    assert two.rows("SELECT run FROM session") == [("theirs",)]
    assert two.rows("SELECT reports FROM quarantine") == [(1,)]


def test_what_is_said_just_before_a_file_is_moved_out_is_heard(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.ours.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    two.take(T)
    real = ingest.set_aside

    def late(path: Path, aside: Path) -> bool:
        say(two, T + DAY)
        return real(path, aside)

    monkeypatch.setattr(ingest, "set_aside", late)
    two.take(T + DAY)
    assert not two.path.exists() and total(two) == 100
    assert two.rows("SELECT run FROM session") == [("theirs",)]
    assert two.rows("SELECT reports FROM quarantine") == [(1,)]


def test_a_turn_with_nothing_new_does_not_open_the_file(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    two.take()
    old = time.time() - 60
    for end in ("", "-wal"):
        os.utime(f"{two.path}{end}", (old, old))
    two.take(T + 1)
    monkeypatch.setattr(ingest, "MembersFile", lambda path: pytest.fail("opened"))
    began = time.monotonic()
    assert sum(two.take(T + 2) for _ in range(100)) == 0
    assert time.monotonic() - began < 1.0


_BEFORE = (
    "INSERT INTO sighting_before (problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, "
    "sampled_us, last_seen_us) SELECT problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, "
    "sampled_us, last_seen_us FROM sighting"
)


def test_what_the_version_before_has_taken_is_not_taken_again(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 15), saw(problem(9), 10)], now_s=T)
    two.theirs.sightings.add("serve", NEW, [saw(problem(10), 7)], now_s=T - 30 * DAY)  # taken, and forgotten since
    edit(two, _BEFORE, "DELETE FROM sighting")
    row, named = (0, 0, 0, int(T // 3600), "miss", 0), Named(problem(), NEW, "serve")
    values = ("1:2", members_progress._hash(row, named), 6, 0, 0.0, int(T * 1e6))
    two.ours._db.write(lambda conn: conn.execute("INSERT INTO taken VALUES (?, ?, ?, ?, ?, ?)", values))
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 5), saw(problem(11), 2)], now_s=T + 60)
    assert two.take(T + 61) == (15 - 6) + 5 + 2
    assert two.rows("SELECT count(*) FROM taken") == [(0,)]
    assert two.take(T + 62) == 0


def test_a_file_that_is_brought_up_to_date_while_it_is_read_counts_once(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "AT_ONCE", 7)
    many = [saw(problem(m), 10, us=3) for m in range(1, 40)]
    two.theirs.sightings.add("serve", NEW, many, now_s=T)
    seen = two.ours.ingest.take_from(two.path, now_s=T, limit_s=0.0)
    edit(two, _BEFORE, "DELETE FROM sighting")  # as step 0016 leaves it, though here it was so before
    two.ours._db.write(lambda conn: conn.execute("UPDATE ingest_row SET graph = 0"))
    two.ours._db.write(lambda conn: conn.execute("UPDATE ingest_file SET after = '[1' || substr(after, 3)"))
    two.theirs.sightings.add("serve", NEW, many, now_s=T + 1)
    assert seen and seen + two.take(T + 2) == 39 * 20 == total(two)
    assert two.take(T + 3) == 0


@pytest.mark.long
def test_a_page_of_a_large_file_costs_no_more_than_one_of_a_small_one(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 1)], now_s=T)
    one = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r WHERE x < 400000)"
    edit(
        two,
        "INSERT INTO sighting_before (problem_id, environment_id, run_id, hour, outcome, graph, calls, sampled_calls, "
        f"sampled_us, last_seen_us) {one} SELECT 1, 1, 1, 1 + x, 'miss', 0, 3, 0, 0, (1 + x) * 3600000000 FROM r",
    )
    began = time.monotonic()
    first = two.ours.ingest.take_from(two.path, now_s=T * 2, limit_s=0.0)
    assert first == 3 * ingest.AT_ONCE
    assert time.monotonic() - began < 2, "one page, not the file"
