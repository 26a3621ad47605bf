"""The table in use: published solutions and the user's own rows, given to the native library whole, on probation first.

Changes are made one at a time, by `changes`.  The hook's thread makes them, and so do callers of gemmtuned.reload() and
load_config.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.change_queue import ChangeQueue
from gemmtuned.configs.packed import Solutions, unpack
from gemmtuned.configs.settings import Settings, UserTables
from gemmtuned.configs.solution import DEFAULT_BACKEND, Solution
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.hooks import ranks
from gemmtuned.hooks.dispatch import Table, build_table
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.overrides import schema_of
from gemmtuned.hooks.pace import free_in_slices, in_slices
from gemmtuned.hooks.watch import Loader

if TYPE_CHECKING:
    from pathlib import Path

    from gemmtuned.configs.verdicts import Verdicts
    from gemmtuned.hooks.heartbeat_writer import Beats
    from gemmtuned.hooks.native import Native
    from gemmtuned.hooks.native.table_rows import Row
    from gemmtuned.hooks.probation import Probation
    from gemmtuned.hooks.routes import Routes
    from gemmtuned.hooks.user_tables import UserLoader
    from gemmtuned.hooks.where import Where

log = logging.getLogger("gemmtuned.hooks")
_UNCHECKED: Final = "the user's table, not checked yet: gemmtuned run or the daemon does"


class Library:
    """The native library once it is there, and what makes its rows once there are any."""

    def __init__(self) -> None:
        self.native: Native | None = None
        self.routes: Routes | None = None


class _Late:
    """Parts of Tables that most programs never need: each is imported and made when it is first asked for."""

    def __init__(self, settings: Settings, tables: Iterable[UserTables], library: Library) -> None:
        self._settings, self._library, self._asked_for = settings, library, tuple(tables)
        self._probation: Probation | None = None  # none before the first table
        self._beats: Beats | None = None  # none before a GPU is used
        self._verdicts: Verdicts | None = None
        self._user_tables: UserLoader | None = None  # none where the user has none

    @property
    def probation(self) -> Probation:
        """What is known of tables that programs die of; made with the first table."""
        if self._probation is None:
            with importing():
                from gemmtuned.hooks.probation import Probation

            self._probation = Probation(self._settings.home / "probation", self._settings.run, self._library.native)
        return self._probation

    @property
    def beats(self) -> Beats:
        """The page that says that this process runs products."""
        if self._beats is None:
            with importing():
                from gemmtuned.hooks.heartbeat_writer import Beats

            self._beats = Beats()
        return self._beats

    @property
    def user_tables(self) -> UserLoader:
        """The user's own tables."""
        if self._user_tables is None:
            with importing():
                from gemmtuned.hooks.user_tables import UserLoader

            self._user_tables = UserLoader(self._asked_for)
        return self._user_tables

    @property
    def verdicts(self) -> Verdicts:
        """What spot checks have said of rows of the user's tables."""
        if self._verdicts is None:
            with importing():
                from gemmtuned.configs.verdicts import Verdicts

            self._verdicts = Verdicts(self._settings.home)
        return self._verdicts

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the user's tables."""
        return self.user_tables.files if self._has_users else ()

    @property
    def _has_users(self) -> bool:
        return bool(self._asked_for) or self._user_tables is not None


