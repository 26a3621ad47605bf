"""Imported rows in the store: kept whole, replaced when imported again, handed to the search, asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from store_cases import NEW, found, lease, problem, saw

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.hint import Hint
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Order, decode, encode
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.db import queries
from gemmtuned.db.store import Store

T = 1_800_000_000.0
TILE = Candidate.of("triton", kernel="tiles", rows=64)


def hint(p: Problem | None, candidate: Candidate | None = TILE, line: int = 2, **columns: Any) -> Hint:
    values: dict[str, Any] = {
        "format": "aiter-csv", "family": "bf16", "kind": "tuned", "source": "t.csv", "row": '{"M":"8"}', **columns
    }  # fmt: skip
    return Hint(problem=p, candidate=candidate, line=line, **values)


def seeds(store: Store, p: Problem) -> tuple[Candidate, ...]:
    """Of the unit that holds p, leased."""
    store.sightings.add("test", NEW, [saw(p)], now_s=T)
    work = lease(store, now_s=T)
    assert work.problem == p
    return store.hints.seeds(work)


def test_a_hint_is_kept_with_all_its_row_said(store: Store) -> None:
    known = hint(problem(threads=0), arch="gfx942", units=304, us=7.5)
    unknown = hint(None, Candidate("asm", '{"kernelName":"k"}'), line=3, family="gdn", row='{"BV":"64"}')

    assert store.hints.add([known, unknown], source="/t.csv", now_s=T) == 2

    first, second = queries.ask(store.path, "SELECT * FROM hints ORDER BY line")
    assert (first["problem"], first["backend"], first["us"], first["arch"], first["units"]) == (
        str(problem(threads=0)), "triton", 7.5, "gfx942", 304,
    )  # fmt: skip
    assert (second["problem"], second["table_family"], second["row"]) == (None, "gdn", '{"BV":"64"}')
    assert store.check() == []


def test_importing_a_file_again_replaces_its_rows_and_no_others(store: Store) -> None:
    p = problem(threads=0)
    store.hints.add([hint(p, line=2), hint(p, line=3)], source="/a.csv", now_s=T)
    store.hints.add([hint(p, line=2)], source="/b.csv", now_s=T)
    store.hints.add([hint(p, Candidate("asm"), line=9)], source="/a.csv", now_s=T)

    rows = queries.hints(store.path, p)

    assert sorted((row["source"], row["line"], row["backend"]) for row in rows) == [
        ("/a.csv", 9, "asm"), ("/b.csv", 2, "triton"),
    ]  # fmt: skip


def test_a_search_gets_the_seeds_of_its_problem_whatever_threads_and_math_mode_it_has(store: Store) -> None:
    store.hints.add([hint(problem(threads=0))], source="/a.csv", now_s=T)

    assert seeds(store, problem(threads=2, math_mode="tf32")) == (TILE,)


def test_a_seed_of_a_backend_that_is_not_here_is_kept_and_not_sent(store: Store) -> None:
    theirs, list_of_shapes = (
        hint(problem(threads=0), Candidate("asm")),
        hint(problem(threads=0), None, 3, kind="untuned"),
    )
    store.hints.add([theirs, list_of_shapes], source="/a.csv", now_s=T)

    assert seeds(store, problem()) == ()
    assert [row["backend"] for row in queries.hints(store.path, problem())] == ["asm"]


def test_seeds_of_sizes_nearest_in_ratio_come_first_then_the_faster_and_only_a_few(store: Store) -> None:
    def named(i: int) -> Candidate:
        return Candidate.of("triton", i=i)

    sizes = {8: (1, 5.0), 9: (2, 1.0), 4: (3, 1.0), 64: (4, 1.0), 4000: (5, 0.1)}
    rows = [hint(problem(m, threads=0), named(i), line=i, us=us) for m, (i, us) in sizes.items()]
    rows.append(hint(problem(8, threads=0), named(6), line=6, us=4.0))
    rows += [hint(problem(10 + i, threads=0), named(i), line=i) for i in range(10, 20)]
    store.hints.add(rows, source="/a.csv", now_s=T)

    some = seeds(store, problem(8))

    assert some == tuple(named(i) for i in (6, 1, 2, 3, 10, 11, 12, 13)), "64 and 4000 say nothing about 8"


def test_of_one_size_what_was_found_on_a_device_like_this_comes_first_and_no_row_can_be_in_the_way(
    store: Store,
) -> None:
    p = problem(threads=0)
    tiles = [Candidate.of("triton", kernel="tiles", rows=rows) for rows in (16, 32, 64)]
    rows = ('{"device":"another"}', f'{{"device":"{NEW.device.key}"}}', '{"x":NaN}')
    both = enumerate(zip(tiles, rows, strict=True), 1)
    store.hints.add([hint(p, t, line=i, row=row, us=float(i)) for i, (t, row) in both], source="/t", now_s=T)

    assert seeds(store, problem()) == (tiles[1], tiles[0], tiles[2])


def test_what_we_found_best_at_sizes_nearby_comes_before_what_others_did(store: Store) -> None:
    def best(m: int, config: int, **changes: Any) -> Solution:
        candidate = Candidate.of("triton", i=config)
        return replace(found(problem(m)), backend="triton", config=candidate.config, stamp="3", **changes)

    store.sightings.add("test", NEW, [saw(problem(8))], now_s=T)
    work = lease(store, now_s=T)
    store.solutions.install(None, [best(16, 16), best(6, 6), best(64, 64)], environment=NEW, now_s=T)
    store.solutions.install(
        None, [replace(found(problem(4)), state="default_best", backend="torch")], environment=NEW, now_s=T
    )
    store.hints.add([hint(problem(threads=0))], source="/a.csv", now_s=T)

    assert store.hints.seeds(work) == (Candidate.of("triton", i=6), Candidate.of("triton", i=16), TILE)


def test_another_shape_or_dtype_is_no_seed(store: Store) -> None:
    others = [problem(n=1025, threads=0), problem(dtype="bf16", threads=0), problem(bias=True, threads=0)]
    store.hints.add([hint(p, line=i) for i, p in enumerate(others)], source="/a.csv", now_s=T)

    assert seeds(store, problem()) == ()


def test_the_order_to_a_worker_carries_the_seeds_through_the_wire(store: Store) -> None:
    store.hints.add([hint(problem(threads=0))], source="/a.csv", now_s=T)
    store.sightings.add("test", NEW, [saw(problem())], now_s=T)
    queue = WorkQueue(store, "host:1")
    work = queue.lease(NEW, T)
    assert work is not None

    order = decode(encode(queue.order(work))[4:])

    assert isinstance(order, Order)
    assert order.options == SearchOptions(seeds=(TILE,))


def test_problems_of_an_imported_list_are_tuned_after_what_programs_call(store: Store) -> None:
    asked, called = problem(8, n=64), problem(8, n=128)
    store.leases.ask_for([asked, asked], NEW, now_s=T)
    store.sightings.add("test", NEW, [saw(called)], now_s=T)

    assert lease(store, now_s=T).problem == called
    assert lease(store, now_s=T).problem == asked
    assert store.hints.known_environments() == [NEW]
    assert store.hints.known_environments()[0].stamps == NEW.stamps


def test_the_rows_of_a_whole_table_are_kept_at_once(store: Store) -> None:
    rows = [hint(problem(m, threads=0), line=m, us=1.0) for m in range(1, 3001)]

    assert store.hints.add(rows, source="/a.csv", now_s=T) == 3000
    assert seeds(store, problem(1500)) == (TILE,)


def test_a_hint_with_a_time_that_is_none_is_refused_whole(store: Store) -> None:
    with pytest.raises(StoreError):
        store.hints.add([hint(problem(threads=0)), hint(problem(threads=0), us=-1.0, line=3)], source="/a", now_s=T)

    assert queries.hints(store.path, problem()) == []
