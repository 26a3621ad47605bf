"""The text of AITER's tables: lines that count, cells of a line, and the header that a row may be glued to."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import Final

from gemmtuned.configs.aiter_headers import ALIASES, DEVICE, FAMILIES, OURS
from gemmtuned.configs.errors import TableError

MAX_LINE: Final = 64 << 10  # characters; the longest in AITER's repository has 1.1 KiB
MAX_BAD_ROWS: Final = 10_000  # with more this is no table, and reading on is a waste
_BEGINS: Final = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")  # most lines
CONFLICT: Final = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")  # git's marks
_NO_VALUE: Final = re.compile(r"#(N/A|NAME\?|VALUE!|REF!|DIV/0!|NULL!|NUM!)\s*[,;\t|]")


SEPARATORS: Final = (",", ";", "\t", "|")


class Bad(Exception):
    """A row that cannot be taken; its text goes on after "file line N, "."""


def check_characters(line: str) -> None:
    """Raise Bad, with its position, for a character that no text has."""
    for position, character in enumerate(line.rstrip("\r\n")):
        if not character.isprintable() and character != "\t":
            raise Bad(f"character {position + 1}: {character!r}, expected text")


def numbered(lines: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """Lines that hold anything but a remark (`#`, `//`), with their numbers; line ends stay.

    A remark that names columns is none below the first line: some tools mark a header so (numpy.savetxt).
    """
    last, begun = 0, False
    for number, line in enumerate(lines, 1):
        if line[:1] == "\ufeff":  # the mark at the beginning of a file that was appended to another
            line = line.lstrip("\ufeff")
        if len(line) > MAX_LINE:
            raise TableError(f"{name} line {number}: more than {MAX_LINE} characters: not a table")
        if line.strip(",;| \t\r\n"):
            last = number
            if not is_remark(line) or (begun and names_columns([c.strip() for c in unmarked(line).split(",")])):
                begun = True
                yield number, line
        elif number - last > MAX_BAD_ROWS:
            raise TableError(f"{name} line {number}: more than {MAX_BAD_ROWS} blank lines: not a table")


def remarks(lines: Sequence[str], *, name: str) -> tuple[list[str], list[str]]:
    """The remarks of a table that stand above its header, and those below it, each with a line end."""
    read = {number for number, _ in numbered(lines, name)}
    found = [(at, f"{line.rstrip()}\n") for at, line in enumerate(lines, 1) if at not in read and is_remark(line)]
    header = min(read, default=0)
    return [line for at, line in found if at < header], [line for at, line in found if at > header]


def is_remark(line: str) -> bool:
    """Whether it begins with `#` or `//`; a spreadsheet's `#N/A` in the first cell is none."""
    if line[:1] in _BEGINS:
        return False
    bare = line.lstrip()
    return bare.startswith(("#", "//")) and not _NO_VALUE.match(bare)


def unmarked(line: str) -> str:
    """What a remark says."""
    return line.lstrip("#/ \t")


def separator_of(line: str) -> str:
    """What parts the columns of this header: a comma, unless there is none and another of the usual ones is."""
    return next((separator for separator in SEPARATORS if separator in line), ",")


def odd_separator(line: str) -> str:
    """What parts the names of columns in a line, where it is none of those that are read; "" where it is none."""
    return next((other for other in (" ", ":", "\\", "~") if names_columns(line.split(other))), "")


def cells_of(line: str, separator: str) -> list[str]:
    """The values of a line, without the spaces around them. Raises Bad for quotes that are not in pairs."""
    bare = line.rstrip("\n")
    if bare.isprintable() and " " not in bare and '"' not in bare:
        return bare.split(separator)  # no other space is printable, so there is nothing to strip
    if '"' not in line:
        return [cell.strip() for cell in line.split(separator)]
    try:
        return [cell.strip() for cell in next(csv.reader([line], strict=True, delimiter=separator))]
    except (csv.Error, StopIteration) as err:
        raise Bad(f"its quotes: {err}, expected them in pairs around a value") from err


def names_of(columns: Sequence[str], cells: int) -> tuple[str, ...]:
    """What each of so many cells is called: `+1`, `+2` ... beyond the header."""
    return (*columns, *(f"+{i + 1}" for i in range(cells - len(columns))))[:cells]


def json_of(columns: tuple[str, ...], cells: tuple[str, ...]) -> str:
    """A row as JSON: the text of each column, sorted by column."""
    form, in_order = _form(columns, len(cells))
    texts, whole = in_order(cells), "".join(cells)
    if not whole.isascii() or not whole.isprintable() or '"' in whole or "\\" in whole:
        texts = tuple(encode_basestring_ascii(text)[1:-1] for text in texts)
    return form % texts


@lru_cache(64)
def _form(columns: tuple[str, ...], cells: int) -> tuple[str, Callable[[tuple[str, ...]], tuple[str, ...]]]:
    """How the JSON of a row of so many cells is put together: (with %s for each text, those cells in that order)."""
    positions = sorted({name: position for position, name in enumerate(names_of(columns, cells))}.items())
    names = (encode_basestring_ascii(name).replace("%", "%%") for name, _ in positions)
    wanted = [position for _, position in positions]
    in_order = itemgetter(*wanted) if len(wanted) > 1 else lambda cells: tuple(cells[position] for position in wanted)
    return "{" + ",".join(name + ':"%s"' for name in names) + "}", in_order


def binary_text(line: str) -> str:
    """Why this line, which cannot be printed, is no header: what the file is instead, and the way out."""
    if line.startswith("\x1f"):
        return "it is compressed, as by gzip: unpack it first"
    if "\0" in line:
        return "zero bytes stand in its header, as in UTF-16 text: save it as UTF-8"
    return "control characters where a header should be"


def names_columns(cells: Sequence[str]) -> bool:
    """True for a line of columns: three cells or more are names of columns, however written, and none is a number."""
    return sum(c.lower() in _NAMES_LOWER for c in cells) >= 3 and not any(c[:1].isdigit() for c in cells)


def unglued(cells: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """(columns, cells of the first row): a file may lack the line end after its header, `...,tflops,bwgfx950,256,...`.

    Only where one cell in the middle is a column's name with something after it, and as many cells follow as stand
    before.  Columns without a name at the end are none.
    """
    half = len(cells) // 2
    if len(cells) % 2 and half:
        joint = next((name for name in _NAMES if cells[half].startswith(name) and cells[half] not in _NAMES), "")
        head = [*cells[:half], joint]
        values = sum(name not in _NAMES for name in cells[half + 1 :])  # one may be called as a column is: k
        joint = joint if any(cell[:1].isdigit() for cell in cells[half:]) else ""  # else BIAS is B and a row
        if joint and all(name in _NAMES for name in head) and values >= half - 1:
            return tuple(head), [cells[half].removeprefix(joint), *cells[half + 1 :]]
    columns = [*cells]
    while columns and not columns[-1]:
        columns.pop()
    return tuple(columns), []


# Longest first: `outdtype` is not `outdt` and the like
_NAMES: Final = sorted(
    {column for family in FAMILIES.values() for column in (*family.tuned_header, *family.also)}
    | {*DEVICE, *ALIASES, OURS, "_tag"},
    key=lambda column: (-len(column), column),
)  # fmt: skip
KNOWN: Final = frozenset(_NAMES)
_NAMES_LOWER: Final = frozenset(name.lower() for name in _NAMES)
