"""Families: inputs lie in memory as the layout says, references are exact, limits are fair and tight."""

from __future__ import annotations

import math

import cases
import pytest
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import wide
from gemmtuned.kernels.families import FAMILIES, family_of
from gemmtuned.kernels.families.base import KINDS, PADDED
from gemmtuned.kernels.families.error import Error, Spread, limits, measure_error
from gemmtuned.kernels.families.operand import lay_out

CPU = torch.device("cpu")


def make(problem: Problem, kind: str = "randn", seed: int = 1, **kw):
    return family_of(problem).make(problem, kind=kind, seed=seed, device=CPU, **kw)


@pytest.mark.parametrize("problem", cases.layouts("fp32"), ids=str)
@pytest.mark.parametrize("kind", ["randn", "padded"])
def test_operands_have_the_strides_their_layout_names(problem, kind):
    inputs = make(problem, kind)
    for tensor, shape, letter in zip((inputs["x"], inputs["w"]), ((9, 72), (72, 40)), problem.layout, strict=True):
        assert tuple(tensor.shape) == shape
        unit = [dim for dim in (0, 1) if tensor.stride(dim) == 1]
        assert unit == {"n": [1], "t": [0], "s": []}[letter]


def test_a_linear_layers_weight_is_a_view_of_a_row_major_matrix():
    inputs = make(Problem(m=3, n=5, k=7, dtype="bf16"))
    assert inputs["w"].t().is_contiguous()
    assert inputs["x"].is_contiguous()


def test_padded_operands_have_nan_all_around_and_odd_offsets():
    inputs = make(Problem(m=4, n=6, k=8, dtype="fp32", bias=True), "padded")
    for tensor, buffer in zip(inputs.tensors.values(), inputs.buffers, strict=True):
        assert not tensor.isnan().any()
        assert int((~buffer.isnan()).sum()) == tensor.numel()
        assert tensor.storage_offset() % 2 == 1
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", (*KINDS, PADDED))
def test_equal_seeds_make_equal_inputs_and_other_seeds_do_not(kind):
    problem = Problem(m=5, n=6, k=200, dtype="bf16", bias=True)
    one, same, other = make(problem, kind, 3), make(problem, kind, 3), make(problem, kind, 4)
    assert torch.equal(one["x"].nan_to_num(), same["x"].nan_to_num())
    assert torch.equal(one["w"].nan_to_num(), same["w"].nan_to_num())
    assert not torch.equal(one["x"].nan_to_num(), other["x"].nan_to_num())
    assert not torch.equal(one["w"].nan_to_num(), other["w"].nan_to_num())


@pytest.mark.parametrize(
    "text",
    [
        "bf16:32x32x64+bias", "batched:fp32:2x32x16x64", "scaled:fp8_e4m3>bf16:32x32x64+bias,scale=row",
        "grouped:bf16:4x32x32x64", "weight_only:bf16/i8:32x32x64,wscale=row",
        "moe:bf16:32x64x64+bias,experts=4,topk=2,inter=32,act=silu_gated",
        "moe:bf16/fp8_e4m3:32x64x64,wscale=row,experts=4,topk=2,inter=32,act=silu_gated",
    ],
)  # fmt: skip
def test_no_operand_is_drawn_as_another_is_whatever_their_seeds(text):
    problem = Problem.parse(text)
    drawn = [
        {
            name: t.float().flatten()
            if t.is_floating_point() and t.element_size() > 1
            else t.view(torch.int8).float().flatten()
            for name, t in family_of(problem).draw(problem, "randn", seed, CPU, weights=True).items()
        }
        for seed in range(4)
    ]
    streams = [(name, seed, t) for seed, one in enumerate(drawn) for name, t in one.items() if t.numel() >= 512]
    for number, (name, seed, t) in enumerate(streams):
        for other, other_seed, u in streams[:number]:
            size = min(len(t), len(u))
            alike = float(torch.corrcoef(torch.stack((t[:size], u[:size])))[0, 1])
            assert abs(alike) < 8 / size**0.5, (name, seed, other, other_seed)


def test_tail_inputs_are_large_at_the_end_and_outliers_are_rare():
    problem = Problem(m=64, n=8, k=1000, dtype="fp32")
    tail, outliers = make(problem, "tail")["x"], make(problem, "outliers")["x"]
    assert tail[:, -64:].std() > 30
    assert 0.004 < float((outliers.abs() > 10).float().mean()) < 0.02


