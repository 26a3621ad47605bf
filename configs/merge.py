"""Several of AITER's tuned tables as one, in memory, looked up by AITER's rules.

AITER merges into a file in /tmp, rewrites the sources when they hold a shape twice, and then refuses to start.  Here
the sources are only read: of rows with equal keys the one of the lowest valid time wins, and of equal times the first.
A row whose time is 0, negative, infinite, nan or empty was not measured and never wins, not even alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.aiter_csv import Row, read_file
from gemmtuned.configs.aiter_headers import FAMILIES, AiterFamily
from gemmtuned.configs.aiter_rows import dtype_of, gfx_of, time_of, units_of
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.padding import lookup_sizes

log = logging.getLogger("gemmtuned.configs")
ANY_DEVICE: Final = 0  # cu_num of rows that name none: the guide's tables, lists made by hand


@dataclass(frozen=True, slots=True)
class Found:
    """A row and the M it is filed under: the one asked for, or a padded one."""

    row: Row
    m: int


class TunedTable:
    """Rows of one family by AITER's look-up key: architecture, compute units and the family's key columns.

    here: this machine's architecture, for rows that tell neither gfx nor a CU count that stands for one.
    """

    def __init__(self, family: AiterFamily, rows: Iterable[Row] = (), *, here: str = "") -> None:
        self.family = family
        self._here = here
        self._size = next((i for i, column in enumerate(family.key) if column in ("M", "m", "token")), 0)
        self._n = next((i for i, column in enumerate(family.key) if column in ("N", "n")), self._size)
        self._rows: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            self._add(row)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        """The winners, in the order their keys came."""
        return list(self._rows.values())

    def find(self, *, gfx: str, cu_num: int, **columns: Any) -> Found | None:
        """The row AITER would take on this device for these key columns: exact M first, then its padded ones.

        Values as rows have them parsed: ints, bools, our dtype names; what is left out is False for bools, bf16 for
        dtypes of the bf16 table, else None.
        """
        wanted = [*_filled({column: columns.get(column, _missing(column)) for column in self.family.key}).values()]
        for m in lookup_sizes(self.family.name, wanted[self._size], wanted[self._n]):
            wanted[self._size] = m
            for units in (cu_num, ANY_DEVICE):
                row = self._rows.get((gfx, units, *wanted))
                if row is not None:
                    return Found(row, m)
        return None

    def _key(self, row: Row) -> tuple[Any, ...]:
        if row.header.family is self.family and None not in row.key and "fp8" not in row.key:
            return row.key
        given = {c: dtype_of(v, row) if v == "fp8" else v for c, v in zip(row.header.family.key, row.key, strict=True)}
        return tuple(_filled({column: given.get(column, _missing(column)) for column in self.family.key}).values())

    def _add(self, row: Row) -> None:
        us = time_of(row)
        if us is None and "us" in row.header.at:  # 0 or less, infinite, nan or empty: not measured
            return
        key = (gfx_of(row, here=self._here), units_of(row), *self._key(row))
        other = self._rows.get(key)
        if other is not None:
            known = time_of(other)
            if us is None or (known is not None and us >= known):
                return
        self._rows[key] = row


def _missing(column: str) -> Any:
    return False if column in ("bias", "scaleAB", "bpreshuffle", "use_g1u1", "doweight_stage1") else None


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Tables older than the dtype columns are of bf16."""
    if "outdtype" in values:
        values["dtype"] = values.get("dtype") or "bf16"
        values["outdtype"] = values["outdtype"] or values["dtype"]
    return values


def merge(paths: Sequence[Path], *, family: str, here: str = "") -> TunedTable:
    """One table of several files, none of which is changed.

    A missing file is logged and left out, and so is a bad row.  Raises TableError when no file is there, or one is no
    table of the family.
    """
    there = [path for path in paths if path.exists()]
    for path in paths:
        if path not in there:
            log.warning("table not found path=%s", path)
    if not there:
        raise TableError(f"none of {', '.join(map(str, paths))} exists")
    tables = [read_file(path, family=family) for path in there]
    for table in tables:
        if table.rejected:
            log.warning("rows left out rows=%d first=%s", table.rejected, table.complaints[0])
    return TunedTable(FAMILIES[family], (row for table in tables for row in table.rows), here=here)
