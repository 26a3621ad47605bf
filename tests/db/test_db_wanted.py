"""Calls of engines' operators that wait for a race beside their own kernel, and the daemon that has that kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_cases import NEW, found, open_store, problem, saw

from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.seats import work_queue
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.db import queries
from gemmtuned.db.store import Store

T = 1_800_000_000.0
ONE, TWO = problem(n=64), problem(n=128)
CUTLASS, SGLANG = "_C::cutlass_scaled_mm", "sgl_kernel::fp8_scaled_mm"
VLLM = {"vllm_cutlass": "0.32.0", "vllm_cutlass_blocks": "0.32.0"}
BOTH = text_of({name: Peer("0.32.0", low) for name, low in zip(VLLM, (1.1, None), strict=True)})
WITH_VLLM = replace(NEW, stamps={**NEW.stamps, **VLLM})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = open_store(tmp_path)
    one.sightings.add("r", NEW, [saw(p, 10, us=100) for p in (ONE, TWO)], now_s=T)
    one.solutions.install(None, [found(p) for p in (ONE, TWO)], environment=NEW, now_s=T)
    yield one
    one.close()


def unraced(store: Store) -> dict[str, str]:
    return {row["problem"]: row["operators"] for row in queries.unraced(store.path, since_s=1e9)}


def again(store: Store, environment: Environment, now_s: float = T + 60) -> str:
    work = WorkQueue(store, "a:1", recheck=True).lease(environment, now_s)
    return "" if work is None else str(work.problem)


def test_what_programs_want_is_kept_by_operator_until_another_solution_comes(store: Store) -> None:
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS), (ONE, SGLANG), (problem(n=72), CUTLASS)], now_s=T)
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T + 1)
    assert unraced(store) == {str(ONE): f"{CUTLASS} {SGLANG}"}

    store.solutions.install(None, [found(ONE, us=4.0)], environment=NEW, now_s=T + 2)
    assert unraced(store) == {}
    store.sightings.add_wanted(NEW, [(ONE, SGLANG)], now_s=T + 3)
    assert unraced(store) == {str(ONE): SGLANG}


def test_what_is_told_of_an_older_table_says_nothing_of_a_newer_solution(store: Store) -> None:
    """The daemon has raced it again, and the program has not taken that up yet."""
    older = store.solutions.generation()
    store.solutions.install(None, [found(ONE, beside=BOTH)], environment=NEW, now_s=T + 1)
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS), (TWO, CUTLASS)], older, now_s=T + 2)
    assert unraced(store) == {str(TWO): CUTLASS}
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], store.solutions.generation(), now_s=T + 3)
    assert unraced(store) == {str(ONE): CUTLASS, str(TWO): CUTLASS}


def test_a_daemon_that_has_the_kernel_races_the_solution_again_and_another_does_not(store: Store) -> None:
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T)
    assert again(store, NEW) == ""
    assert not store.wanted.is_any(NEW.device.key, {"sglang_fp8": "1"})
    assert store.wanted.is_any(NEW.device.key, VLLM) and not store.wanted.is_any("cpu-other", VLLM)

    assert again(store, WITH_VLLM) == str(ONE)

    store.solutions.install(None, [found(ONE, beside=BOTH)], environment=WITH_VLLM, now_s=T + 61)
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T + 62)  # a program with an older version of it
    assert [s.beside for s in store.solutions.published()[1] if s.problem == ONE] == [BOTH]
    assert again(store, WITH_VLLM, T + 200) == ""
    newer = replace(NEW, stamps={**NEW.stamps, **dict.fromkeys(VLLM, "0.33.0")})
    assert again(store, newer, T + 300) == str(ONE)


def test_a_daemon_with_a_newer_engine_races_again_what_was_raced_beside_an_older_one(store: Store) -> None:
    """Programs with the newer one are served meanwhile, and so they tell of nothing that waits."""
    store.solutions.install(None, [found(ONE, beside=BOTH)], environment=NEW, now_s=T + 1)
    for others in ("0.32.0", "0.32.0+cu129", "0.31.9"):
        assert again(store, replace(NEW, stamps={**NEW.stamps, **dict.fromkeys(VLLM, others)})) == ""
    newer = dict.fromkeys(VLLM, "0.33.0")
    assert store.wanted.is_any(NEW.device.key, newer) and not store.wanted.is_any("cpu-other", newer)
    assert not store.wanted.is_any(NEW.device.key, {"sglang_fp8": "9"})

    with_newer = replace(NEW, stamps={**NEW.stamps, **newer})
    assert again(store, with_newer) == str(ONE)

    beside = text_of({"vllm_cutlass": Peer("0.33.0", 1.1), "vllm_cutlass_blocks": Peer("0.33.0", None)})
    store.solutions.install(None, [found(ONE, beside=beside)], environment=with_newer, now_s=T + 61)
    assert again(store, with_newer, T + 200) == "" and again(store, WITH_VLLM, T + 300) == ""


@pytest.mark.parametrize(("low", "waits"), [(1.1, True), (None, False)])
def test_what_the_older_engine_did_not_run_is_raced_again_only_where_programs_call_it(
    store: Store, low: float | None, waits: bool
) -> None:
    beside = text_of({"vllm_cutlass": Peer("0.32.0", low)})
    store.solutions.install(None, [found(ONE, beside=beside)], environment=NEW, now_s=T + 1)
    assert store.wanted.is_any(NEW.device.key, {"vllm_cutlass": "0.33.0"}) == waits


def test_a_pinned_solution_and_one_that_is_not_asked_for_stay_as_they_are(store: Store) -> None:
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T)
    store.curation.pin([ONE], now_s=T)
    assert not store.wanted.is_any(NEW.device.key, VLLM)
    assert again(store, WITH_VLLM) == ""


@pytest.mark.parametrize(("installed", "waits"), [(VLLM, True), ({}, False)])
def test_a_worker_is_started_for_it_where_the_engine_is_installed(
    store: Store, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], waits: bool
) -> None:
    """Before a worker has said what it has."""
    monkeypatch.setattr(work_queue, "installed", lambda: installed)
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T)
    queue = WorkQueue(store, "a:1", recheck=True)
    assert queue.is_waited_for(T + 60, NEW.device.key) == waits


def test_captured_calls_that_wait_for_it_are_not_said_to_be_frozen(store: Store) -> None:
    store.sightings.add("r", NEW, [replace(saw(p, 5), graph=True) for p in (ONE, TWO)], now_s=T + 30)
    assert len(queries.frozen(store.path, since_s=1e9)) == 2
    store.sightings.add_wanted(NEW, [(ONE, CUTLASS)], now_s=T + 30)
    assert [row["problem"] for row in queries.frozen(store.path, since_s=1e9)] == [str(TWO)]


def test_it_stays_with_a_verdict_that_is_published_lost_or_rolled_back(store: Store) -> None:
    store.solutions.install(None, [found(ONE, beside=BOTH)], environment=NEW, now_s=T + 1)
    to = store.solutions.generation()
    store.solutions.install(None, [found(ONE, us=1.0)], environment=NEW, now_s=T + 2)
    store.curation.roll_back(to, now_s=T + 3)
    assert [s.beside for s in store.solutions.published()[1] if s.problem == ONE] == [BOTH]
