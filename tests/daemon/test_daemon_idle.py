from __future__ import annotations

import random
from collections import deque

import pytest

from gemmtuned.daemon.device.idle import Limits, Mean, Reading, idleness_of, must_yield

LIMITS = Limits(clear=0.1, busy=0.25, free_bytes=1000)


def readings(
    *others: float | None, step_s: float = 0.5, start_s: float = 0.0, free: int | None = None
) -> list[Reading]:
    return [Reading(start_s + i * step_s, start_s + (i + 1) * step_s, o, free) for i, o in enumerate(others)]


def state(rs: list[Reading], *, now_s: float | None = None, window_s: float = 10.0) -> str:
    return idleness_of(rs, now_s=rs[-1].at_s if now_s is None else now_s, window_s=window_s, limits=LIMITS).state


def test_a_device_is_idle_only_after_a_whole_clear_window() -> None:
    assert state(readings(*[0.0] * 19)) == "clearing"
    assert state(readings(*[0.0] * 20)) == "idle"


def test_a_window_of_zero_needs_one_clear_reading() -> None:
    assert state(readings(0.0), window_s=0) == "idle"
    assert state(readings(0.5), window_s=0) == "busy"


def test_one_busy_reading_starts_the_window_again() -> None:
    assert state(readings(*[0.0] * 19, 0.5)) == "busy"
    assert state(readings(*[0.0] * 19, 0.5, *[0.0] * 19)) == "clearing"
    assert state(readings(*[0.0] * 19, 0.5, *[0.0] * 20)) == "idle"


def test_unknown_is_busy() -> None:
    assert idleness_of([], now_s=0, window_s=0, limits=LIMITS).state == "busy"
    assert state(readings(*[0.0] * 30, None)) == "busy"
    assert state(readings(*[0.0] * 10, None, *[0.0] * 19)) == "clearing"
    assert must_yield(readings(0.0, None), now_s=1.0, limits=LIMITS)
    assert must_yield([], now_s=1.0, limits=LIMITS)


def test_an_old_reading_says_nothing_of_now() -> None:
    clear = readings(*[0.0] * 30)
    assert state(clear, now_s=15.0 + 60) == "busy"
    assert must_yield(clear, now_s=15.0 + 60, limits=LIMITS) == "no reading"


def test_readings_from_before_the_clock_was_set_back_do_not_count() -> None:
    clear = readings(*[0.0] * 30)
    assert state(clear, now_s=-86400.0) == "busy"


def test_a_gap_between_readings_starts_the_window_again() -> None:
    before, after = readings(*[0.0] * 30), readings(*[0.0] * 5, start_s=16.0)
    assert state(before + after) == "clearing"


def test_a_reading_over_a_sleep_of_the_machine_is_not_a_clear_window() -> None:
    assert state([Reading(0.0, 3600.0, 0.0)]) == "busy"


def test_too_little_memory_is_busy() -> None:
    assert state(readings(*[0.0] * 30, free=999)) == "busy"
    assert state(readings(*[0.0] * 30, free=1000)) == "idle"


def test_between_clear_and_busy_tuning_goes_on_but_does_not_start() -> None:
    middle = readings(*[0.2] * 30)
    assert state(middle) == "busy"
    assert must_yield(middle, now_s=15.0, limits=LIMITS) == ""


def test_a_blip_of_one_tick_does_not_end_tuning_and_two_tenths_of_a_second_do() -> None:
    quiet = readings(*[0.0] * 20, step_s=0.1)
    assert must_yield([*quiet, *readings(0.4, step_s=0.1, start_s=2.0)], now_s=2.1, limits=LIMITS) == ""
    assert must_yield([*quiet, *readings(0.4, 0.4, step_s=0.1, start_s=2.0)], now_s=2.2, limits=LIMITS)


def test_a_fully_used_device_is_given_up_at_the_first_reading() -> None:
    rs = [*readings(*[0.0] * 20, step_s=0.1), *readings(1.0, step_s=0.1, start_s=2.0)]
    assert must_yield(rs, now_s=2.1, limits=LIMITS)


@pytest.mark.parametrize("hertz", [0.2, 1.0, 5.0])
def test_an_hour_of_bursts_never_looks_idle(hertz: float) -> None:
    rng = random.Random(7)
    seen: deque[Reading] = deque(maxlen=40)
    next_burst_s, now_s = 0.0, 0.0
    while now_s < 3600:
        end_s = now_s + 0.5
        used_s = 0.0
        while next_burst_s < end_s:
            used_s += 0.06
            next_burst_s += rng.uniform(0.5, 1.0) / hertz
        seen.append(Reading(now_s, end_s, min(used_s / 0.5, 1.0)))
        now_s = end_s
        assert idleness_of(seen, now_s=now_s, window_s=10.0, limits=LIMITS).state != "idle"


def test_what_others_used_is_a_mean_over_time_of_readings_that_say_something() -> None:
    mean = Mean()
    assert mean.share is None
    for reading in (
        Reading(0.0, 1.0, 0.8),
        Reading(1.0, 4.0, 0.0),
        Reading(4.0, 5.0, None),
        Reading(5.0, 100.0, 1.0),  # too long to say what happened in it
        Reading(7.0, 7.0, 1.0),
    ):
        mean.add(reading)
    assert mean.share == pytest.approx(0.2)
    over = Mean()
    over.add(Reading(0.0, 1.0, 1.07))
    assert over.share == 1.0, "a driver's rounding"
