"""PyTorch TunableOp's results and untuned lists (torch.cuda.tunable).

    Validator,PT_VERSION,2.13.0
    GemmTunableOp_BFloat16_TN,tn_2048_8_1024_ld_1024_1024_2048,Gemm_Rocblas_21,0.0079       microseconds / 1000

The sizes are BLAS's, column-major: N first, then M, then K; the first letter is for the weight, the second for X.  An
untuned list has the first two fields alone.  The validators say where a file holds; torch rejects a file with another
set of them.  Source: torch/cuda/tunable.py and ATen/cuda/tunable of torch 2.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.aiter_columns import real
from gemmtuned.configs.aiter_csv import lines_of
from gemmtuned.configs.aiter_text import MAX_BAD_ROWS, MAX_LINE
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.numbers import decimal
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Solution

FORMAT: Final = "tunableop"
_OP: Final = re.compile(r"(Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_([A-Za-z0-9_:<>]+)_([NT])([NT])")
_SIZES: Final = re.compile(
    r"([nt]{2})_([0-9]{1,10})_([0-9]{1,10})_([0-9]{1,10})(?:_B_([0-9]{1,10}))?((?:_[A-Za-z0-9]+)*)"
)
# What sizes of scaled products and of all others may go on with: strides, whether scales are of rows, the bias
_KNOWN: Final = {
    True: re.compile(r"^(?:_ld(?:_[0-9]+){3})?(?:_rw_[01])?(?:_bias_[A-Za-z0-9]+)?"),
    False: re.compile(r"^(?:_ld(?:_[0-9]+){3})?"),
}
_DTYPES: Final = {
    "float": "fp32", "tf32": "fp32", "double": "fp64", "BFloat16": "bf16", "Half": "fp16",
    "Float8_e4m3fn": "fp8_e4m3", "Float8_e5m2": "fp8_e5m2", "Float8_e4m3fnuz": "fp8_e4m3fnuz",
    "Float8_e5m2fnuz": "fp8_e5m2fnuz",
}  # fmt: skip
_PLAIN: Final = ("float", "tf32", "double", "BFloat16", "Half")  # types of products without scales
_NAMES: Final = {"fp32": "float", "fp64": "double", "bf16": "BFloat16", "fp16": "Half"}
_FP8: Final = re.compile(r"Float8_[a-z0-9]+|[A-Za-z0-9]+")


def is_ours(start: str) -> bool:
    """Whether a file that begins so is one."""
    first = next((line for line in start.splitlines() if line.strip()), "")
    return first.startswith("Validator,") or _OP.match(first) is not None


def read(path: Path) -> Imported:
    """Read results or an untuned list. Raises TableError."""
    return read_lines(lines_of(path), name=str(path))


def read_lines(lines: Iterable[str], *, name: str) -> Imported:
    """Read the lines of one, with their line ends. Raises TableError."""
    found = Imported(path=name, format=FORMAT, family=FORMAT, kind="untuned")
    validators: dict[str, str] = {}
    last, form, ended = 0, (0, 0), False
    for number, line in enumerate(lines, 1):
        fields = [part.strip() for part in line.split(",")]
        last = number if any(fields) else last
        if number - last > MAX_BAD_ROWS or len(line) > MAX_LINE:
            raise TableError(f"{name} line {number}: {'blank' if line.isspace() else 'too long'}: not a table")
        this = (len(fields), len(fields[1].split("_")) if len(fields) > 1 else 0)
        if fields[0] == "Validator" and len(fields) >= 3:
            validators[fields[1]] = ",".join(fields[2:])
        elif ended and not line.endswith("\n") and (this[0] < form[0] or this[1] < form[1]):
            found.reject(f"{name} line {number}: it ends in the middle and without a line end: the file was cut there")
        elif any(fields):
            _add(found, number, fields, validators)
            if ended and not line.endswith("\n"):
                found.notes.append(f"{name} line {number}: the last row has no line end; read as it stands")
            form, ended = this, line.endswith("\n")
        if found.rejected > MAX_BAD_ROWS:
            raise TableError(f"{name}: more than {MAX_BAD_ROWS} bad rows, the first: {found.reasons[0]}")
    return found


def _add(found: Imported, number: int, fields: Sequence[str], validators: Mapping[str, str]) -> None:
    where = f"{found.path} line {number}"
    op = _OP.fullmatch(fields[0])
    sizes = _SIZES.fullmatch(fields[1]) if len(fields) > 1 else None
    if op is None or sizes is None:
        column = 2 if op else 1
        text = fields[1] if op and len(fields) > 1 else fields[0]
        found.reject(f"{where}, field {column}: {text[:80]!r} is not an operator's {'sizes' if op else 'name'}")
        return
    if sizes[1] != f"{op[3]}{op[4]}".lower():
        found.reject(f"{where}, field 2: {fields[1][:80]!r} has other letters than the operator {fields[0][:80]}")
        return
    tuned = any(fields[2:]) and not fields[2].startswith("BLAS_PARAMS")
    if tuned and (not fields[2] or decimal(fields[2]) is not None):
        found.reject(f"{where}, field 3: {fields[2][:80]!r} names no solution")
        return
    beyond = next((number for number, text in enumerate(fields[4:], 5) if text), 0)
    if tuned and beyond and not fields[4].startswith("BLAS_PARAMS"):
        said = f"{fields[beyond - 1][:80]!r} follows the time, so it is not clear what the time is"
        found.reject(f"{where}, field {beyond}: {said}")
        return
    try:
        ms = real(fields[3]) if tuned and len(fields) > 3 else None
    except ValueError:
        found.reject(f"{where}, field 4: {fields[3][:80]!r} is not a time in milliseconds")
        return
    us = ms * 1e3 if ms and 0 < ms < math.inf else None
    problem = _problem(op, sizes)
    row = {"op": fields[0], "sizes": fields[1], "solution": fields[2] if tuned else "", "validators": dict(validators)}
    found.kind = "tuned" if tuned else found.kind
    found.add(
        number,
        row,
        kind="tuned" if tuned else "untuned",
        problem=problem if isinstance(problem, Problem) else None,
        why=problem if isinstance(problem, str) else "",
        candidate=_candidate(fields[2]) if tuned else None,
        arch=validators.get("GCN_ARCH_NAME", "").partition(":")[0],
        us=us,
    )


def _problem(op: re.Match[str], sizes: re.Match[str]) -> Problem | str:
    """The product of a line, or why it is no problem of ours."""
    kind, types, w, x = op.groups()
    odd = _KNOWN[kind == "ScaledGemm"].sub("", sizes[6], count=1)
    if odd:
        return f"{odd[1:40]} in the sizes is not known"
    if (kind == "GemmStridedBatched") != bool(sizes[5]):
        return f"operator {kind} {'with' if sizes[5] else 'without'} a batch (B) in its sizes is not known"
    values: dict[str, Any] = {
        "n": int(sizes[2]), "m": int(sizes[3]), "k": int(sizes[4]), "batch": int(sizes[5] or 1),
        "layout": ("n" if x == "N" else "t") + ("t" if w == "T" else "n"), "bias": kind == "GemmAndBias",
    }  # fmt: skip
    names = _FP8.findall(types) if kind == "ScaledGemm" else [types]
    known = _DTYPES if kind == "ScaledGemm" else _PLAIN
    if len(names) != (3 if kind == "ScaledGemm" else 1) or any(name not in known for name in names):
        return f"operator {op[0][:60]} with these types is no problem of gemmtuned's"
    if kind == "ScaledGemm":  # W's type comes first
        wdtype, dtype, out = (_DTYPES[name] for name in names)
        scale = "row" if "_rw_1" in sizes[6] else "tensor"
        bias = re.search(r"_bias_(?!None)", sizes[6]) is not None
        values |= {"family": "scaled", "dtype": dtype, "wdtype": wdtype, "out_dtype": out, "scale": scale, "bias": bias}
    else:
        values |= {"dtype": _DTYPES[types], "math_mode": "tf32" if types == "tf32" else "ieee"}
        if kind == "GemmStridedBatched":
            values["family"] = "batched"
    try:
        return Problem(**values)
    except ProblemError as err:
        return f"no problem of gemmtuned's: {err}"


def _candidate(solution: str) -> Candidate | None:
    """`Gemm_Hipblaslt_1219`, `Gemm_Rocblas_-621294427`: the library, and its own name of the kernel."""
    if solution == "Default":
        return Candidate(DEFAULT_BACKEND)
    library = re.match(r"Gemm_([A-Za-z]{1,40})_", solution)
    return Candidate.of(library[1].lower(), solution=solution[:200]) if library else None


def line_of(solution: Solution) -> tuple[str, ...] | None:
    """A solution as TunableOp has it; None for one it cannot run: it knows libraries' kernels and torch's default."""
    p = solution.problem
    expressible = p.family in ("dense", "batched") and not (p.family == "batched" and p.bias) and p.dtype in _NAMES
    if solution.backend != DEFAULT_BACKEND or solution.covers != "exact" or not expressible or "s" in p.layout:
        return None
    if p.wdtype != p.dtype or p.out_dtype != p.dtype:
        return None
    w, x = ("T" if p.layout[1] == "t" else "N"), ("N" if p.layout[0] == "n" else "T")
    kind = "GemmStridedBatched" if p.family == "batched" else "GemmAndBias" if p.bias else "Gemm"
    name = "tf32" if p.math_mode == "tf32" else _NAMES[p.dtype]
    ld = (p.k if w == "T" else p.n, p.k if x == "N" else p.m, p.n)
    batch = f"_B_{p.batch}" if p.family == "batched" else ""
    sizes = f"{w}{x}_{p.n}_{p.m}_{p.k}{batch}_ld_{ld[0]}_{ld[1]}_{ld[2]}".lower().replace("_b_", "_B_")
    return f"{kind}TunableOp_{name}_{w}{x}", sizes, "Default", f"{solution.us / 1e3:.6f}"


def version_of(stamp: str) -> str:
    """A version of torch as TunableOp compares it, without what was built: 2.13.0+cu130 is 2.13.0."""
    return re.sub(r"^([0-9]+(?:\.[0-9]+)*).*", r"\1", stamp)


def write(path: Path, lines: Iterable[Sequence[str]], validators: Mapping[str, str]) -> None:
    """Write a results file. Raises TableError when the disk refuses."""
    rows = [["Validator", name, value] for name, value in validators.items()]
    first, *rest = [*rows, *map(list, lines)]
    write_file(path, first, rest)
