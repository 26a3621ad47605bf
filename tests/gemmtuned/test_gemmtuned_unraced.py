"""Reports say which calls of an engine's operator run its own kernel, since the solution was not raced beside that."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command_line import HERE, TUNED, Cli, solution

from gemmtuned.configs.beside import Peer, text_of
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.db.store import Store

CUTLASS = "_C::cutlass_scaled_mm"
BESIDE = text_of({"sglang_fp8": Peer("0.4.4", 1.25)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home" / "tune.db", locks=tmp_path / "home" / "locks")
    now_s = time.time()
    store.sightings.add("vllm", HERE, [Sighting(TUNED, "miss", 10), Sighting(TUNED, "exact", 4)], now_s=now_s)
    store.solutions.install(None, [solution(TUNED, beside=BESIDE)], environment=HERE, now_s=now_s)
    facts = Session(host="here", pid=7, started_us=int(now_s * 1e6), run="vllm", path="native", generation=1, calls=14)
    store.sightings.beat(facts, now_s=now_s)
    return store


@pytest.mark.parametrize(
    "command", [("coverage",), ("coverage", "--by", "layer"), ("status",), ("doctor", "--quick")], ids=" ".join
)
def test_what_waits_for_a_race_is_told_with_the_way_out(call: Cli, store: Store, command: tuple[str, ...]) -> None:
    assert CUTLASS not in call(*command).stdout

    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS)], now_s=time.time())
    store.close()
    said = " ".join(call(*command).stdout.split())

    assert f"{CUTLASS} runs its own kernel for 1 problem that has a faster one than torch's" in said
    assert "A daemon that runs where that is installed races them" in said or command[0] == "doctor"


def test_json_says_it_too(call: Cli, store: Store) -> None:
    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS), (TUNED, "_C::of_a_later_version")], now_s=time.time())
    store.close()
    [row] = json.loads(call("coverage", "--json").stdout)["unraced"]
    assert (row["problem"], row["operators"], row["missed"]) == (str(TUNED), f"{CUTLASS} _C::of_a_later_version", 10)
    assert json.loads(call("status", "--json").stdout)["unraced_problems"] == 1
    checks = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]
    found = {row["found"].partition(" ")[0]: (row["result"], row["fix"]) for row in checks if row["name"] == "engines"}
    assert found[CUTLASS] == ("WARN", "run the daemon in the environment that the engine is installed in")


def test_explain_says_beside_what_a_solution_was_raced_and_whose_calls_it_does_not_serve(
    call: Cli, store: Store
) -> None:
    before = " ".join(call("explain", str(TUNED)).stdout.split())
    assert "raced beside sglang_fp8 0.4.4 (1.25x)" in before and CUTLASS not in before

    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS)], now_s=time.time())
    store.close()
    said = " ".join(call("explain", str(TUNED)).stdout.split())

    assert f"calls of {CUTLASS} run its own kernel, for the solution was not raced beside that of vllm" in said
    assert "run the daemon in the environment that the engine is installed in" in said


@pytest.mark.parametrize(
    ("peer", "reason", "result", "fix"),
    [
        (
            Peer("0.32.0", 1.25),
            "raced beside that of vllm 0.32.0, and the program has another one",
            "WARN",
            "run the daemon in the environment of the program",
        ),
        (Peer("0.32.0", None), "raced where that of vllm 0.32.0 does not run this problem", "PASS", ""),
    ],
)
def test_a_solution_that_was_raced_all_the_same_is_not_said_to_wait_for_another_race(
    call: Cli, store: Store, peer: Peer, reason: str, result: str, fix: str
) -> None:
    """The program has an older version, or the kernel does not run the problem where the daemon is."""
    store.solutions.install(
        None, [solution(TUNED, beside=text_of({"vllm_cutlass": peer}))], environment=HERE, now_s=time.time()
    )
    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS)], now_s=time.time())
    store.close()

    status, explained = (" ".join(call(*command).stdout.split()) for command in (("status",), ("explain", str(TUNED))))
    assert f"a faster one than torch's: it was {reason}" in status and f"for the solution was {reason}" in explained
    assert ("A daemon that runs where the program runs races them" in status) == bool(fix)
    assert "that is installed" not in status and "engine is installed in" not in explained
    checks = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]
    [found] = [row for row in checks if row["found"].startswith(CUTLASS)]
    assert (found["result"], found["fix"] or "") == (result, fix) and reason in found["found"]
