"""The hook of one process: what it has patched, which table it serves from, its threads.

    native    our operators stand in front of aten's GEMMs (hooks/native)
    off       nothing is patched: switched off, or the native library is not there yet

The library is never built here: that takes child processes and CPU time, which are the program's.  Until it is there
the process counts nothing, says so, and looks for it now and then.  Registering operators later recompiles nothing.

Whatever goes wrong here ends with the program on stock torch and a line that says why.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gemmtuned.configs.errors import CandidateFailed, GemmtunedError
from gemmtuned.configs.real import allocate_lock
from gemmtuned.configs.say import Once, say_line, tell
from gemmtuned.configs.settings import BATCH_INVARIANT, Settings, UserTables, batch_invariance
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.configs.solution import DEFAULT_BACKEND, Environment, Solution
from gemmtuned.configs.verdicts import Verdicts
from gemmtuned.hooks import frozen_layers, native, ranks
from gemmtuned.hooks.background import Background, Fork, thread_body
from gemmtuned.hooks.breaker import Breaker
from gemmtuned.hooks.compiled import Compiled
from gemmtuned.hooks.dispatch import Table, build_table, solution_of
from gemmtuned.hooks.flush import Flusher, never_again, new_session
from gemmtuned.hooks.graphs import GraphCounts
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.native import build as native_build
from gemmtuned.hooks.op_counts import OpCounts
from gemmtuned.hooks.pace import in_slices
from gemmtuned.hooks.probation import Probation
from gemmtuned.hooks.ready import Ready
from gemmtuned.hooks.routes import Routes
from gemmtuned.hooks.user_tables import UserLoader, usable
from gemmtuned.hooks.watch import Loader, Watcher

if TYPE_CHECKING:
    from gemmtuned.configs.problem import Problem
    from gemmtuned.hooks.selections import Selections

log = logging.getLogger("gemmtuned.hooks")
_UNCHECKED: Final = "the user's table, not checked yet: gemmtuned run or the daemon does"
EXIT_S: Final = 0.5  # at the end of the program the thread is waited for so long,
FORK_S: Final = 0.02  # and before a fork: it sleeps, unless it is in the middle of something
LOOK_S: Final = 5.0  # between two looks for a library that was not there at the start
_parents: list[_Parts] = []  # a forked child must not close its parent's SQLite handle, so it keeps it for ever


class _Parts(NamedTuple):
    """What the thread of a process does, and the thread."""

    flusher: Flusher
    loader: Loader
    watcher: Watcher
    ready: Ready
    background: Background


class Hook:
    """One at a time, made by activate(). tables: what the program asked for besides those of the environment."""

    def __init__(self, settings: Settings, tables: Iterable[UserTables] = ()) -> None:
        self.settings = settings
        self.path = "off"
        self.note = ""
        self.table = Table()
        self.native: native.Native | None = None
        self.routes: Routes | None = None
        self.graphs: GraphCounts | None = None
        self.started_us = time.time_ns() // 1000
        self.active_us = 0  # since when the table is in use
        self.breaker = Breaker()
        self._look_at_s: float | None = None  # when to look again for the native library; of time.monotonic()
        self._environments: dict[str, Environment] = {}
        self._solutions: tuple[int, list[Solution]] | None = None  # the newest table as it was published
        self._failed: dict[int, str] = {}
        self._compiled = Compiled()
        self.probation = Probation(settings.home / "probation", settings.run)
        self._refused = self._stale = ""  # notes: of a generation, of frozen weights
        self.verdicts = Verdicts(settings.home)  # on rows of the user's tables
        self._unchecked: list[Solution] = []
        self._built_for: tuple[str, ...] = ()
        self._set_mode = native.OFF
        self._announced = False
        self._invariant = ""  # who asks for kernels that are the same for every M
        self._told_others = Once()
        self._swap = allocate_lock()  # one table change at a time
        self.op_counts = OpCounts()
        self._tables = (*settings.tables, *tables)
        self.user_tables = UserLoader(self._tables)
        self.selections = (
            _selections()(
                settings.config_dir,
                lambda solution: self.user_tables.solutions_file(solution),
                waits=settings.reload != "manual",
            )
            if settings.log_tuned
            else None
        )
        self._parts: _Parts | None = None
        self._making = allocate_lock()
        self._first_count = thread_body(lambda: self.background.run())
        self._inherited: int | None = None  # the descriptor of ours that a child is about to be born with

    # ---- patches

    def install(self) -> None:
        """Patch torch, or say why not."""
        if self.settings.capture:
            self._compiled.install()
        if self.settings.native:
            self._take_library()
            if self.note:
                tell(log, logging.WARNING, "%s", self.note)
        else:
            self.note = "GEMMTUNED_NATIVE=0: nothing is counted or routed"

    def remove(self) -> None:
        """Take every patch back."""
        self._compiled.remove()
        if self.graphs is not None:
            self.graphs.remove()
        if self.native is not None:
            self.native.set_mode(native.OFF)  # and never deregistered, see hooks/native/install.h
        self.path = "off"

    def _take_library(self) -> None:
        """Serve by the native library if it is there; else note why not, and when to look again."""
        self._look_at_s = time.monotonic() + LOOK_S
        try:
            found = native_build.find_built(self.settings.cache)
            if found is None:
                self.note = native_build.missing(self.settings.cache)
                return
            self._look_at_s = None
            with self._swap:  # the table must not change between giving it to the library and using that
                self._install(native.Native(found))
            self.note = ""
        except (GemmtunedError, OSError) as err:
            self.note = f"nothing is counted or routed: {err}"

    def _install(self, library: native.Native) -> None:
        routes = Routes(library, self.settings.config_dir)
        self.probation.pages = library
        self._put_on_trial(self.table)
        library.load(routes.rows(self.table), self.table.generation)
        library.set_mode(native.OFF)
        library.install()
        library.live_check(self.settings.live_check)
        if self.settings.capture or self.settings.dispatch:
            self.graphs = _watch_graphs(
                library, self.settings, lambda: self.ready.before_capture()
            )  # another in a child
        self._set_mode = self._mode()
        library.set_mode(self._set_mode)
        self.native, self.routes, self.path = library, routes, "native"

    def _look_again(self, now_s: float) -> None:
        if self._look_at_s is not None and now_s >= self._look_at_s:
            self._take_library()
            if self.path == "native":
                self._announce()
                for follow in frozen_layers.when_native:
                    follow()

    def _switched_off(self) -> str:
        if self.settings.disabled:
            return "switched off by GEMMTUNED_DISABLE or AITER_BYPASS_TUNE_CONFIG"
        if self.settings.switched_off:
            return f"switched off: {self.settings.kill_switch} exists"
        return ""

    def _mode(self) -> int:
        if self._switched_off():
            return native.OFF
        self._invariant = batch_invariance()
        asked = not self._invariant or self._invariant == BATCH_INVARIANT  # of an engine: its own kernels stay
        dispatch = native.DISPATCH if self.settings.dispatch and not self.breaker.open and asked else 0
        count = self.settings.capture or self.selections is not None  # what is told was counted
        return (native.CAPTURE if count else 0) | dispatch | (native.INVARIANT if self._invariant else 0)

    # ---- the thread

    @property
    def parts(self) -> _Parts:
        """What the thread does, and the thread. A forked child that needs neither has neither: making them costs it."""
        if self._parts is None:
            with self._making:
                if self._parts is None:
                    self._parts = self._make_parts()
        return self._parts

    @property
    def flusher(self) -> Flusher:
        """From the counters to the store."""
        return self.parts.flusher

    @property
    def loader(self) -> Loader:
        """Reads published tables."""
        return self.parts.loader

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
        """The thread."""
        return self.parts.background

    def _make_parts(self) -> _Parts:
        flusher = Flusher(
            self.settings,
            drain=self.drain,
            environment=self.environment,
            session=self.session,
            tick=self.tick,
            keep=self.settings.capture,
            compiled=self._compiled.take,
        )
        watcher = Watcher(
            self.settings.config_dir,
            self.reload,
            automatic=self.settings.reload == "auto" and self.settings.dispatch,
            held=ranks.several if self.settings.reload_by_ranks else None,
            files=self.user_tables.files,
        )
        ready = Ready(
            is_current=self._is_current,
            make_current=self._make_current,
            wake=self._hurry,
            wait_s=self.settings.graph_wait_s,
        )
        background = Background([ready, flusher, *([watcher] if self._watches else [])], watcher.events)
        return _Parts(flusher, Loader(self.settings.config_dir), watcher, ready, background)

    @property
    def _watches(self) -> bool:
        return self.settings.dispatch and self.settings.reload != "manual"

    def _is_current(self) -> bool:
        """Whether the newest table that we know of is active wherever this process has a context."""
        if self.native is None or not self.dispatches:
            return True
        if self._watches and not self.watcher.begun:
            return False
        return self._solutions is None or self.places() == self._built_for

    def _make_current(self) -> None:
        if self._watches and not self.watcher.begun:
            self.watcher.turn()
        self._follow_places()

    def _follow_places(self) -> None:
        if self._solutions is not None and self.places() != self._built_for:
            with self._swap:
                self.use(*self._solutions)

    def _hurry(self) -> None:
        if not self.background.alive:  # a forked child that has counted nothing yet
            with suppress(OSError):
                self.background.start()
        self.watcher.events.wake()

    def start(self) -> None:
        """Start flushing and watching. Raises OSError when there is no thread to be had."""
        self.background.start()
        if not self._watches:
            self._announce()

    def stop(self) -> None:
        """Last flush; the thread ends."""
        nothing_counted = self.native is None or self.native.at_first_count(None)
        if self._parts is None and nothing_counted:  # a forked child, or one that never began
            return
        self.background.end(EXIT_S)
        self._report_fault()
        self.flusher.stop()
        if self.selections is not None:
            self.selections.finish()
        self.probation.leave()

    def _report_fault(self) -> None:
        """A kernel has broken a GPU while the table is on trial: tell the daemon which of the table's ran there."""
        if self.native is None or not self.probation.has_launched():
            return
        fault, idents = self.native.fault()
        if not fault:
            return
        self.probation.note_fault(fault)
        for solution in map(solution_of, idents):
            self.flusher.report_failure(solution, f"launched in a process whose GPU had a fault later (CUDA {fault})")
        what = "the GPU has a fault, and generation %d is new: the daemon runs its kernels again kernels=%d fault=%d"
        tell(log, logging.WARNING, what, self.table.generation, len(idents), fault)

    def before_fork(self) -> Fork:
        """Have the thread asleep, which it mostly is."""
        if self._parts is None:
            return Fork.BESIDE
        how = self.background.before_fork(FORK_S)
        self._inherited = self.watcher.events.descriptor() if how is Fork.HELD else None
        return how

    def pause_flushes(self) -> bool:
        """Let no flush be going on during a fork; False when one is."""
        return self._parts is not None and self.flusher.pause(for_fork=True)

    def after_fork_in_parent(self, how: Fork, *, goes_on: bool) -> None:
        """The thread goes on, unless the hook was switched off meanwhile."""
        with suppress(OSError):
            self.background.after_fork_in_parent(how, goes_on=goes_on)

    def after_fork(self, *, paused: bool) -> None:
        """In a forked child: counts start at nothing (the native ones reset themselves), and the thread with the first.

        Most children count nothing, and each page that is touched here is copied for them: so little is done.
        paused: no flush was going on in our parent.  If one was, in SQLite, its locks are held here for ever.
        """
        parents, self._parts = self._parts, None
        self._making = allocate_lock()
        self._swap = allocate_lock()
        self.op_counts.reset()
        self.probation.after_fork()
        self.started_us = time.time_ns() // 1000
        if parents is None:
            return
        _parents.append(parents)
        if self._inherited is not None:
            with suppress(OSError):
                os.close(self._inherited)
        if not paused and parents.flusher.in_store:
            never_again("it was forked in the middle of a flush")
        if self.native is not None:
            self.native.at_first_count(self._first_count)
        elif self._look_at_s is not None:  # no call comes to us before the library does: a thread has to look for it
            with suppress(OSError):
                self.background.start()

    def environment(self, place: str) -> Environment:
        """Device and versions of a place (`cpu`, `cuda:0`) in this process; needs torch fully imported."""
        if place not in self._environments:
            with importing():  # the backends import their libraries
                from gemmtuned.kernels.backends import environment
                from gemmtuned.kernels.device import device_at

                self._environments[place] = environment(device_at(place))
        return self._environments[place]

    def places(self) -> tuple[str, ...]:
        """Where this process may run GEMMs; each GPU only once it uses that one itself: we never initialise CUDA.

        A kernel is loaded for each place, and the first on a GPU makes a context there: 0.5 GiB, which eight ranks of
        one host would each take on every GPU that they see.
        """
        if self.native is None or not self.native.has_cuda:
            return ("cpu",)
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return ("cpu",)
        return ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()) if _has_context(i)))

    def drain(self) -> Iterator[Sighting]:
        """What was counted since the last time, under aten and by our ops themselves."""
        for path in (self.native, self.op_counts):
            for sighting in path.drain() if path is not None else ():
                if self.selections is not None and self.settings.dispatch:
                    with suppress(CandidateFailed):  # on a device that we do not know: nothing is selected there
                        self.selections.note(sighting, self.table, self.environment(sighting.place).device)
                yield sighting

    def session(self) -> Session:
        """This process for the store's session table."""
        dropped = (self.native.dropped if self.native else 0) + self.op_counts.dropped
        return new_session(
            self.settings,
            path=self.path,
            started_us=self.started_us,
            generation=self.table.generation,
            active_us=self.active_us,
            calls=self.flusher.calls,
            dropped=dropped + self.flusher.dropped,
            errors=len(self._failed),
            reload_failures=self.loader.failures,
            rank=ranks.rank() if self.settings.rank is None else self.settings.rank,
            note=self._note(),
        )

    def _note(self) -> str:
        tables = self._refused or self.loader.refused
        off = self._switched_off() or self._invariant_note()
        others = _of_others(self.overridden())
        notes = (off, self.breaker.note, tables, self.note, self._stale, self.flusher.complaint, others)
        return next(filter(None, notes), "")

    def _invariant_note(self) -> str:
        if not self._invariant or not self.settings.dispatch:
            return ""
        if self._invariant == BATCH_INVARIANT:
            return f"{BATCH_INVARIANT}: dense products by kernels proven batch-invariant alone, all else by torch"
        return (
            f"dispatch is off, capture is on: {self._invariant} asks for one kernel whatever the batch "
            f"({BATCH_INVARIANT}=1 has those served that are proven so)"
        )

    def overridden(self, *, anew: bool = False) -> dict[str, str]:
        """Operators whose calls do not reach us: name -> where the kernel that serves them was registered."""
        return self.native.overridden(anew=anew) if self.native is not None else {}

    def _tell_of_others(self) -> None:
        new = {name: place for name, place in self.overridden().items() if self._told_others.is_new(name)}
        if new:
            tell(log, logging.WARNING, "%s", _of_others(new))

    def tick(self) -> None:
        """Housekeeping of the flush thread: kill switch, failed routes, a native library that came in."""
        self._look_again(time.monotonic())
        self.probation.turn(time.monotonic())
        self._follow_probation()
        self._stale = "; ".join(filter(None, (note() for note in frozen_layers.notes)))
        self._follow_places()
        opened = self.breaker.turn(time.monotonic(), self._collect_failures())
        self._follow_mode()
        self._tell_of_others()
        if opened:
            tell(log, logging.WARNING, "dispatch switched off reason=%s", self.breaker.note)

    def _follow_mode(self) -> None:
        before, mode = self._invariant, self._mode()
        if mode != self._set_mode and self.native is not None:
            self.native.set_mode(mode)
            self._set_mode = mode
        if self._invariant != before and self._invariant_note():
            tell(log, logging.WARNING, "%s", self._invariant_note())

    @property
    def dispatches(self) -> bool:
        """Whether calls are routed now: False once the switch, or the breaker, has taken effect."""
        return bool(self._set_mode & native.DISPATCH)

    def _collect_failures(self) -> int:
        """Quarantine the routes that failed since the last time; how many."""
        failures = self.native.failures() if self.native is not None else []
        for ident, how, reason in failures:
            solution = solution_of(ident)
            self._failed[ident] = reason
            tell(
                log,
                logging.WARNING,
                "route %s problem=%s backend=%s served=torch reason=%s",
                how,
                solution.problem,
                solution.backend,
                reason,
            )
            self.flusher.report_failure(solution, reason, how)
        return len(failures)

    # ---- tables

    def reload(self) -> int | None:
        """Take up the newest table; its generation, or None when there was nothing newer."""
        with self._swap:
            loaded = self.loader.load(newer_than=self.table.generation)
            if loaded is not None and self.refuses(loaded[0]):
                loaded = None
            generation = self.use(*loaded) if loaded is not None else None
        if self.user_tables.load() or any(self.verdicts.of(s) is not None for s in self._unchecked):
            with self._swap:
                generation = self.use(*(self._solutions or (self.table.generation, [])))
        if self.selections is not None:
            self.selections.loaded()
        self._announce()
        return generation

    def _announce(self) -> None:
        """Say once that it is on; not in children of multiprocessing, whose parent has said it."""
        if self._announced or self.settings.quiet or self.path == "off" or self._switched_off():
            return
        self._announced = True
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            return
        version = sys.modules["gemmtuned"].__version__
        what = "" if self.settings.dispatch else ", counting only" if self.settings.capture else ""
        say_line(
            f"gemmtuned {version}: {self.path}{what}, generation {self.table.generation}, {len(self.table)} rows, home "
            f"{self.settings.home} (GEMMTUNED_QUIET=1 silences this)"
        )

    def add_table(self, table: UserTables) -> None:
        """Use one more table of the user's, from now on, as far as its rows have been checked."""
        self._tables = (*self._tables, table)
        self.user_tables = UserLoader(self._tables)
        self.reload()

    def count_op(self, problem: Problem, place: str) -> None:
        """A call of one of our ops that aten did not see."""
        if self._set_mode & native.CAPTURE:
            self.op_counts.add(problem, place)
            if not self.background.alive:  # in a forked child
                with suppress(OSError):
                    self.start()

    def refuses(self, generation: int) -> bool:
        """Whether too many processes of this run have died of this generation; says so once."""
        note = self.probation.note(generation) if self.probation.refuses(generation) else ""
        if note and note != self._refused:
            tell(log, logging.WARNING, "table not taken reason=%s", note)
        self._refused = note
        return bool(note)

    def _follow_probation(self) -> None:
        """Put the table down when others of this run died of it, as our own workers: the next ones have it from us.

        Ranks change tables together: they keep it.
        """
        generation = self.probation.generation
        if generation is None or not self.probation.refuses(generation):
            return
        if (self.settings.reload_by_ranks and ranks.several()) or not self.refuses(generation):
            return
        self.probation.give_up()
        with self._swap:
            self.use(0, [])

    def take_rows(self, generation: int, rows: list[dict[str, Any]]) -> None:
        """Take up what another rank has read."""
        with self._swap:
            if generation > self.table.generation:
                self.use(generation, [Solution.from_row(row) for row in rows])

    def use(self, generation: int, solutions: list[Solution]) -> int:
        """Make these solutions the table in use; the caller holds `_swap`."""
        places = self.places()
        users, refused = usable(self.user_tables, solutions, check=self._holds_here)
        self._unchecked = [s for s in self.user_tables.solutions if self._holds_here(s) == _UNCHECKED]
        self.verdicts.ask(self._unchecked)
        table = build_table(
            in_slices([*solutions, *users]),
            {place: self.environment(place) for place in places},
            generation=generation,
            failed=frozenset(self._failed),
        )
        table.refused += refused
        self._put_on_trial(table, known=self.table if generation == self.table.generation else None)
        if self.native is not None and self.routes is not None:
            self.native.load(in_slices(self.routes.rows(table)), table.generation)
        self.table, self._solutions, self._built_for = table, (generation, solutions), places
        self.active_us = time.time_ns() // 1000
        self.flusher.beat_soon()
        tell(
            log,
            logging.INFO,
            "table active generation=%d rows=%d refused=%d",
            table.generation,
            len(table),
            table.refused.total(),
        )
        return table.generation

    def _put_on_trial(self, table: Table, *, known: Table | None = None) -> None:
        """Begin the generation's probation if it routes anything that it did not as `known`: rows, or GPUs they serve.

        The user's own rows have no part in it: they were tried in another process, and come with every generation.
        """
        own = set(map(id, self.user_tables.solutions))
        served = {(place, key): solution for place, key, solution in in_slices(known.items() if known else ())}
        for place, key, solution in in_slices(table.items()):
            routed = solution.backend != DEFAULT_BACKEND and id(solution) not in own
            if routed and served.get((place, key)) != solution:
                self.probation.begin(table.generation)
                return

    def _holds_here(self, solution: Solution) -> str:
        """Why a solution of the user's tables must not be used; "" when it may."""
        if self.settings.reload_by_ranks and (self.settings.reload == "start" or ranks.several()):
            return "the user's table: ranks of one program change tables together, and so use published ones alone"
        environment = self.environment("cpu")
        if solution.launch or solution.device != environment.device.key:
            return "the user's table, made for another device: a seed for the search"
        if not environment.accepts(solution.backend, solution.stamp):
            return f"the user's table, backend {solution.backend} of another version: a seed for the search"
        verdict = self.verdicts.of(solution)
        return _UNCHECKED if verdict is None else verdict


def _selections() -> type[Selections]:
    from gemmtuned.hooks.selections import Selections

    return Selections


def _of_others(overridden: dict[str, str]) -> str:
    """One line on operators that somebody else serves."""
    if not overridden:
        return ""
    served = ", ".join(f"{operator} ({place})" for operator, place in list(overridden.items())[:3])
    more = f" and {len(overridden) - 3} more" if len(overridden) > 3 else ""
    return f"kernels of others are left alone and their calls not counted: {served}{more}"


def _watch_graphs(library: native.Native, settings: Settings, before: Callable[[], None]) -> GraphCounts | None:
    if not library.has_cuda:
        return None
    import torch

    graphs = GraphCounts(
        library, torch.cuda.CUDAGraph, torch.cuda.current_device, before=before, replays=settings.capture
    )
    graphs.install()
    return graphs


def _has_context(index: int) -> bool:
    """Whether this process has a context on a GPU; asking makes none. For a process that has CUDA initialised."""
    import torch

    if hasattr(torch._C, "_cuda_hasPrimaryContext"):
        return bool(torch._C._cuda_hasPrimaryContext(index))
    return torch.cuda.memory_reserved(index) > 0  # the current device is no answer: each thread has its own, and ours 0