def test_a_given_weight_is_used_itself_and_left_as_it_was():
    problem = Problem(m=2, n=6, k=8, dtype="fp32")
    weight = make(problem)["w"]
    kept = weight.clone()
    assert make(problem, "outliers", weights=(weight,))["w"] is weight
    assert make(problem, PADDED, weights=(weight,))["w"].data_ptr() != weight.data_ptr()
    assert torch.equal(weight, kept)


def test_weight_copies_have_equal_values_in_memory_of_their_own():
    for layout in ("nt", "nn", "ns"):
        problem = Problem(m=2, n=6, k=8, dtype="fp32", layout=layout)
        copies = [w for (w,) in family_of(problem).weight_copies(problem, count=3, device=CPU)]
        assert len({c.untyped_storage().data_ptr() for c in copies}) == 3
        assert all(torch.equal(c, copies[0]) and c.stride() == copies[0].stride() for c in copies)


def test_fp16_results_stay_finite_on_every_kind():
    problem = Problem(m=16, n=32, k=4096, dtype="fp16")
    for kind in KINDS:
        inputs = make(problem, kind)
        assert bool((inputs["x"].float() @ inputs["w"].float()).abs().max() < 60000)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(m=3, n=5, k=7, dtype="fp32", bias=True),
        Problem(family="dense_add", m=3, n=5, k=7, dtype="bf16"),
        Problem(family="batched", batch=4, m=3, n=5, k=7, dtype="fp16"),
        Problem(family="batched_add", batch=4, m=3, n=5, k=7, dtype="fp32"),
    ],
    ids=str,
)
def test_the_reference_is_the_fp64_product(problem):
    family = family_of(problem)
    inputs = make(problem)
    sample = family.sample(problem, seed=1, device=CPU)
    expected = inputs["x"].double() @ inputs["w"].double()
    if set(inputs.tensors) - {"x", "w"}:
        expected = expected + inputs["c" if problem.family.endswith("_add") else "bias"].double()
    assert torch.allclose(family.reference(problem, inputs, sample), expected, rtol=1e-12, atol=1e-12)


def test_a_large_problem_is_sampled_with_its_edges(monkeypatch):
    monkeypatch.setattr("gemmtuned.kernels.families.base.SAMPLED_WEIGHTS", 1 << 12)
    problem = Problem(m=500, n=900, k=64, dtype="fp32")
    family = family_of(problem)
    sample = family.sample(problem, seed=1, device=CPU)
    assert (len(sample.rows), len(sample.cols)) == (64, 64)
    assert {0, 499} <= set(sample.rows.tolist())
    assert {0, 899} <= set(sample.cols.tolist())
    assert len(set(sample.rows.tolist())) == 64
    inputs = make(problem)
    whole = inputs["x"].double() @ inputs["w"].double()
    assert torch.allclose(family.reference(problem, inputs, sample), sample.of(whole))


def test_unknown_families_and_mixed_dtypes_are_refused_by_name():
    with pytest.raises(CandidateFailed, match="act of silu, "):
        family_of(Problem(family="moe", m=1, n=1, k=1, experts=1, topk=1, inter=1, act="tanh"))
    with pytest.raises(CandidateFailed, match="mixed dtypes"):
        family_of(Problem(m=1, n=1, k=1, dtype="bf16", out_dtype="fp32", threads=1))  # torch has it on GPUs alone
    family_of(Problem(m=1, n=1, k=1, dtype="bf16", out_dtype="fp32"))
    with pytest.raises(CandidateFailed, match="dtype fp8_e4m3 has scales"):
        family_of(Problem(m=1, n=1, k=1, dtype="fp8_e4m3"))
    plain = {"dense", "batched", "dense_add", "batched_add"}
    assert set(FAMILIES) == plain | {"scaled", "grouped", "moe", "weight_only"}


def test_integer_and_complex_problems_have_inputs_too():
    for dtype in ("i8", "i32", "i64", "u8", "c64", "fp64"):
        assert make(Problem(m=2, n=3, k=4, dtype=dtype))["x"].dtype is not None


def test_lay_out_keeps_values_with_a_batch_in_front():
    values = torch.randn(3, 4, 5)
    for letter in "nts":
        for pad in (0, 3):
            assert torch.equal(lay_out(values, letter, pad=pad)[0], values)


