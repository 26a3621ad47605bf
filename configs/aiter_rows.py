"""Converts rows of AITER's tables into our problems and candidates, and our solutions into rows of AITER's tables.

A row becomes a problem if ours can express it; grouped and shared-expert mixtures, the mxscale batch and the gdn tables
stay text.  AITER's rows have no CPU threads and no math mode, so a row stands for the plain case of a problem.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from gemmtuned.configs import aiter_moe, aiter_quantised
from gemmtuned.configs.aiter_columns import parser, torch_name
from gemmtuned.configs.aiter_csv import Header, Row, read_lines
from gemmtuned.configs.aiter_headers import FAMILIES, OURS, SHAPES, AiterFamily, gfx_of_units
from gemmtuned.configs.aiter_names import dtype_told
from gemmtuned.configs.aiter_quantised import QUANTISED
from gemmtuned.configs.aiter_write import write_lines
from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.hint import plain_case
from gemmtuned.configs.numbers import decimal, signed, whole
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, NAME, Candidate, Device, Solution

SCALES: Final = {  # aiter.QuantType
    "No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x32": "1x32", "per_1x128": "1x128",
    "per_128x128": "128x128",
}  # fmt: skip
_UNTOLD: Final = "neither columns nor file name say what these M, N and K multiply: --family does, for example bf16"
_NO: Final = ("", "0", "0.0", "false")
# Columns that some ages of mixtures have, with the value that adds nothing
_NOTHING_MORE: Final = {
    **dict.fromkeys(("bias", "hidden_pad", "intermediate_pad", "swiglu_limit"), _NO), "ep": ("1", "1.0"),
    **dict.fromkeys(("stage", "q_dtype", "wq_dtype"), ()),
}  # fmt: skip
# Columns that name the best kernel of a row
_NAMES: Final = ("kernelName", "kernelName1", "kernelName2", "kernel_name")
_NUMBERS: Final = ("kernelId", "solidx", "algo_index", "splitK", "block_m", "ksplit")
_LIBRARY: Final = ("libtype", "lib")
_KINDS: Final = 4096  # kinds of problems and kernels kept per table; with more, most rows have one of their own
# families that `gemmtuned tune` takes
TUNABLE: Final = ("bf16", "batched_bf16", "guide", "fmoe", *QUANTISED)
_NO_NUMBER: Final = "0"  # kernel number of rows we write: our kernels have names
# Libraries that AITER's dispatcher has a call for; a row with another would stop an AITER program
AITER_LIBRARIES: Final = ("torch", "hipblaslt", "skinny", "asm", "triton", "flydsl", "opus")


def problem_of(row: Row, *, dtype: str = "", threads: int = 0) -> Problem | None:
    """The row's problem, or None where ours cannot express it.

    dtype is for rows whose cell for it is empty; without it these are no problem.  threads: AITER does not say them (0
    for devices other than CPUs).
    """
    found = problem_or_reason(row, dtype=dtype, threads=threads)
    return found if isinstance(found, Problem) else None


def problem_or_reason(row: Row, *, dtype: str = "", threads: int = 0) -> Problem | str:
    """As problem_of, or why there is none."""
    family = row.header.family
    values = dict(zip(family.key, row.key, strict=True))
    make = _MAKERS.get(family.name)
    if family is SHAPES:
        return _UNTOLD
    if make is None:
        return f"a product of family {family.name} is no problem of gemmtuned's yet"
    try:
        return Problem(**make(row, values, dtype), threads=threads)
    except (ProblemError, TypeError) as err:  # an activation or a quantisation newer than this page
        return f"no problem of gemmtuned's: {err}"


class Problems:
    """The problems of one table's rows. Most rows differ only in M, N and K, so everything else is parsed once."""

    def __init__(self, header: Header) -> None:
        plain = {"M", "N", "K"}.issubset(header.family.key) and header.family.name in _MAKERS
        self._sizes = [header.family.key.index(size) for size in ("M", "N", "K")] if plain else []
        self._also = ("gfx", "cu_num", *[column for column in header.family.also if column in header.at])
        self._kinds: dict[tuple[Any, ...], Problem | str] = {}

    def of(self, row: Row) -> Problem | str:
        """As problem_or_reason."""
        if not self._sizes:
            return problem_or_reason(row)
        others = [value for position, value in enumerate(row.key) if position not in self._sizes]
        kind = (*[row[column] for column in self._also], *others)
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.clear()
            found = self._kinds[kind] = problem_or_reason(row)
        return found if isinstance(found, str) else found.with_shape(*[row.key[position] for position in self._sizes])


