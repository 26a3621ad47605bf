"""The hook of one process: it owns the parts below and one thread, and sees both through forks and the exit.

    Patches    the operators in front of torch's, and what they may do           patches.py
    Tables     the table in use, on probation first, and the user's own rows     tables.py
    Where      the devices of this process                                       where.py
    Account    what was counted, and what the process reports about itself       account.py

The hook's one thread alternates between flushing (flush.py, which calls `tick`), watching for tables (watch.py, which
calls `reload`) and making the table current for a graph capture that waits for it (ready.py).  Whatever goes wrong
here, the program goes on with stock torch, and one line says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.file_size import no_signal_at_a_limit
from gemmtuned.configs.frame_lock import FrameLock, Running
from gemmtuned.configs.settings import Settings, UserTables
from gemmtuned.configs.sighting import OUTCOMES
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.hooks import ranks
from gemmtuned.hooks.account import Account
from gemmtuned.hooks.background import Background, Fork, at_first_count, in_late_child
from gemmtuned.hooks.flush import EXIT_BUSY_S, EXIT_S, Flusher, never_again, say_cut_off
from gemmtuned.hooks.housekeeping import keep_house
from gemmtuned.hooks.patches import Patches
from gemmtuned.hooks.ready import Ready
from gemmtuned.hooks.tables import Library, Tables
from gemmtuned.hooks.watch import Watcher
from gemmtuned.hooks.where import Where

if TYPE_CHECKING:
    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.sighting import Session, Sighting
    from gemmtuned.hooks.dispatch import Table
    from gemmtuned.hooks.native import Native
    from gemmtuned.hooks.selections import Selections

__builtins__ = builtins

FORK_S: Final = 0.02  # the longest wait for it before a fork: mostly it sleeps
_parents: list[_Parts] = []  # a forked child keeps its parent's parts: to free them would close the parent's SQLite


class _Parts:
    """What the thread of a process does by turns, and the thread itself."""

    def __init__(self, flusher: Flusher, watcher: Watcher, ready: Ready, background: Background) -> None:
        self.flusher, self.watcher, self.ready, self.background = flusher, watcher, ready, background

    def close_inherited(self) -> None:
        """In a forked child, of its parent's: what it has of the descriptor, if that is still ours."""
        with suppress(OSError):
            inherited = self.watcher.events.descriptor()
            if inherited is not None:
                os.close(inherited)


