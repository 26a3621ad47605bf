"""Ten questions that people ask of the database, each in the forms that they ask them in; docs/database.md shows them.

`gemmtuned db datasette` writes them as canned queries.  Every form is run by tests/docs/test_docs_database.py, and all
of one question must give the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gemmtuned.db import queries

UNITS: Final = {  # what pint, which datasette asks, calls them
    "_us": "us",
    "_gb_s": "GB/s",
}


@dataclass(frozen=True, slots=True)
class Question:
    """name: of the canned query.  sqlite_utils: the words after `sqlite-utils rows tune.db`, or "" for the SQL itself.

    pandas: lines that leave the answer in `answer`, with the columns of the SQL.
    """

    name: str
    title: str
    sql: str
    pandas: str
    sqlite_utils: str = ""


QUESTIONS: Final = (
    Question(
        "covered",
        "How much of the last 24 hours is covered?",
        "SELECT family, device, calls, covered_percent, hit_percent FROM coverage ORDER BY family",
        'answer = gemmtuned.frame("coverage")[["family", "device", "calls", "covered_percent", "hit_percent"]]\n'
        'answer = answer.sort_values("family")',
        "coverage -c family -c device -c calls -c covered_percent -c hit_percent --order family",
    ),
    Question(
        "programs",
        "Which programs have most to gain?",
        "SELECT run, round((time_us - covered_time_us) / 1e6, 3) AS open_s, covered_percent FROM coverage_by_run "
        "ORDER BY open_s DESC, run",
        'runs = gemmtuned.frame("coverage_by_run")\n'
        'runs["open_s"] = ((runs.time_us - runs.covered_time_us) / 1e6).round(3)\n'
        'answer = runs.sort_values(["open_s", "run"], ascending=[False, True])[["run", "open_s", "covered_percent"]]',
    ),
    Question(
        "last_week",
        "And of the last seven days, or any other time?",
        "SELECT device, sum(calls) AS calls, round(100.0 * sum(time_us * (answer <> 'none')) / sum(time_us), 1) "
        "AS covered_percent FROM traffic WHERE hour_at >= datetime('now', '-7 days') GROUP BY device",
        'week = gemmtuned.frame("traffic")\n'
        'week = week[pd.to_datetime(week.hour_at) >= pd.Timestamp.now("UTC").tz_localize(None) - pd.Timedelta("7D")]\n'
        'week["covered_us"] = week.time_us.where(week.answer != "none", 0)\n'
        'sums = week.groupby("device", as_index=False)[["calls", "time_us", "covered_us"]].sum()\n'
        'sums["covered_percent"] = (100 * sums.covered_us / sums.time_us).round(1)\n'
        'answer = sums[["device", "calls", "covered_percent"]]',
    ),
    Question(
        "by_day",
        "How did the share of calls that hit a solution grow, day by day?",
        "SELECT date(hour_at) AS day, sum(calls) AS calls, "
        "round(100.0 * sum(calls * (outcome <> 'miss')) / sum(calls), 1) AS hit_percent FROM traffic GROUP BY day",
        'seen = gemmtuned.frame("traffic")\n'
        'seen["day"] = seen.hour_at.str[:10]\n'
        'seen["hits"] = seen.calls.where(seen.outcome != "miss", 0)\n'
        'sums = seen.groupby("day", as_index=False)[["calls", "hits"]].sum()\n'
        'sums["hit_percent"] = (100 * sums.hits / sums.calls).round(1)\n'
        'answer = sums[["day", "calls", "hit_percent"]]',
    ),
    Question(
        "layers",
        "Which layers got faster? (A layer is an N and a K, with all its M.)",
        "SELECT n, k, sum(calls) AS calls, round(sum(time_us) / sum(now_us), 2) AS gain FROM traffic "
        "WHERE hour_at >= datetime('now', '-1 day') GROUP BY n, k ORDER BY gain DESC, n, k",
        'seen = gemmtuned.frame("traffic")\n'
        'seen = seen[pd.to_datetime(seen.hour_at) >= pd.Timestamp.now("UTC").tz_localize(None) - pd.Timedelta("1D")]\n'
        'sums = seen.groupby(["n", "k"], as_index=False)[["calls", "time_us", "now_us"]].sum()\n'
        'sums["gain"] = (sums.time_us / sums.now_us).round(2)\n'
        'answer = sums.sort_values(["gain", "n", "k"], ascending=[False, True, True])[["n", "k", "calls", "gain"]]',
    ),
    Question(
        "saved",
        "What saved most?",
        "SELECT problem, backend, speedup, hit_calls, saved_us FROM solutions WHERE state IN ('published', 'pinned') "
        "ORDER BY saved_us DESC, problem LIMIT 20",
        'found = gemmtuned.frame("solutions")\n'
        'found = found[found.state.isin(["published", "pinned"])]\n'
        'found = found.sort_values(["saved_us", "problem"], ascending=[False, True]).head(20)\n'
        'answer = found[["problem", "backend", "speedup", "hit_calls", "saved_us"]]',
    ),
    Question(
        "waiting",
        "What waits, and why?",
        "SELECT problem, device, calls, est_time_us, state, reason, last_seen_at FROM untuned "
        "ORDER BY worth DESC, problem LIMIT 20",
        'open_ = gemmtuned.frame("untuned").sort_values(["worth", "problem"], ascending=[False, True]).head(20)\n'
        'answer = open_[["problem", "device", "calls", "est_time_us", "state", "reason", "last_seen_at"]]',
    ),
    Question(
        "backends",
        "Which kernels win?",
        "SELECT backend, state, count(*) AS solutions, round(avg(speedup), 3) AS mean_speedup FROM solutions "
        "GROUP BY backend, state ORDER BY backend, state",
        'found = gemmtuned.frame("solutions").groupby(["backend", "state"], as_index=False)\n'
        'answer = found.agg(solutions=("speedup", "size"), mean_speedup=("speedup", "mean")).round(3)',
    ),
    Question(
        "failures",
        "What was tried and did not pass?",
        "SELECT backend, outcome, count(*) AS trials FROM trials WHERE outcome <> 'ok' GROUP BY backend, outcome "
        "ORDER BY trials DESC, backend, outcome",
        'tried = gemmtuned.frame("trials")\n'
        'failed = tried[tried.outcome != "ok"].groupby(["backend", "outcome"], as_index=False)\n'
        'answer = failed.size().rename(columns={"size": "trials"})\n'
        'answer = answer.sort_values(["trials", "backend", "outcome"], ascending=[False, True, True])',
    ),
    Question(
        "processes",
        "Which processes run, and with which table?",
        "SELECT run, pid, generation, calls, state, last_seen_at FROM sessions WHERE state <> 'ended' ORDER BY pid",
        'there = gemmtuned.frame("sessions")\n'
        'there = there[there.state != "ended"].sort_values("pid")\n'
        'answer = there[["run", "pid", "generation", "calls", "state", "last_seen_at"]]',
    ),
)


def of_views(database: Path) -> dict[str, Any]:
    """Metadata for datasette 0.6x: what views and columns are for, units, canned queries. Raises StoreError."""
    meanings = json.loads(files("gemmtuned.reports").joinpath("columns.json").read_text())
    tables = {}
    for view in queries.VIEWS:
        columns = [row["name"] for row in queries.ask(database, "SELECT name FROM pragma_table_info(?)", (view,))]
        tables[view] = {
            "description": meanings["views"][view],
            "columns": {column: meaning_of(meanings, view, column) for column in columns},
            "units": {column: unit for column in columns if (unit := unit_of(column))},
        }
    canned = {one.name: {"title": one.title, "sql": one.sql} for one in QUESTIONS}
    return {"title": "gemmtuned", "databases": {database.stem: {"tables": tables, "queries": canned}}}


def meaning_of(meanings: Mapping[str, Mapping[str, str]], view: str, column: str) -> str:
    """What columns.json says of a view's column; "" where it says nothing."""
    for name in (f"{view}.{column}", column):
        for part in ("columns", "problem columns"):
            if name in meanings[part]:
                return meanings[part][name]
    return ""


def unit_of(column: str) -> str:
    """Pint's name of the unit that a column's name says; "" for none, and for times of day."""
    if column == "active_us":  # a time of day
        return ""
    return next((unit for ending, unit in UNITS.items() if f"_{column}".endswith(ending)), "")
