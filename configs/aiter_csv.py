"""Reads AITER's tables with all their quirks, so that they can be written back as they were.

A row is validated in the columns that decide what it means (shape, dtypes, times, kernel numbers) and kept as text, so
that unknown columns survive a round trip.  A bad row is left out with one complaint that names file, line and column.
As AITER's own readers must, this accepts spaces and tabs around values, blank and comma-only rows, missing and extra
blank columns, no final newline, bools as True/False or 1/0, dtypes as `torch.bfloat16`, `dtypes.bf16` or `bf16`,
`Null`, `None` and `nan` in any column, `#` lines, a header without a line end before the first row, and `;`, tab or `|`
between cells.  A row with more cells than the header is refused, and so is a last row with fewer cells and no line end,
because their cells may belong to other columns.  AITER evaluates dtype text as Python; here it is looked up.

aiter_rows.py says what a row means in our terms, and aiter_headers.py which headers there are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TextIO

from gemmtuned.configs import aiter_headers
from gemmtuned.configs.aiter_ages import positions
from gemmtuned.configs.aiter_columns import CHECKED, NOTHING, decides, parser, real
from gemmtuned.configs.aiter_headers import (
    EVERY,
    AiterFamily,
    family_of_header,
    ignoring,
    kind_of,
    named_family,
)
from gemmtuned.configs.aiter_remarks import is_flag, is_index
from gemmtuned.configs.aiter_swapped import LOOKED_AT, exchanged, other_unit
from gemmtuned.configs.aiter_text import (
    CONFLICT,
    KNOWN,
    MAX_BAD_ROWS,
    MAX_LINE,
    SEPARATORS,
    Bad,
    binary_text,
    cells_of,
    check_characters,
    is_remark,
    json_of,
    names_columns,
    names_of,
    numbered,
    odd_separator,
    separator_of,
    unglued,
    unmarked,
)
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.numbers import whole
from gemmtuned.configs.read_file import open_regular

MAX_BYTES: Final = 256 << 20
MAX_COMPLAINTS: Final = 1000  # so many complaints are kept; all are counted


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of one file, in its order, and their family."""

    file: str
    family: AiterFamily
    kind: str  # tuned, untuned
    columns: tuple[str, ...]
    at: dict[str, int] = field(compare=False)  # column, and the usual name of one with another -> position in a row
    separator: str = field(default=",", compare=False)
    ends: bool = field(default=False, compare=False)  # its line has a line end, so each complete row has one
    micro: float = field(default=1.0, compare=False)  # microseconds per unit of its times
    turned: bool = field(default=False, compare=False)  # M and N are exchanged (aiter_ages.py)


@dataclass(slots=True)
class Row:
    """One row. cells: the text of each column, stripped; fewer or more than the header has, as in the file.

    key: the parsed values of the family's key columns; missing ones are None (False for a bool).
    us: None if the table has no times, or the row has none.
    """

    header: Header = field(repr=False)
    line: int = field(compare=False)
    cells: tuple[str, ...]
    key: tuple[Any, ...]
    us: float | None

    def __getitem__(self, column: str) -> str:
        """The text in a column; "" if the row has none, or has nan, None or Null."""
        position = self.header.at.get(column, MAX_LINE)
        text = self.cells[position] if position < len(self.cells) else ""
        return "" if len(text) < 5 and text.lower() in NOTHING else text

    @property
    def values(self) -> dict[str, str]:
        """All columns with their text; cells beyond the header are named `+1`, `+2` ..."""
        return dict(zip(names_of(self.header.columns, len(self.cells)), self.cells, strict=True))

    @property
    def text(self) -> str:
        """`values` as JSON, sorted by column."""
        return json_of(self.header.columns, self.cells)

    @property
    def has_time(self) -> bool:
        """Whether its time can be compared: 0, negative and infinite times are AITER's marks for no measurement."""
        return self.us is not None and 0 < self.us < math.inf

    @property
    def where(self) -> str:
        """File and line, for complaints and logs."""
        return f"{self.header.file} line {self.line}"


