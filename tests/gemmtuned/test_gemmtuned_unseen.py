"""Where nothing was recorded no command says that all is well, and they name who had the hook."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command_line import HERE, TUNED, Cli, solution
from hooked import Home
from store_cases import new_file

from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.db.store import Store

ALL_WELL = "has a verdict"
COMMANDS = (
    ("untuned",),
    ("untuned", "--by", "layer"),
    ("coverage",),
    ("coverage", "--by", "layer"),
    ("status",),
    ("gains",),
)


def session(run: str, pid: int = 7, **more: object) -> Session:
    now_us = int(time.time() * 1e6)
    facts: dict[str, object] = {"path": "native", "generation": 0, "calls": 0}
    return Session(host="here", pid=pid, started_us=now_us, run=run, **{**facts, **more})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "home").mkdir()
    return Store(new_file(tmp_path / "home" / "tune.db"), locks=tmp_path / "home" / "locks")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_recorded_is_not_taken_for_success(call: Cli, store: Store, command: tuple[str, ...]) -> None:
    store.sightings.beat(session("vllm serve"), now_s=time.time())
    store.sightings.beat(session("off.py", pid=8, path="off", note="GEMMTUNED_NATIVE=0"), now_s=time.time())
    store.close()
    said = call(*command).stdout

    assert ALL_WELL not in said
    if command != ("gains",):  # it speaks of solutions, not of programs
        assert "1 process ran with the hook and no product of theirs was recorded" in said.replace("\n", " ")
        assert "vllm serve" in said and "GEMMTUNED_NATIVE=0" in said


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_program_that_calls_nothing_beside_one_that_does_is_no_matter(
    call: Cli,
    store: Store,
    command: tuple[str, ...],
) -> None:
    store.sightings.beat(session("api server"), now_s=time.time())
    store.sightings.add("worker", HERE, [Sighting(TUNED, "miss", 10)], now_s=time.time())
    store.close()

    assert "no product of theirs" not in call(*command).stdout


def test_everything_recorded_has_a_verdict_once_it_has(call: Cli, store: Store) -> None:
    assert "so nothing waits" in call("untuned").stdout
    assert json.loads(call("untuned", "--json").stdout)["recorded"] == 0
    now_s = time.time()
    store.sightings.add("worker", HERE, [Sighting(TUNED, "miss", 10)], now_s=now_s)
    work = store.leases.lease_next("test", HERE, now_s=now_s, hold_s=60, problems=[TUNED])
    store.solutions.install(work, [solution(TUNED)], environment=HERE, now_s=now_s)
    store.close()

    assert "Everything that was recorded has a verdict." in call("untuned").stdout
    assert json.loads(call("untuned", "--json").stdout)["recorded"] == 1


KNOWN = {
    "counted": ["_C::onednn_mm", "_C::awq_gemm"],
    "left": {"_C::machete_mm": "it is another"},
    "unseen": ["FlashInfer's functions"],
}


@pytest.mark.parametrize("command", [("coverage",), ("coverage", "--by", "layer"), ("status",)], ids=" ".join)
def test_the_share_of_an_engines_ways_to_products_is_said(call: Cli, store: Store, command: tuple[str, ...]) -> None:
    store.sightings.beat(session("vllm", operators=json.dumps(KNOWN), calls=3), now_s=time.time())
    store.sightings.beat(
        session("vllm", pid=8, operators=json.dumps({"counted": ["_C::gptq_gemm"]})), now_s=time.time()
    )
    store.sightings.beat(session("old", pid=9, operators=json.dumps(KNOWN)), now_s=time.time() - 8 * 86400)
    store.sightings.beat(session("cut short", pid=10, operators=json.dumps(KNOWN)[:30]), now_s=time.time())
    store.close()
    said = " ".join(call(*command).stdout.split())

    assert "vllm: calls of 3 of its 5 known ways to products beside torch's are recorded" in said
    assert "left alone: _C::machete_mm (it is another)" in said
    assert "not counted where it is called: FlashInfer's functions" in said
    assert "old:" not in said and "cut short:" not in said
    facts = json.loads(call(*command, "--json").stdout)["engine_paths"]
    assert [(one["run"], one["share"]) for one in facts] == [("vllm", 0.6)]


def test_doctor_names_what_of_an_engine_is_not_seen(call: Cli, store: Store) -> None:
    store.sightings.beat(session("vllm", operators=json.dumps(KNOWN)), now_s=time.time())
    store.sightings.beat(
        session("sgl", pid=8, operators=json.dumps({"counted": ["sgl_kernel::fp8_scaled_mm"]})), now_s=time.time()
    )
    store.close()
    checks = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]
    engines = {row["found"].partition(":")[0]: row["result"] for row in checks if row["name"] == "engines"}

    assert engines == {"vllm": "WARN", "sgl": "PASS"}
    (row,) = [row for row in checks if row["name"] == "not counted"]
    assert "quantized::linear" in row["found"]


@pytest.mark.parametrize("ended", [False, True])
def test_calls_that_were_not_counted_are_told_after_the_programs_end_too(call: Cli, store: Store, ended: bool) -> None:
    now_s = time.time()
    wide = session("wide.py", calls=131_040, dropped=94_464)
    (store.sightings.end_session if ended else store.sightings.beat)(wide, now_s=now_s)
    store.sightings.end_session(session("last month", pid=8, calls=1, dropped=9), now_s=now_s - 8 * 86400)
    store.close()

    for command in (("coverage",), ("coverage", "--by", "layer"), ("status",)):
        said = " ".join(call(*command).stdout.split())
        assert "wide.py: 94,464 calls not counted: too many problems" in said
        assert json.loads(call(*command, "--json").stdout)["dropped_calls"] == {"wide.py": 94_464}
    checks = json.loads(call("doctor", "--quick", "--json").stdout)["checks"]
    said_by = [row for row in checks if row["name"] == "programs" and "calls not counted" in row["found"]]
    assert [("wide.py" in row["found"], row["result"]) for row in said_by] == [(True, "WARN")]


@pytest.mark.soak  # the database takes seconds for so many problems
def test_more_problems_than_a_thread_holds_are_told_after_the_programs_end(home: Home) -> None:
    home.run(
        """
        import torch
        x, w = torch.zeros(70_000, 1), torch.zeros(1, 1)
        for m in range(1, 70_001):
            torch.mm(x[:m], w)
        """,
        GEMMTUNED_FLUSH_S="1000",  # all in the last flush, which keeps 65,536 and has two seconds
    )
    lost = 70_000 - home.calls()
    assert lost >= 4464
    report = """
        import sys
        sys.argv[1:] = {}
        from gemmtuned.cli import main
        try:
            main()
        except SystemExit:
            pass
        """
    for command in (["coverage"], ["status"], ["doctor", "--quick"]):
        said = " ".join(home.run(report.format(command), AITER_TUNE_GEMM="0").out.split())
        assert f"{lost:,} calls not counted" in said, command