def test_error_of_a_nan_is_never_within_a_limit():
    exact = torch.randn(4, 4, dtype=torch.float64)
    y = exact.float()
    y[0, 0] = math.nan
    assert not measure_error(y, exact).within(Error(1e9, 1e9))


@pytest.mark.parametrize("k", [16, 64, 1024, 8192])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_summation_in_order_is_allowed_and_a_lost_product_is_not(k, dtype):
    problem = Problem(m=16, n=64, k=k, dtype=dtype)
    inputs = make(problem)
    a, b = inputs["x"].float(), inputs["w"].float()
    exact = inputs["x"].double() @ inputs["w"].double()
    in_order = torch.zeros(16, 64)
    for i in range(k):
        in_order += a[:, i : i + 1] * b[i : i + 1]
    best = exact.to(inputs["x"].dtype)  # a default that rounds once and no more
    limit = limits(problem, measure_error(best, exact), Spread.of(exact, inputs["x"]))
    assert measure_error(in_order.to(inputs["x"].dtype), exact).within(limit)
    lost = (exact - inputs["x"][:, -1:].double() * inputs["w"][-1:].double()).to(inputs["x"].dtype)
    assert not measure_error(lost, exact).within(limit)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "c64"])
@pytest.mark.parametrize("size", [(1, 1, 64), (1, 3, 1), (2, 33, 65), (7, 256, 512)])
def test_no_order_of_adding_is_refused(size, dtype):
    """Also where a default rounds once, results are few, or one product of a row outweighs all others."""
    problem = Problem(m=size[0], n=size[1], k=size[2], dtype=dtype)
    order = torch.Generator().manual_seed(1)
    in_order = torch.arange(problem.k)
    for kind in KINDS:
        drawn = [make(problem, kind=kind, seed=seed) for seed in range(12)]
        if kind == "outliers":  # one alone, and where it spoils most
            for inputs in drawn:
                inputs["x"][:, 0] *= 1000
        anyhow = [torch.randperm(problem.k, generator=order) for _ in drawn]
        for orders in ([in_order] * len(drawn), anyhow):  # the products of all seeds are added side by side
            x = torch.stack([inputs["x"][:, by] for inputs, by in zip(drawn, orders, strict=True)])
            w = torch.stack([inputs["w"][by] for inputs, by in zip(drawn, orders, strict=True)])
            ys = torch.zeros(len(drawn), problem.m, problem.n, dtype=x.dtype)
            for i in range(problem.k):
                ys += x[:, :, i : i + 1] * w[:, i : i + 1]
            for seed, (y, inputs) in enumerate(zip(ys, drawn, strict=True)):
                exact = wide(inputs["x"]) @ wide(inputs["w"])
                best = measure_error(exact.to(inputs["x"].dtype), exact)
                limit = limits(problem, best, Spread.of(exact, inputs["x"]))
                assert measure_error(y, exact).within(limit), (kind, seed, measure_error(y, exact), limit)


@pytest.mark.parametrize("k", [64, 4096])
def test_a_lost_product_is_far_above_the_limits_however_few_results_there_are(k):
    for seed in range(20):
        problem = Problem(m=1, n=1, k=k, dtype="fp32")
        inputs = make(problem, seed=seed)
        exact = inputs["x"].double() @ inputs["w"].double()
        lost = (exact - inputs["x"][:, -1:].double() * inputs["w"][-1:].double()).float()
        limit = limits(problem, Error(0.0, 0.0), Spread.of(exact, inputs["x"]))
        if inputs["x"][0, -1].abs() > 0.1 and inputs["w"][-1, 0].abs() > 0.1 * k**-0.5:
            assert not measure_error(lost, exact).within(limit)


def test_bf16_partial_sums_in_bf16_are_refused():
    problem = Problem(m=32, n=256, k=4096, dtype="bf16")
    inputs = make(problem)
    exact = inputs["x"].double() @ inputs["w"].double()
    parts = sum(
        (inputs["x"][:, i::2] @ inputs["w"][i::2] for i in range(2)), torch.zeros(32, 256, dtype=torch.bfloat16)
    )
    limit = limits(problem, measure_error(inputs["x"] @ inputs["w"], exact), Spread.of(exact, inputs["x"]))
    assert not measure_error(parts, exact).within(limit)


def test_the_cap_holds_when_the_default_itself_is_broken():
    limit = limits(Problem(m=4, n=4, k=64, dtype="bf16"), Error(0.5, 3.0), Spread(16, 4.0))
    assert limit.r == 5e-3
    assert limit.m < 0.1
