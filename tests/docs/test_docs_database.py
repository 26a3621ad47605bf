"""docs/database.md: a question has one answer in SQL, sqlite-utils, datasette and pandas; every column is explained."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner as ClickRunner
from store_cases import HOUR, NEW, found, new_store, open_store, problem, saw
from typer.testing import CliRunner

from gemmtuned.cli import build
from gemmtuned.configs.sighting import Session
from gemmtuned.db import queries
from gemmtuned.reports.questions import QUESTIONS, of_views, unit_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/database.md").read_text()
NOW_S = time.time()


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine days of two programs: exact hits, padded hits, a verdict that torch is best, a wait, a failed trial."""
    store = new_store(tmp_path)
    for ago in (9 * 24, 8 * 24, 20, 5, 2):
        for run, times in (("serve", 3), ("embed <b>", 1)):
            seen = [
                saw(problem(), 100 * times, "exact" if ago < 10 else "miss", us=10.0),
                saw(problem(m=70), 50 * times, "padded" if ago < 3 else "miss", us=20.0),
                saw(problem(n=4096), 10 * times, us=40.0),
                saw(problem(n=64), 2 * times, us=1.0),
            ]
            store.sightings.add(run, NEW, seen, now_s=NOW_S - ago * HOUR)
    best = found(problem(n=4096), backend="torch", config="", state="default_best", us=40.0, baseline_us=40.0)
    padded = found(problem(m=80), covers="fine", us=5.0, baseline_us=20.0)
    for solution in (found(problem()), padded, best):
        store.solutions.install(None, [solution], environment=NEW, now_s=NOW_S - 11 * HOUR)
    session = Session(
        host="h", pid=4711, started_us=1, run="serve", path="native", generation=1, active_us=0, calls=5, dropped=0,
        errors=0, reload_failures=0, note="",
    )  # fmt: skip
    store.sightings.beat(session, now_s=NOW_S)
    store.close()
    with sqlite3.connect(tmp_path / "tune.db") as conn:
        conn.execute(
            "INSERT INTO trial (problem_id, environment_id, mode, backend, config, phase, us, err, outcome, note, "
            "started_us, owner, stamp) "
            "SELECT 1, 1, 'eager', 'onednn', '{}', 'check', NULL, NULL, 'wrong', 'late', 1, 'h', ''"
        )
    conn.close()
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    return tmp_path / "tune.db"


