"""Measuring: intervals with their promised level, fair races, cold weights. No test looks at a real time."""

from __future__ import annotations

import gc
import itertools
import math
import random
from contextlib import nullcontext

import pytest
import torch
from noise import NoisyClock

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child import measure
from gemmtuned.daemon.child.arms import Arms
from gemmtuned.daemon.child.checks import Watch, Wrong
from gemmtuned.daemon.child.clocks import clock_for
from gemmtuned.daemon.child.measure import (
    Arm,
    Bench,
    WallClock,
    burst_for,
    copies_needed,
    pairs_for,
    race,
    signed_rank_interval,
)
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of, moe

CPU = torch.device("cpu")


def arm(name: str, copies: int = 4) -> Arm:
    return Arm(name, [lambda: None] * copies)


class Recorder:
    """Notes what it is asked to time."""

    def __init__(self, times: dict[str, float] | None = None) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.times = times or {}

    def forget(self, arm): ...

    def us(self, arm, copies):
        assert not gc.isenabled()
        self.asked.append((arm.name, tuple(copies)))
        return self.times.get(arm.name, 100.0)


def test_the_interval_is_wilcoxons():
    # n = 8: the two-sided 5 % critical value of W is 3, so the ends are the 4th means from either side
    values = [0.1, 0.2, 0.35, 0.4, 0.55, 0.7, 0.8, 1.5]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    middle, low, high = signed_rank_interval(values)
    assert (low, high) == (means[3], means[-4])
    assert low < middle < high


def test_six_equal_signs_are_the_fewest_that_decide():
    assert signed_rank_interval([0.3] * 5)[1] == -math.inf
    assert signed_rank_interval([0.3, 0.4, 0.5, 0.6, 0.7, 0.8])[1] == 0.3


def test_one_wild_value_moves_the_interval_little():
    values = [0.1 + 0.001 * i for i in range(20)]
    calm, wild = signed_rank_interval(values), signed_rank_interval([*values[:-1], 50.0])
    assert abs(calm[0] - wild[0]) < 0.002
    assert abs(calm[1] - wild[1]) < 0.002


@pytest.mark.parametrize("jitter", [0.02, 0.3])
def test_equal_arms_are_told_apart_in_no_more_than_the_promised_share_of_races(jitter):
    coin, wins = random.Random(5), 0
    clock = NoisyClock(jitter=jitter, burst=0.05, second=0.1, seed=5)
    for _ in range(1000):
        wins += race(arm("a"), arm("b"), clock=clock, pairs=20, coin=coin).gain_low > 1.0
    assert wins <= 40  # 2.5 % are promised; 40 is three standard deviations above


def test_a_real_gain_lies_in_its_interval():
    coin, hits = random.Random(6), 0
    clock = NoisyClock({"slow": 240.0, "fast": 200.0}, seed=6)
    for _ in range(200):
        result = race(arm("slow"), arm("fast"), clock=clock, pairs=60, coin=coin)
        hits += result.gain_low <= 1.2 <= result.gain_high
    assert hits >= 180
    assert result.us < result.baseline_us
    assert result.pairs == 60


def test_each_pair_holds_both_arms_and_the_coin_decides_the_order():
    clock = Recorder()
    race(arm("base"), arm("new"), clock=clock, pairs=40, coin=random.Random(1))
    names = [name for name, _ in clock.asked]
    pairs = [tuple(names[i : i + 2]) for i in range(0, 80, 2)]
    assert {frozenset(p) for p in pairs} == {frozenset(("base", "new"))}
    assert 10 <= sum(p[0] == "base" for p in pairs) <= 30


@pytest.mark.parametrize(
    ("far", "new_us", "pairs", "us"),
    [
        (0.9, [112.0, 115.0, 120.0] + [90.0] * 9, 3, 115.0),
        (0.9, [112.0, 115.0, 110.0] + [90.0] * 9, 12, 90.0),  # 100 / 110 is above 0.9
        (0.9, [90.0] * 3 + [120.0] * 9, 12, 120.0),  # later pairs end nothing, those before count
        (0.0, [1e6] * 12, 12, 1e6),  # a race that decides
    ],
)
def test_a_race_ends_early_only_where_it_is_told_to_and_each_of_the_first_pairs_is_far_behind(far, new_us, pairs, us):
    clock, new = Recorder(), iter(new_us)
    clock.us = lambda arm, copies: next(new) if arm.name == "new" else 100.0

    found = race(arm("base"), arm("new"), clock=clock, pairs=12, coin=random.Random(1), least=3, far=far)

    assert (found.pairs, found.us, found.baseline_us) == (pairs, us, 100.0)
    assert len(list(new)) == 12 - pairs


def test_no_weight_copy_is_read_again_before_all_others_were():
    clock = Recorder()
    race(arm("base", 7), arm("new", 7), clock=clock, pairs=20, coin=random.Random(1), burst=3)
    read = [i for _, copies in clock.asked for i in copies]
    assert read == [i % 7 for i in range(len(read))]
    assert len(read) == 20 * 2 * 3


def test_timing_alone_goes_through_the_weight_copies():
    clock = Recorder({"x": 7.0})
    assert measure.time_alone(arm("x", 3), clock=clock, rounds=5) == 7.0
    assert clock.asked == [("x", (i,)) for i in (0, 1, 2, 0, 1)]


def test_the_garbage_collector_is_off_while_timing_and_back_afterwards():
    assert gc.isenabled()

    class Fails(Recorder):
        def forget(self, arm): ...

        def us(self, arm, copies):
            super().us(arm, copies)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        race(arm("a"), arm("b"), clock=Fails(), pairs=6, coin=random.Random(0))
    assert gc.isenabled()


