"""What every backend must keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import MAX_LENGTH, read_launch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import NAME, Candidate, Device
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends.base import Backend, LaunchedBackend
from gemmtuned.kernels.backends.torch_ import TORCH
from gemmtuned.kernels.device import device_at
from gemmtuned.kernels.torch_flags import as_called


class BackendContract:
    """backend: the subject.  problems: some that it runs, and that take no more than milliseconds.

    place: `cpu` or `cuda:0`, where it runs.  others: problems that it does not run.
    """

    backend: ClassVar[Backend]
    problems: ClassVar[tuple[Problem, ...]]
    others: ClassVar[tuple[Problem, ...]] = ()
    place: ClassVar[str] = "cpu"

    @pytest.fixture(autouse=True)
    def _on_its_device(self) -> None:
        if self.place != "cpu" and not torch.cuda.is_available():
            pytest.skip("needs a GPU")

    def _here(self) -> Device:
        return device_at(self.place)

    def _offered(self) -> Iterator[tuple[Problem, Candidate]]:
        for problem in self.problems:
            for candidate in self.backend.candidates(problem):
                yield problem, candidate

    def test_its_name_is_a_key_of_tables(self) -> None:
        assert NAME.fullmatch(self.backend.name) and "." not in self.backend.name
        assert isinstance(self.backend.order, int) and self.backend.order >= 0

    def test_its_stamps_are_under_its_name_and_say_the_same_twice(self) -> None:
        stamps = self.backend.stamps(self._here())
        assert stamps, "it is not available here, so nothing was tested"
        for name, stamp in stamps.items():
            backend, _, kernel = name.partition(".")
            assert backend == self.backend.name and stamp and isinstance(stamp, str)
            assert not kernel or stamp.startswith(f"{kernel}/"), "the stamp of a kernel begins with its name"
        assert self.backend.stamps(self._here()) == stamps

    def test_it_is_not_there_on_a_device_that_nobody_has(self) -> None:
        nowhere = Device("none-1", "none", "No device", "none", 1)
        assert self.backend.stamps(nowhere) == {} or self.backend is TORCH or self.place == "cpu"

    def test_it_offers_distinct_candidates_of_its_own_for_each_problem(self) -> None:
        for problem in self.problems:
            found = list(self.backend.candidates(problem))
            assert found, f"nothing is offered for {problem}"
            assert len(set(found)) == len(found) and {c.backend for c in found} == {self.backend.name}
            for candidate in found:
                values = json.loads(candidate.config)
                assert Candidate.of(candidate.backend, **values) == candidate, "a config is in canonical form"

    def test_it_offers_nothing_for_what_it_does_not_run(self) -> None:
        assert [str(p) for p in self.others if any(self.backend.candidates(p))] == []

    def test_a_config_of_nobody_is_refused(self) -> None:
        for config in ('{"no":"such"}', "not json", "[]"):
            with pytest.raises(CandidateFailed):
                self.backend.prepare(Candidate(self.backend.name, config), self.problems[0])

    def test_every_candidate_is_as_exact_as_torch_and_sees_every_edit(self) -> None:
        """The daemon's own gate: tails, outliers, NaN around operands, edits in place, memory of results."""
        for problem in self.problems:
            found = list(self.backend.candidates(problem))
            with as_called(problem):
                kernels = {c: self.backend.prepare(c, problem) for c in found}
                verdicts = verify(
                    problem, kernels, TORCH.prepare(Candidate(TORCH.name), problem), device=torch.device(self.place)
                )
            assert {str(c): v.note for c, v in verdicts.items() if v.outcome != "ok"} == {}

    def test_a_launch_that_it_publishes_is_read_back_as_it_was_written(self) -> None:
        if not isinstance(self.backend, LaunchedBackend):
            pytest.skip("its solutions are run by name")
        for problem, candidate in self._offered():
            text, binary = self.backend.launch_of(candidate, problem)
            assert len(text) <= MAX_LENGTH and read_launch(text).text() == text
            assert binary is None or binary
