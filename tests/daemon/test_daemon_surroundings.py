"""What surrounds a call in the gate: shared memory and torch's switches, and all as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from planted_base import Call, right
from planted_stateful import lies_in, spoilt_if, storage

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.checks import Wrong, case_of, same_bits
from gemmtuned.daemon.child.surroundings import in_one_storage, surroundings
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.base import StatelessKernel
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
PROBLEMS = (
    Problem(m=5, n=24, k=40, dtype="fp32", bias=True, threads=1),
    Problem(m=40, n=3, k=7, dtype="bf16", bias=True, layout="st", threads=1),
    Problem(m=9, n=30, k=50, dtype="fp16", threads=1),
    Problem(family="batched", batch=3, m=5, n=7, k=8, dtype="fp64", threads=1),
    Problem(family="dense_add", m=3, n=4, k=8, dtype="fp32", threads=1),
)


def faults(problem: Problem, call: Call) -> list[str]:
    """What each of the checks says of this kernel."""
    default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
    kernel, said = StatelessKernel(call), []
    with as_called(problem):
        family = family_of(problem)
        inputs = family.make(problem, kind="randn", seed=1, device=CPU)
        before = [t.clone() for t in inputs.buffers]
        case = case_of(problem, default, inputs, family.sample(problem, seed=1, device=CPU))
        for check in surroundings(problem, default, case):
            try:
                check(kernel)
            except Wrong as err:  # noqa: PERF203  each check has a say
                said.append(str(err).split(":")[0])
        assert all(same_bits(t, old) for t, old in zip(inputs.buffers, before, strict=True))
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
    return said


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_right_kernel_passes_and_switches_and_operands_are_as_before(problem: Problem) -> None:
    assert faults(problem, right) == []


def test_each_surrounding_shows_what_is_wrong_in_it_alone() -> None:
    hit = spoilt_if
    known: list[torch.Tensor] = []

    def counts_edits(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if a.is_inference() or not known or known[0]._version != a._version:
            known[:] = [a, a.clone()]
        return right(known[1], b, bias)

    fp32, bf16 = PROBLEMS[0], PROBLEMS[1]
    without = hit(lambda a, b, bias=None: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
    assert faults(fp32, without) == ["with gradients off"]
    assert faults(fp32, hit(lambda a, b, bias=None: torch.get_default_dtype() == torch.bfloat16)) == [
        "with another default dtype"
    ]
    assert faults(bf16, hit(lambda a, b, bias=None: torch.is_autocast_enabled("cpu"))) == ["under autocast"]
    assert faults(fp32, hit(lambda a, b, bias=None: lies_in(a, b))) == ["X is a part of the weight"]
    assert len(faults(fp32, hit(lambda a, b, bias=None: storage(a) == storage(b)))) == 7
    assert "X edited by way of .data" in faults(fp32, counts_edits)


def test_operands_in_one_storage_keep_values_and_strides() -> None:
    for problem in PROBLEMS:
        inputs = family_of(problem).make(problem, kind="randn", seed=1, device=CPU)
        one = in_one_storage(inputs)
        assert list(one.tensors) == list(inputs.tensors)
        for operand, t in inputs:
            copy = one[operand.name]
            assert torch.equal(t, copy) and t.stride() == copy.stride()
            assert copy.untyped_storage().data_ptr() == one.buffers[0].data_ptr()