@dataclass(slots=True)
class Table:
    """One file. complaints: one for each bad row, at most MAX_COMPLAINTS; rejected: the number of bad rows.

    notes: remarks on the file that are not about a bad row.  micro: microseconds per unit of `us`.
    """

    header: Header
    micro: float = 1.0
    rows: list[Row] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    rejected: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def family(self) -> AiterFamily:
        """The family of all its rows."""
        return self.header.family

    @property
    def kind(self) -> str:
        """tuned or untuned."""
        return self.header.kind


def read_file(path: Path, *, family: str | None = None, ignore: Sequence[str] = ()) -> Table:
    """Read a table. family: if neither header nor name says it. Raises TableError as read_lines does.

    Never reads a pipe or device, nor more than MAX_BYTES.
    """
    return read_lines(lines_of(path), name=str(path), family=family, ignore=ignore)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, cut after MAX_LINE + 1 characters. Raises TableError when it cannot be read."""
    try:
        with open_text(path, limit=MAX_BYTES) as file:
            yield from iter(lambda: file.readline(MAX_LINE + 1), "")
    except OSError as err:
        raise TableError(f"{path}: cannot be read ({err.strerror or err})") from err


def open_text(path: Path, *, limit: int) -> TextIO:
    """A regular file of at most `limit` bytes as text, with or without a byte order mark.

    Raises OSError, also for any other kind of file, and TableError for a larger one.
    """
    fd, facts = open_regular(path)
    if facts.st_size > limit:
        os.close(fd)
        raise TableError(f"{path}: {facts.st_size} bytes, at most {limit} are read")
    return os.fdopen(fd, encoding="utf-8-sig", errors="replace", newline=None)


def read_lines(lines: Iterable[str], *, name: str, family: str | None = None, ignore: Sequence[str] = ()) -> Table:
    """Read a table; `name` is used in complaints ("name line 7, column M: ...") and may say the family.

    ignore: unknown columns that the user says do not matter for the product.  Raises TableError when the header is not
    one of AITER's, has an unknown column that could matter, or the rest is no table.
    """
    reader = Reader(lines, name=name, family=family, ignore=ignore)
    table = Table(reader.header)
    table.rows.extend(reader)
    table.micro = reader.micro
    table.complaints, table.rejected, table.notes = reader.complaints, reader.rejected, reader.notes
    return table


class Reader:
    """The rows of a table one by one, so that none need stay in memory; complaints are complete after the last row.

    Raises TableError as read_lines does; the constructor raises it for the header.
    """

    def __init__(
        self, lines: Iterable[str], *, name: str, family: str | None = None, ignore: Sequence[str] = ()
    ) -> None:
        self.complaints: list[str] = []
        self.notes: list[str] = []
        self.rejected = 0
        self.micro = 1.0  # final once the first rows are read
        self._name = name
        self._numbered = numbered(lines, name)
        number, line = next(self._numbered, (0, ""))
        if not number:
            raise TableError(f"{name}: empty, expected a header such as M,N,K")
        if not line.isprintable() and not line.replace("\t", "").strip("\r\n").isprintable():
            raise TableError(f"{name} line {number}: not a table: {binary_text(line)}")
        if line.startswith(CONFLICT):
            raise TableError(f"{name} line {number}: a merge conflict stands in it: settle it first")
        separator = separator_of(line)
        try:
            columns, glued = unglued(cells_of(line, separator))
        except Bad as err:
            raise TableError(f"{name} line {number}: not a table: {err}") from err
        odd = odd_separator(line) if len(columns) == 1 else ""
        if odd:
            raise TableError(
                f"{name} line {number}: cells are parted by {odd!r}, expected commas, semicolons, tabs or bars"
            )
        if family is None:
            found = family_of_header(columns, name=name, ignore=ignore)
        else:
            found = named_family(family, columns, name=name, ignore=ignore)
        found_at = positions(columns, name=name)
        kind, ends = kind_of([*columns, *found_at.at]), line.endswith("\n")
        self.header = Header(name, found, kind, columns, found_at.at, separator, ends, found_at.micro, found_at.turned)
        self.notes += found_at.notes
        self._line = line
        self._other = 0  # the line of a second header with other columns, after which no row is read
        self._strict, self._ignore = EVERY not in ignore, ignore
        self._glued = (number, separator.join(glued) + "\n", glued)
        if glued:
            self.notes.append(f"{name} line {number}: the first row stands on the header's line, and is read")
        if separator != ",":
            self.notes.append(f"{name}: cells are parted by {separator!r}")

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows()
        first = [*islice(rows, LOOKED_AT)]
        found = exchanged(first)
        if found:
            raise TableError(f"{self._name}: {found}")
        self._refuse_telling(first)
        unit, said = other_unit(first)
        self.micro = unit * self.header.micro
        if said:
            self.notes.append(f"{self._name}: {said}")
        for row in chain(first, rows) if said else ():
            row.us = row.us and row.us * unit
            yield row
        if not said:
            yield from first
            yield from rows

    def _refuse_telling(self, rows: Sequence[Row]) -> None:
        """Raise TableError for a column that seemed to be a remark but has data types in these rows."""
        header = self.header
        for position, column in enumerate(() if header.family.text or not self._strict else header.columns):
            if column and column not in KNOWN and column not in self._ignore:
                cells = (row.cells[position] for row in rows if position < len(row.cells))
                deciding = next((cell for cell in cells if decides(cell, flag=is_flag(column))), "")
                if deciding:
                    raise TableError(
                        f"{self._name}: column {column} holds {deciding[:40]!r}, which tells what the product is: "
                        f"name it as AITER does, or say {ignoring(column)}"
                    )

    def _rows(self) -> Iterator[Row]:
        reader = _RowReader(self.header, strict=self._strict)
        if self._glued[2]:
            row = self._row(reader, *self._glued)  # its line end is the header's
            if row is not None:
                yield row
        for number, line in self._numbered:
            if line == self._line:  # two files were joined
                continue
            try:
                cells = cells_of(unmarked(line) if is_remark(line) else line, self.header.separator)
            except Bad as err:
                self._reject(number, err)
                continue
            if any(cells):
                row = self._row(reader, number, line, cells)
                if row is None:
                    continue
                yield row
                if self.header.ends and not line.endswith("\n"):
                    self.notes.append(f"{self._name} line {number}: the last row has no line end; read as it stands")

    def _row(self, reader: _RowReader, number: int, line: str, cells: list[str]) -> Row | None:
        """The row with these cells; None for a bad one, which is counted."""
        try:
            if self._other:
                raise Bad(f"it stands below another header, that of line {self._other}: make that a file of its own")
            return reader.row(number, line, cells)
        except Bad as err:
            if self._other or not self._is_header(cells):
                self._reject(number, err)
            elif unglued(cells)[0] != self.header.columns:  # else it is the header again, spelled differently
                self._other = number
                self._reject(number, Bad("a header with other columns: what stands below is another table, not read"))
            return None

    def _is_header(self, cells: list[str]) -> bool:
        """Whether these cells are names of columns: known ones, or words in place of M, N and K."""
        sizes = [cells[self.header.at[size]] for size in ("M", "N", "K") if self.header.at.get(size, 99) < len(cells)]
        words = [text for text in sizes if text.isidentifier() and text.lower() not in NOTHING]
        return names_columns(cells) or len(words) == 3

    def _reject(self, number: int, err: Bad) -> None:
        self.rejected += 1
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints.append(f"{self._name} line {number}, {err}")
        if self.rejected > MAX_BAD_ROWS:
            raise TableError(
                f"{self._name}: more than {MAX_BAD_ROWS} bad rows, the first: {self.complaints[0]}"
            ) from err


def is_header(line: str) -> bool:
    """True when this line begins one of AITER's tables."""
    return aiter_headers.is_header([column.strip() for column in line.split(separator_of(line))])


