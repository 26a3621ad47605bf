"""What `make demo` calls a missed promise: a slow-down that the rounds show, and no swing of the machine."""

from __future__ import annotations

import os
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[2] / "docs" / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(DEMO), run_name="demo")


def served(seed: int, times: float, swing: float, rounds: int = 20) -> dict[str, dict[str, list[float]]]:
    """Tokens/s of two servers, the hooked one by so many times as fast; swing: deviation of a single round."""
    dice = random.Random(seed)
    stock = [100 * dice.gauss(1, swing) for _ in range(rounds)]
    hooked = [100 * times * dice.gauss(1, swing) for _ in range(rounds)]
    return {"stock": {"bf16": stock}, "hooked": {"bf16": hooked}}


def missed(demo: dict[str, Any], times: float, swing: float, most: int = 200) -> int:
    return sum(not demo["reached"](served(seed, times, swing), "hooked", "bf16")[1] for seed in range(most))


def test_a_slow_down_of_a_twentieth_is_a_missed_promise(demo: dict[str, Any]) -> None:
    assert missed(demo, 0.95, 0.02) >= 180
    assert missed(demo, 0.92, 0.04) >= 180


def test_a_program_that_is_as_fast_as_stock_misses_nothing_by_chance(demo: dict[str, Any]) -> None:
    assert missed(demo, 1.0, 0.02) <= 10
    assert missed(demo, 1.0, 0.08) <= 10


def test_what_two_un_hooked_servers_differ_by_is_no_slow_down(demo: dict[str, Any]) -> None:
    """At least 2 %, and no more than they were seen to."""
    assert missed(demo, 0.985, 0.005) == 0 and missed(demo, 0.96, 0.005) == 200
    after = served(1, 0.96, 0.005)
    for speed, ok in ((100.0, False), (97.5, False), (95.0, True), (105.0, True)):
        after["again"] = {"bf16": [speed] * 15}
        text, seen = demo["reached"](after, "hooked", "bf16")
        assert seen is ok, text
    both = {name: dict.fromkeys(("fp32", "bf16"), by["bf16"]) for name, by in after.items()}
    demo["show"](both | {"again": after["again"]})


def test_the_rounds_that_were_once_called_a_miss_are_not_enough_to_tell(demo: dict[str, Any]) -> None:
    after = served(0, 1.0, 0.0)
    after["hooked"]["bf16"] = [100 * (0.89 + 0.22 * i / 19) for i in range(8)] + [96.0] * 6 + [101.0] * 6
    text, ok = demo["reached"](after, "hooked", "bf16")
    assert ok and "of 20 rounds (not slower" in text
    assert demo["falls_short"](after, "hooked", "bf16"), "the median lies below 1: more rounds are asked for"


def test_a_goal_above_one_is_reached_by_the_median(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo["GOALS"], ("hooked", "bf16"), 1.0)
    assert demo["reached"](served(1, 1.3, 0.02), "hooked", "bf16")[1]
    monkeypatch.setitem(demo["GOALS"], ("hooked", "bf16"), 1.15)
    monkeypatch.setitem(demo["reached"].__globals__, "GOALS_OF", "")
    monkeypatch.setitem(demo["reached"].__globals__, "has_bf16_kernels", lambda: True)
    assert demo["reached"](served(1, 1.3, 0.02), "hooked", "bf16")[1]
    assert not demo["reached"](served(1, 1.1, 0.02), "hooked", "bf16")[1]


def test_a_machine_that_others_use_is_named_before_anything_is_measured(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpus = os.cpu_count() or 1
    for load, told in ((cpus + 0.6, f"load {cpus + 0.6:.1f} on {cpus} CPUs"), (cpus - 0.1, "")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        demo["warn_of"](demo["crowd"]())
        said = capsys.readouterr().out
        assert told in said and bool(said) is bool(told)
    source = DEMO.read_text()
    assert source.index("warn_of(crowd())") < source.index("servers = {name: Server(")
