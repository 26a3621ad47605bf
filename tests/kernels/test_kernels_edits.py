"""Edits of operands in place: every value is written somewhere, and all is as it was afterwards."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.edits import Edit, edits, holding, patterns
from gemmtuned.kernels.families.operand import Inputs

CPU = torch.device("cpu")
PROBLEMS = (
    Problem(m=1, n=24, k=40, dtype="fp32", bias=True),
    Problem(m=2, n=1, k=40, dtype="fp64", layout="tn"),
    Problem(m=40, n=24, k=40, dtype="fp16", bias=True, layout="st"),
    Problem(m=9, n=300, k=5000, dtype="bf16"),
    Problem(family="batched", batch=3, m=5, n=7, k=8, dtype="fp32"),
    Problem(family="batched_add", batch=2, m=3, n=4, k=8, dtype="bf16"),
    Problem(family="dense_add", m=3, n=4, k=8, dtype="fp32"),
    Problem.parse("weight_only:bf16/fp4_e2m1:3x16x64,wscale=1x32"),
    Problem.parse("moe:bf16/fp4_e2m1:3x64x64+bias,wscale=1x32,experts=4,topk=2,inter=32,act=silu_gated"),
    Problem.parse("moe:bf16/fp8_e4m3:3x64x64,wscale=tensor,experts=4,topk=2,inter=32,act=silu_gated"),
    Problem.parse("moe:bf16/i4:3x64x64,wscale=1x32,wscaledtype=bf16,experts=4,topk=2,inter=32,act=silu_gated"),
)


def made(problem: Problem) -> Inputs:
    return family_of(problem).make(problem, kind="randn", seed=1, device=CPU)


def all_of(problem: Problem, inputs: Inputs, *, thorough: bool = True, seed: int = 1) -> list[Edit]:
    return list(edits(problem, inputs, seed=seed, thorough=thorough))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("thorough", [False, True])
def test_operands_change_in_their_place_and_are_as_they_were_afterwards(problem: Problem, thorough: bool) -> None:
    inputs = made(problem)
    before = {o.name: t.clone() for o, t in inputs}
    for edit in all_of(problem, inputs, thorough=thorough):
        with edit.applied(inputs):
            assert any(not torch.equal(t, before[o.name]) for o, t in inputs), edit.what
        assert all(torch.equal(t, before[o.name]) for o, t in inputs), edit.what


@pytest.mark.parametrize("problem", PROBLEMS[-4:], ids=str)
def test_every_weight_and_scale_is_edited(problem: Problem) -> None:
    """Also those that hold no numbers: a kernel that kept a copy of any would be seen."""
    inputs = made(problem)
    before = {o.name: t.clone() for o, t in inputs if o.weight}
    changed = set()
    for edit in all_of(problem, inputs, thorough=False):
        if "edited in place" in edit.what:
            with edit.applied(inputs):
                changed |= {name for name, t in before.items() if not torch.equal(inputs[name], t)}
    assert changed == set(before)


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=str)
def test_each_operand_gets_zeros_large_and_small_numbers_and_what_is_no_number(problem: Problem) -> None:
    inputs = made(problem)
    seen = {name: torch.empty(0, dtype=torch.float64) for name in ("x", "w", "bias")}
    for edit in all_of(problem, inputs, thorough=False):
        with edit.applied(inputs):
            for name in edit.marks:
                seen[name] = torch.cat([seen[name], inputs[name].double().flatten()])
    large, small = {"fp16": (1e3, 1e-2), "fp64": (1e50, 1e-50)}.get(problem.dtype, (1e29, 1e-28))
    for name, found in seen.items():
        if name == "bias" and not problem.bias:
            continue
        finite = found[found.isfinite()].abs()
        assert found.isnan().any() and (found == math.inf).any() and (found == -math.inf).any(), name
        assert (finite == 0).any() and finite.max() > large and finite[finite > 0].min() < small, name


def test_a_thorough_one_puts_each_value_on_every_row() -> None:
    problem = Problem(m=9, n=24, k=40, dtype="fp32")
    inputs = made(problem)
    hit = torch.zeros(9, dtype=torch.int64)
    for edit in all_of(problem, inputs):
        if edit.what == "NaN and Inf in rows of X":
            with edit.applied(inputs):
                hit += inputs["x"].isnan().any(1)
    assert hit.tolist() == [1] * 9


def test_results_are_as_large_as_their_unit_says() -> None:
    problem = Problem(m=9, n=24, k=40, dtype="fp32", bias=True)
    inputs = made(problem)
    for edit in all_of(problem, inputs):
        with edit.applied(inputs):
            y = torch.addmm(inputs["bias"], inputs["x"], inputs["w"])
            size = (y.double() / edit.unit(y, problem, inputs.operands)).abs()
            assert not size.isfinite().any() or size[size.isfinite()].max() < 10, edit.what


def test_a_packed_weight_is_left_alone() -> None:
    problem = Problem(m=9, n=24, k=40, dtype="fp32", weight_state="packed", threads=1)
    assert all("w" not in edit.marks for edit in all_of(problem, made(problem)))


def test_equal_seeds_make_equal_edits_and_other_seeds_do_not() -> None:
    problem = Problem(m=40, n=24, k=40, dtype="fp32")
    inputs = made(problem)
    texts = [
        [(e.what, {k: v.tolist() for k, v in e.marks.items()}, e.seed) for e in all_of(problem, inputs, seed=seed)]
        for seed in (3, 3, 4)
    ]
    same, other = (str(one) == str(two) for one, two in pairwise(texts))
    assert same and not other


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_patterns_of_x_are_what_they_say_and_x_is_itself_again(problem: Problem) -> None:
    x = made(problem)["x"]
    before = x.clone()
    found = dict(patterns(x, seed=1))
    for values_ in found.values():
        assert (values_.shape, values_.dtype) == (x.shape, x.dtype)
        with holding(x, values_):
            assert torch.equal(x, values_)
        assert torch.equal(x, before)
    positive, single, alike = found.values()
    assert bool((positive >= 0).all()) and torch.equal(positive, x.abs())
    assert bool(((single != 0).sum(-1) == 1).all())
    assert torch.equal(single[single != 0], x[single != 0])
    half = problem.k // 2
    assert bool((alike[..., :half] == x[..., :1, :half]).all()) and torch.equal(alike[..., half:], x[..., half:])
