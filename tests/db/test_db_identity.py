"""Whose solutions hold, whose problems are asked for, and what is never tried: kernels, environments, abilities."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
from store_cases import NEW, found, lease, problem, saw

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import FAMILIES, Problem, known_problems
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.configs.tunable import why_not
from gemmtuned.daemon.seats.request import Request
from gemmtuned.db import abilities, queries
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.kernels.families import tunable

T = 1_800_000_000.0
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
HERE = Environment(
    H200,
    {
        "torch": "2.13",
        "cublaslt": "130100/sm_90",
        "triton.gemv": "gemv/3.6/sm_90/a",
        "triton.tiles": "tiles/3.6/sm_90/b",
    },
)
ONE, TWO, THREE = (Problem(m=m, n=256, k=512) for m in (1, 8, 64))


def by(p: Problem, environment: Environment, kernel: str) -> Solution:
    candidate = Candidate.of("triton", kernel=kernel, rows=8)
    return found(p, environment, "triton", config=candidate.config, stamp=environment.stamp_of(candidate))


def leased(store: Store, environment: Environment, **options: Any) -> list[Problem]:
    """All units that a worker of this environment gets, one after the other; they are given back at the end."""
    held = []
    while work := store.leases.lease_next("host:1", environment, now_s=T, hold_s=60, **options):
        held.append(work)
    for work in held:
        store.leases.release(work, now_s=T, counted=False)
    return [work.problem for work in held]


def served(store: Store, environment: Environment) -> set[Problem]:
    table = build_table(store.solutions.published()[1], {"cuda:0": environment}, generation=1, failed=frozenset())
    return {p for _, (p, _, _), _ in table.items()}


def with_stamp(**stamps: str) -> Environment:
    return Environment(H200, {**HERE.stamps, **{name.replace("__", "."): stamp for name, stamp in stamps.items()}})


def test_editing_one_kernel_keeps_the_solutions_by_every_other(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(p, 9) for p in (ONE, TWO)], now_s=T)
    store.solutions.install(None, [by(ONE, HERE, "gemv"), by(TWO, HERE, "tiles")], environment=HERE, now_s=T)
    assert not leased(store, HERE) and served(store, HERE) == {ONE, TWO}

    edited = with_stamp(triton__gemv="gemv/3.6/sm_90/edited")

    assert served(store, edited) == {TWO}
    assert leased(store, edited) == [ONE]
    store.solutions.install(None, [by(ONE, edited, "gemv")], environment=edited, now_s=T)
    assert not leased(store, edited) and served(store, edited) == {ONE, TWO}
    assert served(store, HERE) == {ONE, TWO}, "a program that began before the edit goes on as it was"


def test_adding_a_kernel_leaves_everything_as_it_is(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(p, 9) for p in (ONE, TWO)], now_s=T)
    store.solutions.install(None, [by(ONE, HERE, "gemv")], environment=HERE, now_s=T)

    more = with_stamp(triton__new="new/3.6/sm_90/c")

    assert leased(store, more) == leased(store, HERE) == [TWO]
    assert served(store, more) == {ONE}


def test_a_backend_more_in_the_daemons_environment_changes_nobodys_queue(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(p, 9) for p in (ONE, TWO)], now_s=T)
    store.solutions.install(None, [by(ONE, HERE, "gemv")], environment=HERE, now_s=T)
    more = with_stamp(plugin="1.0")
    before = queries.untuned(store.path)

    assert leased(store, more) == [TWO]
    assert [row["environment"] for row in store.resume.waiting(now_s=T)] == [HERE.key] == [more.key]
    assert [row["problem"] for row in queries.untuned(store.path)] == [row["problem"] for row in before]

    store.solutions.install(None, [found(TWO, more, "plugin")], environment=more, now_s=T)
    store.sightings.add("serve", HERE, [saw(THREE, 9)], now_s=T)  # the program has no such backend: nothing changes
    assert leased(store, more) == [THREE]


def test_two_daemons_that_disagree_both_come_to_an_end(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    other = with_stamp(triton__gemv="gemv/3.7/sm_90/a")
    for environment in (HERE, other):
        assert leased(store, environment) == [ONE]
        store.solutions.install(None, [by(ONE, environment, "gemv")], environment=environment, now_s=T)

    assert not leased(store, HERE) and not leased(store, other) and not leased(store, HERE)
    assert served(store, HERE) == served(store, other) == {ONE}


def test_another_torch_is_another_environment(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(ONE)], now_s=T)

    assert not leased(store, with_stamp(torch="2.14"))


def test_hits_are_counted_once_though_two_versions_of_a_solution_are_live(store: Store) -> None:
    edited = with_stamp(triton__gemv="gemv/3.6/sm_90/edited")
    store.sightings.add("serve", HERE, [saw(ONE)], now_s=T)
    store.solutions.install(None, [by(ONE, HERE, "gemv")], environment=HERE, now_s=T)
    store.sightings.add("serve", HERE, [saw(ONE, 100, "exact")], now_s=T)
    store.solutions.install(None, [by(ONE, edited, "gemv")], environment=edited, now_s=T)
    store.sightings.add("serve", edited, [saw(ONE, 20, "exact")], now_s=T)

    hits = {row["stamp"]: row["hit_calls"] for row in queries.solutions(store.path)}
    assert hits == {"gemv/3.6/sm_90/a": 100, "gemv/3.6/sm_90/edited": 20}


def test_what_a_worker_cannot_tune_is_never_leased_and_said_with_a_count(store: Store) -> None:
    scaled = Problem(family="scaled", m=16, n=256, k=512, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
    able = replace(HERE, tunable=(ONE.operands,))
    store.sightings.add("serve", HERE, [saw(ONE, 1), saw(scaled, 900)], now_s=T)
    assert leased(store, HERE) == [scaled, ONE], "nobody has said what can be tuned: all is tried"

    assert leased(store, able) == [ONE]
    assert leased(store, able, problems=[scaled]) == []
    states = {row["problem"]: row["state"] for row in queries.untuned(store.path)}
    assert states[str(scaled)] == "untunable"
    assert store.leases.remaining(able, now_s=T).queued == 1
    assert [row["problems"] for row in store.resume.waiting(now_s=T)] == [1]
    assert store.resume.states([scaled], able, now_s=T)[scaled].state == "untunable"
    coverage = {row["family"]: row for row in queries.coverage(store.path, now_s=T)}
    assert coverage["scaled"]["untunable_problems"] == 1 and coverage["scaled"]["untunable_calls"] == 900
    assert coverage["dense"]["untunable_calls"] == 0
    (place,) = queries.environments(store.path)
    assert (place["open_problems"], place["untunable"]) == (1, 1)

    store.sightings.add("serve", HERE, [saw(replace(scaled, m=32), 5)], now_s=T)  # new, and known at once
    assert leased(store, able) == [ONE]
    assert scaled in leased(store, replace(able, tunable=(ONE.operands, scaled.operands))), "a later version can"


@pytest.fixture
def one_cpu() -> Iterator[tuple[set[int], set[int]]]:
    """This thread may use one CPU of several: that one, and all of them."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two CPUs")
    os.sched_setaffinity(0, {min(before)})
    yield {min(before)}, before
    os.sched_setaffinity(0, before)


