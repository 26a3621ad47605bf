"""Grouped products with scales: operands as torch takes them, exact references, and what the gate finds wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, cpu_device
from gemmtuned.configs.tunable import can_tune
from gemmtuned.daemon.child.measure import copies_needed
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.dtypes import bits
from gemmtuned.kernels.families import family_of, tunable
from gemmtuned.kernels.families.base import PADDED
from gemmtuned.kernels.kernel import StatelessKernel
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
EXPERTS = Problem(family="grouped", batch=5, m=23, n=48, k=80, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
PROBLEMS = [EXPERTS, replace(EXPERTS, batch=1, m=4), replace(EXPERTS, batch=3, m=1, math_mode="reduced")]
# of one group: X, W, the scales of their rows, all in fp64
Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def right(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    return x @ w * sx[:, None] * sw


def dealt(offs: Tensor) -> Iterator[tuple[slice, int]]:
    """Rows and group of each group that has some."""
    ends = offs.tolist()
    for g, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > first:
            yield slice(first, end), g


def kernel(
    product: Product = right,
    *,
    of_w: Callable[[int, int], int] = lambda g, count: g,
    of_scale: Callable[[int, int], int] = lambda g, count: g,
) -> StatelessKernel:
    """One that multiplies so, each group by the weight and the scales that it is said to take; right as it is."""

    def call(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, offs: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], w.shape[-1], dtype=torch.float64)
        for rows, g in dealt(offs):
            of = w[of_w(g, len(w))].double(), scale_w[of_scale(g, len(w))].double()
            y[rows] = product(x[rows].double(), of[0], scale_x[rows].double(), of[1])
        return y.bfloat16()

    return StatelessKernel(call)


def short(t: Tensor) -> Tensor:
    """13 bits behind the point of the largest of the last axis, cut off: how the tensor core of sm_90 adds up."""
    unit = torch.exp2(t.abs().amax(-1, keepdim=True).clamp_min(1e-300).log2().floor() - 13)
    return (t / unit).trunc() * unit


def fast(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """Sums of 32 products at a time, never brought over to fp32."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for first in range(0, x.shape[1], 32):
        terms = x[:, None, first : first + 32] * w.mT[None, :, first : first + 32]
        total = short(torch.cat([total.unsqueeze(-1), terms], -1)).sum(-1)
    return total * sx[:, None] * sw


