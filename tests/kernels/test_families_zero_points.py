"""int8 products with zero points: inputs, exact results, torch's own call, and what the gate finds in wrong kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import own_kernels
import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed, ProblemError
from gemmtuned.configs.launch import slots_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, cpu_device
from gemmtuned.configs.tunable import can_tune
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import catalog, cublaslt
from gemmtuned.kernels.backends import candidates, environment
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import family_of, tunable
from gemmtuned.kernels.families.zero_points import SCALED_WITH_ZERO_POINTS
from gemmtuned.kernels.integers import scaled_int_product
from gemmtuned.kernels.kernel import StatelessKernel
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.testing import FamilyContract

CPU = torch.device("cpu")
ROW = Problem(family="scaled", m=6, n=48, k=272, dtype="i8", out_dtype="bf16", scale="row+zero", threads=1)
TENSOR = replace(ROW, m=2, scale="tensor+zero", wscale="tensor", out_dtype="fp16", bias=True)
MIXED = replace(TENSOR, m=1, wscale="row", out_dtype="fp32")
KINDS = (ROW, TENSOR, MIXED, replace(ROW, bias=True, m=1))
Operands = dict[str, Tensor]


class TestTheFamily(FamilyContract):
    family = SCALED_WITH_ZERO_POINTS
    problems = KINDS


def sums_less(o: Operands) -> Tensor:
    """In fp64, [M, N]."""
    zero = o["zero_x"].double()[:, None] if "zero_x" in o else 1.0
    return o["x"].double() @ o["w"].double() - zero * o["sums_w"].double()


def kernel(p: Problem, whole: Callable[[Operands], Tensor] = sums_less) -> StatelessKernel:
    """One that multiplies so; right when nothing else is said."""
    names = [o.name for o in family_of(p).operands if not o.result]

    def call(*given: Tensor | None) -> Tensor:
        o = {name: t for name, t in zip(names, given, strict=True) if t is not None}
        y = whole(o) * o["scale_w"].double() * o["scale_x"].double()
        return (y + o["bias"].double() if "bias" in o else y).to(torch_dtype(p.out_dtype))

    return StatelessKernel(call)


def judge(p: Problem, wrong: StatelessKernel, default: StatelessKernel | None = None) -> str:
    with as_called(p):
        found = verify(p, {Candidate("x"): wrong}, default or kernel(p), device=CPU)[Candidate("x")]
    return f"{found.outcome}: {found.note}"


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_the_reference_is_of_codes_less_their_zero_points(p: Problem) -> None:
    family = family_of(p)
    for kind in family.kinds(p):
        inputs = family.make(p, kind=kind, seed=2, device=CPU)
        sample = family.sample(p, seed=2, device=CPU)
        exact = sums_less(inputs.tensors) * inputs["scale_w"].double() * inputs["scale_x"].double()
        exact = exact + inputs["bias"].double() if p.bias else exact
        assert torch.allclose(family.reference(p, inputs, sample), sample.of(exact), rtol=1e-12, atol=1e-12), kind
        assert set(inputs.tensors) == slots_of(p) - {"y"}
        if p.scale == "row+zero":
            assert torch.equal(inputs["sums_w"], inputs["w"].sum(0, dtype=torch.int32))
            true = (inputs["x"].long() - inputs["zero_x"].long()[:, None]) @ inputs["w"].long()
            assert torch.equal(sums_less(inputs.tensors), true.double())


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_torchs_own_is_right_bit_for_bit(p: Problem) -> None:
    """Whole numbers in 64 bits, then the steps that torch rounds; of `integers` the exact result itself."""
    family = family_of(p)
    for kind in ("randn", "integers"):
        inputs = family.make(p, kind=kind, seed=3, device=CPU)
        o = inputs.tensors
        zero = o["zero_x"].long()[:, None] if "zero_x" in o else 1
        whole = o["x"].long() @ o["w"].long() - zero * o["sums_w"].long()
        steps = whole.float() * o["scale_w"].reshape(1, -1) * o["scale_x"].reshape(-1, 1)
        expected = (steps + o["bias"] if p.bias else steps).to(torch_dtype(p.out_dtype))
        y = inputs.run(family.default(p))
        assert torch.equal(y, expected), kind
        if family.is_exact(kind):
            exact = family.reference(p, inputs, family.sample(p, seed=3, device=CPU))
            assert torch.equal(y, exact.to(y.dtype))


def test_what_is_beyond_32_bits_wraps_around_as_in_the_product_itself() -> None:
    x, w = torch.full((1, 1 << 17), -128, dtype=torch.int8), torch.full((8, 1 << 17), -128, dtype=torch.int8)
    zero, sums, one = torch.tensor([127], dtype=torch.int32), w.sum(1, dtype=torch.int32), torch.ones(1)
    y = scaled_int_product(x, w, one, one, None, torch.float64, sums, zero)
    whole = x.long() @ w.long().t() - 127 * sums.long()
    assert whole.max() >= 1 << 31
    assert torch.equal(y, whole.to(torch.int32).float().double())


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_a_right_kernel_passes_and_so_does_torchs_own(p: Problem) -> None:
    default = family_of(p).default(p)
    assert judge(p, kernel(p)) == judge(p, default) == judge(p, kernel(p), default) == "ok: "


WRONG = {
    "no zero point": lambda o: o["x"].double() @ o["w"].double(),
    "the zero point added": lambda o: 2 * (o["x"].double() @ o["w"].double()) - sums_less(o),
    "the sum of the next column": lambda o: sums_less(o | {"sums_w": o["sums_w"].roll(1)}),
    "the last 16 of K": lambda o: sums_less(o | {"x": o["x"][:, :-16], "w": o["w"][:-16]}),
}
WRONG_BY_ROW = {
    "the zero point of the next row": lambda o: sums_less(o | {"zero_x": o["zero_x"].roll(1)}),
    "the first row's zero point": lambda o: sums_less(o | {"zero_x": o["zero_x"][:1].expand(len(o["x"]))}),
    "zero points of eight bits without a sign": lambda o: sums_less(o | {"zero_x": o["zero_x"].byte().int()}),
    "sums of its own": lambda o: sums_less(o | {"sums_w": o["w"].sum(0, dtype=torch.int32)}),
}


@pytest.mark.parametrize(
    ("p", "what"), [*((p, what) for what in WRONG for p in (ROW, MIXED)), *((ROW, what) for what in WRONG_BY_ROW)],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_zero_points_is_found(p: Problem, what: str) -> None:
    assert judge(p, kernel(p, (WRONG | WRONG_BY_ROW)[what])).startswith("wrong"), what


@pytest.mark.parametrize("kept", ["sums_w", "zero_x"])
def test_a_kernel_that_keeps_an_operand_of_an_earlier_call_is_found(kept: str) -> None:
    class Keeps:
        def bind(self, *weights: Tensor) -> Callable[..., Tensor]:
            run = kernel(ROW).bind(*weights) if kept != "sums_w" else kernel(ROW).bind(*weights[:2], weights[2].clone())
            first: list[Tensor] = []

            def call(x: Tensor, scale_x: Tensor, zero_x: Tensor, *bias: Tensor) -> Tensor:
                first.append(zero_x.clone())
                return run(x, scale_x, first[0] if kept == "zero_x" and len(first[0]) == len(x) else zero_x, *bias)

            return call

    said = judge(ROW, Keeps())  # type: ignore[arg-type]
    assert said.startswith("wrong")
    if kept == "sums_w":
        assert "sums of w edited in place" in said


@pytest.mark.parametrize(
    "p",
    [
        replace(ROW, dtype="fp8_e4m3", wdtype="fp8_e4m3"),
        replace(ROW, wscale="tensor"),
        replace(ROW, wdtype="fp8_e4m3"),
        replace(ROW, out_dtype="i32"),
        replace(ROW, scale_dtype="e8m0"),
        replace(ROW, batch=2),
    ],
    ids=str,
)
def test_what_the_family_has_not_is_refused_by_name(p: Problem) -> None:
    with pytest.raises(CandidateFailed, match="family scaled has"):
        family_of(p)
    assert not can_tune(p)


def test_zero_points_of_w_and_of_other_families_are_none() -> None:
    with pytest.raises(ProblemError, match=r"wscale is 'row\+zero'"):
        replace(ROW, wscale="row+zero")
    with pytest.raises(CandidateFailed, match="cannot be tuned"):
        family_of(replace(ROW, family="grouped"))


def test_each_form_is_a_problem_of_its_own_on_both_kinds_of_devices() -> None:
    without = {replace(ROW, scale="row", wscale="row"), replace(TENSOR, scale="tensor", wscale="tensor")}
    assert not without & set(KINDS)
    for p in KINDS:
        assert Problem.parse(str(p)) == p == Problem.from_rest(p.rest, p.m) == Problem.from_row(p.row())
        assert can_tune(p) and can_tune(replace(p, threads=0))
        assert all(p.operands in tunable(kind) for kind in ("cpu", "cuda"))


def test_who_cannot_subtract_zero_points_offers_nothing() -> None:
    assert [c.backend for c in candidates(ROW, environment(cpu_device()))] == ["torch"]
    on_gpu = replace(ROW, threads=0, m=16, n=4096, k=4096)
    for m, other in ((16, "scaled_fragments"), (64, "scaled_tiles")):
        found = catalog.candidates(replace(on_gpu, m=m), own_kernels.device("sm_90"))
        assert {c.kernel for c in found.pop("cuda")} == {other, "scaled_one_shot"} and not any(found.values())
    with pytest.raises(CandidateFailed, match="asked for scaled products of fp8"):
        cublaslt.check_problem(on_gpu)