def test_what_takes_more_threads_than_the_worker_has_cpus_is_left_to_one_that_has_them(
    store: Store, one_cpu: tuple[set[int], set[int]]
) -> None:
    """Of two threads on one CPU one waits for the other, whichever kernel runs."""
    alone, pair = problem(threads=1), problem(threads=2)
    able = replace(NEW, tunable=tunable("cpu"))
    store.sightings.add("serve", NEW, [saw(alone, 1), saw(pair, 900)], now_s=T)

    assert leased(store, able) == [alone]
    assert leased(store, able, problems=[pair]) == []
    assert store.leases.remaining(able, now_s=T).queued == 1
    (why,) = [row["reason"] for row in queries.untuned(store.path) if row["problem"] == str(pair)]
    assert "it takes 2 threads, and what tunes here may run 1 at once on the machine's CPUs" in why
    assert Request(problems=[alone, pair]).refused == {pair: why}
    os.sched_setaffinity(0, one_cpu[1])
    assert leased(store, able) == [pair, alone], "one that may use them"
    for one in (pair, alone):
        store.solutions.install(lease(store, now_s=T, environment=able), [found(one)], environment=able, now_s=T)
    assert store.recheck.ask_again([alone, pair]) == 2
    os.sched_setaffinity(0, one_cpu[0])
    again = [store.recheck.lease_recheck("d", able, ["asked"], now_s=T, hold_s=60) for _ in range(2)]
    assert [work.problem for work in again if work is not None] == [alone]


