"""benchmarks/engine_cost.py: order of turns, CPU time and intervals; a real vLLM is asked by `make engines`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import engine_cost

ARMS = ("off", "on", "off again")


def test_what_changes_steadily_falls_out_of_each_round() -> None:
    order = list(engine_cost.turns(ARMS, 6))
    for number in range(6):
        places = {arm: [at for at, turn in enumerate(order) if turn == (number, arm)] for arm in ARMS}
        assert {len(at) for at in places.values()} == {2}
        assert len({sum(at) for at in places.values()}) == 1, "an arm was asked later than another by the mean"
    first = [order[6 * number][1] for number in range(6)]
    assert {arm: first.count(arm) for arm in ARMS} == dict.fromkeys(ARMS, 2)


def test_cpu_time_is_that_of_a_process_and_of_what_it_started() -> None:
    busy = (
        "from time import process_time as now\nend = now() + 0.3\nwhile now() < end: pass\nprint(flush=True)\ninput()"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()  # the child has had its 0.3 s
        pids = engine_cost.family(process.pid)
        assert pids[0] == process.pid and len(pids) == 2
        assert 0.3 <= engine_cost.cpu_s(pids) < 5
        assert engine_cost.cpu_s(pids[:1]) < engine_cost.cpu_s(pids)
        process.stdin.write("\n")
    assert engine_cost.cpu_s(pids) == 0, "processes that have ended"


def test_each_arm_is_made_ready_before_its_work_and_timed_without_that() -> None:
    seen: list[str] = []

    def ready(arm: str) -> list[int]:
        seen.append(f"ready {arm}")
        time.sleep(0.02)
        return [os.getpid()]

    def work(arm: str) -> None:
        seen.append(arm)
        time.sleep(0.005 if arm == "on" else 0)

    taken = engine_cost.measure({arm: lambda arm=arm: ready(arm) for arm in ARMS}, work, 2)  # type: ignore[misc]
    assert seen[::2] == [f"ready {arm}" for arm in seen[1::2]]
    assert all(s >= 0.01 for s in taken["seconds"]["on"]) and len(taken["seconds"]["on"]) == 2
    assert all(s < 0.04 for s in taken["seconds"]["off"]), "making ready was timed"


def test_an_interval_holds_the_planted_ratio_and_tells_it_from_none() -> None:
    draw = random.Random(3)
    off = [1 + draw.gauss(0, 0.02) for _ in range(60)]
    said = engine_cost.compared({
        "seconds": {"off": off, "on": [1.05 * s * (1 + draw.gauss(0, 0.01)) for s in off], "off again": off},
    })  # fmt: skip
    low, high = said["seconds"]["on / off"]["interval_95"]
    assert 1 < low <= 1.05 <= high < 1.06
    assert low <= said["seconds"]["on / off"]["median"] <= high
    assert said["seconds"]["off again / off"] == {"median": 1.0, "interval_95": [1.0, 1.0]}
