"""The daemon: look at the devices, lease, have a worker measure, publish; one turn at a time.

`Daemon.turn(now_s)` does one turn and returns; only `main.py` loops and sleeps.  All parts are injected, so a day
of its life is a test of milliseconds.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import GemmtunedError, StoreBusy, StoreError, TableError
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.shipped import shipped
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.notice import Notice, SeatNotice, write_notice
from gemmtuned.daemon.publishing.beside_the_loop import Publishing
from gemmtuned.daemon.publishing.prune import prune
from gemmtuned.daemon.publishing.publish import take_back
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.seat import Seat, Solved
from gemmtuned.daemon.seats.work_queue import WorkQueue, is_dead, outlived_boot, owner_name
from gemmtuned.daemon.seats.worker import Tuner
from gemmtuned.daemon.service.ahead import AT_ONCE, Ahead
from gemmtuned.daemon.service.caretaker import Caretaker
from gemmtuned.daemon.service.rules import Rules

if TYPE_CHECKING:
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")

BUSY_TURN_S: Final = 0.1  # a worker is away half a second after others come: 0.3 s to be sure, 0.1 s to end it
QUIET_TURN_S: Final = 0.5
NOTICE_S: Final = 2.0
UPKEEP_S: Final = 2.0  # routes that failed in programs, withdrawals by hand
PRUNE_S: Final = 86_400.0
INGEST_S: Final = 0.05  # for what members left; a page that is begun then is ended
INGEST_AGAIN_S: Final = 60.0  # after something was wrong with it; under _waits' limit of 120 s
RETRY_S: Final = 5.0  # after the disk refused to publish
CHECKPOINT_S: Final = 60.0
ROLL_UP_S: Final = 100.0  # old sightings are merged (db/rollup.py); under _waits' limit of 120 s
ROLL_UP_FOR_S: Final = 0.1  # of a turn, when there is much of it
OVERDUE_S: Final = 6 * 3600.0  # not merged to the end for so long: then it is done while a worker measures, too
LOOK_AROUND_S: Final = 10.0
WAITS_S: Final = 10.0  # without a device for this long: said in the log
SAY_AGAIN_S: Final = 3600.0


class Daemon:
    """See the module.

    request: tune only what it asks for.  always: whatever others do on the devices.  quiet: a run in the foreground,
    which does not write `daemon.json`.  rules: what the operator allows.  recheck: race again what is in use, too,
    when there is reason to; only_asked: when somebody asked and not else.  ahead: compiles for GPUs that are not idle.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        monitors: Sequence[Monitor],
        make_worker: Callable[[str], Tuner],
        *,
        now_s: float,
        owner: str = "",
        request: Request | None = None,
        always: bool = False,
        quiet: bool = False,
        rules: Rules | None = None,
        recheck: bool = False,
        only_asked: bool = False,
        ahead: Ahead | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.owner = owner or owner_name()
        window_s = settings.idle_s
        self.rules = rules or Rules()
        who = f"pid {os.getpid()}, home {settings.home}"
        self.seats = [
            Seat(
                monitor,
                WorkQueue(
                    store,
                    self.owner,
                    request=request,
                    conditions=monitor.conditions,
                    recheck=recheck,
                    only_asked=only_asked,
                ),
                make_worker,
                window_s=window_s,
                always=always,
                lock=None if monitor.id == "cpu" else DeviceLock(settings.device_locks, monitor.id, who),
            )
            for monitor in monitors
        ]
        self._ahead = ahead
        self._recheck = recheck
        self._turned_s = now_s
        self.solved = 0
        self._newly_solved: list[Solved] = []
        self._quiet = quiet
        self.last_used_s = now_s  # when a device was last ours to use
        self._started_s = now_s
        self._generation = -1  # of the store, when it was last published
        self._publishing, self._stopping = Publishing(store, settings), False
        self._caretaker = Caretaker(store)
        self.trouble = self._ingest_trouble = ""  # why the database cannot be written, or the tables; "" when they can
        self._elsewhere: list[dict[str, Any]] = []
        self._upkeep_at_s = self._publish_at_s = self._checkpoint_at_s = self._notice_at_s = self._look_at_s = float(
            "-inf"
        )
        self._pruned_s = float("-inf")
        self._roll_up_at_s = self._ingest_at_s = self._rolled_up_s = float("-inf")
        self._told: object = None
        self._waits_since_s = now_s
        self._waiting_told: dict[tuple[str, str], float] = {}
        self.last_notice: Notice | None = None

    def resume(self, now_s: float) -> None:
        """Take over from daemons that are no more: their leases are free again at once. May raise StoreError.

        A service also has the database looked over, since whatever ended them may have damaged it.  What the store has
        lost of the published tables comes back into it; a run in the foreground raises where that cannot be done, so
        that it does not work for nothing.
        """
        if not self._quiet:
            self.rules.remember(self.settings.home)
            self._caretaker.begin(now_s)
        try:
            take_back(self.store, self.settings.config_dir, self.settings.locks, now_s=now_s)
        except TableError as err:
            if self._quiet:
                raise
            logger.warning("published tables not compared reason=%r", str(err))
        freed = self.store.release_dead(is_dead, counts=lambda owner: not outlived_boot(owner), now_s=now_s)
        if freed:
            logger.info("resumed leases_of_dead_daemons=%d", freed)
        for arch in dict.fromkeys(seat.monitor.device.arch for seat in self.seats):
            rows = shipped(arch)
            if rows:
                self.store.add_hints(rows, source=f"shipped with gemmtuned: {arch}", now_s=now_s)

    def turn(self, now_s: float) -> None:
        """Look, decide, act once. Never sleeps, and does not raise for what a machine may do to it."""
        forbidden = self.rules.why_not(now_s, self.settings.home)
        passed_s, self._turned_s = min(max(now_s - self._turned_s, 0.0), 1.0), now_s
        solved: list[Solved] = []
        for seat in self.seats:
            if seat.tuning:
                self.rules.spend(now_s, passed_s)
                self._keep_rules()
            seat.look(now_s, forbidden=forbidden)
        for seat in self.seats:  # all that must leave have been told by now, so none waits for another's end
            seat.act(now_s)
            if seat.in_use:
                self.last_used_s = now_s
            solved += seat.take_solved()
        self.solved += len(solved)
        self._newly_solved += solved
        self._upkeep(now_s, at_once=bool(solved))
        self._compile_ahead(now_s, forbidden)
        self._tell(now_s, forbidden)

    def take_solved(self) -> list[Solved]:
        """The verdicts of the turns since this was last asked."""
        solved, self._newly_solved = self._newly_solved, []
        return solved

    def stop(self, now_s: float) -> None:
        """Leave every device, give the leases back uncounted, say so."""
        if self._ahead is not None:
            self._ahead.stop()
        for seat in self.seats:
            seat.keeper.hurry()
        self._caretaker.stop()
        for seat in self.seats:
            seat.stop(now_s)
            self.solved += len(seat.take_solved())
        self._publishing.wait()
        self._publish_at_s, self._stopping = float("-inf"), True
        self._upkeep(now_s, at_once=True)
        self._keep_rules(now=True)
        self._tell(now_s, "", "stopped")

    @property
    def pause_s(self) -> float:
        """How long until the next turn if no worker speaks before."""
        return BUSY_TURN_S if any(seat.busy for seat in self.seats) else QUIET_TURN_S

    def sockets(self) -> list[int]:
        """What to wait on besides the clock: the workers."""
        return [seat.worker.fileno() for seat in self.seats if seat.worker is not None]

    def is_finished(self, now_s: float) -> bool:
        """True when every captured problem that can be tuned here has a verdict or has failed for good.

        With `recheck`, also every solution that somebody wants raced again: it was, or failed for good.
        """
        if not all(seat.at_rest for seat in self.seats):
            return False
        try:
            if self.store.generation() != self._generation:
                return False
            # What a worker could do that has not spoken yet is not known, but for its device
            silent = {seat.monitor.device.key for seat in self.seats if seat.environment is None}
            if silent and any(row["device"] in silent for row in self.store.waiting(now_s=now_s)):
                return False
            for seat in self.seats:
                if self._recheck and self.store.count_asked(seat.monitor.device.key, seat.environment):
                    return False
                if seat.environment is None:
                    continue
                left = self.store.remaining(seat.environment, now_s=now_s)
                if not seat.out_of_work or left.queued or left.leased or left.waiting:
                    return False
        except StoreError:
            return False
        return True

    def busiest(self) -> str:
        """Which device is used by whom, for the message that none was idle."""
        notices = [seat.notice() for seat in self.seats]
        return "; ".join(f"{n.name}: {n.reason or n.state}" for n in notices)

    def _keep_rules(self, *, now: bool = False) -> None:
        if not self._quiet:  # what a person has tuned by hand is no daemon's time
            self.rules.keep(self.settings.home, now=now)

    # --- after the seats had their turn

    def _upkeep(self, now_s: float, *, at_once: bool) -> None:
        """Withdraw what failed in programs, publish what changed, keep the database's log short."""
        if not at_once and _waits(self._upkeep_at_s, now_s):
            return
        self._upkeep_at_s = now_s + UPKEEP_S
        try:
            if self._caretaker.look(now_s):
                self._publishing.forget()
                self._generation = -1  # compared with what is published before all else
            self._take_ingest(now_s)
            for gone in self.store.take_quarantined(now_s=now_s):
                logger.warning(
                    "withdrawn problem=%s backend=%s reason='reported by a program'", gone.problem, gone.backend
                )
            self._publish(now_s)
            if all(seat.at_rest for seat in self.seats) and not _waits(self._checkpoint_at_s, now_s):
                self._checkpoint_at_s = now_s + CHECKPOINT_S
                self.store.checkpoint()
            self._roll_up(now_s)
            self._look_around(now_s)
            self._prune(now_s)
            self.trouble = ""
        except GemmtunedError as err:
            self._upkeep_at_s = now_s + RETRY_S
            if self.trouble != str(err):
                logger.warning("upkeep failed retry_s=%g reason=%r", RETRY_S, str(err))
            self.trouble = str(err)

    def _roll_up(self, now_s: float) -> None:
        """Keep the database small, a little at each turn: the looks at the devices do not wait for it."""
        rests = all(seat.at_rest for seat in self.seats)
        overdue = not self._rolled_up_s <= now_s < self._rolled_up_s + OVERDUE_S  # a daemon may never rest
        if _waits(self._roll_up_at_s, now_s) or not (rests or (overdue and not self._quiet)):
            return
        if self.store.roll_up(now_s=now_s, for_s=ROLL_UP_FOR_S):
            self._rolled_up_s, self._roll_up_at_s = now_s, now_s + ROLL_UP_S
        elif rests:
            self._upkeep_at_s = now_s  # the next turn goes on

    def _prune(self, now_s: float) -> None:
        """Once a day, and soon after the start: compiled kernels that nothing names."""
        if self._quiet or not all(seat.at_rest for seat in self.seats) or 0 <= now_s - self._pruned_s < PRUNE_S:
            return
        self._pruned_s = now_s
        prune(self.store, self.settings.home, self.settings.config_dir, self.settings.locks)

    def _compile_ahead(self, now_s: float, forbidden: str) -> None:
        """Have kernels compiled for GPUs that others use now; nothing while one of ours measures."""
        if self._ahead is None:
            return
        gpus = [seat.monitor.device for seat in self.seats if seat.monitor.device.kind != "cpu"]
        if forbidden or any(seat.tuning for seat in self.seats):
            self._ahead.stop()
        elif gpus and self._ahead.wants(now_s):
            device = gpus[0]
            try:
                problems = self.store.dearest(device.key, now_s=now_s, limit=4 * AT_ONCE)
            except StoreError:  # it only saves time
                return
            self._ahead.begin(device, problems, now_s)

    def _take_ingest(self, now_s: float) -> None:
        """Counts of other users' programs, where the home is shared. What they wrote must not stop us."""
        if _waits(self._ingest_at_s, now_s):
            return
        began_s = time.monotonic()
        try:
            self.store.take_from(self.settings.ingest, now_s=now_s, limit_s=INGEST_S)
            self._ingest_trouble = ""
            if time.monotonic() - began_s > INGEST_S:  # there is more
                self._upkeep_at_s = now_s
        except StoreBusy:
            raise
        except StoreError as err:
            if self._ingest_trouble != str(err):
                logger.warning("ingest file not taken reason=%r", str(err))
            self._ingest_trouble = str(err)
            self._ingest_at_s = now_s + INGEST_AGAIN_S

    def _publish(self, now_s: float) -> None:
        self._take_published(now_s)
        if self._publishing.runs:
            self._upkeep_at_s = now_s  # looked after at the next turn
            return
        if self.store.generation() == self._generation:
            return
        if _waits(self._publish_at_s, now_s):
            self._upkeep_at_s = self._publish_at_s
            return
        self._publishing.begin(now_s, here=self._stopping)
        self._take_published(now_s)

    def _take_published(self, now_s: float) -> None:
        done = self._publishing.result()
        if done is not None:
            self._generation = done
            # Tables are written whole: with thousands of solutions, several verdicts share one publication
            self._publish_at_s = now_s + 10 * self._publishing.took_s

    def _look_around(self, now_s: float) -> None:
        """Which environments wait for a daemon started elsewhere: another torch, another CPU."""
        ours = {seat.environment.key for seat in self.seats if seat.environment is not None}
        if not ours or _waits(self._look_at_s, now_s):
            return  # before the first worker has spoken, nobody knows what it can reproduce
        self._look_at_s = now_s + LOOK_AROUND_S
        found = [row for row in self.store.waiting(now_s=now_s) if row["environment"] not in ours]
        for row in found:
            if row["environment"] not in {known["environment"] for known in self._elsewhere}:
                logger.warning(
                    "not ours to tune problems=%d environment=%r: start a daemon with that torch on that device",
                    row["problems"], row["environment"],
                )  # fmt: skip
        self._elsewhere = found

    def _log_waiting(self, now_s: float, seats: Sequence[SeatNotice]) -> None:
        """An operator who looks at the log tomorrow sees why nothing was tuned, once for each reason and hour."""
        if any(seat.in_use for seat in self.seats):
            self._waits_since_s = now_s
            return
        if now_s - self._waits_since_s < WAITS_S:
            return
        for seat in seats:
            kind = re.sub(r"[\d.]+", "#", seat.reason)
            if now_s - self._waiting_told.get((seat.id, kind), float("-inf")) >= SAY_AGAIN_S:
                self._waiting_told[seat.id, kind] = now_s
                level = logging.WARNING if seat.state == "stuck" else logging.INFO
                logger.log(level, "%s device=%s reason=%r", seat.state, seat.name, seat.reason)

    def _tell(self, now_s: float, forbidden: str, state: str = "") -> None:
        seats = [seat.notice() for seat in self.seats]
        states = {seat.state for seat in seats}
        first = ("tuning", "waiting", "stuck", "ready")
        state = state or ("paused" if forbidden else next((s for s in first if s in states), "waiting"))
        self.last_notice = Notice(
            owner=self.owner,
            pid=os.getpid(),
            started_s=self._started_s,
            updated_s=now_s,
            state=state,
            reason=self.trouble or forbidden or "; ".join(f"{s.name}: {s.reason}" for s in seats if s.reason),
            generation=max(self._generation, 0),
            solved=self.solved,
            environment=next((seat.environment.key for seat in self.seats if seat.environment is not None), ""),
            seats=seats,
            elsewhere=self._elsewhere,
        )
        told = (state, self.solved, [(s.state, s.problem) for s in seats])
        if told == self._told and _waits(self._notice_at_s, now_s):
            return
        self._told, self._notice_at_s = told, now_s + NOTICE_S
        self._log_waiting(now_s, [seat for seat in seats if seat.state in ("waiting", "stuck") and seat.reason])
        if not self._quiet:
            write_notice(self.settings.home, self.last_notice)


def _waits(until_s: float, now_s: float) -> bool:
    """Whether it is too early yet; a clock set back must not make us wait for hours."""
    return until_s - 120.0 <= now_s < until_s
