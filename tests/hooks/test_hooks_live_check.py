"""What the live check expects of results is what the gate lets them be, in C++ as in Python."""

from __future__ import annotations

from hooked import Home


def test_its_caps_are_those_of_the_gate(home: Home) -> None:
    """A route is switched off by these: one that the gate has let through must not be."""
    done = home.run(
        """
    import itertools, json, torch
    from dataclasses import replace
    from gemmtuned.configs.problem import Problem
    from gemmtuned.hooks import activate
    from gemmtuned.kernels.families.error import Spread, cap

    native = activate.current().native
    scaled = dict(family="scaled", dtype="fp8_e4m3", wdtype="fp8_e4m3", scale="row", wscale="row", scale_dtype="fp32",
                  wscale_dtype="fp32", math_mode="reduced")
    mixture = dict(family="moe", inter=64, experts=8, topk=2, act="silu")
    kinds = [
        *(dict(dtype=dtype, out_dtype=dtype) for dtype in ("fp64", "fp32", "fp16", "bf16")),
        dict(dtype="bf16", out_dtype="fp32"),
        *(dict(dtype="fp32", out_dtype="fp32", math_mode=mode) for mode in ("tf32", "bf16")),
        dict(dtype="fp16", out_dtype="fp16", math_mode="reduced"),
        *(dict(scaled, out_dtype=dtype) for dtype in ("bf16", "fp16", "fp32")),
        *(dict(mixture, dtype=dtype, out_dtype=dtype) for dtype in ("bf16", "fp32")),
        *(dict(mixture, dtype=dtype, wdtype="fp8_e4m3", wscale="row") for dtype in ("bf16", "fp16")),
    ]
    found = []
    for kind, k, count in itertools.product(kinds, (16, 4096, 200_000, 50_000_000), (1, 100, 1 << 20)):
        problem = Problem(**{"m": 8, "n": 16, "k": k, "threads": 2, **kind})
        found.append([str(problem), native.live_cap(problem, count), cap(problem, Spread(count, 4.0))])
    print(json.dumps(found))
    """
    )
    assert len(done.said) == 15 * 12
    for problem, live, gate in done.said:
        assert abs(live - gate) <= 1e-12 * gate, problem
    assert len({round(gate, 12) for _, _, gate in done.said}) > 10, "the grid has more than the constants"


def test_results_that_the_gate_knows_no_rounding_of_are_not_compared(home: Home) -> None:
    done = home.run(
        """
    import json, torch
    from gemmtuned.configs.problem import Problem
    from gemmtuned.hooks import activate
    native = activate.current().native
    dtypes = ("i32", "fp8_e4m3", "fp8_e5m2")
    print(json.dumps([native.live_cap(Problem(m=8, n=16, k=32, dtype="i8", out_dtype=d), 100) for d in dtypes]))
    """
    )
    assert done.said == [0.0] * 3
