"""The look-up: exact, fine, coarse, miss; what is refused; and what becomes of a route that fails."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, publish, published, solution
from hypothesis import given
from hypothesis import strategies as st

from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import MAX_DIM, Problem
from gemmtuned.configs.solution import Device, Environment, Solution, cpu_device
from gemmtuned.hooks import native
from gemmtuned.hooks.breaker import MAX_FAILURES, REARM_S, Breaker
from gemmtuned.hooks.dispatch import NATIVE_CODES, Table, build_table, ident_of, solution_of
from gemmtuned.hooks.native.build import build

CPU = Device(key="cpu-test", kind="cpu", name="Test CPU", arch="x86_64", units=4)
HERE = Environment(CPU, {"torch": "2.13", "torch_swap": "2.13", "onednn": "2.13/cpu-test", "onednn_packed": "2.13/x"})


def found(problem: Problem = LINEAR, backend: str = "torch_swap", **columns: Any) -> Solution:
    return solution(
        problem,
        backend,
        columns.pop("device", CPU.key),
        columns.pop("stamp", HERE.stamps.get(backend, "none")),
        **columns,
    )


def table(*solutions: Solution, failed: frozenset[int] = frozenset()) -> Table:
    return build_table(solutions, {"cpu": HERE}, generation=1, failed=failed)


# ---- which row


def test_exact_then_fine_then_coarse_then_miss() -> None:
    exact, fine, coarse = (found(LINEAR.with_m(m), covers=c) for m, c in ((30, "exact"), (32, "fine"), (64, "coarse")))
    rows = table(exact, fine, coarse)

    assert rows.find(LINEAR.with_m(30)) == ("exact", exact)
    assert rows.find(LINEAR.with_m(31)) == ("padded", fine)
    assert rows.find(LINEAR.with_m(33)) == ("padded", coarse)
    assert rows.find(LINEAR.with_m(65)) == ("miss", None)
    assert rows.find(replace(LINEAR, m=30, bias=True)) == ("miss", None)
    assert rows.find(LINEAR.with_m(30), "graph") == ("miss", None)


@pytest.fixture(scope="module")
def library(native_cache: Path) -> native.Native:
    import torch  # noqa: F401  the library links against it

    return native.Native(build(native_cache))


SMALL = st.integers(1, 70)
ROWS = st.lists(
    st.builds(
        lambda m, n, covers, backend: found(replace(LINEAR, m=m, n=n), backend, covers=covers),
        SMALL,
        st.integers(1, 2),
        st.sampled_from(COVERS),
        st.sampled_from(("torch", "torch_swap", "onednn")),
    ),
    max_size=12,
)


@given(solutions=ROWS, m=SMALL, n=st.integers(1, 2))
def test_both_languages_find_the_same_row(library: native.Native, solutions: list[Solution], m: int, n: int) -> None:
    rows = table(*solutions)
    library.load(
        [native.Row(p, c, mode, ident_of(s), NATIVE_CODES[s.backend]) for _, (p, c, mode), s in rows.items()], 1
    )
    outcome, chosen = rows.find(replace(LINEAR, m=m, n=n))

    assert library.find(replace(LINEAR, m=m, n=n)) == (outcome, None if chosen is None else ident_of(chosen))


def test_of_two_rows_for_one_problem_the_faster_wins() -> None:
    slow, fast = found(us=7.0), found(backend="onednn", us=6.0)

    assert table(slow, fast).find(LINEAR) == table(fast, slow).find(LINEAR) == ("exact", fast)
    assert table(found(us=6.0), fast).find(LINEAR) == ("exact", found(us=6.0))


REFUSED = {
    "another device": {"device": "cpu-other"},
    "another version": {"stamp": "2.12"},
    "withdrawn": {"state": "withdrawn"},
    "an unknown backend": {"backend": "cutlass", "stamp": "1"},
    "a packed kernel for a plain weight": {"backend": "onednn_packed"},
    "scales": {"problem": replace(LINEAR, scale="row")},
    "a family of another package": {"problem": replace(LINEAR, family="package.mixture", topk=1)},
    "a shuffled weight": {"problem": replace(LINEAR, weight_state="shuffled"), "backend": "torch"},
    "a plain kernel for a shuffled weight": {
        "problem": replace(LINEAR, family="scaled", dtype="i8", out_dtype="bf16", scale="row", weight_state="shuffled"),
        "backend": "torch_swap",
    },
    "a padded size beyond all": {"problem": LINEAR.with_m(MAX_DIM), "covers": "fine"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_row_that_does_not_hold_here_is_counted_and_left_out(library: native.Native, what: str) -> None:
    columns = dict(REFUSED[what])
    bad = found(columns.pop("problem", LINEAR), **columns)
    good = found(LINEAR.with_m(9))
    rows = table(bad, good)

    assert rows.refused.total() == 1, what
    assert [s for _, _, s in rows.items()] == [good]
    library.load([native.Row(p, c, m, 0, 0) for _, (p, c, m), _ in rows.items()], 1)


def test_what_failed_here_stays_off_under_every_later_generation() -> None:
    bad = found(LINEAR.with_m(77))
    later = replace(bad, us=3.0, generation=9)

    assert solution_of(ident_of(bad)) == bad
    assert len(table(later, failed=frozenset({ident_of(bad)}))) == 0


# ---- the circuit breaker, with the time told


def test_the_breaker_opens_after_ten_failures_and_closes_again() -> None:
    breaker = Breaker()

    assert not breaker.turn(0, MAX_FAILURES - 1)
    assert breaker.turn(1, 1)
    assert breaker.open
    assert str(MAX_FAILURES) in breaker.note
    assert not breaker.turn(2, 5)  # told once
    assert not breaker.turn(1 + REARM_S, 0)
    assert not breaker.open
    assert not breaker.turn(2 + REARM_S, MAX_FAILURES - 1)
    assert breaker.turn(3 + REARM_S, 1)


def test_failures_far_apart_do_not_open_it() -> None:
    breaker = Breaker()

    assert not any(breaker.turn(i * REARM_S / 5, 1) for i in range(100))


# ---- in a hooked process


CALLS = """
    import json, pathlib, sys, torch
    from hooked import wait_for
    import gemmtuned
    from gemmtuned.hooks import activate
    hook = activate.current()
    hook.flusher.flush()

    def outcomes():
        list(hook.drain())
        torch.nn.functional.linear(torch.ones(4, 16), torch.ones(8, 16))
        return [s.outcome for s in hook.drain()]
    """


@pytest.mark.parametrize(("isa", "outcome", "devices"), [("AVX2", "miss", 0), ("ALL", "exact", 1)])
def test_what_was_raced_with_all_instructions_serves_no_program_that_is_held_to_some(
    home: Home, isa: str, outcome: str, devices: int
) -> None:
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    home.run(
        """
    import torch, torch.nn.functional as F
    import gemmtuned
    assert gemmtuned.ready(30)
    F.linear(torch.randn(4, 16), torch.randn(8, 16))
    """,
        ONEDNN_MAX_CPU_ISA=isa,
        fresh=True,
    )

    assert home.counts() == {(str(LINEAR), outcome): 1}
    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT count(*) FROM device WHERE key = ?", (cpu_device().key,)).fetchone() == (devices,)


def test_a_failing_route_is_served_by_torch_reported_once_and_never_taken_again(home: Home) -> None:
    fails = replace(LINEAR, dtype="fp64", wdtype="fp64", out_dtype="fp64")  # oneDNN has no fp64
    home.path.mkdir()
    publish(home.path / "configs", [published(fails, "onednn"), published(LINEAR, "onednn")], 1)
    done = home.run(
        """
        import json, torch
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        wait_for(lambda: gemmtuned.generation() == 1)
        x, w = torch.randn(4, 16, dtype=torch.double), torch.randn(8, 16, dtype=torch.double)
        right = (x.unsqueeze(1) * w).sum(-1)
        same = [torch.allclose(torch.mm(x, w.t()), right) for _ in range(5)]
        hook = activate.current()
        wait_for(lambda: hook.tables.failed)
        same += [torch.allclose(torch.nn.functional.linear(x, w), right) for _ in range(5)]
        torch.mm(x.float(), w.float().t())
        hook.flusher.flush()
        print(json.dumps([all(same), gemmtuned.status()["errors"], gemmtuned.status()["dispatch"]]))
        """
    )

    assert done.said == [True, 1, True]
    assert len(done.ours) == 1
    assert "route failed problem=fp64:4x8x16,threads=2 backend=onednn served=torch" in done.ours[0]
    assert home.counts() == {("fp64:4x8x16,threads=2", "miss"): 10, ("fp32:4x8x16,threads=2", "exact"): 1}
    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT backend, reports FROM quarantine").fetchall() == [("onednn", 1)]


FAILING = {
    "it raises": (replace(LINEAR, dtype="fp64", wdtype="fp64", out_dtype="fp64"), "onednn", ""),  # oneDNN has no fp64
    "the live check finds it wrong": (
        replace(LINEAR, m=1),
        "torch_mv",
        """
        import warnings
        warnings.simplefilter("ignore")
        lib = torch.library.Library("aten", "IMPL")
        lib.impl("mv", lambda a, b: torch.zeros(a.size(0)), "CPU")  # what the route calls inside
        """,
    ),
}


@pytest.mark.parametrize("how", FAILING)
def test_the_next_row_that_holds_serves_what_a_failing_route_did_before_any_table_comes(home: Home, how: str) -> None:
    problem, backend, breaks = FAILING[how]
    home.path.mkdir()
    bucket = published(problem.with_m(16), "torch_swap", covers="fine")
    publish(home.path / "configs", [published(problem, backend), bucket], 1)
    done = home.run(
        f"""
        import json, torch
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        wait_for(lambda: gemmtuned.generation() == 1)
        hook = activate.current()
        x = torch.randn({problem.m}, 16, dtype=torch.{"double" if problem.dtype == "fp64" else "float"})
        w = torch.randn(8, 16, dtype=x.dtype)
        right = (x.unsqueeze(1) * w).sum(-1)
        {breaks}
        near = [torch.allclose(torch.mm(x, w.t()), right, atol=1e-5) for _ in range(5)]
        print(json.dumps([all(near), {{s.outcome: s.calls for s in hook.native.drain()}}]))
        """,
        GEMMTUNED_LIVE_CHECK="1",
        GEMMTUNED_FLUSH_S="1000",  # nobody makes a table without it meanwhile
    )

    assert done.said == [True, {"miss": 1, "padded": 4}]


def test_ten_failing_routes_switch_dispatch_off(home: Home) -> None:
    home.path.mkdir()
    bad = [replace(LINEAR, m=m, dtype="fp64", wdtype="fp64", out_dtype="fp64") for m in range(1, 13)]
    publish(home.path / "configs", [published(p, "onednn") for p in bad] + [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, torch
        from hooked import wait_for
        import gemmtuned
        wait_for(lambda: gemmtuned.generation() == 1)
        w = torch.randn(8, 16)
        for m in range(1, 13):
            x = torch.randn(m, 16)
            assert torch.allclose(torch.mm(x.double(), w.double().t()).float(), torch.mm(x, w.t()), atol=1e-5)
        wait_for(lambda: not gemmtuned.status()["dispatch"])
        torch.mm(torch.randn(4, 16), w.t())
        print(json.dumps(gemmtuned.status()["note"]))
        """
    )

    assert "10 routes failed" in done.said
    assert sum("dispatch switched off" in line for line in done.ours) == 1
    counts = home.counts()
    assert counts["fp32:4x8x16,threads=2", "exact"] == counts["fp32:4x8x16,threads=2", "miss"] == 1


