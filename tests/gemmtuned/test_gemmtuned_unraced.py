"""Reports say which calls of an engine's operator run its own kernel, since the solution was not raced beside that."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command_line import HERE, TUNED, Cli, solution

from gemmtuned.configs.engine_races import OPERANDS, Peer, text_of
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.db import queries, watched
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


def test_only_what_hits_of_a_problem_that_waits_is_covered_and_faster(call: Cli, store: Store, tmp_path: Path) -> None:
    """4 of 14 calls hit: those of torch's own. The solution takes half of torch's time."""
    database, share = store.path, 4 / 14
    before = json.loads(call("coverage", "--json").stdout)["total"]
    assert before["covered_share"] == before["faster_share"] == 1.0 and before["gain"] == pytest.approx(2)

    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS)], now_s=time.time())
    told = json.loads(call("coverage", "--json").stdout)
    total, [row] = told["total"], told["rows"]
    assert (row["tuned_problems"], row["covered_calls"], row["unserved_problems"], row["unserved_calls"]) == (
        0,
        4,
        1,
        10,
    )
    assert total["covered_share"] == pytest.approx(share) == total["faster_share"] and total["best_share"] == 0
    assert total["gain"] == pytest.approx(14 / (10 + 4 / 2))
    assert "not covered: 10 calls that solutions may not serve (below)" in call("coverage").stdout
    layers = json.loads(call("coverage", "--by", "layer", "--json").stdout)
    assert layers["total"]["covered_share"] == pytest.approx(share) and layers["total"]["gain"] == total["gain"]
    assert [row["calls"] for row in layers["rows"]] == [14] and layers["rows"][0]["none"] == pytest.approx(10 / 14)
    assert json.loads(call("status", "--json").stdout)["covered_share"] == pytest.approx(share)
    assert watched.answered(database) == pytest.approx({"faster": 400.0, "best": 0.0, "none": 1000.0})
    answers = {row["outcome"]: row for row in queries.ask(database, "SELECT * FROM traffic")}
    assert (answers["miss"]["answer"], answers["miss"]["now_us"], answers["miss"]["backend"]) == ("none", 1000, None)
    assert (answers["exact"]["answer"], answers["exact"]["now_us"]) == ("faster", 200)
    [count] = store.fleet_sync.counts(HERE, now_s=time.time(), limit=10)
    assert count["covered"] == pytest.approx(share)
    call("report", "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "no verdict yet" in page and f"{CUTLASS} runs its own kernel for 1 problem" in page

    store.solutions.install(None, [solution(TUNED, beside=BESIDE)], environment=HERE, now_s=time.time())
    assert json.loads(call("coverage", "--json").stdout)["total"]["covered_share"] == 1.0, "raced again"
    store.close()


@pytest.mark.parametrize(
    "command", [("coverage",), ("coverage", "--by", "layer"), ("status",), ("explain", str(TUNED))], ids=" ".join
)
def test_operands_that_a_solution_does_not_take_are_told(call: Cli, store: Store, command: tuple[str, ...]) -> None:
    assert "with operands" not in call(*command).stdout

    store.sightings.add_wanted(HERE, [(TUNED, OPERANDS)], now_s=time.time())
    said = " ".join(call(*command).stdout.split())
    assert "with operands, too, that" in said and "engine" not in said and str(TUNED) in said
    assert json.loads(call("coverage", "--json").stdout)["unraced"] == []
    assert json.loads(call("status", "--json").stdout)["unfit_problems"] == 1
    store.sightings.add_wanted(HERE, [(TUNED, CUTLASS)], now_s=time.time())
    store.close()
    told = json.loads(call("coverage", "--json").stdout)
    assert [row["operators"] for row in told["unraced"]] == [CUTLASS] and len(told["unfit"]) == 1


def test_gains_say_beside_what_they_are_where_an_engines_kernel_was_raced(call: Cli, store: Store) -> None:
    store.sightings.add("vllm", HERE, [Sighting(TUNED, "exact", 4)], now_s=time.time())
    told = " ".join(call("gains").stdout.split())
    assert "1 problem was raced beside engines' kernels, too: what was saved is beside torch's own product" in told

    store.solutions.install(None, [solution(TUNED)], environment=HERE, now_s=time.time())
    store.sightings.add("vllm", HERE, [Sighting(TUNED, "exact", 4)], now_s=time.time())
    assert "beside engines" not in call("gains").stdout
    store.close()


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
