"""Commands that change what is stored or published, and copies of the database."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_homes import small_home
from command_line import EVEN, TUNED, WAITING, Cli, environment

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.db.migrations import SCHEMA


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `gemmtuned ARGS` as a process of its own, its home in tmp_path/home."""

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemmtuned", *args]
        env = environment(tmp_path / "home", **more)
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)

    return run


def _states(home: Path) -> dict[str, str]:
    from gemmtuned.configs.manifest import read_table

    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return {str(s.problem): s.state for f in manifest.files for s in read_table(home / "configs", f)[0]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small_home(tmp_path)


def test_pin_forget_retune_and_rollback_reach_the_published_tables(call: Cli, home: Path) -> None:
    both = {str(TUNED): "published", str(EVEN): "default_best"}
    assert _states(home) == both
    assert call("pin", str(TUNED), "--dry-run").stdout.splitlines()[-1] == "1 would be pinned"
    assert _states(home) == both
    assert call("pin", str(TUNED)).returncode == 0
    assert _states(home)[str(TUNED)] == "pinned"
    again = call("pin", str(TUNED))
    assert again.returncode == 1 and "pinned already" in again.stdout
    assert "pinned" in call("gains").stdout, "a table with something pinned says so"
    assert call("pin", str(TUNED), "--off").returncode == 0
    assert _states(home) == both

    would = json.loads(call("retune", str(EVEN), str(WAITING), "--dry-run", "--json").stdout)
    assert would["dry_run"] and (would["solutions"], would["asked_for"]) == (1, 1)
    assert json.loads(call("status", "--json").stdout)["asked_again"] == 0
    retuned = json.loads(call("retune", str(EVEN), "--json").stdout)
    assert (retuned["schema"], retuned["solutions"]) == ("gemmtuned.retune/1", 1)
    assert call("retune", "fp32:7x7x7,threads=1").returncode == 1
    for spelled in (["9", "2048", "1024"], ["9x2048x1024", str(EVEN)]):
        assert json.loads(call("retune", *spelled, "--json").stdout)["solutions"] == 1
    assert call("retune", "9", "2048", "7").returncode == 1
    for large in ("9" * 20, "9" * 5000):
        told = call("retune", "9", "2048", large)
        assert told.returncode == 2 and "M, N and K are 2147483647 at most" in told.stderr
    assert call("pin", "9", "2048", "1024", "--dry-run").stdout.splitlines()[-1] == "1 would be pinned"

    dry = json.loads(call("forget", str(EVEN), "--dry-run", "--json").stdout)
    done = json.loads(call("forget", str(EVEN), "--json").stdout)
    assert dry["dropped_rows"] == done["dropped_rows"] > 0
    assert _states(home) == {str(TUNED): "published"}
    assert json.loads(call("db", "check", "--json").stdout)["ok"]

    would = json.loads(call("rollback", "--generation", "2", "--dry-run", "--json").stdout)
    assert [(row["change"], row["problem"]) for row in would["rows"]] == [("comes back", str(EVEN))]
    back = json.loads(call("rollback", "--generation", "2", "--json").stdout)
    assert back["generation"] > would["generation"]
    assert _states(home) == both
    manifest = read_manifest(home / "configs")
    assert manifest is not None and manifest.generation == back["generation"]
    wrong = call("rollback", "--generation", "99")
    assert wrong.returncode == 1 and wrong.stderr == (
        f"gemmtuned: generation 99: the store has 0 to {back['generation']}. gemmtuned rollback lists the newest, with "
        "--generation N --dry-run it shows what would change\n"
    )
    assert f" {back['generation']} " in call("rollback").stdout and "rolled back to gen" in call("rollback").stdout


def test_pause_and_resume_are_the_file_the_daemon_looks_at(call: Cli, home: Path) -> None:
    from gemmtuned.daemon.service.rules import paused_until

    assert "until gemmtuned resume" in call("pause").stdout
    assert paused_until(home, time.time()) == 0
    assert "PAUSED" in call("status").stdout.splitlines()[0]
    assert call("resume").stdout == "resumed\n"
    assert paused_until(home, time.time()) is None
    assert call("resume").stdout == "was not paused\n"
    call("pause", "--for", "2h")
    until_s = paused_until(home, time.time())
    assert until_s is not None and 7100 < until_s - time.time() <= 7201  # told in whole seconds, rounded up


def test_withdraw_takes_it_out_of_the_published_tables(call: Cli, home: Path) -> None:
    before = read_manifest(home / "configs")

    dry = call("withdraw", str(TUNED), "--dry-run")
    assert (dry.returncode, read_manifest(home / "configs")) == (0, before)
    assert "1 would be withdrawn" in dry.stdout
    shape = str(TUNED.m), str(TUNED.n), str(TUNED.k)
    assert call("withdraw", *shape, "--dry-run").stdout == dry.stdout
    nothing = call("withdraw", "9", "9", "9")
    assert nothing.returncode == 1 and "No solution in use for 9 9 9" in nothing.stdout

    done = call("withdraw", str(TUNED))
    after = read_manifest(home / "configs")
    assert done.returncode == 0 and before is not None and after is not None
    assert (before.generation, after.generation) == (2, 3)
    assert sum(file.rows for file in after.files) == 1

    assert call("withdraw", str(TUNED)).returncode == 1


@pytest.mark.long
def test_writers_make_no_database(cli: Cli, tmp_path: Path) -> None:
    for args in (["withdraw", str(TUNED)], ["db", "backup"]):
        done = cli(*args)
        assert done.returncode == 1
        assert done.stderr.startswith("gemmtuned: no database at")
    assert not (tmp_path / "home").exists()


def test_a_backup_is_a_database_that_passes_its_check(call: Cli, home: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"

    assert call("db", "backup", str(target)).returncode == 0
    assert json.loads(call("db", "check", "--json", GEMMTUNED_DB=str(target)).stdout)["ok"] is True


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA + 1])
def test_a_backup_of_another_versions_database_is_of_that_version(
    call: Cli, home: Path, tmp_path: Path, version: int
) -> None:
    with contextlib.closing(sqlite3.connect(home / "tune.db")) as conn:
        conn.execute(f"PRAGMA user_version = {version}")
    assert call("db", "backup", str(tmp_path / "copy.db")).returncode == 0
    assert ("Upgrade gemmtuned here" in call("status").stdout) == (version > SCHEMA)
    for file in (home / "tune.db", tmp_path / "copy.db"):
        with contextlib.closing(sqlite3.connect(file)) as conn:
            assert conn.execute("PRAGMA user_version").fetchone() == (version,)