def test_no_call_is_routed_once_status_says_that_dispatch_is_off(home: Home) -> None:
    home.path.mkdir()
    bad = [replace(LINEAR, m=m, dtype="fp64", wdtype="fp64", out_dtype="fp64") for m in range(1, 11)]
    publish(home.path / "configs", [published(p, "onednn") for p in bad] + [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        CALLS
        + """
    import logging, time

    class Slow(logging.Handler):
        def emit(self, record):
            if "switched off" in record.getMessage():
                time.sleep(0.5)

    wait_for(lambda: gemmtuned.generation() == 1)
    logging.getLogger("gemmtuned.hooks").addHandler(Slow())
    hook.flusher._drain = lambda: iter(())  # the counts are for this test
    seen = [gemmtuned.status()["dispatch"], outcomes()]
    for m in range(1, 11):
        torch.nn.functional.linear(torch.ones(m, 16).double(), torch.ones(8, 16).double())
    wait_for(lambda: not gemmtuned.status()["dispatch"], every_s=0.001)
    seen.append(outcomes())
    print(json.dumps(seen))
    """
    )

    assert done.said == [True, ["exact"], ["miss"]]


def test_padded_rows_and_default_best_serve_calls(home: Home) -> None:
    home.path.mkdir()
    fine = published(LINEAR.with_m(16), "torch_swap", covers="fine")
    default = published(replace(LINEAR, n=5), "torch", state="default_best")
    publish(home.path / "configs", [fine, default], 1)
    done = home.run(
        """
        import json, torch
        import gemmtuned
        x, w = torch.randn(4, 16), torch.randn(8, 16)
        five = torch.mm(x, w[:5].t())
        gemmtuned.reload()
        swapped = torch.mm(w, x.t()).t()
        print(json.dumps([torch.equal(torch.mm(x, w.t()), swapped), torch.equal(torch.mm(x, w[:5].t()), five)]))
        """,
        GEMMTUNED_RELOAD="manual",
    )

    assert done.said == [True, True]
    counts = {key: calls for key, calls in home.counts().items() if key[1] != "miss"}
    assert counts == {("fp32:4x8x16,threads=2", "padded"): 1, ("fp32:4x5x16,threads=2", "exact"): 1}


def test_the_kill_switch_reaches_a_running_process(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        CALLS
        + """
    hook.flusher._drain = lambda: iter(())  # the counts are for this test
    wait_for(lambda: gemmtuned.generation() == 1)
    seen = [outcomes()]
    switch = hook.settings.kill_switch
    switch.touch()
    wait_for(lambda: outcomes() == [])
    note = gemmtuned.status()["note"]
    switch.unlink()
    wait_for(lambda: outcomes() == ["exact"])
    print(json.dumps([*seen, str(switch) in note, gemmtuned.status()["note"]]))
    """
    )

    assert done.said == [["exact"], True, ""]


@pytest.mark.parametrize(
    ("env", "outcomes"),
    [
        ({"GEMMTUNED_DISABLE": "1"}, []),
        ({"AITER_BYPASS_TUNE_CONFIG": "1"}, []),
        ({"GEMMTUNED_DISPATCH": "0"}, ["miss"]),
        ({"AITER_TUNE_GEMM": "0", "GEMMTUNED_DISPATCH": "1"}, ["exact"]),
    ],
)
def test_variables_decide_what_is_captured_and_dispatched(home: Home, env: dict[str, str], outcomes: list[str]) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        CALLS + "\n    gemmtuned.reload()\n    print(json.dumps([outcomes(), hook.stop()]))\n",
        GEMMTUNED_FLUSH_S="9",
        **env,
    )

    assert done.said == [outcomes, None]
    assert (home.path / "tune.db").exists() == ("GEMMTUNED_DISPATCH" not in env or env["GEMMTUNED_DISPATCH"] == "0")


def test_a_row_that_the_native_table_cannot_hold_leaves_the_others_in_use(home: Home) -> None:
    strange = published(replace(LINEAR, k=17, packing="of_tomorrow"), "torch", state="default_best")
    publish(home.path / "configs", [strange, published(LINEAR, "torch_swap")], 3)
    done = home.run(
        """
        import json, gemmtuned, torch
        from hooked import wait_for
        wait_for(lambda: gemmtuned.generation() == 3)
        torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
        print(json.dumps([gemmtuned.status()["refused"], gemmtuned.status()["reload_failures"]]))
        """
    )
    assert done.said == [{"the native table cannot hold it": 1}, 0]
    assert len(done.ours) == 1 and "of_tomorrow" in done.ours[0]
    assert home.counts() == {(str(LINEAR), "exact"): 1}
