"""How a seat asks the queue for work: as soon as one problem is done, else seldom enough to cost nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.daemon.timer import Timer

if TYPE_CHECKING:
    from gemmtuned.db.store import Work

ASK_S: Final = 1.0  # how often an empty queue is asked again
LONGEST_S: Final = 30.0


class Asking:
    """out_of_work: nothing waits that this device could begin now. trouble: why nothing can be leased."""

    def __init__(self, queue: WorkQueue, device_key: str) -> None:
        self.out_of_work = False
        self.trouble = ""
        self._queue, self._device_key = queue, device_key
        self._ask = Timer(LONGEST_S)

    def lease(self, environment: Environment | None, now_s: float) -> Work | None:
        """Lease what is worth most; with no environment, before a worker has named it, only look whether any waits."""
        if not self._ask.is_due(now_s):
            return None
        began_s = time.monotonic()
        work = None
        try:
            if environment is None:
                self.out_of_work = not self._queue.is_waited_for(now_s, self._device_key)
            else:
                work = self._queue.lease(environment, now_s)
                self.out_of_work = work is None
            self.trouble = ""
        except StoreError as err:
            self.out_of_work = True  # nothing that can be begun
            self.trouble = str(err)
        if work is None:  # else the next one is asked for as soon as this one is done
            took_s = time.monotonic() - began_s
            wait_s = min(max(ASK_S, 50 * took_s), LONGEST_S)  # 2 % of a core, however long the queue
            self._ask.wait_until(now_s + wait_s)
        return work

    def hurry(self) -> None:
        """Ask at the next turn."""
        self._ask.hurry()