def _dtype_in(column: str, row: Row, usual: str = "") -> str | None:
    """The data type in a column; `usual` for an empty cell and in a table without it, None if that is "".

    Raises ProblemError for an empty cell without a default, since it may be any type.
    """
    if column not in row.header.at:
        return usual or None
    try:
        found = parser(column, row.header.family)(row[column])
    except ValueError as err:
        raise ProblemError(f"column {column}: {row[column][:40]!r} {err}") from err
    if found is None and not usual:
        raise ProblemError(f"column {column} is empty")
    return dtype_of(found, row) or usual


def _dense(row: Row, values: dict[str, Any], dtype: str) -> dict[str, Any]:
    if not dtype and "bias" in row.header.at and not row["bias"]:
        raise ProblemError("column bias is empty")
    found = {**_shape(values), "bias": values.get("bias", False), "dtype": _dtype_in("dtype", row, dtype) or "bf16"}
    found["out_dtype"] = _dtype_in("outdtype", row, dtype and found["dtype"]) or ""
    quantised = found["dtype"].startswith(("fp8", "fp4")) or found["dtype"] in ("i8", "i4")
    if values.get("scaleAB") and not quantised:
        raise ProblemError(f"scaleAB with {found['dtype']}: AITER multiplies the scales in after the product")
    if quantised:  # AITER runs it through _scaled_mm, with scales of 1 if none is given
        found |= {"family": "scaled", "scale": "tensor"}
    if values.get("bpreshuffle"):
        found["weight_state"] = "shuffled"
    return found


