"""The HTML report: says what the store says, needs nothing from elsewhere, shows hostile names as text."""

from __future__ import annotations

import re
import sqlite3
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from store_cases import CPU, DAY, HOUR, NEW, found, new_store, open_store, problem, saw
from typer.testing import CliRunner

from gemmtuned._testing import faults
from gemmtuned.cli import build
from gemmtuned.configs.solution import Environment
from gemmtuned.db.timeline import timeline
from gemmtuned.reports.page import collect, render

NOW_S = time.time()
HOSTILE = '<script>alert(1)</script>\x1b[31m"><img src=x onerror=alert(2)>'


@pytest.fixture
def page(tmp_path: Path) -> str:
    """Two layers: one twice as fast in a bucket and an exact size, one best on torch, and one shape that waits."""
    store = new_store(tmp_path)
    for ago in range(48, 0, -1):
        seen = [
            saw(problem(), 100, "exact" if ago < 24 else "miss", us=10.0),
            saw(problem(m=70), 50, us=20.0),
            saw(problem(n=4096), 10, us=40.0),
            saw(problem(n=64), 2, us=1.0),
        ]
        store.sightings.add(HOSTILE, NEW, seen, now_s=NOW_S - ago * HOUR)
    best = found(problem(n=4096), backend="torch", config="", state="default_best", us=40.0, baseline_us=40.0)
    padded = found(problem(m=80), covers="fine", us=5.0, baseline_us=20.0)
    for solution in (found(problem()), padded, best):
        store.solutions.install(None, [solution], environment=NEW, now_s=NOW_S - HOUR)
    store.close()
    return render(collect(tmp_path / "tune.db", since_s=7 * 86400, now_s=NOW_S))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "line", "polygon", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_outside_it(page: str) -> None:
    reader = _Reader()
    reader.feed(page)

    assert reader.open == []
    assert {"script", "link", "img", "iframe"} & {tag for tag, _ in reader.tags} == set()
    assert not [attrs for _, attrs in reader.tags if {"src", "href", "onerror", "onload"} & attrs.keys()]
    assert not re.search(r"url\(|@import|https?://", page)


