"""Candidates that are wrong, go wrong or raise are never published and stop no search."""

from __future__ import annotations

import planted_kernels as planted
import pytest
from noise import NoisyClock
from planted_table import Table

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate

TORCH = Candidate("torch")


@pytest.fixture
def table(monkeypatch):
    return Table(monkeypatch)


def quiet(**true_us: float) -> NoisyClock:
    return NoisyClock(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)


def test_a_wrong_candidate_is_never_published_however_fast(table):
    table.plant("wrong", planted.dropped_tail)
    table.plant("right")
    solution = table.tune(quiet(wrong=50.0, right=150.0))
    assert solution.backend == "right"
    assert ("verify", "wrong") in table.phases("wrong")
    assert all(phase != "confirm" for phase, _ in table.phases("wrong"))


class RunningClock(NoisyClock):
    """Runs what it makes times up for, and looks at results, as a real one does."""

    def us(self, arm, copies):
        for i in copies:
            arm.look(arm.calls[i]())
        return super().us(arm, copies)


def running(**true_us: float) -> RunningClock:
    return RunningClock(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)


def test_a_candidate_that_goes_wrong_while_it_wins_is_found_in_the_race(table):
    def wrong_in_races(a, b, bias):
        raced = any(r.phase == "verify" for r in table.reports)
        return planted.right(a, b, bias) * (0 if raced else 1)

    table.plant("late", wrong_in_races)
    assert table.tune(running(late=100.0)).state == "default_best"
    assert table.phases("late")[-1] == ("confirm", "wrong")
    assert "while it was raced" in table.reports[-1].note


def test_a_candidate_that_goes_wrong_after_its_races_is_found_and_the_next_best_wins(table):
    def wrong_after_races(a, b, bias):
        races = sum(r.phase == "confirm" and r.candidate.backend == "late" for r in table.reports)
        return planted.right(a, b, bias) * (0 if races == 2 else 1)

    table.plant("late", wrong_after_races)
    table.plant("right")
    assert table.tune(running(late=100.0, right=150.0)).backend == "right"
    assert table.phases("late")[-1] == ("verify", "wrong")


def test_a_candidate_whose_very_first_call_is_wrong_is_not_published(table):
    calls = []

    def wrong_at_first(a, b, bias):
        calls.append(1)
        return planted.right(a, b, bias) * (0 if len(calls) == 1 else 1)

    table.plant("first", wrong_at_first)
    assert table.tune(running(first=100.0)).state == "default_best"
    assert any("its first call" in r.note for r in table.reports if r.outcome == "wrong")


def test_a_default_that_changes_in_a_race_tells_that_the_challenger_writes_where_it_may_not(table):
    def spoils_x(a, b, bias):
        y = planted.right(a, b, bias)
        if any(r.phase == "verify" for r in table.reports):
            a[0, 0] += 100.0
        return y

    table.plant("spoils", spoils_x)
    assert table.tune(running(spoils=100.0)).state == "default_best"
    assert ("confirm", "wrong") in table.phases("spoils")


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("y"), ZeroDivisionError("z"), AssertionError()])
def test_whatever_a_candidate_raises_costs_that_candidate_only(table, error):
    def raises(a, b, bias):
        raise error

    table.plant("raises", raises)
    table.plant("right")
    assert table.tune(quiet(right=150.0)).backend == "right"
    assert ("screen", "refused") in table.phases("raises")


def test_a_candidate_that_raises_is_refused_and_the_search_goes_on(table):
    table.plant("raises", planted.raises)
    table.plant("right")
    assert table.tune(quiet(right=150.0)).backend == "right"
    assert table.phases("raises") == [("start", "ok"), ("screen", "refused")]
    refused = next(r for r in table.reports if r.outcome == "refused")
    assert refused.note == "RuntimeError: no kernel image is available"


def test_whatever_runs_was_announced_by_the_last_start(table):
    """The parent blames a crash on the candidate whose start came last."""

    def spy(name):
        def call(a, b, bias):
            assert [r for r in table.reports if r.phase == "start"][-1].candidate == Candidate(name)
            return planted.right(a, b, bias)

        return call

    for name in ("one", "two"):
        table.plant(name, spy(name))
    solution = table.tune(RunningClock({"one": 150.0, "two": 140.0}, jitter=0.01, burst=0.0, drift=0.0))
    assert solution.backend == "two"


def test_skipped_candidates_are_not_touched(table):
    bad = table.plant("bad")
    assert table.tune(quiet(bad=100.0), skip={Candidate("bad")}).state == "default_best"
    assert bad.prepared == 0
    with pytest.raises(CandidateFailed, match="failed before"):
        table.tune(quiet(), skip={TORCH})


def test_a_problem_that_torch_itself_cannot_run_says_so(table):
    with pytest.raises(CandidateFailed, match="family scaled"):
        table.tune(quiet(), members=(Problem(family="scaled", m=4, n=16, k=16, dtype="fp8_e4m3", threads=1),))