def _batched(row: Row, values: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {**_shape(values), "family": "batched", "dtype": dtype if dtype in ("bf16", "fp16", "fp32") else "bf16"}


def _quantised(row: Row, values: dict[str, Any], dtype: str) -> dict[str, Any]:
    family = row.header.family
    scale, weight_state, usual = QUANTISED[family.name]
    if row["preshuffleB"].lower() not in _NO:
        weight_state = "shuffled"
    found = _dtype_in("q_dtype_w", row)
    if found is None:
        by_name = dtype_told(row.header.file) if scale == "row" else ""
        if by_name == "both":
            raise ProblemError("the file's name speaks of fp8 and of int8, and it has no column q_dtype_w")
        found = dtype_of(by_name or usual, row) or usual
    allowed = ("fp4",) if usual.startswith("fp4") else ("fp8", "i8") if scale == "row" else ("fp8",)
    if not found.startswith(allowed):
        raise ProblemError(f"q_dtype_w is {found}: the weights of family {family.name} are {' or '.join(allowed)}")
    out = dtype_of(values.get("outdtype"), row) or "bf16"
    known = aiter_quantised.columns(family.name, found, out, weight_state)
    return {**_shape(values), **known, "bias": values.get("bias", False)}


def _moe(row: Row, values: dict[str, Any], dtype: str) -> dict[str, Any]:
    missing = [column for column in row.header.family.key if column not in row.header.at or not row[column]]
    if missing:
        raise ProblemError(f"column {missing[0]} is missing or empty")
    if values["topk"] is None:
        raise ProblemError("topk is -1: it does not say how many experts a token visits")
    if values["topk"] > values["expert"]:
        raise ProblemError(f"topk is {values['topk']}, of {values['expert']} experts")
    for column, nothing in _NOTHING_MORE.items():
        if row[column] and row[column].lower() not in nothing:
            raise ProblemError(f"a mixture whose {column} is {row[column][:40]}")
    for column in ("q_dtype_a", "q_dtype_w", "q_type"):  # the second product's columns, where it differs
        if row[f"{column}2"] and row[f"{column}2"] != row[column]:
            raise ProblemError(f"a mixture whose {column}2 is not its {column}")
    act = values["act_type"].rpartition(".")[2].lower()
    act += "_gated" if values["use_g1u1"] else ""
    act += "_weighted" if values["doweight_stage1"] else ""
    x, w = (dtype_of(values[column], row) for column in ("q_dtype_a", "q_dtype_w"))
    if x in ("i32", "i4"):
        raise ProblemError(f"q_dtype_a is {x}: no mixture multiplies it")
    w = "i4" if w == "i32" else w  # eight in a word, as in uint32
    return {
        "family": "moe", "m": values["token"], "n": values["model_dim"], "k": values["model_dim"],
        "inter": values["inter_dim"], "experts": values["expert"], "topk": values["topk"], "act": act,
        **aiter_moe.types(dtype_of(values["dtype"], row) or dtype, x, w, values["q_type"]),
    }  # fmt: skip


def _shape(values: dict[str, Any]) -> dict[str, int]:
    return {"m": values["M"], "n": values["N"], "k": values["K"], "batch": values.get("B", 1)}


def dtype_of(name: str | None, row: Row) -> str | None:
    """The dtype of a name; AITER's `fp8` is the device's own, which on gfx942 is the one without a negative zero."""
    if name == "u32":  # where torch has no int4, AITER calls eight of them by the word they lie in
        return "i4"
    if name is not None and name != "fp8" and name not in DTYPES:
        raise ProblemError(f"no word for data type {name}")
    if name != "fp8":
        return name
    return "fp8_e4m3fnuz" if gfx_of(row) == "gfx942" else "fp8_e4m3"


_MAKERS: Final = {
    "bf16": _dense,
    "guide": _dense,
    "batched_bf16": _batched,
    **dict.fromkeys(QUANTISED, _quantised),
    "fmoe": _moe,
}


def gfx_of(row: Row, *, here: str = "") -> str:
    """The architecture on which a row was tuned, by its CU count if need be, as AITER does it; else `here`."""
    return row["gfx"] or gfx_of_units(units_of(row), here=here)


def units_of(row: Row) -> int:
    """A row's number of compute units; 0 if it has none."""
    return _units(row["cu_num"])


@lru_cache(256)
def _units(text: str) -> int:
    return whole(text.partition(".")[0]) or 0


def time_of(row: Row) -> float | None:
    """A row's time in microseconds, if it can be compared; in the guide's tables it follows from the TFLOPS."""
    if row.has_time:
        return row.us
    if row.header.family.name == "guide":
        m, n, k = row.key
        tflops = decimal(row["tflops"]) or 0.0
        return 2 * m * n * k / (tflops * 1e6) if 0 < tflops < 1e9 else None
    return None


def candidate_of(row: Row) -> Candidate | None:
    """The best kernel of a tuned row, by AITER's name for the library; None when it names none.

    For rows of our own export it is our candidate.
    """
    solution = solution_of(row)
    return _named(row) if solution is None else solution.candidate


class Kernels:
    """The best kernels of one table's rows. Thousands of rows name a few kernels, so each is made once."""

    def __init__(self, header: Header) -> None:
        self._positions = [header.at[column] for column in (*_NAMES, *_NUMBERS, *_LIBRARY) if column in header.at]
        self._found: dict[tuple[str, ...], Candidate | None] = {}
        self._distinct: dict[Candidate | None, Candidate | None] = {}

    def of(self, row: Row) -> Candidate | None:
        """As candidate_of, for a row that carries no solution of ours."""
        cells = row.cells
        said = tuple([cells[position] if position < len(cells) else "" for position in self._positions])
        if said not in self._found:
            if len(self._found) >= _KINDS:
                self._found.clear()
            candidate = _named(row)
            self._found[said] = self._distinct.setdefault(candidate, candidate)
        return self._found[said]


def _named(row: Row) -> Candidate | None:
    kernels = {name: row[name] for name in _NAMES if row[name]}
    read = {name: signed(row[name].partition(".")[0]) for name in _NUMBERS}
    numbers = {name: number for name, number in read.items() if number is not None}
    backend = library_of(row)
    if not backend or not NAME.fullmatch(backend):
        return None
    if backend == DEFAULT_BACKEND:
        return Candidate(DEFAULT_BACKEND)
    found = Candidate.of(backend, **kernels, **numbers)
    return found if len(found.config) <= 4096 else None


def library_of(row: Row) -> str:
    """The library a tuned row names, "" when it names none.

    Tables without libtype are of composable kernels and assembly: assembly has mangled names.
    """
    name = row["kernelName"] or row["kernelName1"] or row["kernel_name"]
    library = row["libtype"] or row["lib"]
    if library:
        return library
    return "" if not name else "asm" if name.startswith("_ZN") else name.split("_", 1)[0] if "flydsl" in name else "ck"


def solution_of(row: Row) -> Solution | None:
    """The solution in a row of our own export; None for rows of others, and for one that was edited since."""
    text = row[OURS]
    if not text:
        return None
    try:
        solution = Solution.from_row(json.loads(text))
    except (ValueError, RecursionError, GemmtunedError):
        return None
    same = problem_of(row) == plain_case(solution.problem)
    return solution if same and row.us is not None and abs(row.us - solution.us) <= 1e-3 * solution.us else None


def columns_for(family: AiterFamily, *, kind: str) -> tuple[str, ...]:
    """The header that we write: AITER's newest, with our own column at the end of tuned tables."""
    return (*family.tuned_header, OURS) if kind == "tuned" else family.key


def family_of(problem: Problem) -> AiterFamily | None:
    """The family of tables for this problem; None if AITER has none, or none that can express everything."""
    if problem.layout != "nt" or problem.weight_state == "packed" or problem.deterministic:
        return None
    if problem.family == "moe":
        odd = problem.bias or "_interleaved" in (problem.act or "") or (problem.topk or 0) > (problem.experts or 0)
        return None if odd or not aiter_moe.says_all(problem) else FAMILIES["fmoe"]
    if (problem.family, problem.scale) in (("dense", "none"), ("scaled", "tensor")):
        return FAMILIES["bf16"] if problem.batch == 1 and problem.dtype == problem.wdtype else None
    if problem.family == "batched":
        return FAMILIES["batched_bf16"] if _is_bf16(problem) and not problem.bias else None
    name = aiter_quantised.family_of(problem)
    return FAMILIES[name] if name else None


def _is_bf16(problem: Problem) -> bool:
    return {problem.dtype, problem.wdtype, problem.out_dtype} == {"bf16"}


def key_texts(problem: Problem, family: AiterFamily) -> dict[str, str]:
    """The family's key columns for a problem: a row of its untuned table."""
    act = problem.act or ""
    kinds, scale = (aiter_moe.SCALES, problem.wscale) if problem.family == "moe" else (SCALES, problem.scale)
    texts = {
        "M": problem.m, "N": problem.n, "K": problem.k, "B": problem.batch, "bias": problem.bias,
        "outdtype": torch_name(problem.out_dtype), "scaleAB": problem.scale == "tensor",
        "bpreshuffle": problem.weight_state == "shuffled", "q_dtype_w": torch_name(problem.wdtype),
        "q_dtype_a": torch_name(aiter_moe.type_of_x(problem)), "token": problem.m, "model_dim": problem.k,
        "inter_dim": problem.inter, "expert": problem.experts, "topk": problem.topk,
        "act_type": f"ActivationType.{act.partition('_')[0].capitalize()}", "use_g1u1": int("_gated" in act),
        "doweight_stage1": int(act.endswith("_weighted")),
        "q_type": "QuantType." + next((q for q, s in kinds.items() if s == scale), "No"),
        "dtype": torch_name(problem.out_dtype if problem.family == "moe" else problem.dtype),
    }  # fmt: skip
    return {column: str(texts[column]) for column in family.key}


def candidate_texts(candidate: Candidate) -> dict[str, str]:
    """The columns that name a kernel, with the names that this family has for them."""
    config: dict[str, Any] = json.loads(candidate.config)
    default = candidate.backend == DEFAULT_BACKEND
    name = "native" if default else str(config.get("kernel", candidate.backend))
    return {
        "libtype": candidate.backend, "solidx": _NO_NUMBER, "kernelId": _NO_NUMBER,
        "splitK": str(config.get("split", 0)), "kernelName": name, "kernelName1": name,
    }  # fmt: skip


def reads_as(problem: Problem, family: AiterFamily, texts: Mapping[str, str]) -> bool:
    """Whether a reader takes this row for the problem's plain case, and for nothing else."""
    file = io.StringIO(newline="")
    write_lines(file, tuple(texts), [tuple(texts.values())])
    file.seek(0)
    rows = read_lines(file, name=family.name, family=family.name).rows
    return [problem_of(row) for row in rows] == [plain_case(problem)]


def tuned_texts(solution: Solution, family: AiterFamily, device: Device) -> dict[str, str]:
    """A solution as a row of the family's tuned table, with the whole solution in our own column.

    AITER's error ratio (the share of wrong elements) stays empty, since we measure another error, in our column.
    """
    problem = solution.problem
    texts = {
        **key_texts(problem, family), **candidate_texts(solution.candidate),
        "gfx": device.arch, "cu_num": str(device.units), "us": f"{solution.us:.4f}",
        "tflops": f"{problem.flops / solution.us / 1e6:.2f}", "bw": f"{problem.bytes / solution.us / 1e3:.2f}",
        OURS: json.dumps(solution.to_row(), sort_keys=True, separators=(",", ":")),
    }  # fmt: skip
    return {column: texts.get(column, "") for column in columns_for(family, kind="tuned")}
