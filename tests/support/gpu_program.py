"""The test's own process as a hooked program on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmtuned
from gemmtuned.configs.manifest import make_folder, write_binary, write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device


class Program:
    """This process, hooked, with tables of our making."""

    def __init__(self) -> None:
        from gemmtuned.hooks.activate import current

        found = current()
        assert found is not None and found.native is not None and found.native.has_cuda
        self.hook: Any = found
        self.device = cuda_device(0)
        self.folder = Settings.from_env().config_dir
        self.generation = 0
        make_folder(self.folder)

    def solution(self, problem: Problem, candidate: Candidate) -> Solution:
        launch, binary = BACKENDS[candidate.backend].launch_of(candidate, problem)  # type: ignore[attr-defined]
        if binary is not None:
            write_binary(self.folder, binary)
        return Solution(
            problem=problem, device=self.device.key, mode="eager", covers="exact", backend=candidate.backend,
            config=candidate.config, stamp=environment(self.device).stamp_of(candidate), us=1.0, baseline_us=2.0,
            gain_low=1.5, err=1e-3, baseline_err=1e-3, state="published", launch=launch,
        )  # fmt: skip

    def publish(self, *solutions: Solution) -> None:
        both = [replace(s, mode=mode) for s in solutions for mode in ("eager", "graph")]
        self.generation += 1
        write_tables(self.folder, {f"dense-{self.device.key}": both}, generation=self.generation)
        gemmtuned.reload()
        assert gemmtuned.generation() == self.generation

    def outcomes(self) -> dict[str, int]:
        """Calls by outcome since the last time, without the references of our checks."""
        found: dict[str, int] = {}
        for s in self.hook.native.drain():
            if s.problem.dtype == "fp64":
                continue
            found[s.outcome] = found.get(s.outcome, 0) + s.calls
        return found


def ours(problem: Problem) -> list[Candidate]:
    """What our Triton kernels offer for the problem; something."""
    found = list(BACKENDS["triton"].candidates(problem))
    assert found, "it is not offered"
    return found


def groups_of(offs: torch.Tensor) -> list[tuple[int, int]]:
    """The first row of each group of a grouped product and the one behind its last. offs: [groups], the latter."""
    ends = offs.tolist()
    return list(zip([0, *ends], ends, strict=False))


def deal_anew(offs: torch.Tensor, rows: int) -> None:
    """Give the rows to the groups by chance, in place; some get none."""
    dealt = torch.randint(0, rows + 1, offs.shape, device=offs.device, dtype=torch.int32).sort().values
    dealt[-1] = rows
    offs.copy_(dealt)


def hooked(home: Path, cache: Path) -> Iterator[Program]:
    before = dict(os.environ)
    os.environ |= {
        "GEMMTUNED_HOME": str(home),
        "GEMMTUNED_CACHE": str(cache),
        "GEMMTUNED_FLUSH_S": "3600",  # the counters are ours to drain
        "GEMMTUNED_RELOAD": "manual",
    }
    torch.zeros(1, device="cuda")
    gemmtuned.enable()
    yield Program()
    gemmtuned.disable()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def fresh(program: Program) -> Iterator[None]:
    program.outcomes()
    program.hook.native.failures()
    with torch.inference_mode():
        yield
