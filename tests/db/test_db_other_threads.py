"""What runs stock torch with its number of threads and is tuned for another one: the question, and the two reports."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from store_cases import DAY, NEW, found, problem, saw
from typer.testing import CliRunner

from gemmtuned.cli import build
from gemmtuned.configs.padding import fine_m
from gemmtuned.db.other_threads import other_threads, tuned_with
from gemmtuned.db.store import Store
from gemmtuned.reports.threads import threads_notes


def asked(store: Store) -> list[tuple[int, int, int]]:
    return [(row["threads"], row["tuned_threads"], row["problems"]) for row in other_threads(store.path)]


def test_only_what_differs_in_threads_alone_is_named(store: Store) -> None:
    now = time.time()
    scaled = {"family": "scaled", "dtype": "fp8_e4m3", "out_dtype": "bf16", "scale": "tensor"}
    calls = [
        problem(8, threads=1), problem(9, threads=1), problem(8, n=64, threads=1), problem(8, threads=1, bias=True),
        problem(8, threads=1, **scaled), problem(8, threads=4),
    ]  # fmt: skip
    store.sightings.add("serve", NEW, [saw(p) for p in calls], now_s=now)
    tuned = [found(problem(8)), found(problem(8, wscale="row", **scaled)), found(problem(8, n=65))]
    store.solutions.install(None, tuned, environment=NEW, now_s=now)
    assert asked(store) == [(1, 2, 1), (4, 2, 1)]
    store.solutions.install(None, [found(problem(8, threads=1))], environment=NEW, now_s=now)
    assert asked(store) == [(4, 1, 1), (4, 2, 1)], "that one is served; it is another that 4 threads could use"


def test_a_bucket_of_another_number_counts_for_all_sizes_in_it(store: Store) -> None:
    now = time.time()
    store.sightings.add("serve", NEW, [saw(problem(m, threads=1)) for m in (300, 301, 5000)], now_s=now)
    bucket = found(problem(fine_m(300)), covers="fine")
    store.solutions.install(None, [bucket], environment=NEW, now_s=now)
    assert asked(store) == [(1, 2, 2)]
    assert [tuned_with(store.path, problem(m, threads=1)) for m in (300, 301, 302, 5000)] == [[2], [2], [2], []]


def test_the_programs_that_called_it_are_named_and_one_can_be_asked_for(store: Store) -> None:
    now = time.time()
    for run, threads in (("a", 1), ("b", 1), ("b", 4), ("c", 2)):
        store.sightings.add(run, NEW, [saw(problem(8, threads=threads))], now_s=now)
    store.sightings.add("d", NEW, [saw(problem(8, threads=1))], now_s=now - 2 * DAY)
    store.solutions.install(None, [found(problem(8))], environment=NEW, now_s=now)

    def of(run: str | None) -> list[tuple[int, list[str]]]:
        return [(row["threads"], row["runs"]) for row in other_threads(store.path, run=run)]

    assert of(None) == [(1, ["a", "b"]), (4, ["b"])]
    assert of("a") == [(1, ["a"])] and of("b") == [(1, ["b"]), (4, ["b"])]
    assert of("c") == of("d") == of("no such program") == []


def test_a_few_programs_are_named_and_the_others_are_counted() -> None:
    row = {"threads": 1, "tuned_threads": 2, "problems": 3, "runs": ["b", "a\x1b[31m", "d", "c", "e"]}
    (note,) = threads_notes([row, {**row, "tuned_threads": 4}])

    assert note.startswith("a , b, c and 2 more with 1 thread: stock torch runs for 3 problems")
    assert "tuned at 2 or 4 threads" in note and note.endswith("Or run it with 2 or 4: OMP_NUM_THREADS")


def test_what_was_called_long_ago_is_not_told(store: Store) -> None:
    store.sightings.add("serve", NEW, [saw(problem(8, threads=1))], now_s=time.time() - 2 * DAY)
    store.solutions.install(None, [found(problem(8))], environment=NEW, now_s=time.time())
    assert asked(store) == []


def said(*command: str) -> str:
    return CliRunner().invoke(build(), command).output


def test_coverage_and_explain_say_so(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.sightings.add("serve", NEW, [saw(problem(8, threads=1), 50)], now_s=time.time())
    store.solutions.install(None, [found(problem(8))], environment=NEW, now_s=time.time())
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    for name in ("GEMMTUNED_DB", "GEMMTUNED_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    told = " ".join(said("coverage").split())
    assert "serve with 1 thread: stock torch runs for 1 problem whose shape is tuned at 2 threads" in told
    assert "gemmtuned tune --threads 1" in told
    for asked_for in (str(problem(8, threads=1)), str(problem(8, threads=3))):  # seen, and never seen
        told = " ".join(said("explain", asked_for).split())
        assert f"{asked_for} has a solution with 2 threads" in told
        assert f"gemmtuned tune '{asked_for}'" in told
    assert "OMP_NUM_THREADS" not in said("explain", str(problem(8)))
