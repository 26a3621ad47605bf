"""Asks a GPU's driver in a process of its own: a wounded driver can hang its caller for ever, and must not hang us.

One question at a time, one answer serves all GPUs of a turn, and nobody ever waits for one.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from gemmtuned.configs.settings import unhooked_env
from gemmtuned.daemon.leftovers import Leftovers

ANSWER_S: Final = 5.0
SHARE_S: Final = 0.09  # one answer serves all GPUs of a turn
RETRY_S: Final = 2.0  # after an error: the child may have to be started again each time
STALE_S: Final = 0.5  # once the next one is due for this long, the last answer is none

Facts = dict[str, Any]  # about one GPU, as the child gives them


def serve(answer: Callable[[], dict[str, Any]]) -> None:
    """CHILD side: one JSON line for every line of standard input, until that ends."""
    for _ in sys.stdin:
        sys.stdout.write(json.dumps(answer()) + "\n")
        sys.stdout.flush()


class Sampler:
    """Asks one child process; one that does not answer in time is replaced, and use is not known meanwhile.

    One that does not die when it is killed is waited for: no other is started beside it.

    module: `nvml_child` or `amdsmi_child`.  command: in its place, for tests.
    """

    def __init__(
        self,
        module: str = "nvml_child",
        *,
        command: list[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command or [sys.executable, "-m", f"gemmtuned.daemon.device.{module}"]
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._killed = Leftovers()
        self._answer: dict[str, Facts] = {}
        self._asked_s: float | None = None  # since when an answer is due
        self._answered_s = float("-inf")
        self.error = ""

    def facts(self) -> dict[str, Facts]:
        """Every GPU by UUID as last answered; empty when the driver has not answered in time. Never waits."""
        now_s = self._clock()
        if self._asked_s is None and now_s - self._answered_s >= (RETRY_S if self.error else SHARE_S):
            self._ask(now_s)
        if self._asked_s is not None:
            self._listen(now_s)
        return self._answer

    def wait(self) -> dict[str, Facts]:
        """As facts(), but waits for the first answer; for the start of the daemon."""
        until_s = self._clock() + ANSWER_S
        while not self.facts() and not self.error and self._clock() < until_s:
            time.sleep(0.02)
        return self._answer

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            self._killed.kill(child)

    def _ask(self, now_s: float) -> None:
        stuck = self._killed.alive()
        if stuck:
            self._fail(f"process {stuck[0]}, which asked the driver, cannot be killed: it is stuck in the driver")
            return
        try:
            if self._child is None or self._child.poll() is not None:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=unhooked_env(),
                )
            assert self._child.stdin is not None
            self._asked_s = now_s
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it said why before it ended
        except OSError as err:
            self._fail(f"cannot be started ({err})")

    def _listen(self, now_s: float) -> None:
        assert self._asked_s is not None
        if self._child is None or self._child.stdout is None:
            return
        if not select.select([self._child.stdout], [], [], 0)[0]:
            if now_s - self._asked_s > ANSWER_S:
                self._fail(f"no answer from the driver for {ANSWER_S:g} s")
            elif now_s - self._asked_s > STALE_S:  # not since the last answer: we may not have asked for a while
                self._answer = {}  # not known is busy; the answer may still come
            return
        try:
            raw = json.loads(self._child.stdout.readline())
        except ValueError:
            self._fail("the child that asks the driver ended without an answer")
            return
        self._asked_s, self._answered_s = None, now_s
        self.error = str(raw.get("error", ""))
        self._answer = {gpu["uuid"]: gpu for gpu in raw.get("gpus", [])}

    def _fail(self, why: str) -> None:
        self.close()
        self._asked_s, self._answered_s, self._answer = None, self._clock(), {}
        self.error = f"GPU monitor: {why}"