def boxes(title: str) -> dict[str, str]:
    """The code of each language under this heading."""
    part = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)\n```", part, re.DOTALL))


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Values that compare whatever library they come from."""

    def value(one: Any) -> Any:
        if one is None or (isinstance(one, float) and math.isnan(one)):
            return None
        return pytest.approx(float(one), rel=1e-3, abs=1e-3) if isinstance(one, int | float) else one

    return [{name: value(one) for name, one in row.items()} for row in rows]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.name)
def test_a_question_has_one_answer_in_every_form(question: Any, database: Path) -> None:
    import sqlite_utils.cli

    code = boxes(question.title)
    conn = sqlite3.connect(database)
    conn.row_factory = sqlite3.Row
    by_sql = [dict(row) for row in conn.execute(code["sql"])]
    conn.close()
    assert by_sql, "a question without an answer proves nothing"

    words = code["sh"].removeprefix("sqlite-utils ").removesuffix(" --table").replace("tune.db", str(database), 1)
    head, quote, sql = words.partition(' "')
    done = ClickRunner().invoke(sqlite_utils.cli.cli, [*head.split(), *([sql.rstrip('"')] if quote else [])])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == plain(by_sql)

    names: dict[str, Any] = {}
    exec(code["python"], names)
    assert json.loads(names["answer"].to_json(orient="records")) == plain(by_sql)


@pytest.mark.long
def test_datasette_answers_the_canned_queries(database: Path) -> None:
    datasette = pytest.importorskip("datasette.app")
    import asyncio

    done = CliRunner().invoke(build(), ["db", "datasette"])
    assert done.exit_code == 0, done.stderr
    served = datasette.Datasette([str(database)], metadata=json.loads(done.stdout))

    async def ask() -> None:
        await served.invoke_startup()
        page = await served.client.get("/tune")
        assert page.status_code == 200
        for question in QUESTIONS:
            assert f"/tune/{question.name}" in page.text
            answer = await served.client.get(f"/tune/{question.name}.json?_shape=array")
            assert answer.status_code == 200 and answer.json(), question.name
        for view in queries.VIEWS:
            answer = await served.client.get(f"/tune/{view}")
            assert answer.status_code == 200, view
        shown = await served.client.get("/tune/solutions")
        assert "microseconds per call of stock torch" in shown.text

    asyncio.run(ask())


def test_every_column_is_explained_and_has_the_unit_of_its_name(database: Path) -> None:
    tables = of_views(database)["databases"]["tune"]["tables"]

    assert set(tables) == set(queries.VIEWS)
    assert [f"{v}.{c}" for v, one in tables.items() for c, said in one["columns"].items() if not said] == []
    assert tables["solutions"]["units"] == {"us": "us", "baseline_us": "us", "saved_us": "us", "gb_s": "GB/s"}
    assert unit_of("active_us") == "" and unit_of("bus") == ""


def test_padded_hits_are_joined_to_what_serves_them(database: Path) -> None:
    rows = queries.ask(database, f"SELECT * FROM traffic WHERE problem = '{problem(m=70)}' AND run = 'serve'")

    assert {(row["backend"], row["covers"], row["answer"], row["gain"]) for row in rows} == {
        ("onednn", "fine", "faster", 4.0)
    }
    assert {row["outcome"] for row in rows} == {"miss", "padded"}
    assert all(row["now_us"] == pytest.approx(row["time_us"] / 4) for row in rows)


def test_times_of_day_are_text_too(database: Path) -> None:
    for view in queries.VIEWS:
        rows = queries.ask(database, f"SELECT * FROM {view}")
        for row in rows:
            for name in (name for name in row if name.endswith("_at")):
                raw = row.get(name.removesuffix("_at"), row.get(name.removesuffix("_at") + "_us"))
                text = None if not raw else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(raw // 1_000_000))
                assert row[name] == text, (view, name)


def test_percents_are_of_what_they_say(database: Path) -> None:
    row = queries.ask(database, "SELECT * FROM coverage")[0]

    assert row["covered_percent"] == pytest.approx(100 * row["covered_time_us"] / row["time_us"], abs=0.06)
    assert row["hit_percent"] == pytest.approx(
        100 * (row["exact_calls"] + row["padded_calls"]) / row["calls"], abs=0.06
    )


def test_the_path_is_printed_for_other_programs(database: Path) -> None:
    assert CliRunner().invoke(build(), ["db", "path"]).stdout == f"{database}\n"


@pytest.mark.parametrize("by", ["family", "device", "run", "problem", "layer"])
def test_coverage_is_an_object_for_notebooks(by: str, database: Path) -> None:
    import gemmtuned

    answer = gemmtuned.coverage(by=by)
    assert len(answer) == len(answer.frame()) > 0
    assert "<table>" in answer._repr_html_() and "<b>" not in answer._repr_html_()
    assert str(answer).splitlines()[0] in answer._repr_html_()
    if by == "run":
        assert {row["run"] for row in answer} == {"serve", "embed <b>"}


def test_gains_is_an_object_for_notebooks(database: Path) -> None:
    import gemmtuned

    answer = gemmtuned.gains()
    assert set(answer.frame()["problem"]) == {str(problem()), str(problem(m=80))}
    assert answer.facts["default_best"] == 1
    assert "4.00x" in str(answer) and "4.00x" in answer._repr_html_()


def test_an_empty_database_is_a_sentence_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gemmtuned

    open_store(tmp_path).close()
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    assert "No GEMM was recorded" in str(gemmtuned.coverage())
    assert "No GEMM was recorded" in gemmtuned.coverage()._repr_html_()
    assert "No solution is in use yet." in str(gemmtuned.gains())
