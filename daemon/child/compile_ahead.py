"""CHILD side: have candidates compiled by a few processes before the device is used.

A candidate takes an eighth of a second to a whole one of CPU time and none of the device's; afterwards the worker finds
the binaries in the compiler's cache.  What crashes its compiler or takes too long is refused without being loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import IO, Final

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import unhooked_env
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.leftovers import Leftovers
from gemmtuned.daemon.process_output import last_line, output_file, signal_name

JOB_S: Final = 60.0  # the first of a process imports Triton, at nice 19
MOST: Final = 8  # processes; half of the cores where these are fewer
GONE_S: Final = 0.5  # within which a killed process is gone, unless it is stuck
# Compilers that end, or do not start, one after the other, when none has ever answered: the candidates are not to blame
BROKEN: Final = 3


class Compilers:
    """Processes that live as long as their owner; each has one job at a time."""

    def __init__(self, count: int | None = None, *, command: Sequence[str] = (), job_s: float = JOB_S) -> None:
        self._count = count or max(1, min(MOST, (os.cpu_count() or 2) // 2))
        self._command = [*(command or (sys.executable, "-m", "gemmtuned.daemon.child.compile_main")), str(os.getpid())]
        self._job_s = job_s
        self._idle: list[subprocess.Popen[bytes]] = []
        self._killed = Leftovers()
        self._output: dict[subprocess.Popen[bytes], IO[bytes] | None] = {}  # for its last line
        self._heard = False  # whether any has ever answered
        self._ended = 0  # those that ended by themselves before that, or did not start

    def run(
        self,
        candidates: Sequence[Candidate],
        problem: Problem,
        device: Device,
        *,
        before: Callable[[Candidate], object] = lambda candidate: None,
    ) -> dict[Candidate, str]:
        """Compile all of them for `device`; those that failed, with the reason. before: called with each that begins.

        Raises TryLater when no compiler works here: a search without its kernels would find for torch.
        """
        waiting = deque(candidates)
        failed: dict[Candidate, str] = {}
        busy: dict[subprocess.Popen[bytes], tuple[Candidate, float]] = {}
        while waiting or busy:
            stuck = self._killed.alive()
            if waiting and not busy and len(stuck) >= self._count:
                stuck = self._killed.wait(GONE_S)
                if len(stuck) >= self._count:
                    why = f"compiler {stuck[0]} cannot be killed: it is stuck at a disk or in a driver"
                    return {**failed, **dict.fromkeys(waiting, why)}
            while waiting and len(busy) + len(stuck) < self._count:
                candidate = waiting.popleft()
                try:
                    process = self._idle.pop() if self._idle else self._start()
                except OSError as err:
                    failed[candidate] = f"no process to compile in: {err.strerror or err}"
                    self._count_broken(failed[candidate], busy)
                    continue
                before(candidate)
                busy[process] = (candidate, time.monotonic() + self._job_s)
                _ask(process, candidate, problem, device)
            for process, reason in self._answers(busy):
                candidate, _ = busy.pop(process)
                if reason is None:
                    failed[candidate] = self._why_it_ended(process)
                    code = process.returncode
                    self._forget(process)
                    if code is not None:
                        self._count_broken(failed[candidate], busy)
                else:
                    self._idle.append(process)
                    self._heard = True
                    if reason:
                        failed[candidate] = reason
        return failed

    def close(self) -> None:
        """End the processes."""
        self._drop(self._idle)
        self._idle.clear()
        self._killed.wait(GONE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        output = output_file()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output or subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=unhooked_env(CUDA_VISIBLE_DEVICES=""),
            )
        except OSError:
            if output is not None:
                output.close()
            raise
        self._output[process] = output
        return process

    def _drop(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            self._forget(process)

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        self._killed.kill(process)
        output = self._output.pop(process)
        if output is not None:
            output.close()

    def _count_broken(self, why: str, busy: Iterable[subprocess.Popen[bytes]]) -> None:
        """One more that ended or did not start. Raises TryLater once that is no fault of candidates."""
        self._ended += not self._heard
        if not self._heard and self._ended >= BROKEN:
            self._drop(busy)
            raise TryLater(f"no kernel can be compiled here: {why}")

    def _why_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        """Say in words why it ended, with its last line of output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GONE_S)  # its output ends a moment before it does
        code = process.returncode
        if code is None:
            return f"its compiler took more than {self._job_s:g} s, or answered nonsense"
        how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        last = last_line(self._output[process])
        return f"its compiler ended {how}{f': {last}' if last else ''}"

    def _answers(
        self, busy: dict[subprocess.Popen[bytes], tuple[Candidate, float]]
    ) -> list[tuple[subprocess.Popen[bytes], str | None]]:
        """The reason that each process gave which has answered; None for one that ended or is past its deadline."""
        if not busy:
            return []
        soonest = min(until for _, until in busy.values())
        outputs = {process.stdout: process for process in busy if process.stdout is not None}
        ready, _, _ = select.select(list(outputs), [], [], max(soonest - time.monotonic(), 0.0))
        done: list[tuple[subprocess.Popen[bytes], str | None]] = []
        for output in ready:
            try:
                reason = json.loads(output.readline())
            except ValueError:
                reason = None
            done.append((outputs[output], reason if isinstance(reason, str) else None))
        now = time.monotonic()
        late = [process for process, (_, until) in busy.items() if process.stdout not in ready and now >= until]
        return done + [(process, None) for process in late]


def _ask(process: subprocess.Popen[bytes], candidate: Candidate, problem: Problem, device: Device) -> None:
    job = {"backend": candidate.backend, "config": candidate.config, "problem": problem.row(), "device": asdict(device)}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its output has ended, too, which is looked at next
        process.stdin.write(json.dumps(job).encode() + b"\n")
