"""The search: what it publishes, what it tells on the way, and that noise alone publishes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import planted_kernels as planted
import pytest
import torch
from noise import NoisyClock
from planted_kernels import Planted

from gemmtuned.configs.engine_races import FASTER, Peer, peers_of, standing
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, Solution, cpu_device
from gemmtuned.daemon.child import engines, last_check, races
from gemmtuned.daemon.child.measure import Arm, Race
from gemmtuned.daemon.child.measure_cuda import Condition, GraphClock
from gemmtuned.daemon.child.outcome import Entrant, preferred
from gemmtuned.daemon.child.races import SCREEN_PAIRS
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import RACING, Trial
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.kernel import StatelessKernel

PROBLEM = Problem(m=4, n=16, k=32, dtype="fp32", threads=1)
TORCH = Candidate("torch")
ENGINE = "_C::cutlass_scaled_mm"


class Table:
    """A registry of torch and planted backends, and a search over it under a made-up clock."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch
        self.backends = {"torch": BACKENDS["torch"]}
        self.reports: list[Trial] = []
        monkeypatch.setattr(registry, "BACKENDS", self.backends)
        monkeypatch.setattr(last_check, "OFTEN_S", 0.02)
        monkeypatch.setattr(last_check, "THREADS_S", 0.02)
        monkeypatch.setattr("gemmtuned.daemon.child.search.BACKENDS", self.backends)

    def plant(self, name: str, kernel=planted.right) -> Planted:
        self.backends[name] = Planted(name, kernel)
        return self.backends[name]

    def tune(self, clock, members=(PROBLEM,), covers="exact", target=None, skip=(), seed=1, **options) -> Solution:
        environment = Environment(cpu_device(), dict.fromkeys(self.backends, "1"))
        self.reports.clear()
        return tune_modes(
            members, covers, target or members[0], environment, mode="eager", skip=skip, emit=self.reports.append,
            clock=clock, seed=seed, options=SearchOptions(**options),
        )[0]  # fmt: skip

    def phases(self, name: str) -> list[tuple[str, str]]:
        return [(r.phase, r.outcome) for r in self.reports if r.candidate.backend == name]


@pytest.fixture
def table(monkeypatch):
    return Table(monkeypatch)


def quiet(**true_us: float) -> NoisyClock:
    return NoisyClock(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)


def test_a_clearly_faster_candidate_is_published_with_its_numbers(table):
    table.plant("fast")
    solution = table.tune(quiet(fast=150.0))
    assert (solution.backend, solution.state, solution.covers) == ("fast", "published", "exact")
    assert solution.problem == PROBLEM
    assert solution.us == pytest.approx(150, rel=0.03)
    assert solution.baseline_us == pytest.approx(200, rel=0.03)
    assert 1.2 < solution.gain_low < 200 / 150
    assert 0 < solution.err < 1e-6
    assert 0 < solution.baseline_err < 1e-6
    assert Solution.from_row(solution.to_row()) == solution


def test_no_faster_candidate_means_that_the_default_is_best(table):
    table.plant("slow")
    solution = table.tune(quiet(slow=220.0))
    assert (solution.backend, solution.config, solution.state) == ("torch", "{}", "default_best")
    assert solution.us == solution.baseline_us == pytest.approx(200, rel=0.03)
    assert solution.gain_low == 1.0
    assert solution.err == solution.baseline_err > 0
    assert table.phases("slow") == [("start", "ok"), ("screen", "slower")]
    assert Solution.from_row(solution.to_row()) == solution


def test_a_gain_too_small_to_be_worth_it_is_not_published(table):
    table.plant("little")
    assert table.tune(quiet(little=200 / 1.015)).state == "default_best"


def test_a_small_gain_on_a_cpu_takes_two_races(table):
    table.plant("small")
    assert table.tune(quiet(small=200 / 1.06)).state == "published"
    assert [r.note.split()[0] for r in table.reports if r.phase == "confirm"] == ["race=1", "race=2"]


class ByRouting(NoisyClock):
    """An arm named `even` is fast on the routing of its first race alone."""

    def __init__(self, routings: list[list[int]], **true_us: float) -> None:
        super().__init__(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)
        self.routings, self.first = routings, None

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        if arm.name == "even":
            arm.calls[copies[0]]()
            self.first = self.first or self.routings[-1]
            self.true_us["even"] = 150.0 if self.routings[-1] == self.first else 220.0
        return super().us(arm, copies)


