"""torch._int_mm on a real GPU: every candidate is exact, the search has a verdict, what it publishes serves the call.

Run it in a process of its own: `pytest tests/gpu/test_gpu_int_mm.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child import search
from gemmtuned.daemon.child.verify import verify
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.backends import candidates as offered
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families import family_of

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
PROBLEMS = [
    Problem(m=m, n=n, k=k, dtype="i8", out_dtype="i32")
    for m in (17, 64, 256, 2048) for n, k in ((4096, 4096), (2112, 7168), (1000, 520))
]  # fmt: skip
ODD = [replace(PROBLEMS[0], m=33, n=72, k=136), replace(PROBLEMS[0], m=49, n=8, k=1032)]
OVERFLOWS = replace(PROBLEMS[0], m=20, n=64, k=(1 << 17) + 512)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, w)


def rivals(p: Problem) -> list[Candidate]:
    """What is raced with torch's own."""
    found = [c for c in offered(p, environment(cuda_device(0))) if c.backend != "torch"]
    assert found, "nothing is offered"
    return found


@pytest.mark.parametrize("p", [*PROBLEMS, *ODD], ids=str)
def test_every_candidate_passes_the_gate(program: Program, p: Problem) -> None:
    kernels = {c: BACKENDS[c.backend].prepare(c, p) for c in rivals(p)}
    said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}
    assert {one.err for one in said.values()} == {0.0}


@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_layouts_that_the_library_may_not_have_are_exact_or_nobodys(program: Program, layout: str) -> None:
    p = replace(PROBLEMS[4], layout=layout)
    kernels = {c: BACKENDS["cublaslt"].prepare(c, p) for c in BACKENDS["cublaslt"].candidates(p)}
    try:
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    except CandidateFailed as err:
        assert "torch's own" in str(err)
        return
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


def test_sums_that_32_bits_do_not_hold_are_as_torchs_or_left_to_it(program: Program) -> None:
    kernels = {c: BACKENDS[c.backend].prepare(c, OVERFLOWS) for c in rivals(OVERFLOWS)}
    try:
        said = verify(OVERFLOWS, kernels, family_of(OVERFLOWS).default(OVERFLOWS), device=GPU)
    except CandidateFailed as err:  # torch's library does not wrap
        assert "one right value" in str(err)
        return
    assert "refused" not in {one.outcome for one in said.values()}, said


@pytest.mark.parametrize("p", [PROBLEMS[1], PROBLEMS[3], PROBLEMS[9]], ids=str)
def test_a_search_has_a_verdict(program: Program, p: Problem) -> None:
    here, trials = environment(cuda_device(0)), list[Trial]()
    found = search.tune_modes((p,), "exact", p, here, mode="graph", skip=(), emit=trials.append)
    assert {s.state for s in found} <= {"published", "default_best"}
    assert all(s.err == s.baseline_err == 0.0 for s in found)
    assert not [t for t in trials if t.outcome == "wrong"], trials
    for solution in found:
        print(f"{p} {solution.mode}: {solution.backend} {solution.us:.2f} us, torch {solution.baseline_us:.2f} us")


@pytest.mark.parametrize("form", ["eager", "out", "graph", "compiled"])
@pytest.mark.parametrize("p", [PROBLEMS[0], PROBLEMS[5], PROBLEMS[11]], ids=str)
def test_a_published_solution_serves_the_call(program: Program, p: Problem, form: str) -> None:
    inputs = family_of(p).make(p, kind="largest", seed=5, device=GPU)
    x, w = inputs["x"], inputs["w"]
    expected = (x.double() @ w.double()).to(torch.int32)
    names = {c.backend for c in rivals(p)}
    for backend in sorted(names):
        program.publish(program.solution(p, next(c for c in rivals(p) if c.backend == backend)))
        program.outcomes()
        if form == "graph":
            torch._int_mm(x, w)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = torch._int_mm(x, w)
            y.zero_()
            graph.replay()
        elif form == "out":
            y = torch.empty(p.m, p.n, dtype=torch.int32, device=GPU)
            torch._int_mm(x, w, out=y)
        else:
            y = (torch.compile(product, dynamic=False) if form == "compiled" else product)(x, w)
        seen = program.outcomes()
        assert set(seen) == {"exact"} and not program.hook.native.failures(), (backend, seen)
        assert torch.equal(y, expected) and y.stride() == (p.n, 1), backend


def test_what_torch_refuses_stays_refused(program: Program) -> None:
    p = PROBLEMS[0]
    program.publish(program.solution(p, rivals(p)[0]))
    inputs = family_of(p).make(p, kind="randn", seed=5, device=GPU)
    x, w = inputs["x"], inputs["w"]
    for call in (lambda: torch._int_mm(x[:16], w), lambda: torch.mm(x, w, out_dtype=torch.int32)):
        with pytest.raises(RuntimeError):
            call()
