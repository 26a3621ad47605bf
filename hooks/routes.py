"""From a table to what the native hook runs: route codes, and for published kernels the binary loaded on its device.

A binary becomes code in this process, so it is read by configs.manifest with its checks (owner, mode, hash).  All of
this happens in the loader thread, before the table is swapped: a call only ever launches what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch import KernelLaunch, Launch, LibraryLaunch, OperatorLaunch, read_launch, slots_of
from gemmtuned.configs.launch_values import of_operands
from gemmtuned.configs.manifest import read_binary
from gemmtuned.configs.packed import unpack
from gemmtuned.configs.rows_config import ROWS, read_rows
from gemmtuned.configs.solution import DEFAULT_BACKEND, Solution
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.hooks.dispatch import NATIVE_CODES, OPERATOR_CODE, Table, ident_of, padded
from gemmtuned.hooks.native import Native
from gemmtuned.hooks.native.launches import conditions, kernel_launch, library_launch, operator_call
from gemmtuned.hooks.native.structures import RowBlocks
from gemmtuned.hooks.native.table_rows import Row
from gemmtuned.hooks.overrides import schema_of
from gemmtuned.hooks.unserved import engines_of

log = logging.getLogger("gemmtuned.hooks")
# Backends of ours whose routes need a record, and of which kind. Others' are registered operators
LAUNCHED: Final[dict[str, type[Launch]]] = {"triton": KernelLaunch, "cuda": KernelLaunch, "cublaslt": LibraryLaunch}


class OperatorMissing(Exception):
    """The program has no operator of this name, not yet."""


class Routes:
    """Makes the native rows of a table; keeps loaded kernels by device and hash."""

    def __init__(self, native: Native, folder: Path) -> None:
        self._native, self._folder = native, folder
        self._kernels: dict[tuple[int, str, str], int] = {}
        self.missing: set[str] = set()  # operators of the last table that the program has not registered

    def rows(self, table: Table) -> Iterator[Row]:
        """The rows as `Native.load` takes them; one whose kernel does not load costs that row and a warning."""
        self.missing = set()
        for place, _, packed in table.rows():
            solution = unpack(packed)
            problem, covers = padded(solution.problem, solution.covers), solution.covers
            if problem.family == "moe":  # gemmtuned.ops.fused_moe asks the table itself
                continue
            code = NATIVE_CODES.get(solution.backend, OPERATOR_CODE)
            row = Row(
                problem, covers, solution.mode, ident_of(solution, packed), code, place, engines=engines_of(solution)
            )
            try:
                yield self._complete(row, solution, int(place.partition(":")[2] or 0))
            except OperatorMissing as err:  # it may come with a module that the program imports later
                self.missing.add(str(err))
                table.refused["the program has not registered its operator"] += 1
            except Exception as err:  # a launch record can hold anything
                table.refused["its kernel does not load"] += 1
                tell(
                    log,
                    logging.WARNING,
                    "kernel not loaded problem=%s backend=%s reason=%s",
                    problem,
                    solution.backend,
                    err,
                )

    def _complete(self, row: Row, solution: Solution, device: int) -> Row:
        """The row with what its route needs."""
        problem, backend = solution.problem, solution.backend
        if backend == DEFAULT_BACKEND:  # the call itself, whatever its operands are
            return row
        rank = 3 if problem.family.startswith(("batched", "grouped")) else 2
        if backend == ROWS:
            rows = read_rows(solution.config)
            own = conditions(of_operands(rows.kernel, but="x"), rank)
            return row.but(launch=RowBlocks(NATIVE_CODES[rows.kernel], rows.block, rows.grain), conditions=own)
        if backend in NATIVE_CODES and backend not in LAUNCHED:
            swaps = backend == "torch_swap"
            if slots_of(problem) - {"x", "w", "y", "bias"} - ({"c"} if swaps else set()):
                raise TableError(f"backend {backend} does not run {problem.family} problems")
            return row.but(conditions=conditions(of_operands(backend), rank), scales_sums=swaps)
        record = read_launch(solution.launch)
        if type(record) is not LAUNCHED.get(backend, OperatorLaunch):
            raise TableError(f"its launch record is not one of backend {backend}")
        record.check_for(problem)
        if problem.batch_invariant and not isinstance(record, KernelLaunch):  # X is cut to fit a binary alone
            raise TableError(f"backend {backend} has no binary, which batch-invariant products run by")
        row = row.but(conditions=conditions(record.checked, rank))
        if isinstance(record, OperatorLaunch):
            if schema_of(record.operator) is None:
                raise OperatorMissing(record.operator)
            called = operator_call(record)
            self._native.check_operator(called)
            return row.but(launch=called, scales_sums={"alpha", "beta"} <= set(record.arguments))
        if isinstance(record, LibraryLaunch):
            version = solution.stamp.partition("/")[0]
            if version != str(self._native.cublaslt_version):
                raise TableError(f"made with cuBLASLt {version}, launches here call {self._native.cublaslt_version}")
            return row.but(launch=library_launch(record), scales_sums=True)
        assert isinstance(record, KernelLaunch)
        key = (device, record.binary, record.name)
        if key not in self._kernels:
            image = read_binary(self._folder, record.binary)
            self._kernels[key] = self._native.load_kernel(device, image, record.name, record.shared, record.cluster)
        chain_rows = record.at_most("x.size0") or 0 if problem.batch_invariant else 0
        return row.but(launch=kernel_launch(record, self._kernels[key], rank), chain_rows=chain_rows)
