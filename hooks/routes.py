"""From a table to what the native hook runs: route codes, and for published kernels the binary loaded on its device.

A binary becomes code in this process, so it is read by configs.manifest with its checks (owner, mode, hash).  All of
this happens in the loader thread, before the table is swapped: a call only ever launches what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ctypes import c_uint64
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch import ARGUMENTS, OPERANDS, OVERS, read_launch
from gemmtuned.configs.manifest import read_binary
from gemmtuned.configs.rows import ROWS, read_rows
from gemmtuned.configs.say import tell
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks.dispatch import NATIVE_CODES, OPERATOR_CODE, Table, ident_of
from gemmtuned.hooks.native import Launch, LtLaunch, Native, OperatorLaunch, Row, RowBlocks
from gemmtuned.kernels.cublaslt import COMPUTE_32F, COMPUTE_TF32, DATA_TYPES

log = logging.getLogger("gemmtuned.hooks")
_OPERAND_KINDS: Final = {name: i for i, name in enumerate(OPERANDS)}  # OperandKind of hooks/native/operator_call.h
_NOTHING, _INTEGER, _REAL, _TRUTH = 4, 5, 6, 7
LAUNCHED: Final = frozenset({"triton", "cublaslt", "cuda", ROWS})  # backends whose routes need more than a code


class Routes:
    """Makes the native rows of a table; keeps loaded kernels by device and hash."""

    def __init__(self, native: Native, folder: Path) -> None:
        self._native, self._folder = native, folder
        self._kernels: dict[tuple[int, str, str], int] = {}

    def rows(self, table: Table) -> Iterator[Row]:
        """The rows as `Native.load` takes them; one whose kernel does not load costs that row and a warning."""
        for place, (problem, covers, mode), solution in table.items():
            launch = None
            code = NATIVE_CODES.get(solution.backend, OPERATOR_CODE)
            if solution.backend in LAUNCHED or code == OPERATOR_CODE:
                try:
                    launch = self._launch(solution, int(place.partition(":")[2] or 0))
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
                    continue
            yield Row(problem, covers, mode, ident_of(solution), code, place, launch)

    def _launch(self, solution: Solution, device: int) -> Launch | LtLaunch | OperatorLaunch | RowBlocks:
        if solution.backend == ROWS:
            rows = read_rows(solution.config)
            return RowBlocks(NATIVE_CODES[rows.kernel], rows.block, rows.grain)
        facts = read_launch(solution.launch)
        if ("operator" in facts) != (solution.backend not in NATIVE_CODES):
            raise TableError(f"its launch record is not one of backend {solution.backend}")
        if "operator" in facts:
            called = _operator_launch(facts)
            self._native.check_operator(called)
            return called
        if ("library" in facts) != (solution.backend == "cublaslt"):
            raise TableError(f"its launch record is not one of backend {solution.backend}")
        if "library" in facts:
            version = solution.stamp.partition("/")[0]
            if version != str(self._native.cublaslt_version):
                raise TableError(f"made with cuBLASLt {version}, launches here call {self._native.cublaslt_version}")
            return _library_launch(facts, solution, device)
        key = (device, facts["binary"], facts["name"])
        if key not in self._kernels:
            image = read_binary(self._folder, facts["binary"])
            needs = facts["shared"], facts["cluster"]
            self._kernels[key] = self._native.load_kernel(device, image, facts["name"], *needs)
        launch = Launch(
            function=self._kernels[key],
            max_m=facts["max_m"],
            partials_offset=facts["partials_offset"],
            workspace_bytes=facts["workspace_bytes"],
            pointer_align=facts["pointer_align"],
            device=device,
            warps=facts["warps"],
            warp_size=facts["warp_size"],
            shared=facts["shared"],
            ld_multiple=facts["ld_multiple"],
            n=solution.problem.n,
            cluster=facts["cluster"],
            argument_count=len(facts["arguments"]),
            null_pointers=facts["null_pointers"],
        )
        for i, axis in enumerate(facts["grid"]):
            launch.over[i], launch.block[i] = OVERS.index(axis["over"]), axis["block"]
        for i, name in enumerate(facts["arguments"]):
            launch.arguments[i] = ARGUMENTS.index(name)
        return launch


def _operator_launch(facts: dict[str, Any]) -> OperatorLaunch:
    name, _, overload = facts["operator"].partition(".")
    launch = OperatorLaunch(
        max_m=facts["max_m"],
        count=len(facts["arguments"]),
        contiguous=sum(1 << OPERANDS.index(operand) for operand in facts["contiguous"]),
        name=name.encode(),
        overload=overload.encode(),
        schema=facts["schema"].encode(),
    )
    for i, argument in enumerate(facts["arguments"]):
        if isinstance(argument, str):
            launch.kind[i] = _OPERAND_KINDS[argument]
        elif isinstance(argument, bool | int):
            launch.kind[i], launch.integer[i] = (_TRUTH if isinstance(argument, bool) else _INTEGER), int(argument)
        elif argument is not None:
            launch.kind[i], launch.real[i] = _REAL, argument
        else:
            launch.kind[i] = _NOTHING
    return launch


def _library_launch(facts: dict[str, Any], solution: Solution, device: int) -> LtLaunch:
    if (facts["dtype"], facts["layout"]) != (solution.problem.dtype, solution.problem.layout):
        raise TableError(f"its launch record is for {facts['dtype']} operands of layout {facts['layout']}")
    return LtLaunch(
        algo=(c_uint64 * 8).from_buffer_copy(bytes.fromhex(facts["algo"])),
        max_m=facts["max_m"],
        workspace_bytes=facts["workspace_bytes"],
        pointer_align=facts["pointer_align"],
        device=device,
        ld_multiple=facts["ld_multiple"],
        data_type=DATA_TYPES[facts["dtype"]],
        compute_type=COMPUTE_TF32 if facts["tf32"] else COMPUTE_32F,
        x_turned=facts["layout"][0] == "t",
        w_turned=facts["layout"][1] == "t",
    )
