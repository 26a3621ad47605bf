"""Tables with several changes at once: never a wrong problem, never a row that nobody counts, and no crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import read_any, rows_in

DATA = Path(__file__).parents[1] / "data/aiter"
FILES = sorted(path for path in DATA.rglob("*.csv") if 200 < path.stat().st_size < 60_000)
NAMES = (
    "alpha", "group_size", "transA", "layout", "N_pad", "m", "quant", "scale", "G", "experts", "mode", "act", "state",
    "dtype", "q_dtype_w", "q_type", "bias", "batch", "B", "tp", "ms", "time", "count", "index", "M", "per_row", "token",
)  # fmt: skip
KINDS = (
    "rename", "drop", "add", "add with cells", "move", "glue", "blank", "twice", "twice with cells", "index",
    "capitals", "shift a row", "one cell more", "cut", "other case",
)  # fmt: skip
CHANGES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 400), st.sampled_from(NAMES)), min_size=2, max_size=3
)
Rows = list[list[str]]


def original(path: Path) -> Rows:
    """Header and up to 40 rows, each of as many cells."""
    lines = [line.rstrip("\r\t ") for line in path.read_text().split("\n") if line.strip(", \t\r")]
    columns = lines[0].rstrip(",").split(",")
    rows = [[cell.strip() for cell in line.split(",")][: len(columns)] for line in lines[1:41]]
    return [columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]


def changed(rows: Rows, kind: str, place: int, word: str) -> None:
    """One change of the header, of the header with its cells, or of one row."""
    head, body = rows[0], rows[1:]
    at, row = place % len(head), body[place % len(body)]
    if kind == "rename":
        head[at] = word
    elif kind == "drop" and len(head) > 1:
        del head[at]
    elif kind == "add":
        head.insert(at, word)
    elif kind == "add with cells":
        for one, cell in zip(rows, (word, *("10bx"[i % 4] for i in range(len(body)))), strict=True):
            one.insert(at, cell)
    elif kind == "move":
        for one in rows:
            one.append(one.pop(min(at, len(one) - 1)))
    elif kind == "glue" and at + 1 < len(head):
        head[at : at + 2] = [head[at] + head[at + 1]]
    elif kind == "blank" and at < len(row):
        row[at] = ("", "nan", "None", "-", "#N/A")[place % 5]
    elif kind == "twice":
        head.append(head[at])
    elif kind == "twice with cells":
        for one in rows:
            one.append(one[at] if at < len(one) else "")
    elif kind == "index":
        for number, one in enumerate(rows):
            one.insert(0, str(number) if number else "")
    elif kind == "capitals":
        head[:] = [column.upper() for column in head]
    elif kind == "shift a row":
        row.insert(at, "")
    elif kind == "one cell more":
        row.append("7")
    elif kind == "cut":
        del body[-1][max(1, at) :]
    elif kind == "other case":
        head[at] = head[at].swapcase()


def check(path: Path, changes: list[tuple[str, int, str]], separator: str, tmp_path: Path) -> None:
    rows, file = original(path), tmp_path / path.name
    file.write_text("".join(",".join(row) + "\n" for row in rows))
    right = {hint.problem for hint in read_any(file).hints} | {None}
    for change in changes:
        changed(rows, *change)
    file.write_text("".join(separator.join(row) + "\n" for row in rows))
    count = sum(any(row) for row in rows[1:])
    try:
        found = read_any(file)
    except TableError as err:
        assert path.name in str(err)
        assert rows_in(file) == count
        return

    assert len(found.hints) + found.rejected == count
    if found.rejected <= count // 2:  # else the import stops at its bad rows
        assert {hint.problem for hint in found.hints} <= right


HOW = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
GIVEN = given(path=st.sampled_from(FILES), changes=CHANGES, separator=st.sampled_from([",", ";", "\t", "|"]))


@settings(max_examples=80, derandomize=True, **HOW)  # type: ignore[arg-type]
@GIVEN
def test_several_changes_give_no_wrong_problem(
    path: Path, changes: list[tuple[str, int, str]], separator: str, tmp_path: Path
) -> None:
    check(path, changes, separator, tmp_path)


@pytest.mark.soak
@settings(max_examples=4000, **HOW)  # type: ignore[arg-type]
@GIVEN
def test_four_thousand_tables_with_several_changes_give_no_wrong_problem(
    path: Path, changes: list[tuple[str, int, str]], separator: str, tmp_path: Path
) -> None:
    check(path, changes, separator, tmp_path)