def judge(p: Problem, one: StatelessKernel, default: StatelessKernel | None = None) -> str:
    with as_called(p):
        found = verify(p, {Candidate("x"): one}, default or kernel(), device=CPU)[Candidate("x")]
    return f"{found.outcome}: {found.note}"


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_torch_takes_the_operands_as_they_lie(p: Problem) -> None:
    """By the checks of its own kernel, which it has for tensors without memory, too; a CPU has none."""
    family = family_of(p)
    for kind in (*family.kinds(p), PADDED):
        made = family.make(p, kind=kind, seed=3, device=CPU)
        without = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for _, t in made]
        y = family.default(p).call(*without)
        assert (y.shape, y.dtype, y.stride()) == ((p.m, p.n), torch.bfloat16, (p.n, 1)), kind
        assert made["w"].stride()[1] == 1 and made["x"].stride()[0] % 16 == made["w"].stride()[2] % 16 == 0
    with pytest.raises(NotImplementedError, match="CPU"):
        made.run(family.default(p))


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_the_reference_is_of_each_row_by_its_group_with_their_scales(p: Problem) -> None:
    family = family_of(p)
    for kind in (*family.kinds(p), PADDED):
        made = family.make(p, kind=kind, seed=2, device=CPU)
        sample = family.sample(p, seed=2, device=CPU)
        x, w = made["x"].double() * made["scale_x"].double()[:, None], made["w"].double()
        expected = torch.zeros(p.m, p.n, dtype=torch.float64)
        for rows, g in dealt(made["offs"]):
            expected[rows] = x[rows] @ (w[g] * made["scale_w"][g].double())
        assert torch.allclose(family.reference(p, made, sample), expected, rtol=1e-12, atol=1e-12), kind
        assert expected.isfinite().all(), kind


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_a_right_kernel_passes_in_whatever_order_it_adds(p: Problem) -> None:
    def in_parts(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        pieces = [x[:, i::3].float() @ w[i::3].float() for i in (2, 0, 1)]
        return (pieces[0] + pieces[1] + pieces[2]).double() * sx[:, None] * sw

    assert judge(p, kernel()) == judge(p, kernel(in_parts)) == "ok: "


WRONG = {
    "the weight of the next group": kernel(of_w=lambda g, count: (g + 1) % count),
    "the scales of the next group": kernel(of_scale=lambda g, count: (g + 1) % count),
    "the scales of the first group": kernel(of_scale=lambda g, count: 0),
    "the scale of the next row of X": kernel(lambda x, w, sx, sw: right(x, w, sx.roll(1), sw)),
    "the scale of the next row of W": kernel(lambda x, w, sx, sw: right(x, w, sx, sw.roll(1))),
    "the last 16 of K": kernel(lambda x, w, sx, sw: right(x[:, :-16], w[:-16], sx, sw)),
    "scales rounded to powers of two": kernel(lambda x, w, sx, sw: right(x, w, torch.exp2(sx.log2().round()), sw)),
    "scales without their sign": kernel(lambda x, w, sx, sw: right(x, w, sx, sw.abs())),
    "NaN in scales of W lost": kernel(lambda x, w, sx, sw: right(x, w, sx, sw.nan_to_num(0.0))),
    "no scales of X": kernel(lambda x, w, sx, sw: x @ w * sw),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_groups_or_their_scales_is_found(what: str) -> None:
    assert judge(EXPERTS, WRONG[what]).startswith("wrong"), what


def test_scales_that_were_bound_before_are_not_kept() -> None:
    class KeepsScales:
        def bind(self, w: Tensor, scale_w: Tensor) -> Callable[..., Tensor]:
            return kernel().bind(w, scale_w.clone())

    note = judge(EXPERTS, KeepsScales())  # type: ignore[arg-type]
    assert note.startswith("wrong") and "scale of w edited" in note


@pytest.mark.long
def test_short_sums_are_refused_where_the_problem_does_not_allow_them_and_taken_where_it_does() -> None:
    slow = replace(EXPERTS, k=2048, m=4, n=32, batch=2)
    assert judge(slow, kernel(fast)).startswith("wrong: ")
    allowed = replace(slow, math_mode="reduced")
    assert judge(allowed, kernel(fast), kernel(fast)) == judge(allowed, kernel(), kernel(fast)) == "ok: "


def test_copies_are_cold_and_alike_whole_or_over_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(EXPERTS)
    assert copies_needed(EXPERTS, 1 << 20, 1 << 40) == 2 * (1 << 20) // (5 * (80 + 4) * 48) + 1
    whole = family.weight_copies(EXPERTS, count=3, device=CPU)
    assert len({t.data_ptr() for pair in whole for t in pair}) == 6
    assert not torch.equal(bits(whole[0][0][0]), bits(whole[0][0][1])), "groups differ"
    monkeypatch.setattr("gemmtuned.kernels.families.grouped.WHOLE_BYTES", 1)
    over = family.weight_copies(EXPERTS, count=3, device=CPU)
    for (w, scale), (one, of_one) in zip(over, whole, strict=True):
        assert (w.shape, w.stride(), scale.shape, scale.stride()) == (
            one.shape, one.stride(), of_one.shape, of_one.stride(),
        )  # fmt: skip
        assert torch.equal(bits(w), bits(over[0][0])) and torch.equal(scale, over[0][1])
    assert len({w.data_ptr() for w, _ in over}) == 3 and len({w.untyped_storage().data_ptr() for w, _ in over}) == 1


def test_it_can_be_tuned_on_gpus_alone() -> None:
    assert EXPERTS.operands in tunable("cuda") and can_tune(EXPERTS)
    assert EXPERTS.operands not in tunable(cpu_device().kind) and not can_tune(replace(EXPERTS, threads=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"wdtype": "fp8_e5m2"},
        {"out_dtype": "fp16"},
        {"scale": "tensor", "wscale": "tensor"},
        {"wscale": "tensor"},
        {"scale": "1x32", "wscale": "1x32", "scale_dtype": "e8m0", "wscale_dtype": "e8m0"},
        {"layout": "nn"},
        {"bias": True},
    ],
    ids=str,
)
def test_what_torch_has_not_is_refused_by_name(changed: dict[str, str]) -> None:
    other = replace(EXPERTS, **changed)  # type: ignore[arg-type]
    with pytest.raises(CandidateFailed, match="family grouped has"):
        family_of(other)
    assert not can_tune(other)
