"""The HTML report: says what the store says, needs nothing from elsewhere, shows hostile names as text."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from store_cases import HOUR, NEW, found, open_store, problem, saw
from typer.testing import CliRunner

from gemmtuned._testing import faults
from gemmtuned.cli import build
from gemmtuned.reports.page import collect, render

NOW_S = time.time()
HOSTILE = '<script>alert(1)</script>\x1b[31m"><img src=x onerror=alert(2)>'


@pytest.fixture
def page(tmp_path: Path) -> str:
    """Two layers: one twice as fast in a bucket and an exact size, one best on torch, and one shape that waits."""
    store = open_store(tmp_path)
    for ago in range(48, 0, -1):
        seen = [
            saw(problem(), 100, "exact" if ago < 24 else "miss", us=10.0),
            saw(problem(m=70), 50, us=20.0),
            saw(problem(n=4096), 10, us=40.0),
            saw(problem(n=64), 2, us=1.0),
        ]
        store.add_sightings(HOSTILE, NEW, seen, now_s=NOW_S - ago * HOUR)
    best = found(problem(n=4096), backend="torch", config="", state="default_best", us=40.0, baseline_us=40.0)
    padded = found(problem(m=80), covers="fine", us=5.0, baseline_us=20.0)
    for solution in (found(problem()), padded, best):
        store.install(None, [solution], environment=NEW, now_s=NOW_S - HOUR)
    store.close()
    return render(collect(tmp_path / "tune.db", since_s=7 * 86400, now_s=NOW_S))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "rect", "line", "polygon", "polyline"):
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


def test_a_layer_sums_its_sizes_and_a_bucket_serves_the_sizes_in_it(page: str) -> None:
    row = re.search(r"<tr><td class=\"l\">1024x512 fp32, 2 threads</td>.*?</tr>", page)

    assert row is not None
    cells = re.findall(r">([^<]*)</td>", row[0])
    # M = 8: 4800 calls of 10 us, twice as fast; M = 70: 2400 of 20 us, four times as fast through the bucket up to 80
    assert cells[2:] == ["8 to 70 (2 sizes)", "7,200", "96.0 ms", "36.0 ms", "2.67x", "100.0 %", "0.0 %", "0.0 %"]


def test_the_three_answers_are_told_apart(page: str) -> None:
    shares = dict(re.findall(r"</i>([^<]+) <b>([0-9.]+)%</b>", page))

    # 96 ms, 480 calls of 40 us, 96 of 1 us
    assert shares == {"runs faster now": "83.3", "torch&#x27;s own kernel is best": "16.7", "no verdict yet": "0.1"}


def test_a_store_without_traffic_says_how_to_begin(tmp_path: Path) -> None:
    open_store(tmp_path).close()

    assert "No GEMM was called" in render(collect(tmp_path / "tune.db", since_s=86400, now_s=NOW_S))


@pytest.mark.parametrize("fails", ["publish.write", "publish.fsync", "publish.rename"])
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
