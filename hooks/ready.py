"""Waiting until the published table is active on this process's devices: servers do, and the capture of a graph.

What is captured keeps its kernels for the life of the graph, and many programs capture soon after making their
context on a GPU, when the table's kernels are not loaded there yet.  The hook's thread loads them; whoever waits only
asks it to hurry, holds nothing meanwhile, and goes on when the time is over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from gemmtuned.configs import clock
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.configs.unpatched import sleep

log = logging.getLogger("gemmtuned.hooks")
_LOOK_S: Final = 0.002
_ASK_S: Final = 0.25  # and again: what was loaded may have been overtaken by another device's context


class Ready:
    """A part of the hook's thread, and what others wait with.

    is_current: whether there is nothing to wait for; cheap, and called from any thread.  make_current: what the thread
    does about it.  wake: has the thread take its turns now.  wait_s: how long a capture may wait.
    """

    def __init__(
        self,
        *,
        is_current: Callable[[], bool],
        make_current: Callable[[], None],
        wake: Callable[[], None],
        wait_s: float,
    ) -> None:
        self._is_current, self._make_current, self._wake, self._wait_s = is_current, make_current, wake, wait_s
        self._asked = False
        self._logged: set[bool] = set()
        self._in_vain = False  # the last wait of a capture

    def due_s(self) -> float:
        """At once when somebody waits."""
        return 0.0 if self._asked else math.inf

    def turn(self) -> None:
        """Load what they wait for."""
        self._asked = False
        self._make_current()

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as the table is active, False when the time is over."""
        until_s = clock.monotonic() + timeout_s
        ask_s = 0.0
        while not self._is_current():
            now_s = clock.monotonic()
            if now_s >= until_s:
                return False
            if now_s >= ask_s:
                ask_s = now_s + _ASK_S
                self._asked = True
                self._wake()
            sleep(_LOOK_S)
        return True

    def before_capture(self) -> None:
        """Wait for it, wait_s at most; the first wait, and the first that was in vain, are logged.

        After one in vain captures wait no more until the table has become active.
        """
        if self._is_current():
            self._in_vain = False
            return
        if self._in_vain:
            return
        began_s = clock.monotonic()
        done = self.wait(self._wait_s)
        self._in_vain = not done
        took_s = clock.monotonic() - began_s
        if done in self._logged:
            return
        self._logged.add(done)
        if done:
            tell(log, logging.INFO, "a graph capture waited for the tuned table waited_s=%.2f", took_s)
        else:
            why = "a graph is captured without the tuned kernels: the table was not active within %g s"
            tell(log, logging.WARNING, f"{why} (GEMMTUNED_GRAPH_WAIT_S)", self._wait_s)
