"""The native hook among other people's kernels: whose operator it is, who is blamed for what, what is checked."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.configs.settings import Settings, batch_invariance

USERS_OWN = """
    import json, torch, warnings
    warnings.simplefilter("ignore")
    import gemmtuned
    from gemmtuned.hooks import activate
    calls = [0]

    def theirs(a, b):
        calls[0] += 1
        return torch.full((a.size(0), b.size(1)), 42.0)

    lib = torch.library.Library("aten", "IMPL")
    x, w = torch.randn(4, 16), torch.randn(16, 8)
"""


def test_a_kernel_that_was_there_before_us_is_left_alone_and_named(home: Home) -> None:
    done = home.run(
        USERS_OWN
        + """
    lib.impl("mm", theirs, "CPU")
    gemmtuned.enable()
    hook = activate.current()
    y = torch.mm(x, w)
    torch.addmm(torch.zeros(8), x, w)
    counted = sum(s.calls for s in hook.native.drain())
    over = gemmtuned.status()["overridden"]
    gemmtuned.disable()
    gemmtuned.enable()
    again = torch.mm(x, w)
    del lib
    print(json.dumps([y.unique().tolist(), again.unique().tolist(), calls[0], counted, over]))
    """,
        GEMMTUNED="0",
        AITER_TUNE_GEMM="0",
    )
    y, again, calls, counted, over = done.said

    assert (y, again, calls) == ([42.0], [42.0], 2)
    assert counted == 1, "addmm is torch's own still"
    assert list(over) == ["CPU aten::mm"]
    assert "<string>" in over["CPU aten::mm"], "it names the file of the one who registered it"


def test_an_override_that_comes_later_wins_and_is_told_once(home: Home) -> None:
    done = home.run(
        USERS_OWN
        + """
    import time
    from hooked import wait_for
    hook = activate.current()
    torch.mm(x, w)
    before = gemmtuned.status()["overridden"]
    lib.impl("mm", theirs, "CPU")
    y = torch.mm(x, w)
    wait_for(lambda: hook.patches.overridden())
    time.sleep(0.3)
    print(json.dumps([before, y.unique().tolist(), list(gemmtuned.status()["overridden"]), gemmtuned.status()["note"]]))
    """
    )
    before, y, over, note = done.said

    assert (before, y, over) == ({}, [42.0], ["CPU aten::mm"])
    assert "aten::mm" in note
    assert len([line for line in done.ours if "left alone" in line]) == 1


def test_an_override_that_goes_leaves_torchs_product_and_it_is_counted(home: Home) -> None:
    """One that was there before us and one that came later, gone in either order: no call meets a dead kernel."""
    done = home.run(
        USERS_OWN
        + """
    import itertools
    right, story = (x.unsqueeze(-1) * w).sum(1), []
    for first, *_ in itertools.permutations("BA", 2):
        libraries = {"B": torch.library.Library("aten", "IMPL")}
        libraries["B"].impl("mm", theirs, "CPU", allow_override=True)
        gemmtuned.enable()
        left = sorted(gemmtuned.status()["overridden"])
        libraries["A"] = torch.library.Library("aten", "IMPL")
        libraries["A"].impl("mm", lambda a, b: torch.full((a.size(0), b.size(1)), 7.0), "CPU", allow_override=True)
        values = [torch.mm(x, w).unique().tolist()]
        for name in (first, "BA".replace(first, "")):
            libraries.pop(name)._destroy()
            y = torch.mm(x, w)
            values.append("right" if torch.allclose(y, right, atol=1e-5) else y.unique().tolist())
        hook = activate.current()
        list(hook.native.drain())
        hook.patches.tell_of_others(float("inf"))
        torch.mm(x, w)
        story.append([left, values, sum(s.calls for s in hook.native.drain()), gemmtuned.status()["overridden"]])
    print(json.dumps(story))
    """,
        GEMMTUNED="0",
        AITER_TUNE_GEMM="0",
        GEMMTUNED_FLUSH_S="1000",
    )
    mm = ["CPU aten::mm"]

    assert done.said == [
        [mm, [[7.0], [7.0], "right"], 1, {}],
        [mm, [[7.0], [42.0], "right"], 1, {}],
    ], "the second time ours is in front of torch's, and the override on top of it"


def test_a_kernel_that_kept_ours_outlives_disable_and_is_counted_again_after_enable(home: Home) -> None:
    done = home.run(
        USERS_OWN
        + """
    kept = torch.library.get_kernel("aten::mm", "CPU")

    def conditional(keys, a, b):
        return theirs(a, b) if a.size(0) == 1 else kept.call_boxed(keys, a, b)

    lib.impl("mm", conditional, "CPU", with_keyset=True)
    right = (x.unsqueeze(-1) * w).sum(1)
    near, counts = [], []
    for switch in (lambda: None, gemmtuned.disable, gemmtuned.enable, gemmtuned.disable):
        switch()
        near.append(torch.allclose(torch.mm(x, w), right, atol=1e-5))
        hook = activate.current()
        counts.append(sum(s.calls for s in hook.native.drain()) if hook else None)
    print(json.dumps([near, counts[1:], torch.mm(x[:1], w).unique().tolist()]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    near, counts, theirs = done.said

    assert near == [True] * 4
    assert counts == [None, 1, None]
    assert theirs == [42.0]


@pytest.mark.parametrize(
    ("env", "argv", "said"),
    [
        ({}, [], ""),
        ({"VLLM_BATCH_INVARIANT": "0", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "false"}, [], ""),
        ({"VLLM_BATCH_INVARIANT": "1"}, [], "VLLM_BATCH_INVARIANT"),
        ({"SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "true"}, [], "SGLANG_ENABLE_DETERMINISTIC_INFERENCE"),
        ({"GEMMTUNED_BATCH_INVARIANT": "1"}, [], "GEMMTUNED_BATCH_INVARIANT"),
        ({}, ["launch", "--enable-deterministic-inference"], "--enable-deterministic-inference"),
    ],
)
def test_who_asks_for_results_that_do_not_depend_on_the_batch(env: dict[str, str], argv: list[str], said: str) -> None:
    assert batch_invariance(env, argv) == said


def test_batch_invariant_modes_switch_dispatch_off_and_leave_capture_on(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, os, torch
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        wait_for(lambda: gemmtuned.generation() == 1)
        x, w = torch.randn(4, 16), torch.randn(8, 16)
        hook = activate.current()

        def outcome():
            hook.flusher.flush()
            torch.nn.functional.linear(x, w)
            return [s.outcome for s in hook.native.drain()]

        hook.flusher.stop()
        said = [outcome(), gemmtuned.status()["dispatch"]]
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # as the engine may, once it has read its own settings
        hook.tick()
        said += [outcome(), gemmtuned.status()["dispatch"], gemmtuned.status()["capture"], gemmtuned.status()["note"]]
        hook.tick()
        del os.environ["VLLM_BATCH_INVARIANT"]
        hook.tick()
        print(json.dumps([*said, outcome()]))
        """
    )
    before, on, during, off, capture, note, after = done.said

    assert (before, on, during, off, capture, after) == (["exact"], True, ["miss"], False, True, ["exact"])
    assert note.startswith("dispatch is off, capture is on: VLLM_BATCH_INVARIANT")
    assert len([line for line in done.ours if "VLLM_BATCH_INVARIANT" in line]) == 1


# ---- blame


def test_a_program_short_of_memory_declines_the_route_and_blames_nobody(home: Home) -> None:
    big = replace(LINEAR, m=2048, n=4096, k=64)
    home.path.mkdir()
    publish(home.path / "configs", [published(replace(big, layout="nn"), "torch_swap")], 1)
    done = home.run(
        """
        import json, resource, torch
        from pathlib import Path
        from hooked import wait_for
        import gemmtuned
        from gemmtuned.hooks import activate
        wait_for(lambda: gemmtuned.generation() == 1)
        hook = activate.current()
        hook.flusher.stop()
        x, w = torch.randn(2048, 64), torch.randn(64, 4096)
        torch.mm(x, w)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # room for one result of 32 MiB and not for two: the route needs it twice, torch once
        resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), -1))
        shapes = [list(torch.mm(x, w).shape) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        outcomes = {s.outcome: s.calls for s in hook.native.drain()}
        torch.mm(x, w)
        print(json.dumps([shapes, outcomes, hook.native.failures(), [s.outcome for s in hook.native.drain()]]))
        """
    )
    shapes, outcomes, failures, after = done.said

    assert shapes == [[2048, 4096]] * 3
    assert failures == []
    assert outcomes == {"exact": 1, "miss": 3}, "the limit was not reached"
    assert after == ["exact"], "the route is used again once there is memory"


def test_what_raises_is_off_here_and_reported_for_the_daemon_to_run(home: Home) -> None:
    fails = replace(LINEAR, dtype="fp64", wdtype="fp64", out_dtype="fp64")  # oneDNN has no fp64
    home.path.mkdir()
    publish(home.path / "configs", [published(fails, "onednn")], 1)
    home.run(
        """
        import torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks import activate
        wait_for(lambda: gemmtuned.generation() == 1)
        torch.mm(torch.randn(4, 16).double(), torch.randn(8, 16).double().t())
        wait_for(lambda: activate.current().tables.failed)
        """
    )
    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT how, backend, reports FROM quarantine").fetchall() == [("failed", "onednn", 1)]


# ---- the live check


LIVE = """
    import json, torch
    from hooked import wait_for
    import gemmtuned
    from gemmtuned.hooks import activate, native
    wait_for(lambda: gemmtuned.generation() == 1)
    hook = activate.current()
    x, w = torch.randn(1, 16), torch.randn(8, 16)
    right = (x.unsqueeze(1) * w).sum(-1)
"""


@pytest.mark.parametrize("form", ["torch.mm(x, w.t())", "torch.mm(x, w.t(), out=torch.empty(1, 8))"])
def test_the_live_check_keeps_a_right_route(home: Home, form: str) -> None:
    home.path.mkdir()
    rows = [published(replace(LINEAR, m=1), backend) for backend in ("torch_mv",)]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        LIVE
        + f"""
    near = [torch.allclose({form}, right, atol=1e-5) for _ in range(50)]
    """
        + """
    print(json.dumps([all(near), {s.outcome: s.calls for s in hook.native.drain()}, hook.native.failures()]))
    """,
        GEMMTUNED_LIVE_CHECK="1",
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [True, {"exact": 50}, []]


@pytest.mark.parametrize("form", ["torch.mm(x, w.t())", "torch.mm(x, w.t(), out=torch.empty(1, 8))"])
def test_the_live_check_finds_a_wrong_kernel_keeps_torchs_result_and_reports_it(home: Home, form: str) -> None:
    """The kernel is right; the weight that its packed form was made of is not the one it is called with."""
    home.path.mkdir()
    publish(home.path / "configs", [published(replace(LINEAR, m=1), "torch_mv")], 1)
    done = home.run(
        LIVE
        + """
    from torch.library import Library
    import warnings
    warnings.simplefilter("ignore")
    lib = Library("aten", "IMPL")
    stock = torch.library.get_kernel("aten::mv", "CPU") if hasattr(torch.library, "get_kernel") else None
    lib.impl("mv", lambda a, b: torch.zeros(a.size(0)), "CPU")  # what the route calls inside gives zeros
    """
        + f"""
    near = [torch.allclose({form}, right, atol=1e-5) for _ in range(400)]
    """
        + """
    wait_for(lambda: hook.tables.failed)
    first = near.index(True)
    print(json.dumps([first, all(near[first:]), list(hook.tables.failed.values())]))
    """,
        GEMMTUNED_LIVE_CHECK="20",
    )
    first, rest, reasons = done.said

    assert first < 300, "one in twenty was to be checked"
    assert rest
    assert "live check" in reasons[0]
    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT how, backend FROM quarantine").fetchall() == [("wrong", "torch_mv")]


FROZEN_LIVE = (
    LIVE
    + """
    from torch.library import Library
    import warnings
    warnings.simplefilter("ignore")
    lib = Library("aten", "IMPL")
    lib.impl("mv", lambda a, b: torch.zeros(a.size(0)), "CPU")  # the route of the layer that is not packed gives zeros
    model = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False)).eval()
    model[0].weight.data.copy_(w)
    gemmtuned.freeze(model)
    with torch.no_grad():
        near = [torch.allclose(model(x), right, atol=1e-5) for _ in range(20)]
    print(json.dumps([near, [how for _, how, _ in hook.native.failures()]]))
    """
)


@pytest.mark.parametrize("packed", [True, False])
def test_the_live_check_of_a_frozen_layer_compares_with_torch(home: Home, packed: bool) -> None:
    """A right packed route is not blamed for a wrong plain one; alone, that is found wrong here too."""
    home.path.mkdir()
    one = replace(LINEAR, m=1)
    rows = [published(one, "torch_mv")]
    if packed:
        rows.append(published(replace(one, weight_state="packed"), "onednn_packed"))
    publish(home.path / "configs", rows, 1)
    done = home.run(FROZEN_LIVE, GEMMTUNED_LIVE_CHECK="1", GEMMTUNED_FLUSH_S="1000")

    assert done.said == [[True] * 20, [] if packed else ["wrong"]]


def test_the_live_check_is_off_unless_asked_for() -> None:
    assert Settings.from_env({"GEMMTUNED_HOME": "/tmp"}).live_check == 0
    assert Settings.from_env({"GEMMTUNED_HOME": "/tmp", "GEMMTUNED_LIVE_CHECK": "1000"}).live_check == 1000


# ---- threads that come and go


def test_threads_that_come_and_go_lose_no_count_and_cost_nothing_that_grows(home: Home) -> None:
    done = home.run(
        """
        import json, threading, torch
        from pathlib import Path
        from gemmtuned.hooks import activate
        hook = activate.current()
        hook.flusher.stop()
        ws = [torch.randn(3, n) for n in range(1, 9)]
        x = torch.randn(2, 3)

        def rss():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4

        def churn(threads):
            for i in range(threads):
                t = threading.Thread(target=torch.mm, args=(x, ws[i % 8]))
                t.start()
                t.join()

        churn(500)
        before = rss()
        churn(3000)
        grown = rss() - before
        sums = {}
        for s in hook.native.drain():
            sums[s.problem.n] = sums.get(s.problem.n, 0) + s.calls
        churn(16)
        print(json.dumps([grown, sorted(sums.values()), sum(s.calls for s in hook.native.drain())]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    grown, sums, more = done.said

    assert sum(sums) == 3500
    assert len(sums) == 8
    assert more == 16
    assert grown < 12_000, f"3000 threads took {grown} KiB; 12 KiB each would be 36,000"


@pytest.mark.long
def test_counts_of_threads_that_end_are_kept_however_many_shapes_they_met(home: Home) -> None:
    """100,000 problems, each met by a thread of few: more than any one thread may keep."""
    done = home.run(
        """
        import json, threading, torch
        from gemmtuned.hooks import activate
        hook = activate.current()
        hook.flusher.stop()
        torch.set_num_threads(1)
        w = torch.ones(2, 100)

        def work(first):
            for m in range(first, first + 1000):
                x = torch.empty(1).expand(m, 2)
                for n in range(1, 11):
                    torch.mm(x, w[:, :n])

        for first in range(1, 10_000, 1000):
            thread = threading.Thread(target=work, args=(first,))
            thread.start()
            thread.join()
        print(json.dumps([sum(s.calls for s in hook.native.drain()), hook.native.dropped]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [100_000, 0]


def test_whole_numbers_are_counted_and_sums_with_a_function_behind_are_sums(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from gemmtuned.hooks import activate
        hook = activate.current()
        hook.flusher.stop()
        y = torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8))
        z = torch._addmm_activation(torch.ones(8), torch.ones(4, 16), torch.ones(16, 8))
        seen = [(s.problem, s.calls) for s in hook.native.drain()]
        names = sorted(f"{p.family} {p.dtype}>{p.out_dtype} {calls}" for p, calls in seen)
        print(json.dumps([y.unique().tolist(), z.unique().tolist(), names]))
        """
    )
    assert done.said == [[16], [17.0], ["dense fp32>fp32 1", "dense i8>i32 1"]]


def test_status_has_the_same_keys_when_the_hook_is_off(home: Home) -> None:
    code = "import json, torch, gemmtuned; print(json.dumps(sorted(gemmtuned.status())))"
    assert home.run(code).said == home.run(code, GEMMTUNED="0", AITER_TUNE_GEMM="0").said


def test_torchs_own_router_on_top_of_ours_is_nobody_elses(home: Home) -> None:
    """torch._native is imported after us and keeps our kernel for what it does not take; its file tells it apart."""
    done = home.run(
        USERS_OWN
        + """
    import tempfile
    from pathlib import Path
    kept = torch.library.get_kernel("aten::mm", "CPU")
    folder = Path(tempfile.mkdtemp()) / "torch" / "_native"
    folder.mkdir(parents=True)
    code = "import torch; lib = torch.library.Library('aten', 'IMPL'); "
    code += "lib.impl('mm', lambda keys, a, b: kept.call_boxed(keys, a, b), 'CPU', with_keyset=True)"
    scope = {"kept": kept}
    exec(compile(code, str(folder / "registry.py"), "exec"), scope)
    hook = activate.current()
    torch.mm(x, w)
    print(json.dumps([gemmtuned.status()["overridden"], sum(s.calls for s in hook.native.drain())]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [{}, 1]
    assert done.ours == []