def test_commands_say_that_programs_lose_their_counts_until_an_older_database_is_brought_up_to_date(
    call: Cli, home: Path
) -> None:
    with contextlib.closing(sqlite3.connect(home / "tune.db")) as conn:
        conn.execute(f"PRAGMA user_version = {SCHEMA - 1}")
    lost = f"schema {SCHEMA - 1}, not yet {SCHEMA}: programs keep their counts to themselves"
    assert call("status").stdout.startswith(f"OLDER: {home / 'tune.db'}: {lost}")
    for words in (("db", "check"), ("doctor", "--quick")):
        done = call(*words)
        assert done.returncode == 1 and lost in done.stdout
        assert "gemmtuned daemon" in done.stdout and "any program that counts" not in done.stdout


@pytest.mark.long
def test_a_damaged_database_fails_its_check_and_is_left_as_it_lies(cli: Cli, home: Path) -> None:
    db = home / "tune.db"
    damaged = b"not a database" * 500
    for name in ("tune.db-wal", "tune.db-shm"):
        (home / name).unlink(missing_ok=True)
    db.write_bytes(damaged)

    check, status = cli("db", "check"), cli("status")

    assert (check.returncode, status.returncode) == (1, 1)
    assert status.stderr.startswith("gemmtuned: ") and status.stderr.count("\n") == 1
    assert db.read_bytes() == damaged


def test_a_limit_on_the_size_of_files_is_named(home: Path) -> None:
    command = f"ulimit -f 4; exec {sys.executable} -m gemmtuned pin {TUNED}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(home), timeout=60)
    assert done.returncode == 1
    assert "may make no file larger than 4 KiB. Raise that: ulimit -f unlimited" in done.stderr
    assert done.stderr.count("\n") == 1
