"""The winner of a search is raced with the kernels of engines that are here."""

from __future__ import annotations

from collections.abc import Sequence

import planted_kernels as planted
import pytest
from noise import NoisyClock
from planted_table import PROBLEM, Table

from gemmtuned.configs.engine_races import FASTER, Peer, peers_of, standing
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child import engines, races
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.measure_cuda import Condition, GraphClock

ENGINE = "_C::cutlass_scaled_mm"


@pytest.fixture
def table(monkeypatch):
    return Table(monkeypatch)


def quiet(**true_us: float) -> NoisyClock:
    return NoisyClock(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)


MEMBERS = tuple(PROBLEM.with_m(m) for m in (17, 24, 31))


def no_image(a, b, bias=None):
    raise RuntimeError("no kernel image is available")


def test_the_winner_is_raced_with_engines_kernels_that_are_here(table, monkeypatch):
    monkeypatch.setattr(engines, "FAMILY", PROBLEM.family)
    table.plant("fast")
    table.plant("vllm_cutlass")
    table.plant("sglang_fp8", no_image)
    solution = table.tune(quiet(fast=150.0, vllm_cutlass=180.0))

    peers = peers_of(solution.beside)
    assert solution.backend == "fast" and set(peers) == {"vllm_cutlass", "sglang_fp8"}
    assert peers["sglang_fp8"] == Peer("1", None)
    assert peers["vllm_cutlass"].version == "1" and 1.1 < peers["vllm_cutlass"].low < 180 / 150
    [told] = [r for r in table.reports if r.candidate.backend == "vllm_cutlass" and "race with fast" in r.note]
    assert told.us == pytest.approx(180, rel=0.05)
    assert standing(ENGINE, "fast", solution.beside, "1").won


@pytest.mark.parametrize(("us", "wins"), [(151.0, "fast"), (100.0, "vllm_cutlass"), (300.0, "torch")])
def test_an_engines_kernel_that_does_not_lose_keeps_its_calls(table, us, wins):
    """A tie that the simpler backend has, the engine's own kernel as the winner, and torch's own as the best of all."""
    table.plant("fast").order -= 1
    table.plant("vllm_cutlass")
    solution = table.tune(quiet(fast=150.0 if us < 200 else 250.0, vllm_cutlass=us))
    assert solution.backend == wins
    assert 0.5 < peers_of(solution.beside)["vllm_cutlass"].low < (2 if wins == "torch" else FASTER)
    assert wins == "torch" or not standing(ENGINE, wins, solution.beside, "1").won


def test_what_an_engines_kernel_takes_at_its_best_member_counts(table):
    table.plant("fast")
    table.plant("vllm_cutlass")

    class FastAtLargest(NoisyClock):
        def forget(self, arm): ...

        def us(self, arm, copies):
            wins = arm.name == "vllm_cutlass" and arm.calls[0]().shape[0] == 31
            return super().us(arm, copies) * (0.8 if wins else 1)

    clock = FastAtLargest({"fast": 150.0, "vllm_cutlass": 180.0}, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
    solution = table.tune(clock, MEMBERS, "fine", PROBLEM.with_m(32))
    assert solution.backend == "fast" and peers_of(solution.beside)["vllm_cutlass"].low < 1


def test_an_engines_kernel_that_was_not_to_be_tried_is_not_said_to_be_unable(table, monkeypatch):
    monkeypatch.setattr(engines, "FAMILY", PROBLEM.family)
    for name in ("fast", "vllm_cutlass"):
        table.plant(name)
    clock = quiet(fast=150.0, vllm_cutlass=180.0)
    assert table.tune(clock, only=(Candidate("fast"),)).beside == ""
    assert table.tune(clock, skip=(Candidate("vllm_cutlass"),)).beside == '{"vllm_cutlass":["1",null]}'


def test_a_problem_that_no_engines_operator_calls_says_nothing_of_their_kernels(table):
    """Versions that know nothing of them read its row, too."""
    table.plant("fast")
    table.plant("vllm_cutlass", no_image)
    assert "beside" not in table.tune(quiet(fast=150.0)).to_row()


def test_a_winner_whose_result_is_wrong_beside_an_engines_kernel_is_not_published(table):
    """Not before, and not after: of all its calls only some of this race are wrong."""
    racing = []

    def right_alone(a, b, bias):
        return planted.right(a, b, bias) + (1 if racing else 0)

    class Watching(NoisyClock):
        def us(self, arm, copies):
            racing[:] = [1] if arm.watch is not None and "vllm_cutlass" in (arm.name, *self.calls[-1:]) else []
            arm.look(arm.calls[copies[0]]())
            racing.clear()
            return super().us(arm, copies)

    table.plant("fast", right_alone)
    table.plant("good")
    table.plant("vllm_cutlass")
    true_us = {"fast": 100.0, "good": 150.0, "vllm_cutlass": 180.0}
    solution = table.tune(Watching(true_us, jitter=0.01, drift=0.0, burst=0.0, second=0.0))
    assert solution.backend == "good" and set(peers_of(solution.beside)) == {"vllm_cutlass"}
    assert table.phases("fast")[-1] == ("confirm", "wrong")
    assert ("confirm", "refused") not in table.phases("vllm_cutlass")


class Graphs(NoisyClock, GraphClock):
    """A clock as of a GPU; the first graph of an engine's kernel that is raced in earnest finds no memory."""

    has_memory = False

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        if arm.name == "vllm_cutlass" and arm.watch is not None and not self.has_memory:
            self.has_memory = True
            raise RuntimeError("CUDA out of memory")
        return super().us(arm, copies)

    def launches(self, arm: Arm) -> int:
        return 1

    def look(self, arm: Arm) -> None: ...

    def keep_busy(self, arms: Sequence[Arm], seconds: float) -> None: ...

    def condition(self) -> Condition:
        return Condition(None, ())

    def host_us(self, arm: Arm, *, blocks: int = 15, calls: int = 16) -> float:
        return 5.0


def test_a_race_with_an_engines_kernel_that_gives_operands_away_loses_no_verdict(table, monkeypatch):
    monkeypatch.setattr(races, "REST_S", 0.0)
    table.plant("fast")
    table.plant("vllm_cutlass")
    clock = Graphs({"fast": 150.0, "vllm_cutlass": 230.0}, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
    solution = table.tune(clock)
    assert clock.has_memory and solution.backend == "fast"
    assert peers_of(solution.beside)["vllm_cutlass"].low > 1.1
