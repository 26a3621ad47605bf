"""Operators of engines whose kernels go, are covered or are destroyed while programs call them."""

from __future__ import annotations

import pytest
import torch
from engine_programs import ORDERS
from hooked import Home

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="torch 2.9 has no way to the kernel beneath"
)


@pytest.mark.parametrize("keeps", [False, True], ids=["plain", "keeping-what-was-there"])
def test_kernels_that_go_leave_calls_as_they_end_without_us(home: Home, keeps: bool) -> None:
    """The engine's, one put over it before ours and one after: gone in every order, looked at in between or not."""
    code = (
        ORDERS
        + f"""
    keeps = {keeps}
    story = []
    for gone in itertools.permutations("EBA"):
        for looks in itertools.product([False, True], repeat=3):
            put("E", 1.0), put("B", 2.0, keeps), look(), story.append(call())
            put("A", 3.0, keeps), story.append(call())
            for name, looked in zip(gone, looks):
                take(name)
                story.append(call())
                if looked:
                    look(), story.append(call())
            put("E", 4.0), story.append(call())
            look(), story.append(call()), take("E"), story.append(call())
    print(json.dumps(story))
    """
    )
    ours, without = home.run(code).said, home.run(code, GEMMTUNED="0", AITER_TUNE_GEMM="0").said

    assert ours == without
    assert [[1.0], [1.0]] in ours, "the engine's, after those over it"


def test_what_is_destroyed_in_the_middle_of_threads_ends_their_calls_as_torch_does(home: Home) -> None:
    """Counts stay exact with a kernel that takes the place of the one that went, and nothing is told."""
    done = home.run(
        ORDERS
        + """
    put("E", 1.0), put("B", 2.0), look(), call()
    seen = [gemmtuned.status()["engine_operators"]]
    take("B")
    results = []

    def calls():
        mine = torch.zeros(2, 8)
        for _ in range(200):
            torch.ops._C.onednn_mm(mine, a, None, a)
            results.append(float(mine[0, 0]))

    workers = [threading.Thread(target=calls) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    first = sum(s.calls for s in hook.native.drain() if s.problem.packing == "opaque")
    look(), calls()
    again = sum(s.calls for s in hook.native.drain() if s.problem.packing == "opaque")
    take("E"), call(), look()
    seen.append(gemmtuned.status()["engine_operators"])
    print(json.dumps([sorted(set(results)), len(results), first, again, seen, gemmtuned.status()["overridden"]]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    values, number, first, again, seen, overridden = done.said

    assert (values, number) == ([1.0], 1000)
    assert 2 + 1 <= first <= 2 + 800, "the two before and the call that found the kernel gone"
    assert again == 200
    assert seen == [["_C::onednn_mm", "_C::int8_scaled_mm_with_quant"], []]
    assert overridden == {}
    assert done.ours == []


def test_another_put_over_an_engines_operator_is_told(home: Home) -> None:
    done = home.run(
        ORDERS
        + """
    put("E", 1.0), look(), call(), put("A", 3.0)
    counted = call()
    over = gemmtuned.status()["overridden"]
    hook.tick(), hook.tick()
    took = take("A")
    call()
    print(json.dumps([counted, sorted(over), gemmtuned.status()["overridden"]]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    counted, over, after = done.said

    assert counted == [[3.0], [3.0]]
    assert over == ["CPU _C::int8_scaled_mm_with_quant", "CPU _C::onednn_mm"]
    assert after == {}
    assert len([line for line in done.ours if "_C::onednn_mm" in line and "left alone" in line]) == 1