ODD = (
    "weight_only:bf16/i8:8x64x256,wscale=row,layout=nn,threads=2",
    "bf16:8x64x256,weight=packed,packing=opaque,threads=2",
    "weight_only:bf16/i4:8x64x200,wscale=1x64,wscaledtype=bf16,threads=2",
)  # fmt: skip


def test_sizes_and_forms_that_no_family_has_are_not_leased_though_their_kind_is(store: Store) -> None:
    """The text of operands says nothing of layout, packing and K."""
    odd = [Problem.parse(text) for text in ODD]
    plain = [replace(odd[0], layout="nt"), replace(odd[1], packing=""), replace(odd[2], k=256)]
    able = replace(HERE, tunable=tunable("cpu"))
    assert {p.operands for p in odd} == {p.operands for p in plain} <= set(able.tunable)
    store.sightings.add("serve", HERE, [saw(p, 9) for p in (*odd, *plain)], now_s=T)
    before = {row["problem"]: (row["state"], row["reason"]) for row in queries.untuned(store.path)}
    counted = queries.coverage(store.path, by="problem", now_s=T)  # before a daemon has looked
    assert {row["problem"] for row in counted if row["untunable_calls"]} == set(ODD)
    assert {before[str(p)][0] for p in odd} == {"untunable"}
    assert {before[str(p)][0] for p in plain}.isdisjoint({"untunable"})

    assert set(leased(store, able)) == set(plain)
    assert leased(store, able, problems=odd) == []
    states = store.resume.states(odd, able, now_s=T)
    assert all(s.state == "untunable" and "this version cannot tune it: " in s.reason for s in states.values())
    assert "W by rows" in states[odd[0]].reason
    assert queries.ask(store.path, "SELECT count(*) AS n FROM untuned WHERE state = 'untunable'")[0]["n"] == 3
    found = queries.coverage(store.path, by="problem", now_s=T)
    assert {row["problem"]: row["untunable_calls"] for row in found} == {
        **dict.fromkeys(ODD, 9), **{str(p): 0 for p in plain}
    }  # fmt: skip
    for p in odd:
        why = next(row["why"] for row in queries.explain(store.path, p) if row["covers"] == "queue")
        assert f"this version cannot tune it: {why_not(p)}" in why
    left = store.leases.remaining(able, now_s=T)
    assert left.queued == 3 and left.failed == 0

    store.sightings.add("serve", HERE, [saw(replace(odd[0], n=128), 5)], now_s=T)  # new
    assert set(leased(store, able)) == set(plain)


def test_what_an_older_version_could_not_tune_is_looked_at_again(store: Store) -> None:
    """A daemon of the same kinds of operands had other rules."""
    able = replace(HERE, tunable=tunable("cpu"))
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    assert leased(store, able) == [ONE]
    with closing(sqlite3.connect(store.path)) as conn, conn:
        conn.execute("UPDATE demand SET tunable = 0")
    assert leased(store, able) == [ONE]


