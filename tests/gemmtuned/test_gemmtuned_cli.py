"""The command line as a user meets it: real processes, a real database, exit codes and what stands on which stream."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from command_line import EVEN, HERE, TUNED, WAITING, Cli, environment, solution
from hooked import wait_for
from store_cases import new_file

from gemmtuned.cli import COMMANDS, build, main
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import unknown_variables
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.db.migrations import SCHEMA
from gemmtuned.reports import checks_host
from gemmtuned.reports.comparison import DISTURBED, TOO_BUSY

READ = [
    ["coverage"],
    ["coverage", "--by", "run", "--weight", "calls"],
    ["coverage", "--by", "problem", "--weight", "flops", "--since", "7d"],
    ["untuned"],
    ["gains"],
    ["trials"],
    ["trials", str(TUNED)],
    ["status"],
    ["explain", str(TUNED)],
    ["explain", "8", "2048", "1024"],
    ["explain", "8x2048x1024"],
    ["db", "check"],
]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `gemmtuned ARGS` as a process of its own, its home in tmp_path/home."""

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gemmtuned", *args]
        env = environment(tmp_path / "home", **more)
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)

    return run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose database holds one tuned problem, one that is best as it is, and one that waits."""
    from gemmtuned.configs.solution import Candidate
    from gemmtuned.daemon.publishing.publish import publish
    from gemmtuned.db.store import Store

    home = tmp_path / "home"
    home.mkdir()
    now_s = time.time()
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    try:
        seen = [Sighting(TUNED, "miss", 1000), Sighting(EVEN, "miss", 10), Sighting(WAITING, "miss", 30)]
        store.sightings.add("serve \x1b[31m[red]", HERE, seen, now_s=now_s - 60)
        started_us = int(now_s * 1e6)
        session = Session(
            host="here", pid=os.getpid(), started_us=started_us, run="serve", path="native", generation=1, errors=2
        )
        store.sightings.beat(session, now_s=now_s)
        work = store.leases.lease_next("test", HERE, now_s=now_s, hold_s=60, problems=[TUNED])
        assert work is not None
        store.trials.add(
            work,
            TUNED,
            Candidate("onednn"),
            phase="confirm",
            us=50.0,
            err=1e-7,
            outcome="ok",
            note="",
            started_us=started_us,
        )
        store.solutions.install(work, [solution(TUNED)], environment=HERE, now_s=now_s)
        best = solution(EVEN, backend="torch", stamp="2.13.0", us=100.0, gain_low=1.0, state="default_best")
        store.solutions.install(None, [best], environment=HERE, now_s=now_s)
        store.sightings.add("serve", HERE, [Sighting(TUNED, "exact", 500)], now_s=now_s)
        publish(store, home / "configs", home / "locks", now_s=now_s)
    finally:
        store.close()
    return home


def ids(args: list[str]) -> str:
    return " ".join(args)


@pytest.mark.parametrize("args", READ, ids=ids)
def test_every_read_command_gives_plain_text_and_valid_json(call: Cli, home: Path, args: list[str]) -> None:
    text, done = call(*args), call(*args, "--json")

    assert (text.returncode, text.stderr) == (0, "")
    assert "\x1b" not in text.stdout and text.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    parsed = json.loads(done.stdout)
    assert parsed["schema"] == f"gemmtuned.{'db.check' if args[0] == 'db' else args[0]}/1"
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("args", [*READ, ["tune", "fp32:8x64x64,threads=1"]], ids=ids)
def test_a_home_that_is_a_file_is_told(call: Cli, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "home").write_text("")

    done = call(*args)

    assert done.returncode == 1 and "home is a file. Set GEMMTUNED_HOME" in done.stderr


def test_a_daemon_tells_a_home_below_a_file(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = call("daemon", "--once", GEMMTUNED_HOME=str(tmp_path / "file" / "home"))

    assert done.returncode == 1 and f"({tmp_path / 'file'} is a file). Set GEMMTUNED_HOME" in done.stderr


@pytest.mark.parametrize("args", READ, ids=ids)
def test_every_read_command_works_before_there_is_a_database_and_makes_none(
    call: Cli, tmp_path: Path, args: list[str]
) -> None:
    text, parsed = call(*args), call(*args, "--json")

    assert (text.returncode, parsed.returncode) == (0, 0)
    assert "No database yet at" in text.stdout and "gemmtuned run" in text.stdout
    tables = [value for key, value in json.loads(parsed.stdout).items() if isinstance(value, list) and key != "notes"]
    assert all(table == [] for table in tables)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("args", READ, ids=ids)
def test_json_has_the_same_keys_before_there_is_a_database(call: Cli, home: Path, args: list[str]) -> None:
    after = json.loads(call(*args, "--json").stdout)
    before = json.loads(call(*args, "--json", GEMMTUNED_DB="/nowhere/tune.db").stdout)

    assert before.keys() | {"database"} == after.keys() | {"database"}


def test_a_size_below_1_is_told_as_that(call: Cli) -> None:
    for args in (
        ["explain", "-8", "2048", "512"],
        ["explain", "0", "2048", "512"],
        ["tune", "8", "-1", "4"],
        ["withdraw", "8x-1x4"],
        ["withdraw", "--dry-run", "-8x2048x512"],
        ["trials", "8", "0", "4"],
    ):
        done = call(*args)
        assert done.returncode == 2 and "M, N and K are 1 or more" in done.stderr, args
    assert call("withdraw", "--reason", "-5", "9", "9", "9").returncode == 1, "an option's value is no size"


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["coverage", "--by", "colour"],
        ["coverage", "--since", "yesterday"],
        ["untuned", "--limit", "-1"],
        ["trials", "not a problem"],
        ["explain", "8", "2048"],
        ["explain"],
        ["withdraw", "8", "9"],
        ["withdraw"],
        ["pin"],
        ["forget", "nonsense"],
        ["rollback", "--generation", "-1"],
        ["pause", "--for", "soon"],
        ["daemon", "--hours", "late"],
        ["daemon", "--budget", "0"],
        ["daemon", "--once", "--devices", "cuda:99"],
        ["withdraw", "fp32:8x8"],
        ["tune", "--space", "waves=3"],
        ["tune", "--libtype", "cutlass"],
        ["tune", "--tp", "8"],
        ["tune", "fp33:8x8x8"],
        ["tune", "-i", "missing.csv"],
        ["run"],
        ["run", "no-such-program-anywhere"],
        ["compare", "--figure", "(", "--", "python"],
        ["compare", "--figure", "none", "--", "python"],
        ["daemon", "--log-level", "loud"],
        ["db"],
    ],
    ids=ids,
)
def test_wrong_usage_ends_with_2_and_says_what(call: Cli, args: list[str]) -> None:
    done = call(*args)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() or args == ["db"]


def test_a_wrong_variable_is_named_on_one_line(cli: Cli) -> None:
    done = cli("status", GEMMTUNED_IDLE_S="soon")

    assert done.returncode == 2
    assert done.stderr == "gemmtuned: GEMMTUNED_IDLE_S must be a number of seconds, got 'soon'\n"


def test_wrong_usage_of_the_real_command_ends_with_2(cli: Cli) -> None:
    done = cli("coverage", "--by", "colour")

    assert (done.returncode, done.stdout) == (2, "")
    assert "'colour' is not one of family, device, run, problem" in done.stderr


def test_version_is_that_of_the_package(cli: Cli) -> None:
    import gemmtuned

    assert cli("--version").stdout == f"gemmtuned {gemmtuned.__version__}\n"


def test_status_imports_nothing_heavy(cli: Cli, home: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['status', '--json']; from gemmtuned.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'numpy', 'sqlite_utils', 'triton', 'rich', 'watchdog', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(home), timeout=60
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_coverage_counts_both_figures(call: Cli, home: Path) -> None:
    parsed = json.loads(call("coverage", "--by", "problem", "--weight", "calls", "--json").stdout)

    assert parsed["total"]["covered_share"] == pytest.approx(1510 / 1540)
    assert parsed["total"]["hit_share"] == pytest.approx(500 / 1540)
    assert {row["problem"]: row["covered_share"] for row in parsed["rows"]} == {
        str(TUNED): 1,
        str(EVEN): 1,
        str(WAITING): 0,
    }


def test_untuned_lists_what_waits(call: Cli, home: Path) -> None:
    parsed = json.loads(call("untuned", "--json").stdout)

    assert [(row["problem"], row["state"]) for row in parsed["rows"]] == [(str(WAITING), "queued")]


def test_untuned_and_status_tell_what_waits_from_what_was_taken_out_by_hand(call: Cli, home: Path) -> None:
    assert "only after gemmtuned retune" not in call("untuned").stdout
    assert call("withdraw", str(TUNED)).returncode == 0

    text = call("untuned").stdout
    assert "1 of them only after gemmtuned retune PROBLEM: failed, or taken out by hand" in text
    assert "gemmtuned daemon tunes them while" in text and "withdrawn: by hand" in text
    status = call("status").stdout
    assert "left out" in status and "failed" not in status
    assert json.loads(call("status", "--json").stdout)["environments"][0]["failed"] == 1

    assert call("rollback", "--generation", "0").returncode == 0
    assert "2 of them only after gemmtuned retune" in call("untuned").stdout


def test_status_says_how_many_wait_because_somebody_asked(call: Cli, home: Path) -> None:
    assert "raced again" not in call("status").stdout
    assert call("retune", str(EVEN)).returncode == 0

    assert "1 solution waits to be raced again, as somebody asked" in call("status").stdout
    assert json.loads(call("status", "--json").stdout)["asked_again"] == 1


def test_gains_leaves_out_what_gained_nothing(call: Cli, home: Path) -> None:
    parsed = json.loads(call("gains", "--json").stdout)

    assert [row["problem"] for row in parsed["rows"]] == [str(TUNED)]
    assert (parsed["faster"], parsed["default_best"]) == (1, 1)
    assert parsed["saved_us"] == pytest.approx(500 * 50.0)


def test_solutions_that_no_program_looks_up_are_named(call: Cli, home: Path) -> None:
    import sqlite3

    assert json.loads(call("gains", "--json").stdout)["unused"] == 0
    conn = sqlite3.connect(home / "tune.db")
    conn.execute("UPDATE solution SET published_us = published_us - 200000000000")
    conn.execute("UPDATE demand SET exact_calls = 0")
    conn.commit()
    conn.close()
    assert "1 solution never looked up" in call("gains").stdout
    rows = json.loads(call("gains", "--unused", "--json").stdout)["rows"]
    assert [row["problem"] for row in rows] == [str(TUNED)]


@pytest.mark.long
def test_status_names_the_generation_and_the_errors_of_programs(cli: Cli, home: Path) -> None:
    text, parsed = cli("status").stdout, json.loads(cli("status", "--json").stdout)

    assert (parsed["generation"], parsed["published_generation"]) == (2, 2)
    assert parsed["environments"][0]["waiting"] == 1
    assert parsed["saved_us"] == pytest.approx(500 * 50.0)
    assert "saved so far: 25.0 ms of GEMM time" in text
    assert "daemon: never ran here" in text
    assert "2 errors in the hook" in text


@pytest.mark.parametrize("state", ["tuning", "stopped"])
def test_status_tells_a_daemon_that_was_killed_from_one_that_was_stopped(call: Cli, home: Path, state: str) -> None:
    from gemmtuned.daemon.seats.work_queue import owner_name
    from gemmtuned.daemon.status_file import Notice, write_notice

    boot, start, namespace = owner_name().rsplit(".", 2)
    gone = f"{boot}.{start}0.{namespace}"  # as this process, started at another time
    now_s = time.time()
    write_notice(
        home, Notice(owner=gone, pid=1, started_s=0, updated_s=now_s, state=state, reason="", generation=1, solved=0)
    )

    said = call("status").stdout.splitlines()[0]

    assert said.startswith("daemon: not running")
    assert ("it was killed, the machine went down" in said) is (state == "tuning")


def test_status_before_any_daemon_has_looked(call: Cli, tmp_path: Path) -> None:
    from gemmtuned.db.store import Store

    folder = tmp_path / "fresh"
    store = Store(folder / "tune.db", locks=folder / "locks")
    store.sightings.add("serve", HERE, [Sighting(WAITING, "miss", 7)], now_s=time.time())
    store.close()

    done = call("status", "--json", GEMMTUNED_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    (place,) = json.loads(done.stdout)["environments"]
    assert (place["problems"], place["waiting"], place["failed"]) == (1, 1, 0)


def test_status_tells_of_what_was_put_off(call: Cli, home: Path) -> None:
    from gemmtuned.db.store import Store

    assert "put off" not in call("status").stdout
    store = Store(home / "tune.db", locks=home / "locks")
    now_s = time.time()
    work = store.leases.lease_next("test", HERE, now_s=now_s, hold_s=60, problems=[WAITING])
    assert work is not None
    store.leases.release(work, now_s=now_s, counted=False, put_off="the CPU is in use")
    store.close()

    assert "1 of 1 problem to be tuned tried, and put off: the CPU is in use" in call("status").stdout
    (place,) = json.loads(call("status", "--json").stdout)["environments"]
    assert (place["waiting"], place["put_off"]) == (1, 1)


def test_a_problem_may_be_spelled_without_its_threads(call: Cli, home: Path) -> None:
    short = "fp32:8x2048x1024"
    assert json.loads(call("explain", short, "--json").stdout)["problems"] == [str(TUNED)]
    assert json.loads(call("trials", short, "--json").stdout)["problem"] == str(TUNED)
    assert call("withdraw", f"{short},threads=4").returncode == 1
    assert call("withdraw", short, "--dry-run").stdout.splitlines()[-1] == "1 would be withdrawn"
    assert json.loads(call("retune", short, "--json").stdout)["solutions"] == 1


def test_a_hostile_run_name_reaches_the_terminal_harmless(call: Cli, home: Path) -> None:
    out = call("coverage", "--by", "run").stdout

    assert "\x1b" not in out and "[red]" in out


def test_what_cannot_be_tuned_is_said_before_anybody_called_it(call: Cli, home: Path) -> None:
    never = "weight_only:bf16/i8:8x64x256,wscale=row,layout=nn,threads=2"
    explained, planned = call("explain", never).stdout, call("tune", "--dry-run", never, str(TUNED)).stdout
    assert "runs stock torch: this version cannot tune it: weight-only products have W by rows" in explained
    assert "gemmtuned tune" not in explained
    assert "1 of them cannot be tuned, for example" in " ".join(planned.split()) and "W by rows" in planned


def test_explain_tells_hit_and_miss_apart(call: Cli, home: Path) -> None:
    hit, miss = call("explain", str(TUNED)).stdout, call("explain", str(WAITING)).stdout
    unseen = call("explain", "7", "7", "7", "--dtype", "fp32").stdout

    assert "onednn" in hit and "2.00x" in hit
    assert "waits for a daemon" in miss
    assert "was never seen" in unseen


def test_explain_of_what_has_no_solution_shows_no_table_of_nothing(call: Cli, home: Path) -> None:
    text = call("explain", str(WAITING)).stdout
    rows = json.loads(call("explain", str(WAITING), "--json").stdout)["rows"]

    assert "no solution is filed for M = " in text
    assert "nothing filed here" not in text and "Looked up in this order" not in text
    assert [row["why"] for row in rows] == ["nothing filed here"] * 3


def test_coverage_tells_of_a_gain_only_where_something_runs_faster(call: Cli, home: Path) -> None:
    assert "all GEMMs together: 1." in call("coverage").stdout
    assert call("withdraw", str(TUNED), str(EVEN)).returncode == 0
    text = call("coverage").stdout
    assert "0.0 % runs faster" in text and "together" not in text and "1.00x" not in text


def test_explain_names_the_steps_by_what_they_round_to(call: Cli, home: Path) -> None:
    text = call("explain", str(TUNED)).stdout
    rows = json.loads(call("explain", str(TUNED), "--json").stdout)["rows"]

    assert [(row["covers"], row["step"], row["m"]) for row in rows] == [
        ("exact", "exact", 8), ("fine", "multiple of 16", 16), ("coarse", "power of two", 8),
    ]  # fmt: skip
    assert all(row["step"] in text for row in rows) and "coarse" not in text


def _states(home: Path) -> dict[str, str]:
    from gemmtuned.configs.manifest import read_table

    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return {str(s.problem): s.state for f in manifest.files for s in read_table(home / "configs", f)[0]}


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


def test_run_switches_the_hook_on_and_keeps_the_programs_exit_code(cli: Cli, tmp_path: Path) -> None:
    names = ("GEMMTUNED", "AITER_TUNE_GEMM", "TORCH_DEVICE_BACKEND_AUTOLOAD", "GEMMTUNED_RUN", "GEMMTUNED_DISPATCH")
    script = tmp_path / "serve.py"
    script.write_text(f"import os, sys; print([os.environ.get(n) for n in {names}], sys.argv[1:]); sys.exit(7)")

    done = cli(
        "run", "--run-label", "nightly", "--capture-only", "serve.py", "--port", "3", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    plain = cli("run", sys.executable, "serve.py")

    assert (done.returncode, done.stdout) == (7, "['1', None, '1', 'nightly', '0'] ['--port', '3']\n")
    assert (plain.returncode, plain.stdout) == (7, "['1', None, '1', None, None] []\n")


FAKE = """
import os
import re
on = os.environ["GEMMTUNED"] == "1" and os.environ["GEMMTUNED_DISPATCH"] == "1"
print("tokens/s: 1"); print(f"tokens/s: {150 if on else 100}")
"""


@pytest.mark.long
@pytest.mark.parametrize("installed", [True, False])
def test_where_aiter_is_installed_run_sets_our_switch_alone_and_doctor_says_why(
    cli: Cli, tmp_path: Path, installed: bool
) -> None:
    if installed:
        (tmp_path / "aiter").mkdir()
        (tmp_path / "aiter/__init__.py").write_text("raise ImportError('never imported by us')")
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['GEMMTUNED'], os.environ.get('AITER_TUNE_GEMM'))")
    ran = cli("run", "--", sys.executable, str(program), AITER_TUNE_GEMM="1", PYTHONPATH=str(tmp_path))
    checked = cli("doctor", "--quick", AITER_TUNE_GEMM="1", PYTHONPATH=str(tmp_path))

    assert ran.stdout.split() == (["1", "None"] if installed else ["1", "1"])
    assert ("AITER is installed" in ran.stderr) == installed
    assert ("AITER is installed" in checked.stdout) == installed


@pytest.mark.long
def test_compare_reads_the_figure_a_program_prints(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(FAKE)

    done = cli(
        "compare", "--rounds", "5", "--no-warm-up", "--figure", r"tokens/s: ([0-9.]+)", "--json", "--", "bench.py"
    )

    parsed = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert {row["arm"]: row["median"] for row in parsed["arms"]} == {"off": 100, "capture": 100, "on": 150}
    busy = statistics.median(parsed["others"]) > DISTURBED
    assert parsed["arms"][2]["ratio"] == 1.5 and parsed["arms"][2]["verdict"] == (TOO_BUSY if busy else "better")
    assert parsed["arms"][1]["verdict"] == (TOO_BUSY if busy else "within noise")
    assert parsed["hits"] == {"solution_calls": 0, "calls": 0}


@pytest.mark.long
def test_compare_reads_a_key_of_the_json_a_program_prints(cli: Cli, tmp_path: Path) -> None:
    line = """import json; print(json.dumps({"speed": {"ms": 200 if on else 400}})); print("{not json"); print("[1]")"""
    (tmp_path / "bench.py").write_text(FAKE + line)

    arguments = ("--rounds", "5", "--no-warm-up", "--key", "speed.ms", "--lower-is-better", "--json")
    parsed = json.loads(cli("compare", *arguments, "--", "bench.py").stdout)

    assert {row["arm"]: row["median"] for row in parsed["arms"]} == {"off": 400, "capture": 400, "on": 200}
    assert (parsed["unit"], parsed["arms"][2]["ratio"]) == ("speed.ms", 2)
    both = cli("compare", "--key", "a", "--figure", "(x)", "--", "bench.py")
    assert both.returncode == 2 and "give one" in both.stderr


@pytest.mark.long
def test_compare_says_when_it_cannot_tell(cli: Cli) -> None:
    done = cli("compare", "--rounds", "2", "--no-warm-up", "--", sys.executable, "-c", "pass")

    assert done.returncode == 0
    assert "cannot tell a gain from noise" in done.stdout
    assert done.stderr.startswith(f"gemmtuned: 6 runs of {sys.executable} -c pass: 2 of each arm\n")


@pytest.mark.parametrize(
    ("code", "said"), [("import sys; print('boom'); sys.exit(3)", "ended with 3"), ("print('x')", "nothing it printed")]
)
def test_compare_fails_when_the_program_does(cli: Cli, code: str, said: str) -> None:
    done = cli("compare", "--figure", "f=([0-9]+)", "--", sys.executable, "-c", code)

    assert done.returncode == 1
    plan, error = done.stderr.splitlines()
    assert "16 runs of" in plan and "one to warm up" in plan
    assert said in error


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_command_that_a_signal_ends_says_which_and_ends_what_it_has_started(
    tmp_path: Path, number: int, code: int
) -> None:
    """In a fork of this process; `make long` has it in one of its own."""
    mark = tmp_path / "pid"
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.environ.update(environment(tmp_path))
            code_of_it = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 60"
            sys.argv = ["gemmtuned", "compare", "--", "/bin/sh", "-c", code_of_it]
            main()
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(1)
    wait_for(mark.exists)
    os.kill(pid, number)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.long
def test_an_interrupt_ends_with_130_and_stops_the_program(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-m", "gemmtuned", "compare", "--", sys.executable, "-c", code]
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        mark.unlink(missing_ok=True)
        process = subprocess.Popen(
            command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == expected
        assert "Traceback" not in stderr
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


def test_a_reader_who_has_seen_enough_is_no_error(home: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gemmtuned", "gains"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment(home), timeout=60)
    os.close(write)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_styles_unless_no_color_is_set(home: Path, no_color: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    env = environment(home, TERM="xterm-256color", NO_COLOR=no_color, COLUMNS="200")
    done = subprocess.run([sys.executable, "-m", "gemmtuned", "gains"], stdout=theirs, env=env, timeout=60)
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        out += part
    os.close(ours)

    assert done.returncode == 0
    assert (b"\x1b[" in out) is coloured


def test_tune_names_bad_rows_and_takes_none_of_them_for_good(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype\n8,64,64,False,torch.bfloat16\n8,64,x,False,torch.bfloat16\n")

    refused = call("tune", "-i", "u.csv", "--dry-run")
    skipped = call("tune", "-i", "u.csv", "--dry-run", "--skip-bad-rows", "--threads", "2", "--json")

    assert refused.returncode == 2
    assert "u.csv line 3, column K: 'x' is not a whole number" in refused.stderr
    assert "Bad rows in all: 1; --skip-bad-rows tunes the 1 problem of the others\n" in refused.stderr
    assert skipped.returncode == 0
    assert [row["problem"] for row in json.loads(skipped.stdout)["rows"]] == ["bf16:8x64x64,threads=2"]


def test_tune_of_a_file_without_a_good_row_says_so(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("M,N,K,bias,dtype\n-3,64,64,False,torch.bfloat16\n8,64,x,False,torch.bfloat16\n")

    refused = call("tune", "-i", "u.csv", "--dry-run")

    assert refused.returncode == 2
    assert "u.csv line 2, column M: '-3' must be 1 or more. Bad rows in all: 2; no row is good" in refused.stderr
    assert "--skip-bad-rows" not in refused.stderr


@pytest.mark.parametrize("args", [["status"], ["gains"], ["db", "check"], ["daemon", "--once"], ["retune", "8x64x64"]])
def test_a_database_that_is_a_folder_is_told(call: Cli, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "folder").mkdir()

    done = call(*args, GEMMTUNED_DB=str(tmp_path / "folder"))
    doctor = json.loads(call("doctor", "--quick", "--json", GEMMTUNED_DB=str(tmp_path / "folder")).stdout)

    said = f"{tmp_path / 'folder'}: a folder, no database. Set GEMMTUNED_DB to a file"
    assert done.returncode == 1 and said in done.stdout + done.stderr
    (database,) = (check for check in doctor["checks"] if check["name"] == "database")
    assert database["result"] == "FAIL" and database["found"].startswith(said)


def test_doctor_says_where_no_native_hook_can_be_built_and_no_table_published(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def found(**env: str) -> dict[str, dict[str, str]]:
        return {
            check["name"]: check for check in json.loads(call("doctor", "--quick", "--json", **env).stdout)["checks"]
        }

    for cache, why in (
        ("file", "file is a file"),
        ("file/cache", "file is a file"),
        ("/proc/x", "/proc takes no folder"),
    ):
        native = found(GEMMTUNED_CACHE=str(tmp_path / cache))["native hook"]
        assert native["result"] == "WARN" and why in native["found"] and "set GEMMTUNED_CACHE" in native["fix"]
    assert found(GEMMTUNED_CACHE=str(tmp_path / "cache"))["native hook"]["result"] == "WARN"
    assert not (tmp_path / "cache").exists()
    for folder in ("file", "file/configs"):
        tables = found(GEMMTUNED_CONFIG_DIR=str(tmp_path / folder))["published tables"]
        assert tables["result"] == "FAIL" and "file is a file" in tables["found"]
        assert "set GEMMTUNED_CONFIG_DIR" in tables["fix"]


def test_doctor_reports_every_part(call: Cli, home: Path) -> None:
    done = call("doctor", "--quick", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    parsed = json.loads(done.stdout)
    found = {check["name"]: check for check in parsed["checks"]}
    assert found["autoload"]["result"] == "FAIL" and "gemmtuned run" in found["autoload"]["fix"]
    assert done.returncode == 1
    assert found["database"]["result"] == "PASS"
    assert found["published tables"]["result"] == "PASS"
    parts = {"python", "torch", "entry point", "native hook", "home", "file system", "disk", "sqlite", "inotify"}
    assert parts | {"daemon", "programs"} <= set(found)
    assert {row["name"] for row in parsed["settings"]} == {variable.name for variable in VARIABLES}


def test_doctor_shows_what_is_wrong_last_and_of_variables_those_that_are_set(call: Cli, home: Path) -> None:
    lines = call("doctor", "--quick").stdout.splitlines()
    every = call("doctor", "--quick", "--variables").stdout

    results = [word for line in lines if (word := line[:4]) in ("PASS", "WARN", "FAIL")]
    assert results == sorted(results, key=("PASS", "WARN", "FAIL").index) and "WARN" in results
    assert "warned" in lines[-1] and lines[-2].startswith(results[-1])
    named = [variable.name for variable in VARIABLES if any(line.startswith(f"{variable.name} ") for line in lines)]
    assert "GEMMTUNED_HOME" in named and "GEMMTUNED_IDLE_S" not in named
    assert all(variable.name in every and variable.meaning in every for variable in VARIABLES)


def test_doctor_names_misspelled_variables_and_what_is_probably_meant(call: Cli) -> None:
    wrong = {"GEMMTUNED_HOMES": "1", "GEMMTUNED_TUNE_GEMM": "1", "gemmtuned_idle_s": "1", "GEMMTUNED_WHATEVER": "1"}

    found = json.loads(call("doctor", "--quick", "--json", **wrong).stdout)["checks"]
    right = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]

    said = {check["found"].split()[0]: check for check in found if check["name"] == "variables"}
    assert {check["result"] for check in said.values()} == {"WARN"}
    assert {name: "or set" in check["fix"] and check["fix"].split()[4] for name, check in said.items()} == {
        "GEMMTUNED_HOMES": "GEMMTUNED_HOME", "GEMMTUNED_TUNE_GEMM": "AITER_TUNE_GEMM",
        "gemmtuned_idle_s": "GEMMTUNED_IDLE_S", "GEMMTUNED_WHATEVER": False,
    }  # fmt: skip
    assert "variables" not in {check["name"] for check in right}


def test_near_misses_of_aiters_switches_are_named_and_aiters_own_variables_are_not() -> None:
    misses = {"AITER_TUNE_GEMMM": "AITER_TUNE_GEMM", "aiter_tune_gem": "AITER_TUNE_GEMM"}
    own = ("AITER_REBUILD", "AITER_LOG_LEVEL", "AITER_ONLINE_TUNE", "AITER_CONFIG_GEMM_A4W8", "AITER_LOG_MORE")

    assert unknown_variables(dict.fromkeys((*misses, *own, "AITER_TUNE_GEMM", "AITER_CONFIG_FMOE"), "1")) == misses


def test_a_name_that_begins_almost_as_ours_do_is_one_of_ours_misspelt() -> None:
    near = {
        "GEMTUNED": "GEMMTUNED", "GEMM_TUNED": "GEMMTUNED", "gemmtuned": "GEMMTUNED", "GEMTUNED_HOME": "GEMMTUNED_HOME",
        "GEMM_TUNE_RUN": "GEMMTUNED_RUN", "gemmtuned_home": "GEMMTUNED_HOME",
    }  # fmt: skip
    others = ("GEMMTUNED", "GEMMTUNED_HOME", "GEM_HOME", "GEMINI_API_KEY", "GEMM_TUNERS_X", "MY_GEMTUNED")
    assert unknown_variables(dict.fromkeys((*near, *others), "1")) == near


def test_what_kubernetes_sets_for_a_service_of_our_name_is_nobodys_mistake() -> None:
    port = "GEMMTUNED_PORT_9464_TCP"
    given = [f"GEMMTUNED_SERVICE_{name}" for name in ("HOST", "PORT", "PORT_METRICS")]
    given += ["GEMMTUNED_PORT", port, *(f"{port}_{name}" for name in ("PROTO", "PORT", "ADDR"))]
    given += ["GEMMTUNED_DAEMON_SERVICE_HOST", "GEMMTUNED_DAEMON_PORT"]  # a service gemmtuned-daemon

    assert unknown_variables(dict.fromkeys(given, "1")) == {}
    assert unknown_variables({"GEMMTUNED_SERVICE": "1", "GEMMTUNED_HOEM": "1"}).keys() == {
        "GEMMTUNED_SERVICE", "GEMMTUNED_HOEM"
    }  # fmt: skip


def test_each_wrong_variable_is_named_and_doctor_goes_on(call: Cli, home: Path) -> None:
    wrong = {"AITER_TUNE_GEMM": "yes", "GEMMTUNED_IDLE_S": "soon", "GEMMTUNED_TRUST": "nobody of this machine"}

    done = call("doctor", "--quick", "--json", **wrong)
    found = json.loads(done.stdout)["checks"]
    other = call("status", **wrong)

    said = [(check["result"], check["found"].split()[0]) for check in found if check["name"] == "variables"]
    assert done.returncode == 1 and sorted(said) == sorted(("FAIL", name) for name in wrong)
    assert {"home", "database", "programs"} <= {check["name"] for check in found}
    assert other.returncode == 2 and other.stderr.count("\n") == 1
    assert all(f"{name} must be" in other.stderr for name in wrong)


@pytest.mark.parametrize("place", ["file/home", "file", "/proc/home"])
def test_doctor_says_that_a_home_cannot_be_made_and_why(call: Cli, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / place  # of two absolute paths the second

    found = {
        check["name"]: check
        for check in json.loads(call("doctor", "--quick", "--json", GEMMTUNED_HOME=str(home)).stdout)["checks"]
    }

    assert found["home"]["result"] == "FAIL"
    assert found["home"]["found"].startswith(f"{home} cannot be ")
    assert ("Not a directory" if "file" in place else "/proc takes no folder") in found["home"]["found"]
    assert "set GEMMTUNED_HOME" in found["home"]["fix"]
    assert not {"disk", "file system", "published tables", "database", "programs"} & set(found)


@pytest.mark.parametrize(("files", "result"), [((1000, 0, 0), "FAIL"), ((1000, 9, 9), "PASS"), ((0, 0, 0), "PASS")])
def test_a_disk_with_room_and_without_inodes_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[int, int, int], result: str
) -> None:
    facts = os.statvfs_result((4096, 4096, 1 << 24, 1 << 24, 1 << 24, *files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert checks_host._space(tmp_path).result == result


def test_doctor_leaves_nothing_in_the_home(call: Cli, tmp_path: Path) -> None:
    call("doctor", "--quick")
    assert not list(tmp_path.iterdir())
    (tmp_path / "home").mkdir()
    call("doctor", "--quick")
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("command", [["doctor", "--quick"], ["status"], ["coverage"], ["daemon", "--once"]])
def test_a_home_in_a_folder_that_is_closed_to_us_is_said_in_one_line(
    call: Cli, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")  # as one without permission, which root always has

    done = call(*command, GEMMTUNED_HOME=str(tmp_path / "loop/home"))

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Set GEMMTUNED_HOME to a folder of your own" in done.stderr


def test_tables_in_a_folder_that_is_closed_to_us_are_no_traceback(call: Cli, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    done = call("doctor", "--quick", "--json", GEMMTUNED_CONFIG_DIR=str(tmp_path / "loop/configs"))

    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["published tables"]
    assert found["result"] == "FAIL" and "manifest.json: cannot be read (" in found["found"]


def test_doctor_says_who_may_write_the_published_tables(call: Cli, home: Path) -> None:
    (home / "configs").chmod(0o777)

    found = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]

    tables = next(check for check in found if check["name"] == "published tables")
    assert tables["result"] == "FAIL" and "chmod go-w" in tables["found"]
    assert tables["fix"].startswith("the command in the line")


def test_help_has_the_first_line_of_each_command_and_imports_none(call: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["gemmtuned.commands"]
    for name in [name for name in sys.modules if name.startswith("gemmtuned.commands.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(package, name.rpartition(".")[2])  # and put back: other tests patch what the package names
    shown = call("--help").stdout
    assert not [name for name in sys.modules if name.startswith("gemmtuned.commands.")]

    commands = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
    assert list(commands) == list(COMMANDS)
    for name, command in commands.items():
        line = COMMANDS[name].line
        assert f"  {name:10s}{line}\n" in shown
        assert command.help.split("\n\n")[0].replace("\n", " ").startswith(line), name


_PLURALS = (
    "calls|candidates|devices|errors|failures|files|kernels|models|places|problems|programs|rows|runs|seeds|shapes|solutions|"
    "weights"
)


@pytest.mark.parametrize(
    "words",
    [
        ("status",), ("coverage",), ("coverage", "--by", "layer"), ("untuned",), ("gains",), ("trials",),
        ("doctor", "--quick"), ("explain", "8", "64", "64"), ("export", "--format", "aiter", "--out", "one.csv"),
        ("retune", "8", "64", "64"), ("pin", "8", "64", "64"), ("forget", "8", "64", "64"), ("import", "one_row.csv"),
        ("import", "one_row.csv", "--dry-run"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_one_is_no_plural(tmp_path: Path, call: Cli, words: tuple[str, ...]) -> None:
    from gemmtuned.daemon.publishing.publish import publish
    from gemmtuned.db.store import Store

    (tmp_path / "one_row.csv").write_text("M,N,K\n8,64,128\n")
    only, now_s = Problem(m=8, n=64, k=64, threads=2), time.time()
    folder = tmp_path / "home"
    folder.mkdir()
    store = Store(folder / "tune.db", locks=folder / "locks")
    store.sightings.add("serve", HERE, [Sighting(only, "exact", 1)], now_s=now_s)
    store.solutions.install(None, [solution(only)], environment=HERE, now_s=now_s)
    publish(store, folder / "configs", folder / "locks", now_s=now_s)
    store.close()

    done = call(*words)

    assert not re.findall(rf"\b1 (?:{_PLURALS})\b.*", done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_coverage_says_first_that_it_is_off(home: Path, call: Cli) -> None:
    (home / "disabled").touch()

    assert call("coverage").stdout.startswith("SWITCHED OFF: ")
    assert call("status").stdout.startswith("SWITCHED OFF: ")


def test_coverage_without_calls_says_that_the_hook_is_not_built(tmp_path: Path, call: Cli) -> None:
    empty = {"GEMMTUNED_CACHE": str(tmp_path / "empty")}

    assert call("coverage", **empty).stdout.startswith("The native hook is not built yet")