class _RowReader:
    """Validates rows of one header, and parses the columns that decide what a row means."""

    def __init__(self, header: Header, *, strict: bool) -> None:
        self._header = header
        self._strict = strict
        self._key = [(column, header.at.get(column, -1), parser(column, header.family)) for column in header.family.key]
        others = [column for column in header.columns if column in CHECKED and column not in (*header.family.key, "us")]
        self._checks = [(column, header.at[column], CHECKED[column]) for column in others]
        self._us = header.at.get("us", -1)
        self._parts = [header.at.get(part, -1) for part in ("us1", "us2")]
        self._columns = len(header.columns)
        while self._columns and not header.columns[self._columns - 1]:
            self._columns -= 1
        self._indexed, self._index = is_index(header.columns[0]), -1  # the last number of a data frame's own
        nameless = (position for position in range(self._columns) if strict and not header.columns[position])
        self._nameless = [position for position in nameless if position or not self._indexed]
        self._before = self._columns

    def row(self, number: int, line: str, cells: list[str]) -> Row:
        """The row with these cells. Raises Bad."""
        if not line.rstrip("\n").isprintable():
            check_characters(line)
        if line.startswith(CONFLICT):
            raise Bad("a merge conflict stands here: settle it first")
        if "�" in line:
            raise Bad("not UTF-8: bytes that are no text")
        count = len(cells)
        if count == 1 and self._columns > 1:
            ours = self._header.separator
            other = next((one for one in SEPARATORS if one != ours and line.count(one) + 1 >= self._columns), "")
            if other:
                raise Bad(f"its cells are parted by {other!r}, those of the header by {ours!r}")
        if self._strict and count > self._columns and any(cells[self._columns :]):
            raise Bad(f"{count} cells, the header has {self._columns} columns: which cell is whose is not clear")
        if count < self._before and self._header.ends and not line.endswith("\n"):
            raise Bad(f"it ends after {count} of {self._columns} cells and without a line end: the file was cut there")
        self._before = min(count, self._columns)  # rows of some files have fewer cells all through
        if self._indexed and cells[0]:
            index = whole(cells[0])
            if index is None or index <= self._index:
                raise Bad(f"cell 1 stands under a column without a name, and numbers no rows: {cells[0][:80]!r}")
            self._index = index
        for position in self._nameless:
            if position < count and cells[position]:
                raise Bad(f"cell {position + 1} stands under a column without a name: {cells[position][:80]!r}")
        try:
            key = [parse(cells[position] if 0 <= position < count else "") for _, position, parse in self._key]
            for _, position, parse in self._checks:
                if position < count:
                    parse(cells[position])
            us = real(cells[self._us]) if 0 <= self._us < count else None
        except ValueError:
            raise self._fault(cells) from None
        if us is not None and self._header.micro != 1.0:
            us *= self._header.micro
        if us is None and self._parts[1] >= 0:
            us = self._sum(cells)
        return Row(self._header, number, tuple(cells), tuple(key), us)

    def _fault(self, cells: list[str]) -> Bad:
        """What is wrong with a row, by the first cell that cannot be read."""
        times = self._header.columns[self._us] if self._us >= 0 else "us"
        for column, position, parse in (*self._key, *self._checks, (times, self._us, real)):
            text = cells[position] if 0 <= position < len(cells) else ""
            try:
                parse(text)
            except ValueError as err:
                return Bad(f"column {column}: {text[:80]!r} {err}")
        raise AssertionError("unreachable")

    def _sum(self, cells: list[str]) -> float | None:
        """The sum of the times of two stages, in tables that have both."""
        first, second = (real(cells[position]) if 0 <= position < len(cells) else None for position in self._parts)
        return first + second if first and second and min(first, second) > 0 else None