def test_hostile_names_are_shown_as_text(page: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page


LABELS = {  # a program's name, and how the page shows it
    HOSTILE: "&lt;script&gt;alert(1)&lt;/script&gt; &#34;&gt;&lt;img src=x onerror=alert(2)&gt;",
    "\u202eeertf eht \u2067rof\u202c": " eertf eht  rof ",
    "\x1b]0;title\x07\x1b[2Jcleared\x9b1A": "  cleared ",
    "one\nline\r\nor three": "one line  or three",
    "{{ 7*7 }}{% raw %}": "{{ 7*7 }}{% raw %}",
    "</td></table><h1>": "&lt;/td&gt;&lt;/table&gt;&lt;h1&gt;",
    "\u0645\u0631\u062d\u0628\u0627": "\u0645\u0631\u062d\u0628\u0627",
    "x" * 10_000: "x" * 512,
    "": "-",
}


def test_a_name_of_any_kind_is_text_in_a_cell_of_bounded_width(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for at, label in enumerate(LABELS):
        store.sightings.add(label, NEW, [saw(problem(n=64 * (at + 1)), 3)], now_s=NOW_S - HOUR)
    store.close()
    page = render(collect(tmp_path / "tune.db", since_s=86400, now_s=NOW_S))
    reader = _Reader()
    reader.feed(page)

    assert sorted(re.findall(r'<td class="l n"><bdi>(.*?)</bdi></td>', page, re.S)) == sorted(LABELS.values())
    assert reader.open == [] and [tag for tag, _ in reader.tags].count("h1") == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", page)
    assert re.search(r"^\.n \{.*overflow-wrap: anywhere;.*max-width", page, re.M)


def test_a_layer_sums_its_sizes_and_a_bucket_serves_the_sizes_in_it(page: str) -> None:
    row = re.search(r"<tr><td class=\"l\">1024x512 fp32, 2 threads</td>.*?</tr>", page)

    assert row is not None
    cells = re.findall(r">([^<]*)</td>", row[0])
    # M = 8: 4800 calls of 10 us, twice as fast; M = 70: 2400 of 20 us, four times as fast through the bucket up to 80
    assert cells[1:] == ["8 to 70 (2 sizes)", "7,200", "96.0 ms", "36.0 ms", "2.67x", "100.0 %", "0.0 %", "0.0 %"]


def test_the_three_answers_are_told_apart(page: str) -> None:
    shares = dict(re.findall(r"</i>([^<]+) <b>([0-9.]+) %</b>", page))

    # 96 ms, 480 calls of 40 us, 96 of 1 us
    assert shares == {"runs faster now": "83.3", "torch&#x27;s own kernel is best": "16.7", "no verdict yet": "0.1"}


def test_a_store_without_traffic_says_how_to_begin(tmp_path: Path) -> None:
    open_store(tmp_path).close()

    assert "No GEMM was recorded" in render(collect(tmp_path / "tune.db", since_s=86400, now_s=NOW_S))


@pytest.mark.parametrize("fails", ["put.write", "put.fsync", "put.rename"])
def test_a_full_disk_leaves_the_page_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    open_store(tmp_path).close()
    out = tmp_path / "report.html"
    out.write_text("the page of before")
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    with faults.armed(f"{fails}=1:ENOSPC"):
        done = CliRunner().invoke(build(), ["report", "--out", str(out)])

    assert done.exit_code == 1 and "No space left on device" in done.stderr
    assert out.read_text() == "the page of before"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_the_floor_is_the_best_rate_of_the_device_and_type(page: str) -> None:
    """Both take 5 us; M = 80 moves 2,588,672 bytes in it and computes ten times as much, M = 8 moves 2,146,304."""
    rows = re.findall(r"<tr><td class=\"l\">(fp32:\S+)</td><td class=\"l\">(?:exact|fine)</td>.*?</tr>", page)
    floors = dict(zip(rows, re.findall(r"<td>([\d.]+)x</td><td>[\d,]+</td><td>[^<]*</td></tr>", page), strict=True))

    assert floors[str(problem(m=80))] == "1.00"
    assert float(floors[str(problem())]) == pytest.approx(2_588_672 / 2_146_304, abs=0.006)


def test_what_was_tried_and_found_lies_in_time(tmp_path: Path) -> None:
    now_s = NOW_S // HOUR * HOUR + HOUR / 2  # hours of the clock: a minute ago is in this one
    store = open_store(tmp_path)
    store.sightings.add("serve", NEW, [saw(problem(), 9)], now_s=now_s)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=now_s - 60)
    store.close()
    with sqlite3.connect(tmp_path / "tune.db") as conn:
        conn.execute(
            "INSERT INTO trial (problem_id, environment_id, mode, backend, config, phase, outcome, note, started_us, "
            "owner, stamp) VALUES (1, 1, 'eager', 'onednn', '{}', 'race', 'ok', '', ?, 'h', '')",
            (round((now_s - 12 * HOUR) * 1e6),),
        )
    conn.close()
    made = timeline(tmp_path / "tune.db", slots=24, since_s=24 * HOUR, now_s=now_s)

    assert list(made) == ["cpu-test"]
    assert [i for i, slot in enumerate(made["cpu-test"]) if slot["trials"]] == [pytest.approx(11, abs=1)]
    assert made["cpu-test"][-1] == {"trials": 0, "problems": 0, "faster": 1, "best": 0}
    page = render(collect(tmp_path / "tune.db", since_s=86400, now_s=now_s))
    assert "What was tuned when" in page and "1 trials of 1 problems" in page


def test_a_devices_name_takes_a_column_only_beside_another_one(page: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    other = Environment(replace(CPU, key="cpu-other"), NEW.stamps)
    store.sightings.add("r", other, [saw(problem())], now_s=NOW_S)
    store.close()
    of_two = render(collect(tmp_path / "tune.db", since_s=7 * 86400, now_s=NOW_S))

    assert "traffic of the last 7 days on cpu-test." in page and page.count("cpu-test") == 3  # and where it tuned
    assert ">device</th>" not in page
    assert "traffic of the last 7 days." in of_two and of_two.count(">device</th>") == 3
    assert {"cpu-test", "cpu-other"} <= {*re.findall(r">([^<]*)</td>", of_two)}


def test_the_page_has_a_dark_form_a_narrow_one_and_one_for_paper(page: str) -> None:
    for rule in ("prefers-color-scheme: dark", "@media print", 'name="viewport"', "overflow-x: auto"):
        assert rule in page


def test_a_year_that_was_merged_has_a_curve_without_holes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for ago in range(0, 200, 2):
        store.sightings.add("serve", NEW, [saw(problem(), 9)], now_s=NOW_S - ago * DAY)
    store.rollup.roll_up(now_s=NOW_S)
    store.close()
    page = render(collect(tmp_path / "tune.db", since_s=365 * DAY, now_s=NOW_S))

    assert page.count('<polyline class="line"') == 1
