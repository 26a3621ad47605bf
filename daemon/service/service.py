"""The daemon, one turn at a time: it looks at devices, leases problems, has workers measure them, and publishes.

`Daemon.turn(now_s)` does one turn and returns; only `main.py` loops and sleeps.  All parts are injected, so that a
test simulates a day in milliseconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.engine_races import installed
from gemmtuned.configs.errors import StoreError, TableError
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.shipped import shipped
from gemmtuned.daemon.device.cpu_locks import lock_of
from gemmtuned.daemon.device.devices import Monitor
from gemmtuned.daemon.publishing.publish import take_back
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.seat import Seat, Solved
from gemmtuned.daemon.seats.work_queue import WorkQueue, is_dead, outlived_boot, owner_name
from gemmtuned.daemon.seats.worker import Tuner
from gemmtuned.daemon.service.ahead import AT_ONCE, Ahead
from gemmtuned.daemon.service.remaining import Remaining
from gemmtuned.daemon.service.rules import Rules
from gemmtuned.daemon.service.telling import Telling
from gemmtuned.daemon.service.upkeep import Upkeep

if TYPE_CHECKING:
    from gemmtuned.daemon.status_file import Notice
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")

BUSY_TURN_S: Final = 0.1  # a worker is gone half a second after others come: 0.3 s to be sure, 0.1 s to end it
QUIET_TURN_S: Final = 0.5
LONGEST_TURN_S: Final = 1.0  # counted as time on a device: a longer turn may mean that the machine slept
SLEPT_S: Final = 30.0  # a turn that is longer surely does, or that the clock was set


class Daemon:
    """The daemon, see the module.

    request: tune only what it asks for.  always: tune even while others use the devices.  quiet: a foreground run,
    which writes no `daemon.json`.  rules: what the operator allows.  recheck: also race solutions in use again when
    there is a reason; only_asked: only when somebody asked for it.  ahead: compiles for GPUs that are not idle.
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
                lock=lock_of(monitor, settings, who, at_once=always),
            )
            for monitor in monitors
        ]
        self._looking = threading.Lock()  # held by whoever looks at devices
        self._ahead = ahead
        self._recheck = recheck
        self._turned_s = now_s
        self.solved = 0
        self._newly_solved: list[Solved] = []
        self._quiet = quiet
        self.last_used_s = now_s  # when we last could use a device
        self.upkeep = Upkeep(store, settings, quiet=quiet)
        self._telling = Telling(None if quiet else settings.home, self.owner, now_s=now_s)
        self._remaining = Remaining(store)

    @property
    def last_notice(self) -> Notice | None:
        """The newest content of `daemon.json`."""
        return self._telling.last

    @property
    def trouble(self) -> str:
        """Why the database cannot be written, or the tables; "" when they can."""
        return self.upkeep.trouble

    def held_up_s(self, now_s: float) -> float:
        """For how long the tables or the database could not be written; 0 while workers have something to do."""
        return max(now_s - self.upkeep.trouble_since_s, 0.0) if all(seat.at_rest for seat in self.seats) else 0.0

    def resume(self, now_s: float) -> None:
        """Take over from daemons that have died: their leases are free again at once. May raise StoreError.

        A service also has the database checked, since whatever ended them may have damaged it.  Published solutions
        that the store has lost are put back into it; a foreground run raises if that fails, before it works in vain.
        """
        if not self._quiet:
            self.rules.remember(self.settings.home)
            self.upkeep.caretaker.begin(now_s)
        try:
            take_back(self.store, self.settings.config_dir, self.settings.locks, now_s=now_s)
        except TableError as err:
            if self._quiet:
                raise
            logger.warning("published tables not compared reason=%r", str(err))
        freed = self.store.resume.release_dead(is_dead, counts=lambda owner: not outlived_boot(owner), now_s=now_s)
        if freed:
            logger.info("resumed leases_of_dead_daemons=%d", freed)
        for arch in dict.fromkeys(seat.monitor.device.arch for seat in self.seats):
            rows = shipped(arch)
            if rows:
                self.store.hints.add(rows, source=f"shipped with gemmtuned: {arch}", now_s=now_s)

    def turn(self, now_s: float) -> None:
        """Look, decide and act once. Never sleeps, and does not raise for errors of the machine (disk, driver)."""
        forbidden = self.rules.why_not(now_s, self.settings.home)
        passed_s, since_s, self._turned_s = min(max(now_s - self._turned_s, 0.0), LONGEST_TURN_S), self._turned_s, now_s
        if not 0 <= now_s - since_s <= SLEPT_S:  # nobody waits meanwhile
            self.last_used_s += now_s - since_s
            self.upkeep.trouble_since_s += now_s - since_s
        solved: list[Solved] = []
        with self._looking:
            for seat in self.seats:
                if seat.tuning:
                    self.rules.spend(now_s, passed_s)
                    self._keep_rules()
                seat.look(now_s, forbidden=forbidden)
        for seat in self.seats:  # all workers that must leave have their order, so they end at the same time
            seat.act(now_s)
            if seat.in_use:
                self.last_used_s = now_s
            solved += seat.take_solved()
        self.solved += len(solved)
        self._newly_solved += solved
        # one of several equal devices may know the environment of all
        by_word = sorted(self.seats, key=lambda seat: seat.environment is not None)
        environments = {seat.monitor.device.key: seat.environment for seat in by_word}
        self.upkeep.look(now_s, at_once=bool(solved), rests=all(seat.at_rest for seat in self.seats), ours=environments)
        self._compile_ahead(now_s, forbidden)
        self._telling.tell(now_s, self.seats, self.upkeep, solved=self.solved, forbidden=forbidden)
        if not self._quiet:
            self._remaining.turn(now_s, passed_s, self.seats, self.solved)

    def mind(self, now_s: float, *, leave: bool) -> None:
        """From another thread, while a turn is held up by a disk: end workers whose device others want, or, leave: all.

        The next turn gives their leases back.
        """
        if self._looking.acquire(blocking=False):  # else the turn is at that itself
            try:
                for seat in self.seats:
                    seat.mind(now_s, leave=leave)
            finally:
                self._looking.release()

    @property
    def has_workers(self) -> bool:
        """Whether any device has a worker now."""
        return any(seat.worker is not None for seat in self.seats)

    def take_solved(self) -> list[Solved]:
        """The verdicts since the last call."""
        solved, self._newly_solved = self._newly_solved, []
        return solved

    def stop(self, now_s: float) -> None:
        """Leave every device, give the leases back without counting the attempts, and report it."""
        if self._ahead is not None:
            self._ahead.stop()
        for seat in self.seats:
            seat.keeper.hurry()
        self.upkeep.caretaker.stop()
        for seat in self.seats:
            seat.stop(now_s)
            self.solved += len(seat.take_solved())
        self.upkeep.stop(now_s)
        self._keep_rules(now=True)
        self._telling.tell(now_s, self.seats, self.upkeep, solved=self.solved, forbidden="", state="stopped")

    @property
    def pause_s(self) -> float:
        """How long until the next turn, if no worker sends a message before."""
        return BUSY_TURN_S if any(seat.busy for seat in self.seats) else QUIET_TURN_S

    def sockets(self) -> list[int]:
        """What to wait on besides the clock: the workers."""
        return [seat.worker.fileno() for seat in self.seats if seat.worker is not None]

    def is_finished(self, now_s: float) -> bool:
        """True when every captured problem that can be tuned here has a verdict or has failed for good.

        With `recheck`, every solution that somebody wants raced again must have been, or have failed for good; so must
        those that programs wait for, which call the operator of an engine that is installed here.
        """
        if not all(seat.at_rest for seat in self.seats):
            return False
        try:
            if self.store.solutions.generation() != self.upkeep.generation:
                return False
            # Of a worker that has sent nothing yet we know only the device
            silent = {seat.monitor.device.key for seat in self.seats if seat.environment is None}
            if silent and any(row["device"] in silent for row in self.store.resume.waiting(now_s=now_s)):
                return False
            for seat in self.seats:
                if self._recheck and self._is_asked_again(seat):
                    return False
                if seat.environment is None:
                    continue
                left = self.store.leases.remaining(seat.environment, now_s=now_s)
                if not seat.out_of_work or left.queued or left.leased or left.waiting:
                    return False
        except StoreError:
            return False
        return True

    def _is_asked_again(self, seat: Seat) -> bool:
        device, here = seat.monitor.device.key, seat.environment
        if self.store.recheck.count_asked(device, here):
            return True
        return self.store.wanted.is_unasked(device, installed() if here is None else here.stamps, here)

    def busiest(self) -> str:
        """Who uses which device, for the message that none was idle."""
        notices = [seat.notice() for seat in self.seats]
        return "; ".join(f"{n.name}: {n.reason or n.state}" for n in notices)

    def _keep_rules(self, *, now: bool = False) -> None:
        if not self._quiet:  # a foreground run does not count as the daemon's time
            self.rules.keep(self.settings.home, now=now)

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
                problems = self.store.resume.dearest(device.key, now_s=now_s, limit=4 * AT_ONCE)
            except StoreError:  # compiling ahead only saves time
                return
            self._ahead.begin(device, problems, now_s)
