"""Compiling ahead: in processes of their own, of which any may crash or hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.compile_ahead import Compilers

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
PROBLEM = Problem(m=1, n=64, k=512)
# Does what a candidate's config says
PLANTED = """
import json, os, sys, time
for line in sys.stdin:
    what = json.loads(line)["config"]
    if what == "abort":
        os.abort()
    if what == "hang":
        time.sleep(60)
    print("nonsense" if what == "nonsense" else json.dumps("" if what == "good" else what), flush=True)
"""


def planted(**more: float) -> Compilers:
    return Compilers(2, command=(sys.executable, "-S", "-c", PLANTED), **more)


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    one = planted(job_s=1.0)
    yield one
    one.close()


def test_every_candidate_is_compiled_and_failures_come_with_their_reason(compilers: Compilers) -> None:
    begun: list[Candidate] = []
    jobs = [Candidate(f"b{i}", what) for i, what in enumerate(("good", "it spills", "good", "good", "too large"))]

    failed = compilers.run(jobs, PROBLEM, H200, before=begun.append)

    assert failed == {jobs[1]: "it spills", jobs[4]: "too large"}
    assert begun == jobs


@pytest.mark.parametrize("what", ["abort", "hang", "nonsense"])
def test_what_kills_its_compiler_fails_alone_and_soon(compilers: Compilers, what: str) -> None:
    jobs = [Candidate(f"b{i}", "good") for i in range(6)]
    jobs.insert(2, Candidate("bad", what))
    began = time.monotonic()

    failed = compilers.run(jobs, PROBLEM, H200)

    assert list(failed) == [Candidate("bad", what)] and "compiler ended or took" in failed[jobs[2]]
    assert time.monotonic() - began < 5
    assert compilers.run(jobs[:2], PROBLEM, H200) == {}  # with a new process in its place


def test_without_processes_every_candidate_fails_with_the_reason() -> None:
    compilers = Compilers(2, command=("/no/such/program",))

    assert compilers.run([Candidate("a")], PROBLEM, H200) == {
        Candidate("a"): "no process to compile in: No such file or directory"
    }


def test_our_kernels_are_in_the_compilers_cache_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from gemmtuned.kernels.backends.triton_ import Triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    good = next(Triton(device=H200).candidates(PROBLEM))
    bad = Candidate("triton", '{"kernel":"gemv"}')
    compilers = Compilers(1)

    failed = compilers.run([good, bad, Candidate("torch")], PROBLEM, H200)
    compilers.close()

    assert list(failed) == [bad] and "config has" in failed[bad]
    assert list(tmp_path.rglob("gemv.cubin"))
