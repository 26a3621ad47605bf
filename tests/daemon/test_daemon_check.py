"""Looking at what is chosen: what is said of good, slow, refused, crashing and absent candidates."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service.check import Checked, check

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
TORCH, SLOW, FAST, BAD = (Candidate(name) for name in ("torch", "slow", "fast", "bad"))


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64)


def look(*asked: tuple[Problem, Candidate]) -> list[Checked]:
    return list(check(asked, SearchOptions(), lambda: Worker("cpu", nice=0, search=SEARCH)))


def test_each_is_answered_in_its_order() -> None:
    found = look((problem(8), FAST), (problem(8), SLOW), (problem(8), TORCH), (problem(8), Candidate("hipblaslt")))

    assert [(c.candidate, c.state, c.is_good) for c in found] == [
        (FAST, "faster", True), (SLOW, "no faster", True), (TORCH, "default", True),
        (Candidate("hipblaslt"), "not here", True),
    ]  # fmt: skip
    assert (found[0].us, found[0].baseline_us) == (50.0, 100.0)
    assert found[3].us is None and "no backend hipblaslt" in found[3].note


def test_one_that_kills_its_worker_costs_itself_alone() -> None:
    found = look((problem(17), BAD), (problem(29), BAD), (problem(8), FAST))

    assert [(c.state, c.is_good) for c in found] == [("crash", False), ("refused", False), ("faster", True)]
    assert "SIGABRT" in found[0].note
    assert found[1].note == "this one cannot be done"


def test_what_cannot_be_timed_now_is_not_called_bad() -> None:
    (found,) = look((problem(43), FAST))

    assert (found.state, found.is_good, found.note) == ("put off", True, "the CPU is in use")


@pytest.mark.long
@pytest.mark.usefixtures("beside_others")
def test_a_real_candidate_is_timed_and_verified() -> None:
    small = Problem(m=4, n=64, k=64, dtype="fp32", threads=1)
    asked = [(small, Candidate("torch_swap")), (small, Candidate("torch_mv"))]

    swap, mv = check(asked, SearchOptions(iters=8), lambda: Worker("cpu", nice=0))

    assert swap.state in ("faster", "no faster") and swap.us is not None and swap.us > 0
    assert mv.state == "refused" and not mv.is_good  # M is not 1


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('torch is broken')\n")

    with pytest.raises(WorkerFailed, match="torch is broken"):
        list(check([(problem(8), FAST)], SearchOptions(), lambda: Worker("cpu", search=f"{tmp_path}/broken.py:tune")))
