"""What this process has counted, and what it reports: failures, its row in the session table, the line at its start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from gemmtuned.configs import clock
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.settings import unknown_variables
from gemmtuned.configs.stderr_lines import say_line, tell
from gemmtuned.configs.unpatched import builtins
from gemmtuned.hooks import engines, frozen_layers, phase, ranks
from gemmtuned.hooks.dispatch import ident_of, solution_of
from gemmtuned.hooks.flush import new_session
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.native import HOW
from gemmtuned.hooks.op_counts import OpCounts
from gemmtuned.hooks.pending import PutOff

if TYPE_CHECKING:
    from gemmtuned.configs.settings import Settings
    from gemmtuned.configs.sighting import Session, Sighting
    from gemmtuned.configs.solution import Solution
    from gemmtuned.hooks.flush import Flusher
    from gemmtuned.hooks.patches import Patches
    from gemmtuned.hooks.selections import Selections
    from gemmtuned.hooks.tables import Library, Tables
    from gemmtuned.hooks.unserved import Note, Unserved
    from gemmtuned.hooks.where import Where

__builtins__ = builtins


log = logging.getLogger("gemmtuned.hooks")


class Account:
    """Counts and reports of the process. selections: logs what served each call, if the user asked for that."""

    # what the line at the start has said in this process, whatever hook was on then
    _line_said: tuple[object, ...] = ()

    def __init__(
        self,
        settings: Settings,
        library: Library,
        tables: Tables,
        patches: Patches,
        where: Where,
        selections: Selections | None,
    ) -> None:
        self._settings, self._library, self._tables, self._patches = settings, library, tables, patches
        self._where, self._selections = where, selections
        self.op_counts = OpCounts()
        self._unserved: Unserved | None = None
        self.started_us = clock.now_ns() // 1000
        self.role = ""  # what the process does for a serving engine
        self._stale = ""  # a note on frozen layers whose weights have changed
        self._op_failures: list[tuple[Solution, str]] = []  # (solution, reason), each solution at most once
        self._announced = self._said_off = False

    def label(self, settings: Settings, role: str) -> None:
        """From now on report this process under the label `settings.run`, with this role."""
        self._settings, self.role = settings, role

    def after_fork(self, at_us: int) -> None:
        """In a forked child: it starts from nothing, and from this Unix time; 0: from now."""
        self.op_counts.reset()
        self._unserved = None
        if self._library.native is not None:
            self._library.native.after_fork()
        self._op_failures = []
        self.started_us = at_us or clock.now_ns() // 1000

    def drain(self) -> Iterator[Sighting]:
        """What was counted since the last call, under aten and by our ops themselves.

        A bug in what else is noted of it is raised at the end: what was read from the counters is there only once.
        """
        native, now, late = self._library.native, phase.current(), PutOff()
        for drained in (native.drain(now) if native is not None else (), self.op_counts.drain()):
            for sighting in drained:
                with late:
                    if sighting.unserved and len(self._tables.table):  # replays say it whatever there is
                        self._note_unserved(sighting)
                    if self._selections is not None and self._settings.dispatch:
                        with suppress(CandidateFailed):  # an unknown device: nothing is selected there
                            device = self._where.environment(sighting.place).device
                            self._selections.note(sighting, self._tables.table, device)
                yield sighting
        late.now()

    def _note_unserved(self, sighting: Sighting) -> None:
        if self._unserved is None:
            with importing():  # late, because few programs call an engine's operators
                from gemmtuned.hooks.unserved import Unserved

            self._unserved = Unserved()
        self._unserved.note(sighting, self._tables.table)

    def take_unserved(self) -> Iterator[Note]:
        """(problem, engine's operator, place, generation): calls since the last time that wait for a race beside it."""
        if self._unserved is not None:
            yield from self._unserved.take()

    def set_aside(self, ends: str) -> None:
        """A phase ends; op_counts note it with each call."""
        if self._library.native is not None:
            self._library.native.set_aside(ends)

    def session(self, flusher: Flusher) -> Session:
        """This process's row for the store's session table."""
        native, tables = self._library.native, self._tables
        dropped = (native.dropped if native is not None else 0) + self.op_counts.dropped
        return new_session(
            self._settings,
            path=self._patches.path,
            started_us=self.started_us,
            generation=tables.table.generation,
            active_us=tables.active_us,
            calls=flusher.calls,
            dropped=dropped + flusher.dropped,
            errors=len(tables.failed),
            reload_failures=tables.loader.failures,
            rank=ranks.rank() if self._settings.rank is None else self._settings.rank,
            note=self._note(flusher.complaint),
            role=self.role,
            operators=self._patches.foreign.known(self._patches.overridden()),
            waited_us=flusher.waited_us,
        )

    def fail_op(self, solution: Solution, reason: str) -> None:
        """Note that a solution failed in one of our ops, which no longer uses it."""
        self._op_failures.append((solution, reason))

    def report_failures(self, flusher: Flusher) -> int:
        """Quarantine the solutions that failed in routes or in our ops since the last call; returns how many."""
        failures = self._library.native.failures() if self._library.native is not None else []
        ops, self._op_failures = self._op_failures, []
        failures += [(ident_of(solution), HOW[0], reason) for solution, reason in ops]
        for ident, how, reason in failures:
            solution = solution_of(ident)
            self._tables.failed[ident] = reason
            what = "route %s problem=%s backend=%s served=torch reason=%s"
            tell(log, logging.WARNING, what, how, solution.problem, solution.backend, reason)
            flusher.report_failure(solution, reason, how)
        return len(failures)

    def report_fault(self, flusher: Flusher) -> None:
        """If a kernel broke a GPU while the table was on probation, tell the daemon which of its routes ran there."""
        if self._library.native is None or not self._tables.has_launched_on_probation():
            return
        fault, idents = self._library.native.fault()
        if not fault:
            return
        self._tables.probation.note_fault(fault)
        for solution in map(solution_of, idents):
            flusher.report_failure(solution, f"launched in a process whose GPU had a fault later (CUDA {fault})")
        what = "the GPU has a fault, and generation %d is new: the daemon runs its kernels again kernels=%d fault=%d"
        tell(log, logging.WARNING, what, self._tables.table.generation, len(idents), fault)

    def finish(self, flusher: Flusher, began_s: float) -> None:
        """Write what is left of a process whose end began then."""
        self.report_failures(flusher)
        self.report_fault(flusher)
        flusher.stop(began_s)
        if self._selections is not None:
            self._selections.finish()
        self._tables.leave()

    def look_at_layers(self) -> None:
        """Note frozen layers whose weights have changed."""
        self._stale = "; ".join(filter(None, (note() for note in frozen_layers.notes)))

    def _note(self, complaint: str) -> str:
        patches, tables = self._patches, self._tables
        off = patches.switched_off() or patches.invariant_note()
        refused = tables.refused or tables.loader.refused
        notes = (off, patches.breaker.note, refused, patches.note, self._stale, complaint, patches.others_note())
        return next(filter(None, notes), "")

    def announce(self) -> None:
        """Print once that the hook is on, or that the user has switched it off; again where it is on in another way.

        Children of multiprocessing print nothing, since their parent has.  A hook that is off for another reason has
        said so in a warning.
        """
        settings, path = self._settings, self._patches.path
        off = self._patches.switched_off() or ("" if settings.native else "switched off by GEMMTUNED_NATIVE=0")
        if self._announced or settings.quiet or (path == "off" and not off) or (off and self._said_off):
            return
        self._announced, self._said_off = not off, True
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            return
        if "--multiprocessing-fork" in sys.orig_argv:  # such a child imports the program before it knows its parent
            return
        version = sys.modules["gemmtuned"].__version__
        quiet = f"{_misspelt()}(GEMMTUNED_QUIET=1 silences this)"
        if off:
            Account._line_said = ()  # once it is on again, that is said again
            say_line(f"gemmtuned {version}: {off}, this program runs stock torch {quiet}")
            return
        if engines.speak():
            return
        what = "" if settings.dispatch else ", counting only" if settings.capture else ""
        if Account._line_said == (path, what, settings.home):
            return
        Account._line_said = path, what, settings.home
        table = self._tables.table
        rows = len(table)
        held = f"generation {table.generation}, {rows} rows" if table.generation or rows else "nothing tuned yet"
        say_line(f"gemmtuned {version}: {path}{what}, {held}, home {settings.home} {quiet}")


def _misspelt() -> str:
    """Variables that are set like ours but that we do not know, for the line at the start; "" without any."""
    unknown = unknown_variables().items()  # a name that is no identifier is no typing error, and may be an attack
    names = {name: meant for name, meant in unknown if name.upper().startswith("GEMMTUNED_") and name.isidentifier()}
    each = (
        f"{name}, set here, is no variable of gemmtuned's" + (f" ({meant}?)" if meant else "")
        for name, meant in names.items()
    )
    return "".join(f"- {one} " for one in each)
