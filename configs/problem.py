"""The problem: all that decides which kernel is right for a GEMM, and nothing else.

A Problem is the key of the whole system: the hook counts one per call, the store keeps one row per distinct
one, the daemon tunes one at a time.  Calls with equal Problems share a solution; if they must not, a field is
missing here.  Standard library only, so that the store and the reports load without torch.

Y[M, N] = X[M, K] @ W[N, K].T always.  `layout` tells how the operands lie in memory, in BLAS letters: first X, then
the [K, N] operand the GEMM is called with.  `nt` is torch's linear (X row-major, W [N, K] row-major), `nn` is `x @ w`
with w [K, N] row-major, `tn` the weight gradient of a linear layer; `s` stands for an operand without unit stride.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError

# Our short names with torch's ScalarType numbers: the native table packs the number, everything else uses the name.
DTYPES: Final[dict[str, int]] = {
    "u8": 0,
    "i8": 1,
    "i16": 2,
    "i32": 3,
    "i64": 4,
    "fp16": 5,
    "fp32": 6,
    "fp64": 7,
    "c32": 8,
    "c64": 9,
    "c128": 10,
    "bool": 11,
    "bf16": 15,
    "fp8_e5m2": 23,
    "fp8_e4m3": 24,
    "fp8_e5m2fnuz": 25,
    "fp8_e4m3fnuz": 26,
    "i4": 40,
    "e8m0": 44,
    "fp4_e2m1": 45,
}
DTYPE_BYTES: Final[dict[str, float]] = {
    "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "fp32": 4, "fp64": 8, "bool": 1, "bf16": 2,
    "c32": 4, "c64": 8, "c128": 16,
    "fp8_e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2fnuz": 1, "fp8_e4m3fnuz": 1, "e8m0": 1, "fp4_e2m1": 0.5, "i4": 0.5,
}  # fmt: skip

# The index of each name is its code in the native table (hooks/native/capture.cpp holds the same order).
FAMILIES: Final = ("dense", "batched", "dense_add", "batched_add", "scaled", "grouped", "moe")
LAYOUTS: Final = ("nn", "nt", "ns", "tn", "tt", "ts", "sn", "st", "ss")
WEIGHT_STATES: Final = ("plain", "packed", "shuffled")
MATH_MODES: Final = ("ieee", "tf32", "bf16", "reduced")
SCALES: Final = ("none", "tensor", "row", "1x32", "1x128", "128x128")

MAX_DIM: Final = 2**31 - 1
_ACT: Final = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One GEMM as a backend sees it.

    family: dense (mm, and addmm with a bias vector), batched (bmm), dense_add and batched_add (beta*C + alpha*X@W.T
    with a full C, or scalars other than 1), scaled and grouped (torch's _scaled_mm and _grouped_mm), moe (fused mixture
    of experts: m tokens, n = k = the model's width).
    m, n, k: rows of X, columns of Y, reduction length.  batch: 1 unless the family is batched, or scaled products in a
    batch.
    threads: the CPU threads of the calling process; 0 on other devices.
    math_mode: `ieee`, or what the program allowed: `tf32`, `bf16` (inside fp32), `reduced` (16-bit reductions).
    experts, topk, inter, act: of moe alone, and needed there.  inter: width between the two products; act: the
    activation, `silu`, with `_gated` after it when the first product has gate and up halves, then `_weighted` when the
    routing weights are applied before the activation.
    """

    family: str = "dense"
    batch: int = 1
    m: int
    n: int
    k: int
    bias: bool = False
    dtype: str = "bf16"
    wdtype: str = ""  # "" becomes dtype
    out_dtype: str = ""  # "" becomes dtype
    scale: str = "none"
    layout: str = "nt"
    weight_state: str = "plain"
    math_mode: str = "ieee"
    deterministic: bool = False
    threads: int = 0
    experts: int | None = None
    topk: int | None = None
    inter: int | None = None
    act: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "wdtype", self.wdtype or self.dtype)
        object.__setattr__(self, "out_dtype", self.out_dtype or self.dtype)
        for name, allowed in _CLOSED.items():
            if getattr(self, name) not in allowed:
                raise ProblemError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("batch", "m", "n", "k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_DIM:
                raise ProblemError(f"{name} is {value!r}, expected an integer from 1 to {MAX_DIM}")
        for name in ("bias", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ProblemError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if not isinstance(self.threads, int) or not 0 <= self.threads <= 32767:
            raise ProblemError(f"threads is {self.threads!r}, expected an integer from 0 to 32767")
        if self.family == "moe":
            self._check_experts()

    def _check_experts(self) -> None:
        for name in ("experts", "topk", "inter"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_DIM:
                raise ProblemError(f"{name} is {value!r}, expected an integer from 1 to {MAX_DIM} in family moe")
        if not isinstance(self.act, str) or not _ACT.fullmatch(self.act):
            raise ProblemError(f"act is {self.act!r}, expected an activation's name in family moe")

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two; the bias is not counted."""
        if self.family == "moe":  # AITER's rule: every token visits topk experts, two products each
            return 2 * self.m * self.k * (self.topk or 1) * (self._first_width + (self.inter or 1))
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def _first_width(self) -> int:
        """Columns of a mixture's first product: gate and up lie side by side."""
        return (self.inter or 1) * (2 if "_gated" in (self.act or "") else 1)

    @property
    def bytes(self) -> int:
        """Bytes that must be moved once: X, W and Y (AITER's bandwidth rule, aiter base_tuner)."""
        if self.family == "moe":  # the weights of all experts, whichever are used
            weights = (self._first_width + (self.inter or 1)) * self.k * (self.experts or 1) * DTYPE_BYTES[self.wdtype]
            tokens = self.m * self.k * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.out_dtype])
            return int(weights + tokens)
        x = self.m * self.k * DTYPE_BYTES[self.dtype]
        w = self.n * self.k * DTYPE_BYTES[self.wdtype]
        y = self.m * self.n * DTYPE_BYTES[self.out_dtype]
        return int(self.batch * (x + w + y))

    def with_m(self, m: int) -> Problem:
        """The same problem with another number of rows."""
        return replace(self, m=m)

    def row(self) -> dict[str, Any]:
        """The problem's columns, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Problem:
        """Build from a mapping that holds at least m, n, k; other keys than ours are ignored.

        Integers 0 and 1 are taken for booleans, as SQLite returns them.  Raises ProblemError.
        """
        known: dict[str, Any] = {name: row[name] for name in COLUMNS if name in row}
        for name in ("bias", "deterministic"):
            if known.get(name) in (0, 1):
                known[name] = bool(known[name])
        try:
            return cls(**known)
        except TypeError as err:
            raise ProblemError(f"not a problem: {err}") from err

    def __str__(self) -> str:  # the one spelling used in logs, reports, errors and on the command line
        out = "" if self.family == "dense" else f"{self.family}:"
        out += self.dtype
        if self.wdtype != self.dtype:
            out += f"/{self.wdtype}"
        if self.out_dtype != self.dtype:
            out += f">{self.out_dtype}"
        batch = f"{self.batch}x" if self.batch != 1 else ""
        out += f":{batch}{self.m}x{self.n}x{self.k}"
        if self.bias:
            out += "+bias"
        for name, short in SPELLED.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                out += f",{short}={int(value) if isinstance(value, bool) else value}"
        return out

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read what str() writes, for example `bf16:8x2048x1024+bias,threads=2`.

        Raises ProblemError with the form expected.
        """
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise ProblemError(
                f"{text!r} is not a problem. Write [family:]dtype:[Bx]MxNxK[+bias][,name=value...], "
                "for example bf16:8x2048x1024+bias,threads=2"
            )
        dims = [int(d) for d in match["dims"].split("x")]
        values: dict[str, Any] = {
            "family": match["family"] or "dense",
            "dtype": match["dtype"],
            "wdtype": match["wdtype"] or "",
            "out_dtype": match["out"] or "",
            "batch": dims[0] if len(dims) == 4 else 1,
            "bias": match["bias"] is not None,
        }
        values["m"], values["n"], values["k"] = dims[-3:]
        for item in filter(None, (match["rest"] or "").split(",")):
            short, _, value = item.partition("=")
            name = _LONG.get(short)
            if name is None:
                raise ProblemError(f"{text!r}: unknown part {short!r}, expected one of {', '.join(_LONG)}")
            if name in ("threads", "experts", "topk", "inter", "deterministic"):
                if not value.isascii() or not value.isdigit():
                    raise ProblemError(f"{text!r}: {short} is {value!r}, expected a number")
                values[name] = bool(int(value)) if name == "deterministic" else int(value)
            else:
                values[name] = value
        return cls(**values)


def known_problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """The problems of rows that have all our columns, each once.

    Rows of a newer version, with a dtype that we do not know, are passed over.
    """
    found: dict[Problem, None] = {}
    for row in rows:
        with suppress(ProblemError):
            found[Problem.from_row({name: row[name] for name in COLUMNS})] = None
    return list(found)


def as_by_default(problem: Problem, *, gpu: bool) -> Problem:
    """The problem as a program calls it that left torch's switches alone, for sources that tell no math mode.

    torch lets cuBLAS add up 16-bit products in 16 bit on GPUs unless told otherwise (torch.backends.cuda.matmul), and
    the hook keys such calls by it.  Scaled products have their mode from the call, other dtypes none by default.
    """
    reduces = gpu and problem.dtype in ("bf16", "fp16") and problem.family != "scaled"
    return replace(problem, math_mode="reduced") if reduces and problem.math_mode == "ieee" else problem


COLUMNS: Final = tuple(f.name for f in fields(Problem))
_DEFAULTS: Final = {f.name: f.default for f in fields(Problem)}
_CLOSED: Final = {
    "family": FAMILIES,
    "dtype": tuple(DTYPES),
    "wdtype": tuple(DTYPES),
    "out_dtype": tuple(DTYPES),
    "scale": SCALES,
    "layout": LAYOUTS,
    "weight_state": WEIGHT_STATES,
    "math_mode": MATH_MODES,
}
SPELLED: Final = {  # a column, and what str() calls it
    "scale": "scale",
    "layout": "layout",
    "weight_state": "weight",
    "math_mode": "math",
    "deterministic": "deterministic",
    "threads": "threads",
    "experts": "experts",
    "topk": "topk",
    "inter": "inter",
    "act": "act",
}
_LONG: Final = {short: name for name, short in SPELLED.items()}
_SPELLING: Final = re.compile(
    r"(?:(?P<family>[a-z_]+):)?(?P<dtype>[a-z][a-z0-9_]*)(?:/(?P<wdtype>[a-z0-9_]+))?(?:>(?P<out>[a-z0-9_]+))?"
    r":(?P<dims>[0-9]{1,10}(?:x[0-9]{1,10}){2,3})(?P<bias>\+bias)?(?P<rest>(?:,[a-z]+=[A-Za-z0-9_]{1,40})*)"
)
