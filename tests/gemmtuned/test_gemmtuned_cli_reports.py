"""What the reading commands say of a small database."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_homes import small_home
from command_line import EVEN, HERE, TUNED, WAITING, Cli, environment

from gemmtuned.configs.sighting import Sighting


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
    return small_home(tmp_path)


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