class Hook:
    """The hook; activate() makes one at a time. tables: those the program asked for, besides the environment's.

    notice_fork: calls `after_fork`, if this is a forked child that has not done so.
    """

    def __init__(
        self, settings: Settings, tables: Iterable[UserTables] = (), notice_fork: Callable[[], object] = bool
    ) -> None:
        self.settings, self._notice_fork = settings, notice_fork
        self.library = Library()
        self.where = Where(lambda: self.native is not None and self.native.has_cuda)
        self.tables = Tables(
            settings, (*settings.tables, *tables), self.library, self.where, lambda: self.flusher.beat_soon()
        )
        self.selections = _selections(settings, self.tables)
        self.patches = Patches(
            settings,
            self.library,
            self.tables,
            counts=settings.capture or self.selections is not None,  # the log of selections is made from counts
            before_capture=lambda: self.ready.before_capture(),  # late: a forked child has a Ready of its own
        )
        self.account = Account(settings, self.library, self.tables, self.patches, self.where, self.selections)
        self._parts: _Parts | None = None
        self._finishing = self._finished = False
        self._making = FrameLock()

    @property
    def native(self) -> Native | None:
        """The native library, once it is there."""
        return self.library.native

    @property
    def table(self) -> Table:
        """The table in use."""
        return self.tables.table

    @property
    def path(self) -> str:
        """native, or off."""
        return self.patches.path

    @property
    def note(self) -> str:
        """Why it is off; "" when it is not."""
        return self.patches.note

    # ---- the thread

    @property
    def parts(self) -> _Parts:
        """The thread's parts, made when first asked for: most forked children need none, and never their parent's."""
        self._notice_fork()
        if self._parts is None:
            with self._making:
                if self._parts is None:
                    made = self._make_parts()
                    self._parts = self._parts or made  # a signal's handler may have made them meanwhile
        return self._parts

    @property
    def flusher(self) -> Flusher:
        """Takes what was counted to the store."""
        return self.parts.flusher

    @property
    def watcher(self) -> Watcher:
        """Notices published tables."""
        return self.parts.watcher

    @property
    def ready(self) -> Ready:
        """Waits until the table is active."""
        return self.parts.ready

    @property
    def background(self) -> Background:
        """The hook's thread."""
        return self.parts.background

    def _make_parts(self) -> _Parts:
        flusher = Flusher(
            self.settings,
            drain=self.drain,
            set_aside=self.account.set_aside,
            environment=self.where.environment,
            session=self.session,
            tick=self.tick,
            keep=self.settings.capture,
            compiled=self.patches.compiled.take,
            unserved=self.account.take_unserved,
            is_child=bool(_parents),
        )
        watcher = Watcher(
            self.settings.config_dir,
            self.reload,
            automatic=self.settings.reload == "auto" and self.settings.dispatch,
            held=ranks.several if self.settings.reload_by_ranks else None,
            files=self.tables.files,
            native=lambda: self.native,
        )
        ready = Ready(
            is_current=self._is_current,
            make_current=self._make_current,
            wake=self._hurry,
            wait_s=self.settings.graph_wait_s,
        )
        background = Background([ready, flusher, *([watcher] if self._watches else [])], watcher.events)
        return _Parts(flusher, watcher, ready, background)

    @property
    def _watches(self) -> bool:
        return self.settings.dispatch and self.settings.reload != "manual"

    def _is_current(self) -> bool:
        """Whether the newest known table is active on every device that this process uses."""
        if self.native is None or not self.patches.dispatches:
            return True
        if self._watches and not self.watcher.begun:
            return False
        return self.tables.is_built() and not self.patches.foreign.is_behind()

    def _make_current(self) -> None:
        if self._watches and not self.watcher.begun:
            self.watcher.turn()
        self.tables.follow_places()
        self.patches.look_for_foreign()

    def _hurry(self) -> None:
        if not self.background.alive:  # in a forked child that has counted nothing yet
            with suppress(OSError):
                self.background.start()
        self.watcher.events.wake()

    # ---- from the start to the end

    def install(self) -> None:
        """Patch torch, or say why not."""
        self.patches.install()

    def remove(self) -> None:
        """Take every patch back."""
        self.patches.remove()

    def start(self) -> None:
        """Start flushing and watching. Raises OSError when there is no thread to be had."""
        self.background.start()
        if not self._watches:
            self.account.announce()

    @no_signal_at_a_limit()
    def stop(self) -> None:
        """The thread flushes for the last time and ends. Where it does not run, this one flushes."""
        no_calls = self.native is None or at_first_count(self.native, None)
        if no_calls and not self.account.op_counts.has_some and self._parts is None:
            return  # a forked child, or the thread never began
        began_s, self._finished = clock.monotonic(), False
        self.flusher.hurried = True
        ended = self.background.end(EXIT_S, lambda: self._finish(began_s))
        busy = self._finishing or self.flusher.in_store
        if not ended and not (busy and self.background.has_ended(EXIT_BUSY_S)):
            say_cut_off(EXIT_BUSY_S if busy else EXIT_S)
        elif not self._finished:
            self._finish(began_s)

    def _finish(self, began_s: float) -> None:
        """Write what is left of a process whose end began then."""
        self._finishing = True
        self.account.finish(self.flusher, began_s)
        self._finished = True

    # ---- forks

    def before_fork(self, fork: Running) -> str:
        """Wait until the thread sleeps, which it mostly does already."""
        if self._parts is None:
            return Fork.BESIDE
        return self.background.before_fork(fork, FORK_S)

    @property
    def in_store(self) -> bool:
        """Whether a flush is inside SQLite, whose locks a child forked now would have for ever."""
        return self._parts is not None and self._parts.flusher.in_store

    def pause_flushes(self, fork: Running) -> bool:
        """Keep flushes from running until the fork is over; False when one could not be waited for."""
        return self._parts is not None and self.flusher.pause(fork)

    def after_fork(self, *, paused: bool, at_us: int = 0, late: bool = False) -> None:
        """In a forked child: counts start at zero (native ones reset themselves); the first count starts the thread.

        Each page written here is copied, and most children count nothing: they never come here.  at_us: as Account's.
        late: the child has run on for a while.  paused: no flush was running in the parent.  If one was inside SQLite,
        this process inherits its locks for ever.
        """
        parents, self._parts = self._parts, None
        self._making = FrameLock()
        self.tables.after_fork()
        self.account.after_fork(at_us)
        self.patches.after_fork()
        _keep(parents, paused=paused)
        if self.native is not None:
            _begin_at_first_count(self, self.native, late=late)
        elif parents is not None and self.patches.look_at_s is not None:
            with suppress(OSError):  # without the library no call can start the thread that looks for it
                self.background.start()

    # ---- the thread's work

    def drain(self) -> Iterator[Sighting]:
        """What was counted since the last time."""
        return self.account.drain()

    def session(self) -> Session:
        """This process's row for the store's session table."""
        return self.account.session(self.flusher)

    def tick(self) -> None:
        """Housekeeping of the flush thread."""
        keep_house(self)

    def reload(self) -> int | None:
        """Take up the newest table; its generation, or None when there was nothing newer."""
        generation = self.tables.reload()
        if self.selections is not None:
            self.selections.loaded()
        self.account.announce()
        return generation

    def begin(self) -> None:
        """The life of a thread that C has started."""
        self.background.run()

    # ---- what the program asks for

    def add_table(self, table: UserTables) -> None:
        """Use one more table of the user's from now on: those of its rows that have been checked."""
        self.tables.add(table)
        self.reload()

    def count_op(self, problem: Problem, place: str, outcome: str = OUTCOMES[0], *, graph: bool = False) -> None:
        """Count a call of one of our ops that runs without aten, by activate.current(). The rest: as in a Sighting."""
        if self.patches.counts:
            self.account.op_counts.add(problem, place, outcome, graph=graph)
            if graph and self.native is not None:
                self.native.op_captured(problem, outcome, place)
            if self._parts is None or not self._parts.background.alive:  # in a forked child
                with suppress(OSError):
                    self.start()


