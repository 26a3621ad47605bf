"""Compile for a GPU while others use it: nothing of it is touched, and once it is idle the kernels are there.

One niced process at a time, for the problems worth most; it compiles into the cache that workers use.  It is ended
when a worker begins to measure, so that the two do not compete for cores, and when the operator pauses.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import unhooked_env
from gemmtuned.configs.solution import Device
from gemmtuned.daemon.leftovers import Leftovers
from gemmtuned.daemon.timer import Timer

LOOK_S: Final = 10.0  # how often an empty list is asked for again
GONE_S: Final = 0.1  # within which a killed process is gone, unless it is stuck
AT_ONCE: Final = 16  # problems given to one process


class Ahead:
    """The parent's half. without: as Pieces'. command: in place of daemon/child/ahead_main.py, and nice, for tests."""

    def __init__(self, command: Sequence[str] = (), *, nice: int = 19, without: Sequence[str] = ()) -> None:
        self._nice, self._without = nice, json.dumps(without)
        self._command = [*(command or (sys.executable, "-m", "gemmtuned.daemon.child.ahead_main"))]
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = Leftovers()
        self._given: list[tuple[str, Problem]] = []  # to the process, in order; a line of its output ends each
        self._done: set[tuple[str, Problem]] = set()
        self._next = Timer(LOOK_S)

    def wants(self, now_s: float) -> bool:
        """Whether it can take problems now: asking the store for them costs something."""
        self._listen()
        if self._process is not None or self._killed.alive():
            return False
        return self._next.is_due(now_s)

    def begin(self, device: Device, problems: Sequence[Problem], now_s: float) -> None:
        """Compile for these what was not compiled before. What cannot be started is not: it only saves time."""
        self._next.wait_until(now_s + LOOK_S)
        self._given = [(device.key, p) for p in problems if (device.key, p) not in self._done][:AT_ONCE]
        if not self._given:
            return
        lines = b"".join(json.dumps(problem.row()).encode() + b"\n" for _, problem in self._given)
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [*self._command, json.dumps(asdict(device)), str(os.getpid()), str(self._nice), self._without],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,  # one kill reaches the compilers it started
                env=unhooked_env(CUDA_VISIBLE_DEVICES=""),
            )
            assert self._process.stdin is not None
            self._process.stdin.write(lines)  # far less than a pipe holds
            self._process.stdin.close()

    def stop(self) -> None:
        """End it and the compilers it started."""
        self._listen()
        process, self._process = self._process, None
        if process is not None:
            self._killed.kill(process, group=True)
            self._killed.wait(GONE_S)

    def _listen(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        while select.select([self._process.stdout], [], [], 0)[0]:
            said = os.read(self._process.stdout.fileno(), 4096)
            if not said:
                # Whatever ended it, the problem it was at is not given again: it may be what ended it
                self._done.update(self._given[:1])
                self._killed.kill(self._process, group=True)
                self._killed.wait(GONE_S)
                self._process = None
                return
            for _ in range(min(said.count(b"\n"), len(self._given))):
                self._done.add(self._given.pop(0))
