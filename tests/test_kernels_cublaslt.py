"""Which of the library's algorithms are candidates; the library itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmtuned.commands.tune_options import _OWN_PARAMETERS
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.daemon.child.search import MOST
from gemmtuned.kernels import cublaslt
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends import cublaslt as backend
from gemmtuned.kernels.cuda import one_shot
from gemmtuned.kernels.cuda.offered import offered as cuda_offered
from gemmtuned.kernels.triton.shortlist import MODULES, shortlist


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


def test_every_parameter_of_our_kernels_is_one_that_a_user_can_name() -> None:
    ours = {key for module in (*MODULES.values(), one_shot) for key in module.KEYS}
    assert ours | {"kernel"} == set(_OWN_PARAMETERS)


@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 65, 256, 257, 2048])
def test_candidates_of_all_backends_are_no_more_than_a_search_times(offers: dict[int, list[int]], m: int) -> None:
    offers[m] = list(range(100))
    problem = Problem(m=m, n=5120, k=5120, dtype="bf16")
    cuda = cuda_offered(problem, Device("", "cuda", "", "sm_90", 132))
    ours = shortlist(m, problem.n, problem.k, 132, arch="sm_90", beside_one_shot=bool(cuda))

    few = len(tiles_of(problem)) + len(ours)
    assert few + len(cuda) >= 25 and few <= MOST, "one_shot's take the place of the last of the others, in turns"
    assert bool(cuda) == (m in (16, 33, 64, 65))
    assert 25 <= len(tiles_of(problem)) + len(shortlist(m, problem.n, problem.k, 108, arch="sm_80")) <= MOST
