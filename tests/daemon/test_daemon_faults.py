"""Every planted fault ends in one failed candidate with its reason, and nothing else is lost: a real search."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Deadlines, Worker
from gemmtuned.daemon.service.main import tune_now
from gemmtuned.db import queries

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_faults.py'}:tune"
FAULTY = Problem(m=9, n=24, k=200, dtype="fp32", threads=1)
SHORT = Problem(m=9, n=40, k=200, dtype="fp32", threads=1)
SOUND = Problem(m=9, n=32, k=200, dtype="fp32", threads=1)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_planted_faults_are_recorded_with_their_reason_and_never_published(tmp_path: Path) -> None:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})

    def make(device: str) -> Worker:
        return Worker(device, nice=0, search=SEARCH, deadlines=Deadlines(candidate_s=5.0, gflop_s=0.0))

    began_s = time.monotonic()
    done = tune_now(Request(problems=[FAULTY, SHORT, SOUND]), settings, make_worker=make)
    assert {p: s.backend for p, s in done.solutions.items()} == {FAULTY: "torch", SOUND: "torch"}
    assert list(done.put_off) == [SHORT], "what could not be tried may win another day"
    assert time.monotonic() - began_s < 120

    said: dict[str, tuple[str, str]] = {}
    for row in queries.trials(settings.db):
        if row["backend"].startswith("planted") and row["outcome"] not in ("ok", "slower"):
            said[row["backend"]] = (row["outcome"], row["note"])
    outcomes = {backend: outcome for backend, (outcome, _) in said.items()}
    assert outcomes == {
        "planted-hang": "hang", "planted-memory": "oom", "planted-address": "crash", "planted-oom-kill": "hindered",
        "planted-beside": "wrong", "planted-49-of-50": "wrong", "planted-nan": "wrong",
    }  # fmt: skip
    for backend, words in (
        ("planted-hang", "past the deadline"),
        ("planted-memory", "memory"),
        ("planted-address", "illegal memory access"),
        ("planted-oom-kill", "out of memory"),
        ("planted-beside", "beside"),
        ("planted-49-of-50", "1 of 216 elements off"),
        ("planted-nan", "nan"),
    ):
        assert words in said[backend][1], said[backend]
    assert all(row["backend"] == "torch" for row in queries.solutions(settings.db))
