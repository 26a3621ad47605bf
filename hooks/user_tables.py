"""The tables that AITER_CONFIG_* name, as far as this process can use them.

A row of AITER's names a kernel of AITER's and says nothing of versions: it is a seed for the search (`gemmtuned
import`), and never run here.  A row that we exported carries its whole solution; it is used where device and stamp are
ours and a spot check passes.  Files are only read, again whenever one of them changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.numbers import rows_are
from gemmtuned.configs.packed import Solutions, pack, unpack
from gemmtuned.configs.settings import UserTables
from gemmtuned.configs.solution import Solution
from gemmtuned.configs.stderr_lines import Once, tell
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.pace import in_slices

log = logging.getLogger("gemmtuned.hooks")
Signature = tuple[int, int, int] | None


class UserLoader:
    """Reads the user's tables; of a file that turned bad, what it last held stays, as of published tables.

    solutions: those a row carries whole, with the file; seeds: other rows, by library.
    """

    def __init__(self, tables: Sequence[UserTables]) -> None:
        self._tables = tuple(tables)
        self.files = tuple(dict.fromkeys(path for table in tables for path in table.paths))
        self.filed: dict[bytes, Path] = {}  # the solutions, packed, and the file of each
        self.seeds: Counter[str] = Counter()
        self.taken: frozenset[bytes] = frozenset()  # what is in use of them, as `usable` said last
        self._good: dict[tuple[str, Path], _Rows] = {}
        self._signatures: dict[Path, Signature] | None = None
        self._logged = Once()

    def load(self) -> bool:
        """Read the files if one of them changed since the last time; True when they were read."""
        signatures = {path: _signature(path) for path in self.files}
        if not self.files or signatures == self._signatures:
            return False
        self._signatures = signatures
        filed: dict[bytes, Path] = {}
        seeds: Counter[str] = Counter()
        for table in self._tables:
            for path in table.paths:
                rows = self._read(table, path)
                for packed in rows.solutions.packed:
                    filed.setdefault(packed, path)
                seeds.update(rows.seeds)
        self.filed, self.seeds = filed, seeds
        return True

    @property
    def solutions(self) -> Solutions:
        """The solutions that rows carry whole."""
        return Solutions.of(self.filed)

    def solutions_file(self, solution: Solution) -> Path | None:
        """The file whose row brought this solution into use; None when a published table has an equal one."""
        packed = pack(solution)
        return self.filed.get(packed) if packed in self.taken else None

    def _read(self, user: UserTables, path: Path) -> _Rows:
        with importing():
            from gemmtuned.configs import launch  # noqa: F401  as in watch.py
            from gemmtuned.configs.aiter_csv import Reader, lines_of
            from gemmtuned.configs.aiter_rows import library_of, solution_of

        if self._signatures and self._signatures[path] is None:  # taken away: so are its rows
            self._good.pop((user.variable, path), None)
        before = self._good.get((user.variable, path))
        rows = _Rows()
        try:
            table = Reader(in_slices(lines_of(path)), name=str(path), family=user.family)
            for row in table:  # one by one: see configs/packed.py
                solution = solution_of(row)
                if solution is not None:
                    rows.solutions.packed.append(pack(solution))
                else:
                    rows.seeds[library_of(row) or "unknown"] += 1
        except TableError as err:
            self._tell(f"{user.variable}: {err}" + ("; its earlier rows stay in use" if before else ""))
            return before or _Rows()
        if table.rejected:
            self._tell(f"{user.variable}: {rows_are(table.rejected)} not used, the first: {table.complaints[0]}")
        self._good[user.variable, path] = rows
        if not rows.solutions:
            count = rows.seeds.total()
            seeds = "they are seeds for the search, which gemmtuned import keeps" if count else "it has none"
            self._tell(f"{user.variable}: 0 of {count} rows of {path} can be used here: {seeds}")
        return rows

    def _tell(self, what: str) -> None:
        if self._logged.is_new(what):
            tell(log, logging.WARNING, "table not taken reason=%s", what)


class _Rows:
    """What one file holds."""

    def __init__(self) -> None:
        self.solutions = Solutions()
        self.seeds: Counter[str] = Counter()


def usable(
    loader: UserLoader, published: Sequence[Solution], *, check: Callable[[Solution], str]
) -> tuple[Solutions, Counter[str]]:
    """The user's solutions to add to the published ones, and why the other rows are not used.

    What the daemon of this machine published goes first: it was measured here.  check gives the reason against one.
    """
    if not loader.filed:
        published = ()
    known = {_text_of(solution) for solution in in_slices(published)}
    refused: Counter[str] = Counter(
        {f"{library}: a library of the table's, a seed for the search": n for library, n in loader.seeds.items()}
    )
    taken = []
    for packed in in_slices(loader.filed):
        solution = unpack(packed)
        if _text_of(solution) in known:
            refused["the user's table; this machine's own solution is used"] += 1
        elif reason := check(solution):
            refused[reason] += 1
        else:
            taken.append(packed)
    loader.taken = frozenset(taken)
    return Solutions.of(taken), refused


def _text_of(solution: Solution) -> str:
    return f"{solution.problem} {solution.covers} {solution.mode} {solution.device}"


def _signature(path: Path) -> Signature:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino
