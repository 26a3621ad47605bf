"""What a candidate fell short of may be there again a minute later: it is tried again, and no verdict says it lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service.main import tune_now
from gemmtuned.db import queries

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_passing.py'}:tune"
HINDERED = Problem(m=9, n=24, k=64, dtype="fp32", threads=1)
OUTCOMES = {
    "full_disk": "hindered", "no_compiler": "hindered", "compiler_killed": "hindered",
    "assembler_on_a_full_disk": "hindered", "no_memory": "oom", "worker_killed": "hindered",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_what_could_not_be_tried_is_no_verdict_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = tmp_path / "lacks"
    lacks.mkdir()
    for name in OUTCOMES:
        (lacks / name).touch()
    monkeypatch.setenv("PLANTED_LACKS", str(lacks))
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path / "home")})

    def run() -> tuple[bool, str, dict[str, str]]:
        done = tune_now(
            Request(problems=[HINDERED]), settings, make_worker=lambda device: Worker(device, nice=0, search=SEARCH)
        )
        rows = sorted(queries.trials(settings.db), key=lambda row: row["started"])
        return HINDERED in done.solutions, done.put_off.get(HINDERED, ""), {r["backend"]: r["outcome"] for r in rows}

    solved, why, outcomes = run()
    assert not solved and not list(queries.solutions(settings.db)), "no verdict"
    assert why.startswith("6 of the candidates could not be tried, such as ")
    assert {name: outcomes[name] for name in OUTCOMES} == OUTCOMES

    for name in OUTCOMES:
        (lacks / name).unlink()
    solved, why, outcomes = run()
    assert solved and not why
    assert {outcomes[name] for name in OUTCOMES} <= {"ok", "slower"}, outcomes
