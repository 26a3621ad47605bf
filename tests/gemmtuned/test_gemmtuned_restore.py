"""The database lost, replaced or foreign: what the commands say, and that doing what they say ends well."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, solution
from store_cases import new_file

from gemmtuned._testing import faults
from gemmtuned.cli import build
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store, check

SIZES = (64, 65, 66, 67)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with four solutions in use, published one by one, and a backup from when there were two."""
    home = tmp_path / "home"
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    for n in SIZES:
        store.sightings.add("serve", ENVIRONMENT, [Sighting(problem(n), "exact", 10)], now_s=time.time())
        store.solutions.install(None, [solution(problem(n))], environment=ENVIRONMENT, now_s=time.time())
        publish(store, home / "configs", home / "locks", now_s=time.time())
        if n == SIZES[1]:
            store.backup(tmp_path / "backup.db")
    store.close()
    return home


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs one command in this process: starting another for each takes ten times as long."""
    logger = logging.getLogger("gemmtuned")
    before = logger.handlers[:], logger.level, logger.propagate
    app = build()
    for name in [name for name in os.environ if name.startswith(("GEMMTUNED_", "AITER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GEMMTUNED_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "500")

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            app(list(args), prog_name="gemmtuned")
        return subprocess.CompletedProcess(args, int(end.value.code or 0), *capsys.readouterr())

    yield call
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64, threads=1)


def in_use(home: Path) -> list[int]:
    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return sorted(s.problem.n for file in manifest.files for s in read_table(home / "configs", file)[0])


def in_store(home: Path) -> list[int]:
    store = Store(home / "tune.db", locks=home / "locks")
    try:
        return sorted(s.problem.n for s in store.solutions.published()[1])
    finally:
        store.close()


def gone(home: Path) -> None:
    for path in home.glob("tune.db*"):
        path.unlink()


def older(home: Path) -> None:
    gone(home)
    shutil.copyfile(home.parent / "backup.db", home / "tune.db")


def truncated(home: Path) -> None:
    os.truncate(home / "tune.db", (home / "tune.db").stat().st_size // 2)


def emptied(home: Path) -> None:
    gone(home)
    (home / "tune.db").touch()


def new(home: Path) -> None:
    """Deleted, and a program has made it anew and counted hits."""
    gone(home)
    store = Store(home / "tune.db", locks=home / "locks")
    store.sightings.add("serve", ENVIRONMENT, [Sighting(problem(n), "exact", 10) for n in SIZES], now_s=time.time())
    store.close()


LOST = {"gone": gone, "older": older, "emptied": emptied, "new": new}


@pytest.mark.part(6)
@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
@pytest.mark.parametrize(
    "command",
    [
        ("db", "publish"),
        ("rollback", "--generation", "4"),
        ("import", "configs"),
        ("withdraw", str(problem(64))),
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_publishes_brings_the_rows_back_first(
    home: Path, run: Run, lose: Callable[[Path], None], command: tuple[str, ...]
) -> None:
    lose(home)
    done = run(*(str(home / part) if part == "configs" else part for part in command))

    assert done.returncode == 0, done.stdout + done.stderr
    assert in_use(home) == in_store(home) == [n for n in SIZES if n != 64 or command[0] != "withdraw"]
    assert check(home / "tune.db") == []


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_status_coverage_and_doctor_say_what_is_missing_and_what_mends_it(
    home: Path, run: Run, lose: Callable[[Path], None]
) -> None:
    lose(home)
    for command in (["status"], ["coverage"], ["doctor", "--quick"]):
        said = run(*command)
        assert "gemmtuned db publish" in said.stdout, (command, said.stdout, said.stderr)
        assert "solutions" in said.stdout and "generation 4" in said.stdout
    assert in_use(home) == list(SIZES), "looking changes nothing"

    assert run("db", "publish").returncode == 0
    for command in (["status"], ["coverage"], ["doctor", "--quick"]):
        assert "gemmtuned db publish" not in run(*command).stdout


def test_coverage_is_not_0_beside_hits_without_a_word(home: Path, run: Run) -> None:
    new(home)
    said = json.loads(run("coverage", "--json").stdout)
    assert (said["total"]["covered_share"], said["total"]["hit_share"]) == (0, 1)
    assert any("lacks 4 of the published solutions" in note for note in said["notes"])

    run("db", "publish")
    said = json.loads(run("coverage", "--json").stdout)
    assert (said["total"]["covered_share"], said["notes"]) == (1, [])


@contextmanager
def held(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    ("command", "word", "left"),
    [
        (("withdraw", str(problem(64))), "1 withdrawn", [65, 66, 67]),
        (("forget", str(problem(64))), "1 withdrawn and forgotten", [65, 66, 67]),
        (("rollback", "--generation", "2"), "rolled back to 2", [64, 65]),
        (("pin", str(problem(64))), "1 pinned", list(SIZES)),
    ],
    ids=["withdraw", "forget", "rollback", "pin"],
)
def test_what_could_not_be_published_is_published_by_trying_again(
    home: Path, run: Run, command: tuple[str, ...], word: str, left: list[int]
) -> None:
    with held(home / "locks" / "publish.lock"):
        first = run(*command)
    assert (first.returncode, in_use(home)) == (75, list(SIZES))
    assert f"{word}, not yet published" in first.stderr
    assert "not yet published" in run("doctor", "--quick").stdout
    assert "not yet published" in run("status").stdout

    again = run(*command)

    assert again.returncode == 0, again.stdout + again.stderr
    assert in_use(home) == left == in_store(home)
    assert "not yet published" not in run("doctor", "--quick").stdout


def test_tables_that_cannot_be_read_of_a_lost_database_are_told_with_the_way_out(home: Path, run: Run) -> None:
    gone(home)
    for path in (home / "configs").glob("*.jsonl"):
        path.write_text("{}\n")
    refused = run("db", "publish")
    assert refused.returncode == 1 and "4 solutions of generation 4 cannot be read" in refused.stderr
    assert "--give-up" in refused.stderr and "--give-up" in run("doctor", "--quick").stdout

    assert run("db", "publish", "--give-up").returncode == 0
    assert in_use(home) == []
    assert "--give-up" not in run("doctor", "--quick").stdout


def test_a_pause_that_cannot_be_written_does_not_pause(home: Path, run: Run) -> None:
    with faults.armed("publish.write=ENOSPC"):
        refused = run("pause", "--for", "1m")
    assert refused.returncode == 1 and "No space left" in refused.stderr
    assert not (home / "paused").exists()
    assert run("pause", "--for", "1m").returncode == 0
    assert (home / "paused").read_text().strip().isdigit()


@pytest.mark.parametrize("command", ["status", "coverage", "untuned", "gains", "trials"])
def test_an_empty_file_is_no_database_yet(home: Path, run: Run, command: str) -> None:
    """A program that starts makes one, and fills it a moment later."""
    emptied(home)
    done = run(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert run("db", "check").returncode == 0


@pytest.mark.parametrize("command", ["status", "coverage", "untuned", "gains", "trials"])
def test_another_programs_database_is_named_and_no_command_is_advised_that_it_refuses(
    home: Path, run: Run, command: str
) -> None:
    (home / "tune.db").unlink()
    with closing(sqlite3.connect(home / "tune.db")) as conn:
        conn.execute("CREATE TABLE photos (name)")

    done, doctor = run(command), run("doctor", "--quick")

    assert done.returncode == doctor.returncode == 1
    assert "a SQLite database of another program. Move it away" in done.stderr
    assert "db publish" not in done.stdout + done.stderr + doctor.stdout


def test_a_full_disk_is_in_the_daemons_log_with_advice_that_fits() -> None:
    reason = "store not written: /home/tune.db: disk full (0 MiB free). Free space, or set GEMMTUNED_HOME"
    assert advice(reason).startswith("free space there")
    assert "upgrade gemmtuned" in advice("/home/tune.db: schema 99, this gemmtuned knows 15. Upgrade gemmtuned here")
    assert "restart gemmtuned daemon" in advice("/home/tune.db: damaged (malformed)")


def test_tables_whose_folder_cannot_be_looked_at_are_one_line_of_a_report(home: Path, run: Run) -> None:
    """Closed to us, on a disk that does not answer: each call of stat fails, here by a link to a name too long."""
    aside = home / "aside"
    (home / "configs").rename(aside)
    (home / "configs").symlink_to("x" * 300)
    for command in ("status", "coverage"):
        done = run(command)
        assert done.returncode == 0 and "rograms that start now get none of them" in done.stdout + done.stderr
    done = run("doctor", "--quick", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert rows["published tables"]["result"] == "FAIL" and rows["database"]["result"] == "PASS"
    for command in (("db", "publish"), ("withdraw", "8", "64", "64")):
        done = run(*command)
        assert done.returncode == 1 and "configs/manifest.json: cannot be read (" in done.stderr

    (home / "configs").unlink()
    aside.rename(home / "configs")
    assert run("db", "publish").returncode == 0 and sorted(in_use(home)) == list(SIZES)
