"""What every kernel of our own must keep."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile_candidate import compile_candidate
from gemmtuned.kernels.own_kernel import Offer, OwnKernel


class KernelContract:
    """kernel: the subject, of `backend`.  problems: some that it runs.  device: one that it runs on; none need be here.

    compiled: how many of each problem's offers, the best by estimate, are compiled.
    """

    kernel: ClassVar[OwnKernel]
    backend: ClassVar[str]
    problems: ClassVar[tuple[Problem, ...]]
    device: ClassVar[Device]
    compiled: ClassVar[int] = 1

    def _offers(self, problem: Problem) -> list[Offer]:
        return self.kernel.offers(problem, self.device, self.backend)

    def test_it_is_found_in_its_folder_with_the_parameters_that_its_file_says(self) -> None:
        assert catalog.kernels(self.backend)[self.kernel.name] is self.kernel
        assert catalog.parameters()[f"{self.backend}.{self.kernel.name}"] == self.kernel.parameters
        assert len({p.name for p in self.kernel.parameters}) == len(self.kernel.parameters)

    def test_its_offers_are_distinct_and_in_the_order_of_their_estimates(self) -> None:
        for problem in self.problems:
            found = self._offers(problem)
            times = [offer.us for offer in found if offer.us is not None]
            assert found and len(times) == len(found), f"{problem}: an offer has an estimate"
            assert times == sorted(times) and all(0 < us < 1e6 for us in times)
            assert len({offer.candidate for offer in found}) == len(found)

    def test_each_offer_is_a_config_that_runs_the_problem(self) -> None:
        for problem in self.problems:
            for offer in self._offers(problem):
                kernel, record = catalog.record_of(offer.candidate, problem)
                assert kernel is self.kernel and record is not None

    def test_it_offers_nothing_elsewhere(self) -> None:
        problem = self.problems[0]
        for arch in ("x86_64", "sm_61", "gfx803"):
            there = Device("", "cuda", "", arch, 100)
            assert self.kernel.offers(problem, there, self.backend) == []
        other = Problem(family="moe", m=4, n=64, k=64, experts=4, topk=2, inter=32, act="silu")
        assert self.kernel.offers(other, self.device, self.backend) == []

    def test_a_config_with_a_parameter_that_is_missing_unknown_or_out_of_range_is_refused(self) -> None:
        problem = self.problems[0]
        _, good = catalog.kernel_of(self._offers(problem)[0].candidate)
        needed = [p for p in self.kernel.parameters if p.default is None]
        wrong: list[dict[str, Any]] = [
            good | {"colour": 1},
            *({n: v for n, v in good.items() if n != p.name} for p in needed),
        ]
        for p in self.kernel.parameters:
            wrong += [good | {p.name: bad} for bad in (p.least - 1, p.most + 1, -1, True, "4", 1.5, None)]
        for config in wrong:
            with pytest.raises(CandidateFailed, match=self.kernel.name):
                self.kernel.record(config, problem)

    def test_a_config_of_before_a_parameter_had_come_is_one_with_its_default(self) -> None:
        problem = self.problems[0]
        _, good = catalog.kernel_of(self._offers(problem)[0].candidate)
        later = {p.name: p.default for p in self.kernel.parameters if p.default is not None}
        old = {name: value for name, value in good.items() if name not in later}
        assert self.kernel.checked(old) == {**old, **later}

    def test_its_best_guess_compiles_without_spills(self) -> None:
        if not catalog.has_compiler(self.backend, self.device):
            pytest.skip(f"needs the compiler of {self.backend}")
        for problem in self.problems:
            for offer in self._offers(problem)[: self.compiled]:
                compile_candidate(offer.candidate, problem, self.device)

    def test_a_candidate_names_its_kernel(self) -> None:
        for problem in self.problems:
            for offer in self._offers(problem):
                values = json.loads(offer.candidate.config)
                assert offer.candidate == Candidate.of(self.backend, **values) and values["kernel"] == self.kernel.name
