"""Files that `gemmtuned tune` writes as it goes: AITER's tuned table, and its profile of every candidate.

After each shape both are written under a temporary name and renamed, so an interrupt loses no result.  Rows of others
stay as they are, with unknown columns and with several for one shape; so do remarks, those between rows below them.  A
solution of ours replaces the rows of its shape and device.  Others may write to the tuned table at the same time: so we
read it again before each write, under a lock that our tuners share, and notice if an editor wrote in between, or into
the file that we replaced; its rows are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.aiter_csv import Row, read_lines
from gemmtuned.configs.aiter_csv import Table as CsvTable
from gemmtuned.configs.aiter_headers import (
    ALIASES,
    DEVICE,
    EVERY,
    FAMILIES,
    OURS,
    AiterFamily,
    family_of_columns,
    named_family,
)
from gemmtuned.configs.aiter_names import canonical_name, family_of_name
from gemmtuned.configs.aiter_remarks import is_remark
from gemmtuned.configs.aiter_rows import (
    candidate_texts,
    columns_for,
    family_of,
    gfx_of,
    key_texts,
    tuned_texts,
    units_of,
)
from gemmtuned.configs.aiter_text import remarks
from gemmtuned.configs.aiter_write import require_writable, write_file, write_lines
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.reports.shared_file import Watched, locked

if TYPE_CHECKING:
    from gemmtuned.daemon.protocol.wire import Trial

_FAILED_US: Final = {
    "hang": "inf",
    "timeout": "inf",
    "crash": "inf",
    "killed": "inf",
}  # AITER's marks; -1 for what cannot run
MOST_TRIES: Final = 50
GRACE_S: Final = 0.2  # in this time an editor that had the file open when we replaced it has written
Identity = tuple[Any, ...]


class TunedTable:
    """One tuned table of one family.

    Raises TableError for a file that is no table, is of another family, or cannot be written.
    """

    def __init__(self, path: Path, family: AiterFamily, *, sort: bool = False) -> None:
        self.path, self.family = path, family
        self.left_out: dict[Problem, None] = {}
        self._sort = sort
        self._columns = list(columns_for(family, kind="tuned"))
        self._separator = ","
        self._above: list[str] = []  # remarks of theirs, above the header and below it
        self._below: list[str] = []
        self._theirs: list[tuple[Identity, Row]] = []  # a shape may stand several times
        self._ours: dict[Identity, Row] = {}
        self._seen = Watched()
        if not self._read():
            named_family(family.name, self._columns, name=str(path))  # else nobody could read it by its name
            by_name = family_of_name(path.name)
            if by_name.startswith("batched_") and "B" not in self._columns and not family_of_columns(self._columns):
                raise TableError(
                    f"{path}: by its name it is of family {by_name}, and the rows to be written are of {family.name}, "
                    f"which have no batch: name it as AITER does, such as {canonical_name(family.name, 'tuned')}"
                )
        require_writable(path)

    def add(self, solution: Solution, device: Device, *, err_ratio: float | None = None) -> None:
        """Add a solution; one that the family's columns cannot express goes to left_out."""
        if family_of(solution.problem) is not self.family:
            self.left_out[solution.problem] = None
            return
        row = self._new(solution, device, err_ratio)
        self._ours[_identity(row)] = row

    def _new(self, solution: Solution, device: Device, err_ratio: float | None = None) -> Row:
        texts = tuned_texts(solution, self.family, device)
        if err_ratio is not None:
            texts[_ratio_column(self.family)] = f"{err_ratio:.4f}"
        return _row(texts, self.family)

    def holds(self, solution: Solution, device: Device) -> bool:
        """Whether there is a row for this solution's problem on this device."""
        if family_of(solution.problem) is not self.family:
            return False
        wanted = _identity(self._new(solution, device))
        return wanted in self._ours or any(wanted == identity for identity, _ in self._theirs)

    def write(self) -> None:
        """Write the file completely or not at all, with rows that others wrote meanwhile. Raises TableError."""
        late: list[list[str]] = []
        with locked(self.path):
            for tries in range(MOST_TRIES):
                late += self._seen.written_after()  # into files that we replaced
                try:
                    self._read()
                except TableError:  # an editor may be in the middle of writing it
                    if tries + 1 == MOST_TRIES:
                        raise
                    time.sleep(0.02)
                    continue
                for lines in late:
                    self._take(read_lines(lines, name=str(self.path), family=self.family.name, ignore=(EVERY,)))
                if self._seen.replace(self.path, self._write_to):
                    return
        raise TableError(f"{self.path}: changed by others {MOST_TRIES} times while it was written")

    def finish(self) -> None:
        """Look once more for rows that an editor wrote into the file that we replaced last. Raises TableError."""
        time.sleep(GRACE_S)
        if self._seen.changed():
            self.write()

    def _read(self) -> bool:
        """Read the file again; False if there is none."""
        lines = self._seen.open(self.path)
        if lines is None:
            self._theirs, self._above, self._below = [], [], []
            return False
        table = read_lines(lines, name=str(self.path), family=self.family.name, ignore=(EVERY,))
        if table.family is not self.family:
            raise TableError(
                f"{self.path}: a table of family {table.family.name}, expected {self.family.name}: name another"
            )
        if table.header.turned or table.micro != 1.0:
            what = "M and N mean each other" if table.header.turned else "times are not in microseconds"
            raise TableError(f"{self.path}: its {what}, and rows of ours would be read so, too: name another file")
        if table.rejected:
            raise TableError(f"{table.complaints[0]}. Mend or move it: its rows are not thrown away")
        ours = columns_for(self.family, kind="tuned")
        self._columns = [*table.header.columns, *(c for c in ours if c not in table.header.columns)]
        self._separator = table.header.separator
        self._above, self._below = remarks(lines, name=str(self.path))
        self._theirs = []
        self._take(table)
        return True

    def _take(self, table: CsvTable) -> None:
        known = {tuple(row.values.items()) for _, row in self._theirs} if self._theirs else set()
        self._theirs += [(_identity(row), row) for row in table.rows if tuple(row.values.items()) not in known]

    def _write_to(self, path: Path) -> None:
        rows: dict[int, Row] = {}  # each once, where the first it replaces stood
        for identity, theirs in self._theirs:
            row = self._ours.get(identity, theirs)
            rows[id(row)] = row
        rows |= {id(row): row for row in self._ours.values()}
        ordered = sorted(rows.values(), key=_order) if self._sort else rows.values()
        cells = map(self._cells, ordered)
        write_file(path, self._columns, cells, separator=self._separator, above=self._above, below=self._below)

    def _cells(self, row: Row) -> Sequence[str]:
        known = len(row.header.columns)
        if list(row.header.columns) == self._columns[:known]:  # from this file: cells beyond its header stay beyond
            more = [""] * (len(self._columns) - known) if len(row.cells) > known else []
            return [*row.cells[:known], *more, *row.cells[known:]]
        return [row[column] for column in self._columns]


