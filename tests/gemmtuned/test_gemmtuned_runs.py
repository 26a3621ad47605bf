"""Reports of one program, by layer, for CI: --run, --by layer, --fail-under, and the share of a program's own time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from store_cases import HOUR, NEW, found, new_store, open_store, problem, saw
from typer.testing import CliRunner, Result

from gemmtuned.cli import build
from gemmtuned.configs.settings import Settings
from gemmtuned.db.of_runs import own_time
from gemmtuned.hooks.flush import new_session
from gemmtuned.reports.comparison import report, undisturbed
from gemmtuned.reports.own_time import with_own_time

NOW_S = time.time()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """serve calls a product that is twice as fast and one that waits; "o'train {x}" only the one that waits."""
    store = new_store(tmp_path)
    store.sightings.add(
        "serve", NEW, [saw(problem(), 100, us=10.0), saw(problem(n=64), 50, us=4.0)], now_s=NOW_S - HOUR
    )
    store.sightings.add("o'train {x}", NEW, [saw(problem(n=64), 50, us=4.0)], now_s=NOW_S - HOUR)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=NOW_S - 60)
    store.close()
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(build(), list(words))


def rows(*words: str) -> list[dict]:
    return json.loads(call(*words, "--json").stdout)["rows"]


def test_a_run_is_reported_alone(home: Path) -> None:
    assert [row["calls"] for row in rows("coverage", "--run", "serve")] == [150]
    assert [row["calls"] for row in rows("coverage", "--run", "o'train {x}")] == [50]
    assert [row["calls"] for row in rows("coverage", "--by", "layer", "--run", "o'train {x}")] == [50]
    assert [row["problem"] for row in rows("gains", "--run", "serve")] == [str(problem())]
    assert rows("gains", "--run", "o'train {x}") == []
    assert [row["problem"] for row in rows("untuned", "--run", "serve")] == [str(problem(n=64))]
    wrong = call("coverage", "--run", "nobody")
    assert wrong.exit_code == 2 and "there are: o'train {x}, serve" in wrong.stderr


def test_by_layer_is_one_row_for_each_n_and_k(home: Path) -> None:
    assert [row["layer"] for row in rows("untuned", "--by", "layer")] == ["64x512 fp32, 2 threads"]
    layer = rows("gains", "--by", "layer")[0]
    assert (layer["layer"], layer["faster"], layer["speedup"]) == ("1024x512 fp32, 2 threads", 1, 2.0)


def test_ci_fails_under_a_share(home: Path) -> None:
    share = json.loads(call("coverage", "--json").stdout)["total"]["covered_share"]
    assert call("coverage", "--fail-under", str(100 * share - 1)).exit_code == 0
    assert call("coverage", "--fail-under", str(100 * share + 1)).exit_code == 1
    assert call("coverage", "--by", "layer", "--fail-under", "99").exit_code == 1


def test_the_three_answers_are_one_whole(home: Path) -> None:
    said = call("coverage").stdout
    total = json.loads(call("coverage", "--json").stdout)["total"]

    assert total["faster_share"] == pytest.approx(1000 / 1400) and total["best_share"] == 0
    assert "runs faster" in said and "has no verdict" in said


def test_a_parent_that_waits_for_its_workers_is_no_time_of_the_program(home: Path) -> None:
    store = open_store(home)
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home), "GEMMTUNED_RUN": "serve"})
    for pid, calls, dropped, seconds in ((1001, 0, 0, 90.0), (1002, 100, 0, 10.0), (1003, 0, 7, 5.0)):
        one = new_session(
            settings, path="native", started_us=round((NOW_S - seconds) * 1e6), generation=0, active_us=0, calls=calls,
            dropped=dropped, errors=0, reload_failures=0, rank=None, note="",
        )  # fmt: skip
        store.sightings.end_session(replace(one, pid=pid), now_s=NOW_S)
    store.close()

    assert own_time(home / "tune.db", now_s=NOW_S)["serve"] == {"processes": 2, "wall_us": 15e6, "waited_us": 0}
    assert rows("coverage", "--by", "run", "--run", "serve")[0]["wall_us"] == 15e6


def test_a_programs_gain_is_bounded_by_the_time_it_ran() -> None:
    row = {"run": "serve", "time_us": 200.0, "now_time_us": 100.0, "hit_saved_us": 100.0}
    half = with_own_time([row], {"serve": {"wall_us": 200.0}})[0]
    assert half["gemm_share"] == pytest.approx(2 / 3) and half["program_gain"] == pytest.approx(1.5)
    more = with_own_time([row], {"serve": {"wall_us": 50.0}})[0]
    assert more["bounded"] and more["gemm_share"] == 1.0 and more["program_gain"] == pytest.approx(2.0)
    assert with_own_time([row], {})[0]["program_gain"] is None


def test_calls_from_before_anything_was_tuned_took_stock_torchs_time() -> None:
    """900 of 1000 us were products, on stock torch: twice as fast they make 550 of it, whatever was tuned since."""
    row = {"run": "serve", "time_us": 900.0, "now_time_us": 450.0, "hit_saved_us": 0.0}
    before = with_own_time([row], {"serve": {"wall_us": 1000.0}})[0]
    assert before["gemm_share"] == pytest.approx(0.9) and before["program_gain"] == pytest.approx(1000 / 550)
    after = with_own_time([{**row, "hit_saved_us": 450.0}], {"serve": {"wall_us": 550.0}})[0]
    assert after["gemm_share"] == pytest.approx(0.9) and after["program_gain"] == pytest.approx(1000 / 550)
    half = with_own_time([{**row, "hit_saved_us": 225.0}], {"serve": {"wall_us": 775.0}})[0]
    assert half["gemm_share"] == pytest.approx(0.9) and not half["bounded"]


def test_what_others_took_of_a_programs_time_is_left_out_of_its_shares(home: Path) -> None:
    """Eight workers on two CPUs: of 80 s that they ran, 60 s they waited, and of the rest half was products."""
    store = open_store(home)
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home), "GEMMTUNED_RUN": "workers"})
    store.sightings.add("workers", NEW, [saw(problem(n=64), 2_500_000, us=4.0)], now_s=NOW_S)
    for number in range(8):
        one = new_session(
            settings, path="native", started_us=round((NOW_S - 10.0) * 1e6), generation=0, active_us=0, calls=1,
            dropped=0, errors=0, reload_failures=0, rank=None, note="", waited_us=7_500_000,
        )  # fmt: skip
        store.sightings.end_session(replace(one, pid=1000 + number), now_s=NOW_S)
    store.close()

    assert own_time(home / "tune.db", now_s=NOW_S)["workers"] == {"processes": 8, "wall_us": 80e6, "waited_us": 60e6}
    half = own_time(home / "tune.db", now_s=NOW_S, since_s=5.0)["workers"]
    assert (half["wall_us"], half["waited_us"]) == (40e6, 30e6), "of a window its part"
    row = rows("coverage", "--by", "run", "--run", "workers")[0]
    assert (row["wall_us"], row["waited_us"]) == (80e6, 60e6)
    assert row["gemm_share"] == pytest.approx(0.5) and row["program_limit"] == pytest.approx(2.0)
    said = call("coverage", "--by", "run").stdout
    assert "workers: 75.0 % of the time that it ran its threads waited for CPUs that others used" in said
    assert "serve: " not in said and "bounded" not in said


def test_disturbed_rounds_are_left_out_where_enough_remain() -> None:
    others = [0.0, 0.9, 0.1, 0.0, 0.0, 0.0]
    assert undisturbed(others) == [0, 2, 3, 4, 5]
    assert undisturbed([0.9] * 6) == list(range(6))
    figures = {arm: [1.0, 9.0, 1.0, 1.0, 1.0, 1.0] for arm in ("off", "capture", "on")}
    said = report(["x"], figures, unit="s", higher_is_better=False, others=others)
    assert said.facts["rounds"] == 5 and said.facts["left_out"] == 1
    assert any("1 of 6 rounds left out" in note for note in said.notes)


def test_generations_are_listed(home: Path) -> None:
    assert [row["generation"] for row in rows("rollback")] == [1]
