"""What our own kernels offer, as the tests of kernels ask for it."""

from __future__ import annotations

import json
from typing import Any

from hooked import solution

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.hooks.dispatch import Table, build_table
from gemmtuned.kernels import budget, catalog
from gemmtuned.kernels.backends.triton_ import Triton

Chosen = list[tuple[str, dict[str, Any]]]  # (kernel, config)


def device(arch: str, units: int = 132) -> Device:
    return Device("", "cuda", "", arch, units)


def shortlist(m: int, n: int, k: int, units: int, *, arch: str, beside_cuda: bool = False) -> Chosen:
    """Candidates in Triton that get a place, beside those in CUDA C++ or as if no compiler for these were there."""
    problem, there = Problem(m=m, n=n, k=k), device(arch, units)
    kernels = catalog.kernels("triton").values()
    offers = {"triton": [o for kernel in kernels for o in kernel.offers(problem, there, "triton")]}
    if beside_cuda:
        offers["cuda"] = [
            o for kernel in catalog.kernels("cuda").values() for o in kernel.offers(problem, there, "cuda")
        ]
    found = [json.loads(candidate.config) for candidate in budget.deal(problem, there, offers)["triton"]]
    return [(config.pop("kernel"), config) for config in found]


def published(kernel: str, config: dict[str, Any], problem: Problem, on: Device) -> tuple[Table, Solution]:
    """(a table, its one solution): a configuration of a Triton kernel as the daemon publishes it for graphs."""
    backend, candidate = Triton(device=on), Candidate.of("triton", kernel=kernel, **config)
    launch, _ = backend.launch_of(candidate, problem)
    here = Environment(on, backend.stamps(on))
    found = solution(
        problem, "triton", on.key, here.stamp_of(candidate), mode="graph", config=candidate.config, launch=launch
    )
    return build_table([found], {"cuda:0": here}, generation=1, failed=frozenset()), found
