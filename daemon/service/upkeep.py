"""What a daemon does for its database and its tables between two looks at the devices, a little at each turn.

The file is cared for (caretaker.py), counts of other users' programs come in, kernels that failed in programs go out of
use, what changed is published, the log is kept short and old counts are merged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import GemmtunedError, StoreBusy, StoreError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing.beside_the_loop import Publishing
from gemmtuned.daemon.publishing.prune import prune
from gemmtuned.daemon.publishing.published_folder import PublishedFolder
from gemmtuned.daemon.service.caretaker import Caretaker
from gemmtuned.daemon.timer import Timer

if TYPE_CHECKING:
    from gemmtuned.configs.solution import Environment
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")

ByDevice = Mapping[str, "Environment | None"]  # by device: of its worker, None before that has said it
LOOK_S: Final = 2.0  # routes that failed in programs, withdrawals by hand
RETRY_S: Final = 5.0  # after the disk refused to publish
INGEST_S: Final = 0.05  # for what members left; a page that is begun then is ended
INGEST_AGAIN_S: Final = 60.0  # after something was wrong with it
CHECKPOINT_S: Final = 60.0
ROLL_UP_S: Final = 100.0  # old sightings are merged (db/rollup.py)
ROLL_UP_FOR_S: Final = 0.1  # that a turn takes for it, at most
OVERDUE_S: Final = 6 * 3600.0  # not merged to the end for so long: then it is done while a worker measures, too
PROGRESS_S: Final = 60.0  # between two log lines on the rows of 0.1.0
LOOK_AROUND_S: Final = 10.0
PRUNE_S: Final = 86_400.0


class Upkeep:
    """Looks after store and tables of one daemon. quiet: a run in the foreground, which leaves slow work to a service.

    trouble: why the database cannot be written, or the tables; "" when they can.  trouble_since_s: since when.
    generation: of the store, when it was last published; -1 before.  elsewhere: environments whose problems wait for a
    daemon started elsewhere.
    """

    def __init__(self, store: Store, settings: Settings, *, quiet: bool) -> None:
        self.trouble = self._ingest_trouble = ""
        self.trouble_since_s = math.inf
        self.generation = -1
        self.elsewhere: list[dict[str, Any]] = []
        self.caretaker = Caretaker(store)
        self.publishing = Publishing(store, settings)
        self._published_folder = PublishedFolder(settings.config_dir)
        self._store, self._settings, self._quiet = store, settings, quiet
        self._stopping = self._full = False
        self._look, self._publish_again, self._checkpoint, self._look_around = Timer(), Timer(), Timer(), Timer()
        self._merge, self._ingest, self._progress = Timer(), Timer(), Timer()
        self._merged_s = self._pruned_s = float("-inf")

    def look(self, now_s: float, *, at_once: bool, rests: bool, ours: ByDevice) -> None:
        """Do what is due. at_once: something was solved; rests: no worker runs; ours: see ByDevice."""
        if not at_once and not self._look.is_due(now_s):
            return
        self._look.wait_until(now_s + LOOK_S)
        self._mind_room()
        try:
            if self.caretaker.look(now_s):
                self.publishing.forget()
                self.generation = -1  # compared with what is published before all else
            self._take_ingest(now_s)
            for gone in self._store.solutions.take_quarantined(now_s=now_s):
                logger.warning(
                    "withdrawn problem=%s backend=%s reason='reported by a program'", gone.problem, gone.backend
                )
            self._publish(now_s)
            if not self._quiet:  # a foreground run tunes for one kind of device at a time, and says itself what is left
                self._see_elsewhere(now_s, ours)
            if not self.publishing.runs:  # else each waits for its thread, or for its lock, and devices for the loop
                self._tidy(now_s, rests)
            self.trouble, self.trouble_since_s = "", math.inf
        except (GemmtunedError, OSError) as err:  # OSError: a home that is closed, a disk that does not answer
            self._look.wait_until(now_s + RETRY_S)
            if self.trouble != str(err):
                logger.warning("upkeep failed retry_s=%g reason=%r", RETRY_S, str(err))
            self.trouble, self.trouble_since_s = str(err), min(self.trouble_since_s, now_s)

    def _mind_room(self) -> None:
        """Say that the disk is full, and when it is not: we may have nothing to write while programs lose counts."""
        from gemmtuned.db import faults

        full = faults.no_room(self._store.path)
        if full and not self._full:
            logger.warning(
                "disk full path=%s what_to_do='free some space: programs keep their counts in memory, and lose them at "
                "their end'",
                self._store.path.parent,
            )
        elif self._full and not full:
            logger.info("disk has room again path=%s", self._store.path.parent)
        self._full = full

    def _tidy(self, now_s: float, rests: bool) -> None:
        if rests and self._checkpoint.is_due(now_s):
            self._checkpoint.wait_until(now_s + CHECKPOINT_S)
            self._store.checkpoint()
        self._merge_old(now_s, rests)
        self._prune(now_s, rests)

    def stop(self, now_s: float) -> None:
        """Publish what is left, in this thread, once all workers have left."""
        self.publishing.wait()
        self._publish_again.hurry()
        self._stopping = True
        self.look(now_s, at_once=True, rests=True, ours={})

    def _merge_old(self, now_s: float, rests: bool) -> None:
        """Keep the database small, a little at each turn: the looks at the devices do not wait for it."""
        overdue = not self._merged_s <= now_s < self._merged_s + OVERDUE_S  # a daemon may never rest
        if not self._merge.is_due(now_s) or not (rests or (overdue and not self._quiet)):
            return
        if self._store.rollup.roll_up(now_s=now_s, for_s=ROLL_UP_FOR_S):
            self._merged_s = now_s
            self._merge.wait_until(now_s + ROLL_UP_S)
            return
        if self._progress.is_due(now_s):
            self._progress.wait_until(now_s + PROGRESS_S)
            left = self._store.rollup.left_of_0_1_0()
            if left:
                logger.info("upgrading in slices left_percent=%.0f of='the counts of version 0.1.0'", 100 * left)
        if rests:
            self._look.hurry()  # the next turn goes on

    def _prune(self, now_s: float, rests: bool) -> None:
        """Once a day, and soon after the start: compiled kernels that nothing names."""
        if self._quiet or not rests or 0 <= now_s - self._pruned_s < PRUNE_S:
            return
        self._pruned_s = now_s
        prune(self._store, self._settings.home, self._settings.config_dir, self._settings.locks)

    def _take_ingest(self, now_s: float) -> None:
        """Counts of other users' programs, where the home is shared. What they wrote must not stop us."""
        if not self._ingest.is_due(now_s):
            return
        began_s = time.monotonic()
        try:
            self._store.ingest.take_from(self._settings.ingest, now_s=now_s, limit_s=INGEST_S)
            self._ingest_trouble = ""
            if time.monotonic() - began_s > INGEST_S:  # there is more
                self._look.hurry()
        except StoreBusy:
            raise
        except StoreError as err:
            if self._ingest_trouble != str(err):
                logger.warning("ingest file not taken reason=%r", str(err))
            self._ingest_trouble = str(err)
            self._ingest.wait_until(now_s + INGEST_AGAIN_S)

    def _publish(self, now_s: float) -> None:
        self._take_published(now_s)
        if self.publishing.runs:
            self._look.hurry()  # looked after at the next turn
            return
        if self._published_folder.changed():  # by another publisher, or by hand
            self.generation = -1
        if self._store.solutions.generation() != self.generation:
            if not self._publish_again.is_due(now_s):
                self._look.wait_until(self._publish_again.at_s)
                return
            self.publishing.begin(now_s, here=self._stopping)
            self._take_published(now_s)

    def _take_published(self, now_s: float) -> None:
        done = self.publishing.result()
        if done is not None:
            self.generation = done
            self._published_folder.keep()
            # Tables are written whole: with thousands of solutions, several verdicts share one publication
            self._publish_again.wait_until(now_s + 10 * self.publishing.took_s)

    def _see_elsewhere(self, now_s: float, ours: ByDevice) -> None:
        """Which environments wait for a daemon started elsewhere: another torch, another CPU."""
        if not self._look_around.is_due(now_s) or all(environment is None for environment in ours.values()):
            return  # before the first worker has spoken, nobody knows what it can reproduce
        self._look_around.wait_until(now_s + LOOK_AROUND_S)
        silent = {device for device, environment in ours.items() if environment is None}
        here = {environment.key for environment in ours.values() if environment is not None}
        waiting = self._store.resume.waiting(now_s=now_s)
        found = [row for row in waiting if row["device"] not in silent and row["environment"] not in here]
        for row in found:
            if row["environment"] not in {known["environment"] for known in self.elsewhere}:
                logger.warning(
                    "not ours to tune problems=%d environment=%r: start a daemon with that torch on that device",
                    row["problems"], row["environment"],
                )  # fmt: skip
        self.elsewhere = found
