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