@contextmanager
def own_op(hook: Hook, routed: str) -> Iterator[None]:
    """While one of our ops runs, do not count the aten calls inside it: the op counts itself.

    routed: the place (`cuda:0`) where a kernel of the table serves the op; "" where none does.
    """
    native = hook.native
    on_probation = native.op_begins(routed) if native is not None else None
    try:
        yield
    finally:
        if native is not None:
            native.op_ends(on_probation)


def _keep(parents: _Parts | None, *, paused: bool) -> None:
    """In a forked child. None: its parent was one, too, and counted nothing."""
    if parents is None:
        return
    _parents.append(parents)
    parents.close_inherited()
    if not paused and parents.flusher.in_store:
        never_again("it was forked in the middle of a flush")


def _begin_at_first_count(hook: Hook, native: Native, *, late: bool) -> None:
    if late:
        in_late_child(hook.begin)
    else:
        at_first_count(native, hook.begin)


def is_at_rest(hook: Hook) -> bool:
    """Whether a child that this thread forks now inherits nothing half done, since our thread sleeps meanwhile."""
    native, parts = hook.library.native, hook._parts
    if native is None or parts is None:
        return native is not None and native.is_held()
    return parts.flusher.is_at_rest and parts.background.is_held(native)


def close_inherited(half: Hook) -> None:
    """In a forked child, of a hook that was half on in its parent: what the child has of the descriptor."""
    if half._parts is not None:
        half._parts.close_inherited()


def label(hook: Hook, run: str, role: str) -> None:
    """Count under this label from now on; "" keeps the current one. role: as in a Session."""
    hook.settings = replace(hook.settings, run=run[:200] or hook.settings.run)
    hook.account.label(hook.settings, role[:60])
    if hook._parts is not None:
        hook.flusher.run = hook.settings.run
        hook.flusher.beat_soon()


def _selections(settings: Settings, tables: Tables) -> Selections | None:
    if not settings.log_tuned:
        return None
    from gemmtuned.hooks.selections import Selections

    return Selections(
        settings.config_dir,
        lambda solution: tables.user_tables.solutions_file(solution),
        waits=settings.reload != "manual",
    )