class Tables(_Late):
    """The table in use, and its changes. tables: the user's.  changed: called after each change."""

    def __init__(
        self,
        settings: Settings,
        tables: Iterable[UserTables],
        library: Library,
        where: Where,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(settings, tables, library)
        self._where, self._changed = where, changed
        self.table = Table()
        self.active_us = 0  # since when the table is in use
        self.built_for: tuple[str, ...] = ()  # the places (`cpu`, `cuda:0`) that it serves
        self.failed: dict[int, str] = {}  # id of a route that failed -> why
        self.refused = ""  # why the newest generation is not used
        self.loader = Loader(settings.config_dir)
        self.changes = ChangeQueue()  # a signal handler may ask for a reload during one
        self._newest: tuple[int, Solutions] | None = None  # generation and solutions, as published
        self._unchecked = Solutions()

    def has_launched_on_probation(self) -> bool:
        """Whether a table that is on probation has run a kernel on a GPU."""
        return self._probation is not None and self._probation.has_launched()

    def after_fork(self) -> None:
        """In a forked child: replace what the parent's threads may have held."""
        if self._beats is not None:
            self._beats.after_fork()
        self.changes = ChangeQueue()
        self.loader = Loader(self._settings.config_dir)
        if self._probation is not None:
            self._probation.after_fork()

    def leave(self) -> None:
        """The process ends in good order."""
        if self._probation is not None:
            self._probation.leave()
        if self._beats is not None:
            self._beats.hide()

    def give_to(self, native: Native) -> None:
        """Load the table into a library that is new; called during a turn."""
        if self._probation is not None or len(self.table):
            self.probation.pages = native
        self._put_on_probation(self.table)
        self._load(native, self.table, self._rows(native, self.table))

    def _load(self, native: Native, table: Table, rows: Iterable[Row]) -> None:
        left_out, why = native.load(rows, table.generation)
        if left_out:  # for example rows of a later version
            table.refused["the native table cannot hold it"] += left_out
            tell(log, logging.WARNING, "rows not used count=%d reason=%s", left_out, why)

    def _rows(self, native: Native, table: Table) -> Iterable[Row]:
        """The table's rows in the form that the library takes."""
        if self._library.routes is None:
            if not len(table):
                return ()
            with importing():  # late, because most programs need no launch records
                from gemmtuned.hooks.routes import Routes

            self._library.routes = Routes(native, self._settings.config_dir)
        return self._library.routes.rows(table)

    def is_built(self) -> bool:
        """Whether the newest table that we know of is in use wherever this process has a context.

        False while a row could have an operator that the program has registered since.
        """
        if self._newest is None:
            return True
        missing = self._library.routes.missing if self._library.routes is not None else ()
        return self._where.in_use() == self.built_for and not any(map(schema_of, missing))

    def follow_places(self) -> None:
        """Serve devices that came into use since, and by operators that were registered since."""
        if self._beats is not None or any(place != "cpu" for place in self.built_for):
            self.beats.follow(self._library.native, self.built_for)
        newest = self._newest
        if newest is not None and not self.is_built():
            self.changes.make(lambda: self.use(*(self._newest or newest)))

    def reload(self) -> int | None:
        """Take up the newest table; its generation, or None when there was nothing newer.

        None, too, in the middle of a reload by the same thread: then the newest is taken up right after that one.
        """
        return self.changes.make(self._reload)

    def _reload(self) -> int | None:
        loaded = self.loader.load(newer_than=self.table.generation)
        if loaded is not None and self.refuses(loaded[0]):
            loaded = None
        generation = self.use(*loaded) if loaded is not None else None
        if self._has_users and (self.user_tables.load() or self._has_answers()):
            generation = self.use(*(self._newest or (self.table.generation, ())))
        return generation

    def _has_answers(self) -> bool:
        """Whether some of the user's rows that were unchecked have been checked since the last look."""
        unchecked = self._unchecked
        if not unchecked or not self.verdicts.may_be_new():
            return False
        return any(self.verdicts.of(solution) is not None for solution in in_slices(unchecked))

    def add(self, table: UserTables) -> None:
        """Know of one more table of the user's; it is read with the next reload."""
        self._asked_for = (*self._asked_for, table)
        self._user_tables = None  # the next that asks has it, too

    def take_rows(self, generation: int, rows: list[str]) -> None:
        """Use the table that another rank has read, even if this rank has read a newer one."""

        def take() -> None:
            if generation != self.table.generation:
                self.use(generation, Solutions(Solution.from_row(json.loads(row)) for row in rows))

        self.changes.make(take)

    def refuses(self, generation: int) -> bool:
        """Whether too many processes of this run have died of this generation; says so once."""
        note = self.probation.note(generation) if self.probation.refuses(generation) else ""
        if note and note != self.refused:
            tell(log, logging.WARNING, "table not taken reason=%s", note)
        self.refused = note
        return bool(note)

    def follow_probation(self) -> None:
        """Stop using the table when other processes of this run died of it, so that workers forked later do not.

        Ranks keep it, because they change tables together.
        """
        if self._probation is None or not self._probation.turn(clock.monotonic()):
            return
        generation = self.probation.generation
        if generation is None or not self.probation.refuses(generation):
            return
        if (self._settings.reload_by_ranks and ranks.several()) or not self.refuses(generation):
            return
        self.probation.give_up()
        self.changes.make(lambda: self.use(0, ()))

    def use(self, generation: int, solutions: Iterable[Solution]) -> int:
        """Make these solutions the table in use; called during a turn."""
        solutions = solutions if isinstance(solutions, Solutions) else Solutions(solutions)
        places = self._where.in_use()
        users, refused = self._usable(solutions)
        table = build_table(
            in_slices(chain(solutions.packed, users.packed)),
            {place: self._where.environment(place) for place in places},
            generation=generation,
            failed=frozenset(self.failed),
        )
        table.refused += refused
        self._put_on_probation(table, known=self.table if generation == self.table.generation else None)
        native = self._library.native
        if native is not None:
            self._load(native, table, in_slices(self._rows(native, table)))
        before = self.table.packed()
        self.table, self._newest, self.built_for = table, (generation, solutions), places
        free_in_slices(before)
        self.active_us = clock.now_ns() // 1000
        self._changed()
        what = "table active generation=%d rows=%d refused=%d"
        tell(log, logging.INFO, what, table.generation, len(table), table.refused.total())
        return table.generation

    def _usable(self, published: Solutions) -> tuple[Solutions, Counter[str]]:
        """What of the user's tables goes beside the published solutions, and why the rest does not."""
        if not self._has_users:
            return Solutions(), Counter()
        with importing():
            from gemmtuned.hooks.user_tables import usable

        users, refused = usable(self.user_tables, published, check=self._holds_here)
        self._unchecked = Solutions(s for s in self.user_tables.solutions if self._holds_here(s) == _UNCHECKED)
        self.verdicts.ask(self._unchecked)
        return users, refused

    def _put_on_probation(self, table: Table, *, known: Table | None = None) -> None:
        """Begin the generation's probation if it has a route (a row on a device) that the table `known` had not.

        The user's own rows do not count: they were tried in another process, and come with every generation.
        """
        own = self.user_tables.taken if self._has_users else frozenset()
        for place, text, packed in in_slices(table.rows()):
            new = known is None or not known.has(place, text, packed)
            if new and packed not in own and unpack(packed).backend != DEFAULT_BACKEND:
                self.probation.begin(table.generation)
                return

    def _holds_here(self, solution: Solution) -> str:
        """Why a solution of the user's tables must not be used; "" when it may."""
        if self._settings.reload_by_ranks and (self._settings.reload == "start" or ranks.several()):
            return "the user's table: ranks of one program change tables together, and so use published ones alone"
        environment = self._where.environment("cpu")
        if solution.launch or solution.device != environment.device.key:
            return "the user's table, made for another device: a seed for the search"
        if not environment.accepts(solution.backend, solution.stamp):
            return f"the user's table, backend {solution.backend} of another version: a seed for the search"
        verdict = self.verdicts.of(solution)
        return _UNCHECKED if verdict is None else verdict