class Profile:
    """All candidates of a run, one row each: the last time, error ratio, the last phase and the outcome.

    Raises TableError for a file that cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            require_writable(path)
        self._trials: dict[tuple[Device, Problem, Candidate], dict[str, Any]] = {}

    def add(self, trial: Trial, device: Device) -> None:
        """Note one step of a candidate, which replaces earlier ones."""
        facts = self._trials.setdefault((device, trial.problem, trial.candidate), {})
        facts |= {"phase": trial.phase, "outcome": trial.outcome}
        facts |= {"us": trial.us} if trial.us is not None else {}
        facts |= {"err_ratio": trial.err_ratio} if trial.err_ratio is not None else {}

    def err_ratio(self, solution: Solution) -> float | None:
        """The largest share of mismatching elements that this solution's candidate had, at any size of its bucket."""
        candidate = solution.candidate
        rest = solution.problem.with_m(1)
        found = [
            facts["err_ratio"]
            for (device, problem, tried), facts in self._trials.items()
            if device.key == solution.device
            and (problem.with_m(1), tried) == (rest, candidate)
            and "err_ratio" in facts
        ]
        return max(found, default=None)

    def write(self) -> None:
        """Write the file completely or not at all, if a path was given. Raises TableError."""
        if self.path is None:
            return
        family = FAMILIES["bf16"]
        columns = (*family.tuned_header, "phase", "outcome")
        rows = []
        for (device, problem, candidate), facts in self._trials.items():
            us: float = facts.get("us") or 0.0
            timed = us > 0 and facts["outcome"] in ("ok", "slower", "rejected")
            texts = {
                **key_texts(problem, family), **candidate_texts(candidate), "gfx": device.arch,
                "cu_num": str(device.units), "us": f"{us:.4f}" if timed else _FAILED_US.get(facts["outcome"], "-1"),
                "err_ratio": f"{facts['err_ratio']:.4f}" if "err_ratio" in facts else "",
                "tflops": f"{problem.flops / us / 1e6:.2f}" if timed else "",
                "bw": f"{problem.bytes / us / 1e3:.2f}" if timed else "",
                "phase": facts["phase"], "outcome": facts["outcome"],
            }  # fmt: skip
            rows.append([texts.get(column, "") for column in columns])
        write_file(self.path, columns, rows)


def table_family(problems: Sequence[Problem]) -> AiterFamily:
    """The family whose table holds these problems: that of the first which has one. Raises TableError."""
    found = next((family for family in map(family_of, problems) if family is not None), None)
    if found is None:
        raise TableError(f"AITER has no table for {problems[0]}: leave out -o, the database and the tables hold it")
    return found


def _ratio_column(family: AiterFamily) -> str:
    return next(column for column in family.result if column.lower().replace("_", "") == "errratio")


def _row(texts: dict[str, str], family: AiterFamily) -> Row:
    text = StringIO()
    write_lines(text, list(texts), [list(texts.values())])
    text.seek(0)
    return read_lines(text, name=family.name, family=family.name).rows[0]


def _identity(row: Row) -> Identity:
    """Device and key, with unknown columns that may matter: a row that differs in them is kept as another product."""
    family = row.header.family
    usual = {*family.tuned_header, *family.also, *DEVICE, *ALIASES, OURS, "libtype", "_tag"}
    more = tuple(
        (name, text) for name, text in row.values.items() if text and name not in usual and not is_remark(name)
    )
    return (gfx_of(row), units_of(row), *row.key, *more)


def _order(row: Row) -> tuple[Any, ...]:
    """AITER's order: device, N, M, K."""
    m, n, k = row.key[:3] if row.header.family.key[0] == "M" else row.key[1:4]
    return gfx_of(row), units_of(row), n, m, k, str(row.key)
