"""Tuning in the foreground, as a process: what somebody asked for, and what it ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_home import HERE, Home
from fakes import FakeMonitor

from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.seats.request import HOPELESS, Request
from gemmtuned.daemon.seats.view import PUT_OFF_S
from gemmtuned.daemon.seats.worker import Deadlines, Worker
from gemmtuned.daemon.service.main import tune_now
from gemmtuned.db import queries

SEARCH = f"{HERE / 'planted_search.py'}:tune"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    for process in home.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    home.store.close()


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64)


def test_problems_never_seen_can_be_tuned_in_the_foreground(home: Home) -> None:
    seen: list[tuple[int, int]] = []
    done = tune_now(
        Request(problems=[problem(8), problem(29), problem(8)]),
        home.settings,
        progress=lambda n, total, doing: seen.append((n, total)),
        make_worker=lambda d: Worker(d, nice=0, search=SEARCH),
    )
    assert list(done.solutions) == [problem(8)]
    assert done.failed == {problem(29): "this one cannot be done"}
    assert seen[-1] == (2, 2)
    assert read_manifest(home.settings.config_dir) is not None
    assert home.store.check() == []


def test_what_cannot_be_timed_now_ends_a_foreground_run_without_a_verdict_and_stays_to_be_tuned(home: Home) -> None:
    began_s = time.monotonic()
    request = Request(problems=[problem(43), problem(8)])
    done = tune_now(request, home.settings, make_worker=lambda d: Worker(d, nice=0, search=SEARCH))

    assert list(done.solutions) == [problem(8)]
    assert done.put_off == {problem(43): "the CPU is in use"} and not done.failed
    assert time.monotonic() - began_s < PUT_OFF_S
    (row,) = queries.untuned(home.settings.db)
    assert (row["n"], row["state"], row["reason"]) == (43, "queued", "put off: the CPU is in use")
    assert queries.explain(home.settings.db, problem(43))[-1]["why"].endswith("(last time put off: the CPU is in use)")


def test_where_nothing_can_be_timed_a_foreground_run_does_not_try_all(home: Home) -> None:
    hopeless = [Problem(m=8, n=43, k=64 * i) for i in range(1, HOPELESS + 4)]
    tried: list[str] = []
    request = Request(problems=hopeless)

    def progress(_done: int, _of: int, now: str) -> None:
        tried.append(now.split(" ")[0])

    done = tune_now(request, home.settings, progress=progress, make_worker=lambda d: Worker(d, nice=0, search=SEARCH))

    assert set(done.put_off) == set(hopeless) and not done.failed
    reasons = list(done.put_off.values())
    assert reasons.count("the CPU is in use") == HOPELESS
    assert reasons.count(f"not tried, since {HOPELESS} in a row were put off") == 3
    assert not {str(problem) for problem in hopeless[HOPELESS:]} & set(tried)
    why = [row["reason"] for row in queries.untuned(home.settings.db)]  # all of them stay to be tuned
    assert (len(why), why.count("put off: the CPU is in use")) == (HOPELESS + 3, HOPELESS)


def test_a_verdict_from_before_is_not_told_as_that_of_a_run_which_was_put_off(home: Home) -> None:
    request = Request(problems=[problem(8)], again=True)

    def put_off(device: str) -> Worker:
        return Worker(device, nice=0, search=f"{Path(__file__).parents[1] / 'support/planted_search.py'}:not_now")

    tune_now(Request(problems=[problem(8)]), home.settings, make_worker=lambda d: Worker(d, nice=0, search=SEARCH))
    done = tune_now(request, home.settings, make_worker=put_off)

    assert done.solutions == {} and list(done.put_off) == [problem(8)]
    assert [s.problem for s in home.store.solutions.published()[1]] == [problem(8)]  # and stays in use


@pytest.mark.long
def test_what_was_given_up_or_withdrawn_is_tried_again_when_asked_for(home: Home) -> None:
    def once(n: int) -> bool:
        return bool(
            tune_now(
                Request(problems=[problem(n)]),
                home.settings,
                make_worker=lambda d: Worker(d, nice=0, search=SEARCH),
            ).solutions
        )

    assert not any(once(29) for _ in range(4))
    assert once(8)
    home.store.solutions.withdraw([problem(8)], reason="by hand", now_s=time.time())
    assert once(8)


def test_the_foreground_tunes_on_a_device_in_use(home: Home) -> None:
    busy = FakeMonitor(lambda now_s: 1.0)
    done = tune_now(
        Request(problems=[problem(8)]),
        home.settings,
        monitors=[busy],
        make_worker=lambda d: Worker(d, nice=0, search=SEARCH),
    )
    assert list(done.solutions) == [problem(8)]


def test_a_worker_that_cannot_start_ends_a_foreground_run_with_the_reason(home: Home, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('torch is broken')\n")

    def make(device: str) -> Worker:
        return Worker(device, nice=0, search=f"{broken}:tune", deadlines=Deadlines())

    from gemmtuned.daemon.seats import keeper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "START_AGAIN_S", 0.1)
        with pytest.raises(WorkerFailed, match="torch is broken"):
            tune_now(Request(problems=[problem(8)]), home.settings, make_worker=make)
