"""Workers that somebody stops or freezes, and what they leave to a daemon that is process 1 of a container."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from worker_messages import said

from gemmtuned.configs.errors import WorkerDied, WorkerKilled
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.leftovers import Leftovers, alive_in_group
from gemmtuned.daemon.protocol.wire import Found, Message, Order, Trial
from gemmtuned.daemon.seats.worker import Deadlines, Worker

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker that is at a problem with this n."""
    started: list[Worker] = []

    def make(n: int, seconds: float) -> Worker:
        limits = {"prepare_s": seconds, "candidate_s": seconds, "may_compile_s": seconds, "other_s": seconds}
        started.append(Worker("cpu", nice=0, search=SEARCH, deadlines=Deadlines(hello_s=20, gflop_s=0, **limits)))
        worker, problem = started[-1], Problem(m=8, n=n, k=64)
        said(worker, lambda heard: worker.environment is not None)
        worker.tune(Order((problem,), "exact", problem, "eager", ()))
        return worker

    yield make
    for worker in started:
        assert worker.stop()


def is_at_bad(heard: list[Message]) -> bool:
    return any(isinstance(m, Trial) and m.candidate.backend == "bad" for m in heard)


def answered(heard: list[Message]) -> bool:
    return bool(heard) and isinstance(heard[-1], Found)


def test_a_worker_that_was_frozen_with_its_daemon_has_its_time_all_the_same(start: Start) -> None:
    """By `docker pause`, a virtual machine that is stopped, or Ctrl-Z and fg."""
    worker = start(53, 2.5)
    said(worker, is_at_bad)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(worker.pid, signal.SIGCONT)
    said(worker, answered)


def test_a_worker_that_somebody_stopped_is_not_said_to_hang(start: Start) -> None:
    """It is tried again as one that was killed: no candidate is to blame."""
    worker = start(13, 0.4)
    said(worker, is_at_bad)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerKilled, match="stopped from outside"):
        said(worker, lambda heard: False)


@pytest.mark.parametrize("how", ["worker", "leftovers"])
def test_process_1_of_a_container_keeps_no_zombies_of_those_that_it_has_ended(start: Start, how: str) -> None:
    """Whoever is left without a parent becomes its child; here by asking Linux for that (PR_SET_CHILD_SUBREAPER)."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(36, 1, 0, 0, 0) == 0
    try:
        if how == "worker":
            worker = start(41, 5.0)  # leaves a child behind and aborts
            with pytest.raises(WorkerDied, match="SIGABRT"):
                said(worker, answered)
            assert worker.stop()
            leader = worker.pid
        else:
            code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); sys.stdin.read()"
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            leader, leftovers = process.pid, Leftovers()
            until = time.monotonic() + 10
            while len(alive_in_group(leader)) < 2:
                assert time.monotonic() < until
                time.sleep(0.01)
            leftovers.kill(process, group=True)
            while leftovers.alive() or leftovers._groups:
                assert time.monotonic() < until
                time.sleep(0.01)
        with pytest.raises(ChildProcessError):
            os.waitpid(-leader, os.WNOHANG)
    finally:
        prctl(36, 0, 0, 0, 0)