def test_marks_are_read_again_only_when_something_came(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All open problems are read for it, which with 20,000 of them took a sixth of the search for work."""
    able, known = replace(HERE, tunable=tunable("cpu")), store.leases._abilities
    looked: list[str] = []
    can_tune = known._can_tune
    monkeypatch.setattr(known, "_can_tune", lambda rest: looked.append(rest) or can_tune(rest))

    def looks() -> int:
        looked.clear()
        known.settle(able, T)
        return len(looked)

    odd = Problem.parse(ODD[0])
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    assert [looks() for _ in range(3)] == [1, 0, 0]
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    assert looks() == 0, "nothing new"
    store.sightings.add("serve", HERE, [saw(odd, 9)], now_s=T + 1)
    assert [looks() for _ in range(2)] == [2, 0]
    with closing(sqlite3.connect(store.path)) as conn, conn:
        conn.execute("UPDATE demand SET tunable = 1 - tunable")
    assert [looks() for _ in range(2)] == [2, 0]
    for end in ("", "-wal", "-shm"):
        Path(f"{store.path}{end}").unlink(missing_ok=True)
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    assert looks() == 1, "another file"
    assert leased(store, able) == [ONE]


def test_no_two_sets_of_open_problems_look_alike() -> None:
    """Where two were solved while solutions of two others were withdrawn, sums of numbers would be what they were."""
    seen = set()
    with closing(sqlite3.connect(":memory:")) as conn:
        conn.execute("CREATE TABLE demand (environment_id, problem_id, tunable, first_seen_us, solution_id)")
        for ids in chain.from_iterable(combinations(range(1, 9), count) for count in range(1, 5)):
            for marks in product((0, 1), repeat=len(ids)):
                conn.execute("DELETE FROM demand")
                conn.executemany("INSERT INTO demand VALUES (1, ?, ?, 0, NULL)", zip(ids, marks, strict=True))
                found = conn.execute(abilities._STATE, {"environment": 1}).fetchone()
                assert found not in seen, (ids, marks)
                seen.add(found)
        conn.executemany("INSERT INTO demand VALUES (1, ?, 1, 0, NULL)", [(1 << 40 | id,) for id in range(10_000)])
        (_, found, _) = conn.execute(abilities._STATE, {"environment": 1}).fetchone()
        assert 0 < found < 1 << 50


def test_an_empty_database_that_comes_between_two_steps_is_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    able, known = replace(HERE, tunable=tunable("cpu")), store.leases._abilities
    store.sightings.add("serve", HERE, [saw(ONE, 9)], now_s=T)
    known.settle(able, T)
    with closing(sqlite3.connect(store.path)) as conn, conn:
        conn.execute("UPDATE demand SET tunable = 0")
    can_tune = known._can_tune

    def purged(rest: str) -> bool:
        for end in ("", "-wal", "-shm"):
            Path(f"{store.path}{end}").unlink(missing_ok=True)
        return can_tune(rest)

    monkeypatch.setattr(known, "_can_tune", purged)
    assert leased(store, able) == []


def test_programs_mark_what_nobody_can_tune_each_time_that_it_is_new(store: Store) -> None:
    """A new file has the numbers of rows, and often of the inode, of the one that was removed."""
    odd = Problem.parse(ODD[0])
    for at in range(3):
        store.sightings.add("serve", HERE, [saw(odd, 9), saw(ONE, 9)], now_s=T + at)
        counted = queries.coverage(store.path, by="problem", now_s=T)
        assert {row["problem"] for row in counted if row["untunable_calls"]} == {str(odd)}
        if at:
            store.curation.forget([odd], now_s=T)
            continue
        for end in ("", "-wal", "-shm"):
            Path(f"{store.path}{end}").unlink(missing_ok=True)


def test_quantised_mixtures_of_an_older_version_are_tuned_where_their_key_says_enough(store: Store) -> None:
    """Counted under 0.1's keys and never tuned: int4's told no group, so those wait for good beside calls of today."""
    ends = "experts=8,topk=2,inter=128,act=silu_gated"
    fp8, mxfp4, int4, today = (
        Problem.parse(f"moe:bf16/{kind},{ends}")
        for kind in (
            "fp8_e4m3:8x256x256,wscale=128x128", "fp4_e2m1:8x256x256,wscale=1x32", "i4:8x256x256,wscale=row",
            "i4:8x256x256,wscale=1x64,wscaledtype=bf16",
        )
    )  # fmt: skip
    before = replace(HERE, tunable=(ONE.operands,))
    store.sightings.add("serve", HERE, [saw(p, 9) for p in (fp8, mxfp4, int4)], now_s=T)
    assert leased(store, before) == []

    now = replace(HERE, tunable=tunable("cuda"))
    store.sightings.add("serve", HERE, [saw(today, 9)], now_s=T)
    assert set(leased(store, now)) == {fp8, mxfp4, today}
    states = {row["problem"]: row["state"] for row in queries.untuned(store.path)}
    assert states[str(int4)] == "untunable" and store.resume.states([int4], now, now_s=T)[int4].state == "untunable"
    calls = {row["problem"]: row["calls"] for row in queries.coverage(store.path, by="problem", now_s=T)}
    assert calls == {str(p): 9 for p in (fp8, mxfp4, int4, today)}


def test_an_upgrade_gives_what_failed_another_chance_and_what_was_withdrawn_none(store: Store) -> None:
    store.sightings.add("serve", HERE, [saw(ONE, 9), saw(TWO, 8)], now_s=T)
    store.solutions.install(None, [by(TWO, HERE, "tiles")], environment=HERE, now_s=T)
    store.solutions.withdraw([TWO], reason="slow", now_s=T)
    for _ in range(3):
        work = lease(store, now_s=T, environment=HERE)
        store.leases.fail(work, "the worker crashed", now_s=T - 1e6)
    assert leased(store, HERE) == []

    assert leased(store, with_stamp(cublaslt="130200/sm_90")) == [ONE]


def test_every_problem_of_the_interface_is_what_it_was(store: Store) -> None:
    p = problem(bias=True, math_mode="tf32")
    store.sightings.add("serve", HERE, [saw(p)], now_s=T)

    (row,) = queries.ask(store.path, "SELECT * FROM problem")
    assert row["rest"] == "n=1024,k=512,bias=1,dtype=fp32,math_mode=tf32,threads=2"
    assert Problem.from_rest(row["rest"], row["m"]) == p


def test_each_problem_is_stored_once_whether_its_sizes_lie_close_or_far_apart(store: Store, tmp_path: Path) -> None:
    sizes = [1, 2, 3, 900, 901, 902, 4096]
    for some in ([2, 900], sizes, [*range(899, 905)], sizes):
        store.sightings.add("serve", HERE, [saw(replace(ONE, m=m), 1) for m in some], now_s=T)
    with closing(sqlite3.connect(tmp_path / "tune.db")) as conn:
        stored = conn.execute("SELECT m, n FROM problem ORDER BY m").fetchall()
    assert stored == [(m, ONE.n) for m in sorted({*sizes, *range(899, 905)})]


EXPERTS: dict[str, Any] = {"experts": 8, "topk": 2, "inter": 64, "act": "silu"}


@pytest.mark.parametrize("column", EXPERTS)
def test_what_mixtures_of_experts_have_no_other_family_of_ours_has(column: str) -> None:
    for family in FAMILIES:
        if family != "moe":
            for value in (EXPERTS[column], -3, 2.5, [1], ""):
                with pytest.raises(ProblemError, match=f"^{column} is .*: family {family} has none, only family moe"):
                    Problem(family=family, m=8, n=64, k=64, **{column: value})
    mixture = Problem(family="moe", m=8, n=64, k=64, **EXPERTS)
    others = Problem(family="package.mixture", m=8, n=64, k=64, **{column: EXPERTS[column]})
    assert [Problem.parse(str(one)) for one in (mixture, others)] == [mixture, others]
    for wrong in (-3, 2.5, True, [1], "", "SiLU!"):
        for family, told in (("moe", EXPERTS), ("package.mixture", {})):
            with pytest.raises(ProblemError, match=f"^{column} is .* in family {family}$"):
                Problem(family=family, m=8, n=64, k=64, **{**told, column: wrong})


def test_a_row_that_mixes_two_families_is_told_by_the_column() -> None:
    row = Problem(m=8, n=64, k=64).row()
    with pytest.raises(ProblemError, match=r"^topk is 2: family dense has none, only family moe has$"):
        Problem.from_row({**row, "topk": 2})
    with pytest.raises(ProblemError, match="topk is 2"):
        Problem.parse("bf16:8x64x64,topk=2")
    assert known_problems([{"problem": "bf16:8x64x64,topk=2"}, {"problem": "bf16:8x64x64"}]) == [
        Problem(m=8, n=64, k=64)
    ]
