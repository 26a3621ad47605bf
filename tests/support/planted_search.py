"""A search for workers under test: no torch, each behaviour chosen by the problem's n. Loaded by path in the child.

n: 13 hangs, 17 aborts, 19 is killed from outside, 23 eats memory, 29 raises, 31 floods its output and ends, 37 takes
half a minute, 53 a second, as it says that it may, 41 leaves a child behind and aborts, 43 says that it cannot be done
now, 47 aborts where `bad` races with another candidate; everything else finds that `fast` wins, or torch where `fast`
may not be tried.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

from gemmtuned.configs.errors import CandidateFailed, TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import MAY_COMPILE, RACING, Trial

TORCH, SLOW, FAST, BAD = (Candidate(name) for name in ("torch", "slow", "fast", "bad"))
DEVICE = Device(key="cpu-planted", kind="cpu", name="planted", arch="x86_64", units=2)
ENVIRONMENT = Environment(DEVICE, {"torch": "1", "slow": "1", "fast": "1", "bad": "1"})


def environment(device: object) -> Environment:
    return ENVIRONMENT


def tune(
    members: Sequence[Problem],
    covers: str,
    target: Problem,
    environment: Environment,
    *,
    mode: str,
    skip: Collection[Candidate],
    emit: Callable[[Trial], None],
    options: SearchOptions,
) -> Solution:
    if target.n == 43:
        not_now()
    offered = [one for one in (SLOW, BAD, FAST) if one not in skip and options.allows(one)]
    for candidate in (TORCH, *offered[: options.first]):
        for problem in members:
            started_us = time.time_ns() // 1000
            note = MAY_COMPILE if problem.n == 53 else ""
            emit(Trial(problem, candidate, "start", None, None, "", note, started_us))
            if candidate == BAD:
                misbehave(problem)
                if problem.n == 47 and not options.torchs_alone:
                    emit(Trial(problem, candidate, "start", None, None, "", RACING, started_us))
                    os.abort()
            us = {TORCH: 100.0, SLOW: 150.0, FAST: 50.0, BAD: 200.0}[candidate]
            time.sleep(pause_s)
            outcome = "slower" if us > 100 else "ok"
            emit(Trial(problem, candidate, "screen", us, 1e-7, outcome, "", started_us))
    won = FAST in offered[: options.first]
    return Solution(
        problem=target, device=environment.device.key, mode=mode, covers=covers, backend="fast" if won else "torch",
        config="{}", stamp="1", us=50.0 if won else 100.0, baseline_us=100.0, gain_low=1.9 if won else 1.0,
        err=1e-7, baseline_err=1e-7, state="published" if won else "default_best",
    )  # fmt: skip


def not_now(*order: object, **options: object) -> Solution:
    raise TryLater("the CPU is in use")


pause_s = 0.002


def misbehave(problem: Problem) -> None:
    if problem.n == 13:
        while True:
            time.sleep(1)
    elif problem.n == 17:
        os.abort()
    elif problem.n == 19:
        os.kill(os.getpid(), signal.SIGKILL)
    elif problem.n == 23:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        hoard = []
        while True:
            hoard.append(bytearray(64 << 20))
    elif problem.n == 29:
        raise CandidateFailed("this one cannot be done")
    elif problem.n == 31:
        sys.stdout.write("noise\n" * 200_000)
        print("\x1b[31mlast words", file=sys.stderr, flush=True)
        os._exit(7)
    elif problem.n in (37, 53):
        time.sleep(30 if problem.n == 37 else 1)
    elif problem.n == 41:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        os.abort()
