"""What every family must keep."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.problem import FAMILIES, OTHERS_FAMILY, Problem
from gemmtuned.kernels.dtypes import wide
from gemmtuned.kernels.families.base import PADDED, Family
from gemmtuned.kernels.families.error import Error, Spread, limits, measure_error
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called


class FamilyContract:
    """family: the subject.  problems: some of it, that take no more than milliseconds.  place: `cpu` or `cuda:0`."""

    family: ClassVar[Family]
    problems: ClassVar[tuple[Problem, ...]]
    place: ClassVar[str] = "cpu"

    @pytest.fixture(autouse=True)
    def _on_its_device(self) -> None:
        if self.place != "cpu" and not torch.cuda.is_available():
            pytest.skip("needs a GPU")

    def _made(self, problem: Problem, kind: str = "randn", seed: int = 1) -> Inputs:
        return self.family.make(problem, kind=kind, seed=seed, device=torch.device(self.place))

    def _stock(self, problem: Problem, inputs: Inputs) -> Tensor:
        with as_called(problem):
            return inputs.run(self.family.default(problem))

    def _error(self, problem: Problem, inputs: Inputs, y: Tensor) -> float:
        sample = self.family.sample(problem, seed=0, device=y.device)
        return measure_error(sample.of(y), self.family.reference(problem, inputs, sample)).r

    def _cap(self, problem: Problem, inputs: Inputs) -> float:
        """What r may be at most, however bad torch's own call is."""
        sample = self.family.sample(problem, seed=0, device=inputs["x"].device)
        exact = self.family.reference(problem, inputs, sample)
        return limits(problem, Error(1.0, 1.0), Spread.of(exact, self.family.x_rows(problem, inputs, sample))).r

    def test_its_name_is_one_that_problems_have(self) -> None:
        assert self.family.name in FAMILIES or OTHERS_FAMILY.fullmatch(self.family.name)
        assert {p.family for p in self.problems} == {self.family.name}
        assert [Problem.parse(str(p)) for p in self.problems] == list(self.problems)

    def test_it_declares_one_result_and_at_least_one_weight(self) -> None:
        operands = self.family.operands
        assert [o.name for o in operands if o.result] == [operands[-1].name], "the result is the last"
        assert any(o.weight for o in operands) and len({o.name for o in operands}) == len(operands)

    def test_it_says_that_its_problems_can_be_tuned(self) -> None:
        kind = "cpu" if self.place == "cpu" else "cuda"
        for problem in self.problems:
            self.family.check(problem)
            assert problem.operands in set(self.family.tunable(kind))

    def test_operands_are_as_declared_and_the_same_for_the_same_seed(self) -> None:
        for problem in self.problems:
            for kind in (*self.family.kinds(problem), PADDED):
                one, same, other = self._made(problem, kind), self._made(problem, kind), self._made(problem, kind, 2)
                for operand, t in one:
                    assert tuple(t.shape) == operand.shape(problem) and t.dtype == operand.torch_dtype(problem)
                    assert torch.allclose(wide(t), wide(same[operand.name]), rtol=0, atol=0, equal_nan=True)
                assert not torch.equal(wide(one["x"]), wide(other["x"])), "another seed, other values"

    def test_the_stock_call_gives_the_result_declared(self) -> None:
        for problem in self.problems:
            y, result = self._stock(problem, self._made(problem)), self.family.operands[-1]
            assert tuple(y.shape) == result.shape(problem) and y.dtype == result.torch_dtype(problem)

    def test_the_reference_is_what_the_stock_call_computes(self) -> None:
        for problem in self.problems:
            for kind in (*self.family.kinds(problem), PADDED):
                inputs = self._made(problem, kind)
                error = self._error(problem, inputs, self._stock(problem, inputs))
                assert error <= self._cap(problem, inputs), f"{problem} {inputs}: {error:.1e}"

    def test_a_lost_tail_of_k_shows(self) -> None:
        for problem in self.problems:
            inputs = self._made(problem)
            short = inputs["x"].clone()
            short[..., -8:] = 0
            error = self._error(problem, inputs, self._stock(problem, inputs.having(x=short)))
            assert error > 2 * self._cap(problem, inputs), (
                f"{problem}: without the last 8 of K it is off by {error:.1e} only"
            )

    def test_copies_of_weights_have_the_same_values_in_memory_of_their_own(self) -> None:
        for problem in self.problems:
            first, second = self.family.weight_copies(problem, count=2, device=torch.device(self.place))
            assert len(first) == len([o for o in self.family.operands if o.weight and o.is_in(problem)])
            for one, other in zip(first, second, strict=True):
                assert torch.equal(wide(one), wide(other)) and one.data_ptr() != other.data_ptr()
                assert one.stride() == other.stride()
