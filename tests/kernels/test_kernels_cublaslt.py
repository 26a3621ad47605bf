"""Which of the library's algorithms are candidates; the library itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from own_kernels import device

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels import catalog, cublaslt
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends import cublaslt as backend
from gemmtuned.kernels.budget import MOST, deal
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.own_kernel import Offer


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
    """M -> the tiles that the library's heuristic names; tiles over 900 do not run at M = 256, tile 6 takes 1 GiB."""
    tiles: dict[int, list[int]] = {}

    def algorithms(problem: Problem) -> tuple[cublaslt.Algorithm, ...]:
        if problem.m not in tiles:
            raise CandidateFailed("nothing")
        return tuple(
            cublaslt.Algorithm((("algo", 66), ("tile", t)), bytes([t % 256]) * 64, 0) for t in tiles[problem.m]
        )

    def check(problem: Problem, data: bytes) -> int:
        if data[0] >= 900 % 256 and problem.m == 256:
            raise CandidateFailed("not supported")
        return 1 << 30 if data[0] == 6 else 1 << 20

    monkeypatch.setattr(cublaslt, "algorithms", algorithms)
    monkeypatch.setattr(cublaslt, "check", check)
    monkeypatch.setattr(backend, "_known", {})
    backend._algorithms.cache_clear()
    yield tiles
    backend._algorithms.cache_clear()


def tiles_of(problem: Problem) -> list[int]:
    return [int(c.config.split('"tile":')[1].rstrip("}")) for c in BACKENDS["cublaslt"].candidates(problem)]


def test_a_large_problem_is_offered_what_suits_sizes_near_it_after_its_own(offers: dict[int, list[int]]) -> None:
    offers |= {256: [1, 2], 128: [2, 3, 6], 512: [4, 905], 192: [5]}

    assert tiles_of(Problem(m=256, n=512, k=512, dtype="bf16")) == [1, 2, 3, 4, 5]
    offers |= {64: [7]}
    assert tiles_of(Problem(m=64, n=512, k=512, dtype="bf16")) == [7], "few rows: its own alone"
    assert tiles_of(Problem(m=1024, n=512, k=512, dtype="bf16")) == [], "the library does not run it"


@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 65, 256, 257, 2048])
def test_candidates_of_all_backends_are_no_more_than_a_search_times(offers: dict[int, list[int]], m: int) -> None:
    offers[m] = list(range(100))
    problem = Problem(m=m, n=5120, k=5120, dtype="bf16")
    library = [Offer(candidate) for candidate in BACKENDS["cublaslt"].candidates(problem)]
    counts = {}
    for arch, units in (("sm_90", 132), ("sm_80", 108)):
        there = device(arch, units)
        dealt = deal(problem, there, {"cublaslt": library, **catalog.offers(problem, there)})
        counts[arch] = {name: len(found) for name, found in dealt.items()}
    few = counts["sm_90"]["cublaslt"] + counts["sm_90"]["triton"]
    cuda = counts["sm_90"].get("cuda", 0)

    assert few + cuda >= 25 and few <= MOST, "one_shot's take the place of the last of the others, in turns"
    assert bool(cuda) == (m in (16, 33, 64, 65) and catalog.has_compiler("cuda", device("sm_90")))
    assert 25 <= counts["sm_80"]["cublaslt"] + counts["sm_80"]["triton"] <= MOST and not counts["sm_80"].get("cuda")


def scaled(x: str, w: str, **more: Any) -> Problem:
    fp8: dict[str, Any] = {"dtype": "fp8_e4m3", "wdtype": "fp8_e4m3", "out_dtype": "bf16", "math_mode": "ieee"}
    scales = {"scale": x, "wscale": w, "scale_dtype": "fp32", "wscale_dtype": "fp32"}
    return Problem(family="scaled", m=8, n=384, k=640, **fp8, **scales, **more)


@pytest.mark.parametrize(
    "problem",
    [
        *(Problem(m=8, n=64, k=32, dtype="bf16", layout=layout) for layout in ("nt", "nn", "tt", "tn")),
        *(Problem(m=32, n=64, k=48, dtype="i8", out_dtype="i32", layout=layout) for layout in ("nt", "nn")),
        Problem(m=8, n=64, k=32, dtype="fp32", bias=True, math_mode="tf32"),
        Problem(family="dense_add", m=8, n=64, k=32, dtype="fp32"),
        Problem(family="batched", batch=3, m=8, n=64, k=32, dtype="bf16"),
        Problem(family="batched_add", batch=3, m=8, n=64, k=32, dtype="bf16", layout="tn"),
        scaled("tensor", "tensor"),
        scaled("row", "row", bias=True),
        scaled("1x128", "128x128", scale_layout="col", wscale_layout="row_padded"),
        scaled("1x128", "1x128", scale_layout="col", wscale_layout="col"),
    ],
    ids=str,
)
def test_the_record_of_every_kind_takes_what_its_family_makes_and_no_operand_that_lies_otherwise(
    problem: Problem,
) -> None:
    record = backend.record_of(problem, bytes(64), 1024)
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    operands = {o.name: t.mT if o.weight and t.dim() > 1 else t for o, t in inputs}

    record.check_for(problem)
    assert read_launch(record.text()) == record
    assert holds(record.checked, operands)
    for name in ("x", "w"):
        shape = operands[name].shape
        apart = torch.empty(*shape[:-1], 2 * shape[-1])[..., ::2]
        unaligned = torch.empty(apart.numel() + 1)[1:].view(shape)
        for wrong in (apart, unaligned):
            assert not holds(record.checked, {**operands, name: wrong})
    assert not holds(record.checked, {**operands, "x": torch.cat([operands["x"].float()] * 2, -2)})
