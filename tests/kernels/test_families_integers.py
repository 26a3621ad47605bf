"""Products of int8 into int32 through the gate: one result is right, and a rival that is off by one anywhere is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.tunable import can_tune
from gemmtuned.daemon.child.checks import Wrong, check_near
from gemmtuned.daemon.child.verify import Checked, verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import FAMILIES, family_of, tunable
from gemmtuned.kernels.families.base import PADDED
from gemmtuned.kernels.families.error import Error, Spread, limits
from gemmtuned.kernels.kernel import StatelessKernel

CPU = torch.device("cpu")
PROBLEM = Problem(m=20, n=40, k=208, dtype="i8", out_dtype="i32", threads=2)
PROBLEMS = (
    PROBLEM,
    *(replace(PROBLEM, layout=layout) for layout in ("nn", "tn", "tt", "ns", "sn")),
    replace(PROBLEM, m=1, n=41, k=64), replace(PROBLEM, m=3, n=1, layout="nn"), replace(PROBLEM, deterministic=True),
)  # fmt: skip


def exact(x: Tensor, w: Tensor) -> Tensor:
    return (x.long() @ w.long()).to(torch.int32)


def judged(problem: Problem, rival: Callable[[Tensor, Tensor], Tensor]) -> Checked:
    candidate = Candidate("triton", "{}")
    kernels = {candidate: StatelessKernel(rival)}
    with torch.inference_mode():
        return verify(problem, kernels, family_of(problem).default(problem), device=CPU)[candidate]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_torchs_own_and_its_products_turned_are_exact(problem: Problem) -> None:
    for backend in ("torch", "torch_swap"):
        (candidate,) = BACKENDS[backend].candidates(problem)
        kernel = BACKENDS[backend].prepare(candidate, problem)
        with torch.inference_mode():
            said = verify(problem, {candidate: kernel}, family_of(problem).default(problem), device=CPU)[candidate]
        assert (said.outcome, said.note, said.err) == ("ok", "", 0.0)


def test_a_right_kernel_passes_with_no_error() -> None:
    said = judged(PROBLEM, exact)
    assert (said.outcome, said.err, said.baseline_err, said.apart_by_rms) == ("ok", 0.0, 0.0, 0.0), said.note


def off_by_one_in_one_place(x: Tensor, w: Tensor) -> Tensor:
    y = exact(x, w)
    y[-1, -1] += 1
    return y


def without_the_last_of_k(x: Tensor, w: Tensor) -> Tensor:
    return exact(x[:, :-1], w[:-1])


def summed_up_in_fp32(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() @ w.float()).to(torch.int32)


def with_pairs_in_16_bits(x: Tensor, w: Tensor) -> Tensor:
    pairs = (x.int()[:, :, None] * w.int()).reshape(len(x), -1, 2, w.shape[1]).sum(2)
    return pairs.clamp(-(1 << 15), (1 << 15) - 1).sum(1, dtype=torch.int32)


def without_minus_128(x: Tensor, w: Tensor) -> Tensor:
    return exact(x.clamp(min=-127), w)


def saturated(x: Tensor, w: Tensor) -> Tensor:
    return (x.long() @ w.long()).clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)


@pytest.mark.parametrize(
    ("rival", "k"),
    [
        (off_by_one_in_one_place, 208), (without_the_last_of_k, 208), (summed_up_in_fp32, 2048),
        (with_pairs_in_16_bits, 208), (without_minus_128, 208), (saturated, (1 << 17) + 64),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(rival: Callable[[Tensor, Tensor], Tensor], k: int) -> None:
    problem = replace(PROBLEM, k=k, m=2, n=4) if k > 2048 else replace(PROBLEM, k=k)
    said = judged(problem, rival)
    assert said.outcome == "wrong", said


def test_sums_that_32_bits_do_not_hold_wrap_as_torchs_do() -> None:
    problem = replace(PROBLEM, m=3, n=5, k=(1 << 17) + 64)
    family = family_of(problem)
    inputs = family.make(problem, kind="randn", seed=1, device=CPU)
    inputs["x"].fill_(-128), inputs["w"].fill_(-128)
    sample = family.sample(problem, seed=1, device=CPU)
    found = family.reference(problem, inputs, sample)
    assert found.unique().tolist() == [(problem.k << 14) - (1 << 32)]
    assert torch.equal(found.to(torch.int32), torch._int_mm(inputs["x"], inputs["w"]))
    assert judged(problem, exact).outcome == "ok"


def test_a_torch_that_is_not_exact_itself_has_no_rivals() -> None:
    """As on CPUs that add pairs of products in 16 bits: what a program gets today is not what others would give."""
    candidate = Candidate("triton", "{}")
    with torch.inference_mode(), pytest.raises(CandidateFailed, match="one right value, and torch gives others here"):
        verify(PROBLEM, {candidate: StatelessKernel(exact)}, StatelessKernel(with_pairs_in_16_bits), device=CPU)


def test_nothing_is_allowed_for_rounding_whatever_the_defaults_error() -> None:
    for default in (Error(0.0, 0.0), Error(0.5, 3.0)):
        assert limits(PROBLEM, default, Spread(64, 4.0)) == Error(0.0, 0.0)
    large = torch.full((2, 2), (1 << 30) + 1, dtype=torch.int32)  # fp32 does not tell it from 1 << 30
    check_near(large, large.clone(), 0.0, "alike")
    with pytest.raises(Wrong, match="1073741825, torch gives 1073741824"):
        check_near(large, torch.full_like(large, 1 << 30), 0.0, "one apart")


def test_inputs_have_every_number_and_sums_as_large_as_can_be() -> None:
    problem = replace(PROBLEM, m=64, n=64, k=256)
    family = family_of(problem)
    usual, largest = (family.make(problem, kind=kind, seed=1, device=CPU) for kind in family.kinds(problem))
    for name in ("x", "w"):
        assert set(usual[name].unique().tolist()) == set(range(-128, 128))
        assert set(largest[name].unique().tolist()) == {-128, 126, 127}
    sums = exact(largest["x"], largest["w"])
    assert int(sums.max()) == 128 * 128 * 256 and int(sums.min()) < -128 * 126 * 256
    assert len(sums.unique()) > 100, "and some between"


def test_padding_is_no_zero_that_a_read_beside_the_operands_would_not_show() -> None:
    inputs = family_of(PROBLEM).make(PROBLEM, kind=PADDED, seed=1, device=CPU)
    for tensor, buffer in zip(inputs.tensors.values(), inputs.buffers, strict=True):
        view = buffer.clone()
        view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(0)
        assert int((view == 127).sum()) == buffer.numel() - tensor.numel()


def test_it_is_a_family_of_its_own_for_these_types_alone() -> None:
    assert family_of(PROBLEM) is not FAMILIES["dense"] and FAMILIES["dense"] is family_of(Problem(m=1, n=1, k=1))
    assert PROBLEM.operands in tunable("cpu") and PROBLEM.operands in tunable("cuda")
    assert can_tune(PROBLEM) and can_tune(replace(PROBLEM, threads=0))
    assert not [text for text in tunable("cuda") if ">i32" in text and text != PROBLEM.operands]
    for other in (
        replace(PROBLEM, bias=True), replace(PROBLEM, batch_invariant=True), replace(PROBLEM, weight_state="packed"),
        replace(PROBLEM, dtype="u8"), replace(PROBLEM, family="batched"), replace(PROBLEM, family="dense_add"),
    ):  # fmt: skip
        assert not can_tune(other), other
        with pytest.raises(CandidateFailed):
            family_of(other)


def test_a_side_of_one_element_may_have_any_stride_for_the_turned_product() -> None:
    """torch 2.13 takes such a stride for the distance of rows; programs have them from slices and from t()."""
    kernel = BACKENDS["torch_swap"].prepare(Candidate("torch_swap"), PROBLEM)
    for m, n, k in ((1, 24, 40), (5, 1, 40), (1, 1, 40), (5, 24, 1), (1, 24, 1)):
        x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
        for of_x in strides_of(m, k):
            for of_w in strides_of(k, n):
                y = kernel.bind(lying(w, of_w))(lying(x, of_x))
                assert torch.equal(y, exact(x, w)) and y.stride() == (n, 1), (m, n, k, of_x, of_w)


def strides_of(rows: int, columns: int) -> list[tuple[int, int]]:
    usual = [(columns, 1), (columns + 3, 1), (1, rows), (1, rows + 3)]
    return [*usual, (1, 1)] if 1 in (rows, columns) else usual


def lying(values: Tensor, strides: tuple[int, int]) -> Tensor:
    room = sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True)) + 1
    return torch.zeros(room, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)