def test_long_calls_get_few_pairs_and_short_ones_are_timed_in_bursts():
    assert pairs_for(1e6, 0.15) == measure.MIN_PAIRS
    assert pairs_for(1.0, 0.15) == measure.MAX_PAIRS
    assert pairs_for(1e6, 0.15, least=3, most=12) == 3
    assert measure.MIN_PAIRS < pairs_for(2500.0, 0.15) < measure.MAX_PAIRS
    assert [burst_for(us) for us in (0.01, 1.0, 5.0, 19.0, 20.0, 1e6)] == [16, 16, 4, 2, 1, 1]


def test_weight_copies_exceed_twice_the_cache_and_stay_within_memory():
    small = Problem(m=8, n=1024, k=1024, dtype="fp32", threads=2)  # 4 MiB
    assert copies_needed(small, 32 << 20, 16 << 30) * (4 << 20) > 64 << 20
    large = Problem(m=8, n=8192, k=4096, dtype="fp32", threads=2)  # 128 MiB
    assert copies_needed(large, 32 << 20, 16 << 30) == 3
    huge = Problem(m=8, n=152064, k=8192, dtype="fp32", threads=2)  # 4.6 GiB
    assert copies_needed(huge, 32 << 20, 16 << 30) == 1
    assert copies_needed(Problem(m=8, n=16, k=16, dtype="fp32"), 32 << 20, 16 << 30) == measure.MAX_COPIES


def test_memory_for_packed_copies_is_counted():
    plain = Problem(m=8, n=8192, k=16384, dtype="fp32", threads=2)  # 512 MiB
    packed = Problem(m=8, n=8192, k=16384, dtype="fp32", threads=2, weight_state="packed")
    assert copies_needed(packed, 32 << 20, 16 << 30) < copies_needed(plain, 32 << 20, 16 << 30) <= 3


def test_arms_share_x_and_the_plain_weights():
    problem = Problem(m=4, n=64, k=32, dtype="fp32", bias=True, threads=2)
    bench = Bench(problem, CPU)
    seen: list[tuple[int, int]] = []

    class Spy:
        def bind(self, b):
            return lambda a, bias: seen.append((a.data_ptr(), b.data_ptr()))

    for name in ("one", "two"):
        for call in bench.arm(name, Spy(), problem).calls[:3]:
            call()
    assert seen[:3] == seen[3:]
    assert len({b for _, b in seen}) == 3


def test_an_arm_runs_the_kernel():
    problem = Problem(m=4, n=64, k=32, dtype="fp32", bias=True, threads=2)
    bench = Bench(problem, CPU)
    ready = bench.arm("torch", BACKENDS["torch"].prepare(Candidate("torch"), problem), problem)
    assert ready.calls[0]().shape == (4, 64)
    assert WallClock().us(ready, (0, 1)) > 0


def test_the_last_result_of_every_reading_is_looked_at_after_its_time_was_taken():
    gives = iter([1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 2.0])
    one = Arm("one", [lambda: torch.full((2, 3), next(gives))] * 2, Watch(torch.full((2, 3), 1.0), 0.01))
    clock = WallClock()
    clock.us(one, (0, 1))
    clock.us(one, (0,))
    clock.us(one, (0, 1))  # a wrong one before the last is the next reading's to see
    clock.us(one, (0,))
    with pytest.raises(CandidateFailed, match="one: while it was raced: 6 of 6 elements off"):
        clock.us(one, (0,))


def test_a_watch_lets_roundings_differ_and_nothing_else():
    stock = torch.ones(2, 3)
    watch = Watch(stock, 0.01)
    for y in (stock, stock + 0.005, stock - 0.005):
        watch.look(y, "here")
    for y, said in ((stock + 0.02, "off"), (stock.double(), "dtype"), (stock[:1], "shape"), (None, "NoneType")):
        with pytest.raises(Wrong, match=f"here.*{said}|{said}"):
            watch.look(y, "here")


def test_a_device_without_a_clock_is_refused_by_name():
    assert isinstance(clock_for(CPU), WallClock)
    with pytest.raises(CandidateFailed, match="meta"):
        clock_for(torch.device("meta"))


def test_results_of_a_race_may_be_as_far_apart_as_at_the_gate_by_their_own_size(monkeypatch):
    # the copies of large weights have one expert many times, whose results add up to more than those of others do
    monkeypatch.setattr(moe, "WHOLE_BYTES", 0)
    problem = Problem.parse("moe:bf16:16x64x64,threads=1,experts=16,topk=8,inter=32,act=silu_gated")
    default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
    verdict = verify(problem, {Candidate("torch"): default}, default, device=CPU)[Candidate("torch")]
    arms = Arms(problem, {problem: default}, CPU, WallClock())
    arms.apart_by_rms |= {("one", problem): verdict.apart_by_rms, ("that quantises", problem): 100.0}
    stock = arms.stock_at(problem).double()
    rms = float(stock.square().mean().sqrt())
    at_the_gate = family_of(problem).make(problem, kind="randn", seed=1, device=CPU).run(default).double()
    assert rms > 2 * float(at_the_gate.square().mean().sqrt())
    for share, is_right in ((1.5, True), (2.5, False)):
        arm = Arm("one", [])
        arms.watch(problem, [arm])
        y = (stock + share * verdict.apart_by_rms * rms).bfloat16()
        with nullcontext() if is_right else pytest.raises(CandidateFailed, match="elements off"):
            arm.look(y)