@pytest.mark.parametrize("other, wins", [({"steady": 170.0}, "steady"), ({"steady": 230.0}, "torch")])
def test_a_kernel_that_is_faster_for_one_routing_alone_is_not_published(table, other, wins):
    routings: list[list[int]] = []
    grouped = Problem(family="grouped", batch=4, m=24, n=16, k=16, dtype="fp32", threads=1)

    def call(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        routings.append(offs.tolist())
        return torch._grouped_mm(x, w, offs=offs)

    table.plant("even", StatelessKernel(call))
    table.plant("steady", StatelessKernel(lambda x, w, offs: torch._grouped_mm(x, w, offs=offs)))

    assert table.tune(ByRouting(routings, **other), members=(grouped,)).backend == wins
    assert [(r.note.split()[0]) for r in table.reports if r.phase == "confirm" and r.candidate.backend == "even"] == [
        "race=1", "race=2"
    ]  # fmt: skip


def test_the_fastest_of_several_wins(table):
    for name in ("good", "better", "worse"):
        table.plant(name)
    assert table.tune(quiet(good=150.0, better=120.0, worse=160.0)).backend == "better"


def test_a_tie_goes_to_the_simpler_backend(table):
    for order, name in enumerate(("complicated", "simple")):
        table.plant(name).order -= order
    assert table.tune(quiet(simple=150.0, complicated=149.5)).backend == "simple"


@pytest.mark.parametrize(
    ("gains", "wins"),
    [
        ({"cublaslt": 1.10, "cuda": 1.11}, "cublaslt"),
        ({"cublaslt": 1.10, "triton": 1.115, "cuda": 1.13}, "cuda"),
        ({"triton": 1.10, "cuda": 1.11}, "cuda"),  # both are our kernels, launched alike: none is simpler
        ({"triton": 1.11, "cuda": 1.10}, "triton"),
        ({"torch_mv": 1.10, "cublaslt": 1.11, "triton": 1.11}, "torch_mv"),
    ],
)
def test_of_our_own_kernels_the_faster_one_wins_however_little_and_beside_a_library_only_by_more(gains, wins):
    entrants = [
        Entrant(Candidate(name), {}, gain, races={PROBLEM: Race(100 / gain, 100, gain, gain, gain, 9)})
        for name, gain in gains.items()
    ]
    assert preferred(entrants).candidate.backend == wins


def test_a_candidate_that_is_far_behind_gets_the_fewest_pairs_and_is_reported_all_the_same(table):
    for name in ("far", "behind"):
        table.plant(name)
    clock = quiet(far=250.0, behind=212.0)
    table.tune(clock)
    least, most = SCREEN_PAIRS
    assert [clock.calls.count(name) for name in ("far", "behind")] == [2 + least, 2 + most]  # 2 to warm up
    told = next(r for r in table.reports if r.candidate.backend == "far" and r.phase == "screen")
    assert (told.outcome, told.us) == ("slower", pytest.approx(250, rel=0.03))
    assert float(told.note.removeprefix("gain=")) == pytest.approx(0.8, rel=0.03)


def test_torch_is_timed_no_more_once_a_candidate_is_far_ahead_and_gains_stay_over_torch(table):
    true_us = {"near": 190.0, "ahead": 20.0, "behind": 30.0, "best": 10.0, "slow": 400.0}
    for name in true_us:
        table.plant(name)
    clock = quiet(**true_us)
    won = table.tune(clock)
    screened = {r.candidate.backend: r for r in table.reports if r.phase == "screen"}
    gains = {name: float(screened[name].note.removeprefix("gain=")) for name in true_us}
    assert gains == {name: pytest.approx(200.0 / us, rel=0.1) for name, us in true_us.items()}
    assert screened["slow"].outcome == "slower" and won.backend == "best"
    assert won.us == pytest.approx(10.0, rel=0.1) and won.baseline_us == pytest.approx(200.0, rel=0.1)
    # by itself and to warm up, then beside `near` and `ahead`; all others race with one of the candidates
    until = len(clock.calls) - clock.calls[::-1].index("slow")
    assert clock.calls[:until].count("torch") <= 2 + 3 * SCREEN_PAIRS[1]


@pytest.mark.parametrize("torchs_alone", [False, True])
def test_who_races_with_another_candidate_is_said_to_and_where_torchs_alone_is_asked_for_nobody_does(
    table, torchs_alone
):
    """If the worker dies then, either may be to blame."""
    true_us = {"first": 150.0, "ahead": 20.0, "one": 30.0, "two": 40.0}
    for name in true_us:
        table.plant(name)
    clock = quiet(**true_us)
    assert table.tune(clock, torchs_alone=torchs_alone).backend == "ahead"
    racing = [r.candidate.backend for r in table.reports if (r.phase, r.note) == ("start", RACING)]
    assert racing == ([] if torchs_alone else ["one", "two"])
    beside_one = {*clock.calls[clock.calls.index("one") : clock.calls.index("two")]}
    assert beside_one & {"torch", "ahead"} == {"torch" if torchs_alone else "ahead"}


class FailsLater(NoisyClock):
    """`ahead` raises from its reading of this number on, as a kernel does whose graph is looked at now and then."""

    def __init__(self, number: int, true_us: dict[str, float]) -> None:
        super().__init__(true_us, jitter=0.01, drift=0.002, burst=0.0, second=0.0)
        self.number = number

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        us = super().us(arm, copies)
        if arm.name == "ahead" and self.calls.count("ahead") >= self.number:
            raise CandidateFailed("gives another result inside a CUDA graph")
        return us


@pytest.mark.parametrize(
    ("number", "ahead_us", "failed"), [(16, 20.0, []), (70, 10.0, [("screen", "ok"), ("screen", "refused")])]
)
def test_what_races_in_torchs_place_and_fails_takes_no_other_candidate_with_it(table, number, ahead_us, failed):
    true_us = {"ahead": ahead_us, "one": 10.0, "two": 10.1, "three": 10.1, "four": 9.9}
    for name in true_us:
        table.plant(name)
    won = table.tune(FailsLater(number, true_us))
    assert won.backend in ("one", "two", "three", "four")
    assert not [r for r in table.reports if r.outcome == "refused" and r.candidate.backend != "ahead"]
    assert not failed or [told for told in table.phases("ahead") if told[0] == "screen"] == failed


def test_a_candidate_that_is_wrong_at_first_does_not_race_in_torchs_place(table):
    right: list[torch.Tensor] = []

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        right.append(x @ w)
        return right[-1] if len(right) > 1 else torch.full_like(right[-1], 1e3)

    table.plant("empty", StatelessKernel(call))
    table.plant("good")
    clock = quiet(empty=2.0, good=150.0)
    assert table.tune(clock).backend == "good"
    first = clock.calls.index("good")
    assert set(clock.calls[first : first + 2 + 2 * SCREEN_PAIRS[0]]) == {"good", "torch"}


class SlowLater(NoisyClock):
    """`slow` takes three times as long once so many trials of a phase have been reported."""

    def __init__(self, reports, phase, after, true_us):
        super().__init__(true_us, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
        self.reports, self.phase, self.after = reports, phase, after

    def us(self, arm, copies):
        later = sum(r.phase == self.phase for r in self.reports) >= self.after
        return super().us(arm, copies) * (3 if arm.name == "slow" and later else 1)


def test_what_is_screened_again_has_all_its_pairs_however_far_behind(table):
    names = ("a", "b", "c", "slow")
    for name in names:
        table.plant(name)
    clock = SlowLater(table.reports, "screen", 1 + len(names), dict.fromkeys(names, 150.0))
    table.tune(clock)
    assert clock.calls.count("slow") == 2 + 3 * SCREEN_PAIRS[1]


def test_a_race_that_decides_has_all_its_pairs_however_far_behind(table):
    table.plant("slow")
    assert table.tune(SlowLater(table.reports, "verify", 1, {"slow": 150.0})).state == "default_best"
    (confirm,) = (r for r in table.reports if r.phase == "confirm")
    assert (confirm.outcome, confirm.note.split()[-1]) == ("slower", "pairs=60")


def test_the_reports_tell_each_step_as_it_happens(table):
    table.plant("fast")
    table.tune(quiet(fast=150.0))
    assert table.phases("torch")[:2] == [("start", "ok"), ("screen", "ok")]
    steps = [p for p in table.phases("fast") if p[0] != "start"]
    assert steps == [("screen", "ok"), ("verify", "ok"), ("confirm", "ok"), ("confirm", "ok"), ("verify", "ok")]
    assert all(r.problem == PROBLEM and r.started_us > 1_600_000_000_000_000 for r in table.reports)
    confirm = [r for r in table.reports if r.phase == "confirm"][-1]
    assert confirm.us == pytest.approx(150, rel=0.05)
    assert confirm.err is not None
    assert "race=2 m=4 gain=1.3" in confirm.note


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


MEMBERS = tuple(PROBLEM.with_m(m) for m in (17, 24, 31))


def test_a_bucket_is_filed_under_its_padded_m_with_the_times_of_the_most_called_size(table):
    table.plant("fast")
    solution = table.tune(quiet(fast=150.0), MEMBERS, "fine", PROBLEM.with_m(32))
    assert (solution.state, solution.covers, solution.problem.m) == ("published", "fine", 32)
    sizes = [r.note.split()[1] for r in table.reports if r.phase == "confirm"]
    assert sizes == ["m=17", "m=24", "m=31"] * 2


def test_a_bucket_is_published_only_if_every_member_gains(table):
    table.plant("fast")

    class SlowAtLargest(NoisyClock):
        def forget(self, arm): ...

        def us(self, arm, copies):
            loses = arm.name == "fast" and arm.calls[0]().shape[0] == 31
            return super().us(arm, copies) * (2 if loses else 1)

    clock = SlowAtLargest({"fast": 150.0}, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
    assert table.tune(clock, MEMBERS, "fine", PROBLEM.with_m(32)).state == "default_best"


def test_a_bucket_needs_right_results_at_every_member(table):
    def wrong_at_31(a, b, bias):
        return planted.right(a, b, bias) + (a.shape[0] == 31)

    table.plant("fast", wrong_at_31)
    assert table.tune(quiet(fast=100.0), MEMBERS, "fine", PROBLEM.with_m(32)).state == "default_best"
    assert ("verify", "wrong") in table.phases("fast")
    assert "confirm" not in dict(table.phases("fast")), "it raced before it was known to be right"


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


def test_a_win_in_one_race_only_is_not_published(table):
    table.plant("lucky")

    class LuckyOnce(NoisyClock):
        def forget(self, arm): ...

        def us(self, arm, copies):
            won = sum(r.phase == "confirm" for r in table.reports)
            return super().us(arm, copies) * (1.4 if arm.name == "lucky" and won else 1)

    clock = LuckyOnce({"lucky": 150.0}, jitter=0.01, drift=0.0, burst=0.0, second=0.0)
    assert table.tune(clock).state == "default_best"
    confirms = [p for p in table.phases("lucky") if p[0] == "confirm"]
    assert confirms == [("confirm", "ok"), ("confirm", "slower")]


def test_every_call_runs_under_the_problems_switches(table):
    seen = set()

    def spy(a, b, bias):
        seen.add((torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return planted.right(a, b, bias)

    table.plant("spy", spy)
    table.tune(quiet(spy=150.0))
    assert seen == {(1, True), (1, False)}, "one thread, in inference mode and, for the gate alone, outside of it"


@pytest.mark.long
@pytest.mark.part(1)
@pytest.mark.parametrize("kind", ["shared", "calm", "wild"])
def test_the_same_kernel_in_both_arms_is_published_at_most_once_in_400_trials(table, kind):
    noise = {
        "calm": {"jitter": 0.01, "drift": 0.003, "burst": 0.002, "second": 0.01},
        "shared": {"jitter": 0.08, "drift": 0.02, "burst": 0.02, "second": 0.03},
        "wild": {"jitter": 0.3, "drift": 0.1, "burst": 0.1, "second": 0.1},
    }[kind]
    for name in ("again", "once_more"):  # two twins of the default: the luckier one goes on
        table.plant(name, BACKENDS["torch"].prepare(TORCH, PROBLEM))
    # Numbers are not what is tested here, and checking them takes 25 ms a trial
    passed = planted_verdicts()
    table.monkeypatch.setattr("gemmtuned.daemon.child.search.verify", passed)
    table.monkeypatch.setattr("gemmtuned.daemon.child.search.last_check", lambda *a, **k: "")
    table.monkeypatch.setattr("gemmtuned.daemon.child.search.default_error", lambda *a, **k: 1e-7)
    wins = 0
    for trial in range(400):
        clock = NoisyClock(seed=trial, **noise)
        wins += table.tune(clock, seed=trial).state == "published"
    assert wins <= 1


def planted_verdicts():
    from gemmtuned.daemon.child.verify import Checked

    def passed(problem, kernels, default, *, device, before, options):
        return {c: Checked("ok", 1e-7, 1e-7) for c in kernels}

    return passed


def test_a_gain_of_a_tenth_is_found_on_a_shared_machine(table):
    table.plant("fast")
    table.monkeypatch.setattr("gemmtuned.daemon.child.search.verify", planted_verdicts())
    table.monkeypatch.setattr("gemmtuned.daemon.child.search.last_check", lambda *a, **k: "")
    wins = sum(
        table.tune(NoisyClock({"fast": 200 / 1.1}, seed=trial), seed=trial).state == "published" for trial in range(60)
    )
    assert wins >= 50


@pytest.mark.usefixtures("beside_others")
def test_the_real_backends_and_the_real_clock_give_a_valid_solution():
    reports: list[Trial] = []
    environment = registry.environment(cpu_device())
    solution, *_ = tune_modes(
        (PROBLEM,), "exact", PROBLEM, environment, mode="eager", skip=(), emit=reports.append
    )  # whichever wins is this machine's business
    assert Solution.from_row(solution.to_row()) == solution
    assert solution.stamp == environment.stamps[solution.backend]
    assert {r.outcome for r in reports} <= {"ok", "slower"}
