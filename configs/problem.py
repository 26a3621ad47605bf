"""The problem: everything that decides which kernel is right for a GEMM, and nothing else.

A Problem is the key of the whole system: the hook counts one per call, the store keeps one row per distinct
one, the daemon tunes one at a time.  Calls with equal Problems share a solution; if they must not, a field is
missing here.  Standard library only, so that the store and the reports load without torch.

Y[M, N] = X[M, K] @ W[N, K].T always.  `layout` tells how the operands lie in memory, in BLAS letters: first X, then
the [K, N] operand the GEMM is called with.  `nt` is torch's linear (X row-major, W [N, K] row-major), `nn` is `x @ w`
with w [K, N] row-major, `tn` the weight gradient of a linear layer; `s` stands for an operand without unit stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.nearest_word import did_you_mean
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.pattern import Pattern
from gemmtuned.configs.spelling import NUMBERS, REST_OF_0_1_0, SPELLED, SWITCHES, values_of, written
from gemmtuned.configs.value_class import defaults_of, names_of, value_class

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

# The index of each name is its code in the native table (hooks/native/problem.gen.h holds the same order).
FAMILIES: Final = ("dense", "batched", "dense_add", "batched_add", "scaled", "grouped", "moe", "weight_only")
LAYOUTS: Final = ("nn", "nt", "ns", "tn", "tt", "ts", "sn", "st", "ss")
WEIGHT_STATES: Final = ("plain", "packed", "shuffled")
MATH_MODES: Final = ("ieee", "tf32", "bf16", "reduced")
ZERO_POINTS: Final = ("tensor+zero", "row+zero")  # X alone has them
_OF_X: Final = ". Zero points are those of X: no product with zero points of W has a key of its own"
SCALES: Final = ("none", "tensor", "row", "1x32", "1x128", "128x128", "1x16", "1x16+tensor", "1x64", *ZERO_POINTS)
SCALE_LAYOUTS: Final = ("row", "col", "row_padded", "col_padded", "swizzled", "other")
# The defaults of scales: W's kind for that of X, and the dtype for a kind
_SCALE_OF_W: Final = {"1x128": "128x128", "tensor+zero": "tensor", "row+zero": "row"}
_SCALE_DTYPES: Final = {"1x32": "e8m0", "1x16": "fp8_e4m3", "1x16+tensor": "fp8_e4m3"}

MAX_DIM: Final = 2**31 - 1
MAX_THREADS: Final = 32767
CHAIN_M: Final = 256  # the m of every batch-invariant problem, whose solution is proven at each M up to it
_WORD: Final = Pattern(r"[a-z0-9_]{1,40}")
OTHERS_FAMILY: Final = Pattern(r"[a-z][a-z0-9_]{0,39}\.[a-z0-9_]{1,40}")  # a family of another package: package.family


@value_class(kw_only=True)
class Problem:
    """One GEMM as a backend sees it.

    family: dense (mm, and addmm with a bias vector), batched (bmm), dense_add and batched_add (beta*C + alpha*X@W.T
    with a full C, or scalars other than 1), scaled and grouped (torch's _scaled_mm and _grouped_mm), moe (fused mixture
    of experts: m tokens, n = k = the model's width), weight_only (X of 16 bits, W of 8 or 4 with scales).
    m, n, k: rows of X, columns of Y, reduction length.  batch: 1 unless the family is batched, or scaled products in a
    batch; of grouped the number of groups that the m rows of X are dealt out to.
    scale, wscale: what one scale of X, of W stands for: the tensor, a row, or a block of that many rows and columns.
    `tensor+zero`, `row+zero`: X has a zero point for it as well, the code that stands for 0.
    scale_dtype, wscale_dtype: of the scales themselves.  scale_layout, wscale_layout: how block scales lie, as a matrix
    with a row for each row of X or W: `row` and `col` major, `_padded` where a row or column is followed by room,
    `swizzled` (blocks of 32x4x4, as the hardware reads them).
    packing: the layout of a weight that is packed or shuffled, where there are several.
    threads: the CPU threads of the calling process; 0 on other devices.
    math_mode: `ieee`, or what the program allowed: `tf32`, `bf16` (inside fp32), `reduced` (16-bit reductions).
    batch_invariant: the bits of a row of Y must not depend on the other rows, nor on their number.  One solution then
    serves every M, so such a problem has neither M nor the layout of X: m is always CHAIN_M and X row-major.  Only for
    dense problems with plain weights.
    experts, topk, inter, act: only for moe, which needs them.  inter: width between the two products; act: the
    activation, `silu`, followed by `_gated` if the first product has gate and up halves, and by `_weighted` if the
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
    wscale: str = ""  # "" becomes what goes with `scale`
    scale_dtype: str = ""  # "" becomes what goes with its kind: fp32, e8m0 for 1x32, fp8_e4m3 for 1x16
    wscale_dtype: str = ""
    scale_layout: str = "row"
    wscale_layout: str = "row"
    layout: str = "nt"
    weight_state: str = "plain"
    packing: str = ""
    math_mode: str = "ieee"
    deterministic: bool = False
    batch_invariant: bool = False
    threads: int = 0
    experts: int | None = None
    topk: int | None = None
    inter: int | None = None
    act: str | None = None

    def __post_init__(self) -> None:
        words = _words_of(self)
        try:
            filled = _filled(words)
        except TypeError:  # a list, say, where a word belongs: it cannot be looked up, but the error can name it
            filled = _filled.__wrapped__(words)
        for name, word in filled:
            object.__setattr__(self, name, word)
        for name, size in zip(_SIZES, _sizes_of(self), strict=True):
            if type(size) is not int or not 0 < size <= MAX_DIM:
                self._check_size(name)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ProblemError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if not isinstance(self.threads, int) or not 0 <= self.threads <= MAX_THREADS:
            raise ProblemError(f"threads is {self.threads!r}, expected an integer from 0 to {MAX_THREADS}")
        if self.packing and not (isinstance(self.packing, str) and _WORD.fullmatch(self.packing)):
            raise ProblemError(f"packing is {self.packing!r}, expected a name of small letters, digits and _")
        if self.batch_invariant:
            if self.family != "dense" or self.weight_state != "plain":
                raise ProblemError(
                    f"batch_invariant: family {self.family} with a weight that is {self.weight_state}, "
                    "expected family dense with a plain weight"
                )
            object.__setattr__(self, "m", CHAIN_M)
            object.__setattr__(self, "layout", f"n{self.layout[1]}")
        if self.family == "moe" or _of_experts(self) != _NO_EXPERTS:
            self._check_experts()

    def __hash__(self) -> int:  # the store asks a dictionary five times for each of thousands
        return _told_apart_by(self).__hash__()  # a program may have replaced `hash`

    def _check_size(self, name: str, where: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_DIM:
            raise ProblemError(f"{name} is {value!r}, expected an integer from 1 to {MAX_DIM}{where}")

    def _check_experts(self) -> None:
        """Check the columns of mixtures of experts: moe has all of them, families of other packages may have some."""
        ours = self.family in FAMILIES
        for name, value in zip(_EXPERTS, _of_experts(self), strict=True):
            if ours and self.family != "moe":
                if value is not None:
                    raise ProblemError(f"{name} is {value!r}: family {self.family} has none, only family moe has")
            elif name != "act" and (ours or value is not None):
                self._check_size(name, f" in family {self.family}")
            elif (ours or value is not None) and not (isinstance(value, str) and _WORD.fullmatch(value)):
                raise ProblemError(f"act is {value!r}, expected an activation's name in family {self.family}")

    @property
    def operands(self) -> str:
        """The kinds of operands without their sizes, as text, by which a version says what it can tune.

        The store keeps this text in a column (db/migrations).
        """
        types = f"{self.dtype}/{self.wdtype}>{self.out_dtype}"
        return f"{self.family} {types} {self.scale}/{self.wscale} {self.weight_state}"

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two; the bias is not counted."""
        if self.family == "moe":  # AITER's rule: every token visits topk experts, two products each
            return 2 * self.m * self.k * (self.topk or 1) * (self.first_width + (self.inter or 1))
        times = 1 if self.family == "grouped" else self.batch  # a row of X visits one group
        return 2 * times * self.m * self.n * self.k

    @property
    def weights_read(self) -> int:
        """How many matrices W a call reads at most; of grouped products, how many groups can have rows."""
        return min(self.batch, self.m) if self.family == "grouped" else self.batch

    @property
    def first_width(self) -> int:
        """Columns of a mixture's first product, where gate and up lie side by side."""
        return (self.inter or 1) * (2 if "_gated" in (self.act or "") else 1)

    @property
    def bytes(self) -> int:
        """Bytes that must be moved once: X, W, Y, a full C (AITER's rule).

        Scales do not count, which are up to 1/32 of weights of 8 bits and 1/4 of those of 4.
        """
        if self.family == "moe":  # the weights of all experts, whichever are used
            weights = (self.first_width + (self.inter or 1)) * self.k * (self.experts or 1) * DTYPE_BYTES[self.wdtype]
            tokens = self.m * self.k * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.out_dtype])
            return int(weights + tokens)
        x = self.m * self.k * DTYPE_BYTES[self.dtype]
        y = (2 if self.family.endswith("_add") else 1) * self.m * self.n * DTYPE_BYTES[self.out_dtype]
        w = self.weights_read * self.n * self.k * DTYPE_BYTES[self.wdtype]
        return int((1 if self.family == "grouped" else self.batch) * (x + y) + w)

    def with_m(self, m: int) -> Problem:
        """The same problem with another number of rows; a batch-invariant one does not change."""
        return replace(self, m=m)

    def filed(self, covers: str) -> Problem:
        """The one under which a solution for it is kept that covers this step of the look-up (padding.COVERS)."""
        return self.with_m(padded_m(self.m, self.n, covers))

    def with_shape(self, m: int, n: int, k: int) -> Problem:
        """The same problem with other sizes, for callers that make many: nothing else is validated again."""
        if self.batch_invariant:
            return replace(self, n=n, k=k)
        for size in (m, n, k):
            if type(size) is not int or not 0 < size <= MAX_DIM:
                return replace(self, m=m, n=n, k=k)  # raises the error that says what is wrong
        other = object.__new__(Problem)
        for put, value in zip(_PUT, (m, n, k, *_all_but_sizes(self)), strict=True):
            put(other, value)
        return other

    def at(self, m: int) -> Problem:
        """One size of a batch-invariant problem, as an ordinary problem that can be run, timed and compared."""
        return replace(self, batch_invariant=False, m=m)

    def row(self) -> dict[str, Any]:
        """The problem's columns, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Problem:
        """Build from a mapping of columns, at least m, n and k. Raises ProblemError.

        An unknown column is refused, since it may matter: without it the row would be read as another problem.
        Integers 0 and 1 are taken as booleans, since SQLite returns them.
        """
        known = dict(row)
        for name in SWITCHES:
            if known.get(name) in (0, 1):
                known[name] = bool(known[name])
        unknown = sorted(str(name) for name in known if name not in _DEFAULTS)
        if unknown:
            raise ProblemError(f"not a problem of this version: it does not know the column {unknown[0][:80]!r}")
        try:
            return cls(**known)
        except TypeError as err:
            raise ProblemError(f"not a problem: {err}") from err

    @property
    def rest(self) -> str:
        """Everything but m, as text: `name=value` for each column that differs from its default.

        Problems with equal rest differ only in m.  A column that is added later changes the text of no older problem.
        """
        before, after, _, _ = _texts_around(_all_but_sizes(self))
        return f"{before}n={self.n},k={self.k}{after}"

    @classmethod
    def from_rest(cls, rest: str, m: int) -> Problem:
        """The problem of this `rest` and m, also as version 0.1.0 wrote it. Raises ProblemError, as from_row does."""
        if "|" in rest:
            values = dict(zip(REST_OF_0_1_0, rest.split("|"), strict=False))
            pairs = {name: {"True": "1", "False": "0"}.get(text, text) for name, text in values.items() if text}
        else:
            pairs = dict(item.partition("=")[::2] for item in rest.split(","))
        try:
            return cls.from_row({"m": m, **{k: int(v) if k in NUMBERS else v for k, v in pairs.items()}})
        except ValueError as err:
            raise ProblemError(f"{rest[:200]!r} is not the key of a problem: {err}") from err

    def __str__(self) -> str:  # the one spelling used in logs, reports, errors and on the command line
        _, _, before, after = _texts_around(_all_but_sizes(self))
        return f"{before}{self.m}x{self.n}x{self.k}{after}"

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read what str() writes, for example `bf16:8x2048x1024+bias,threads=2`.

        Raises ProblemError with the form expected.
        """
        return cls(**values_of(text))


def known_problems(rows: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """The problems of rows with a column `problem`, spelled as str() does, each once.

    Rows of a newer version, with names that we do not know, are skipped.
    """
    found: dict[Problem, None] = {}
    for row in rows:
        with suppress(ProblemError):
            found[Problem.parse(row["problem"])] = None
    return list(found)


def as_by_default(problem: Problem, *, gpu: bool) -> Problem:
    """The problem as called in a program that did not change torch's switches, for sources without a math mode.

    torch lets cuBLAS add up 16-bit products in 16 bit on GPUs unless told otherwise (torch.backends.cuda.matmul), and
    the hook keys such calls by it.  Scaled products have their mode from the call, other dtypes none by default.
    """
    reduces = gpu and problem.dtype in ("bf16", "fp16") and problem.family != "scaled"
    return replace(problem, math_mode="reduced") if reduces and problem.math_mode == "ieee" else problem


COLUMNS: Final = names_of(Problem)
_DEFAULTS: Final = defaults_of(Problem)
# What "" becomes, column by column in this order
_IMPLIED: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "wdtype": lambda values: values["dtype"],
    "out_dtype": lambda values: values["dtype"],
    "wscale": lambda values: _SCALE_OF_W.get(values["scale"], values["scale"]),
    "scale_dtype": lambda values: _SCALE_DTYPES.get(values["scale"], "fp32"),
    "wscale_dtype": lambda values: _SCALE_DTYPES.get(values["wscale"], "fp32"),
}
_CLOSED: Final = {
    "dtype": tuple(DTYPES),
    "wdtype": tuple(DTYPES),
    "out_dtype": tuple(DTYPES),
    "scale": SCALES,
    "wscale": tuple(scale for scale in SCALES if scale not in ZERO_POINTS),
    "scale_dtype": tuple(DTYPES),
    "wscale_dtype": tuple(DTYPES),
    "scale_layout": SCALE_LAYOUTS,
    "wscale_layout": SCALE_LAYOUTS,
    "layout": LAYOUTS,
    "weight_state": WEIGHT_STATES,
    "math_mode": MATH_MODES,
}
_WORDS: Final = ("family", *_CLOSED)
_SIZES: Final = ("batch", "m", "n", "k")
_EXPERTS: Final = ("experts", "topk", "inter", "act")
_NO_EXPERTS: Final = (None,) * len(_EXPERTS)
_of_experts: Final = attrgetter(*_EXPERTS)
_told_apart_by: Final = attrgetter(*_SIZES, "dtype", "layout", "threads")  # problems of one program, nearly always
_OTHERS: Final = tuple(name for name in COLUMNS if name not in ("m", "n", "k"))
_words_of: Final = attrgetter(*_WORDS)
_sizes_of: Final = attrgetter(*_SIZES)
_all_but_sizes: Final = attrgetter(*_OTHERS)
_PUT: Final = [getattr(Problem, name).__set__ for name in ("m", "n", "k", *_OTHERS)]  # setters of its slots
_KINDS: Final = 1024  # problems of a program differ mostly in sizes, so everything else is validated once


@lru_cache(_KINDS)
def _filled(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(column, default) for each of _WORDS that is "". Raises ProblemError for an unknown word."""
    given = dict(zip(_WORDS, words, strict=True))
    filled: dict[str, str] = {}
    for name, of in _IMPLIED.items():
        if not given[name]:
            given[name] = filled[name] = of(given)
    family = given.pop("family")
    if family not in FAMILIES and not (isinstance(family, str) and OTHERS_FAMILY.fullmatch(family)):
        raise ProblemError(
            f"family is {family!r}, expected one of {', '.join(FAMILIES)}, or package.family of another's"
            f"{did_you_mean(family, FAMILIES)}"
        )
    for name, value in given.items():
        if value not in (allowed := _CLOSED[name]):
            near = _OF_X if name == "wscale" and value in ZERO_POINTS else did_you_mean(value, allowed)
            raise ProblemError(f"{name} is {value!r}, expected one of {', '.join(allowed)}{near}")
    return tuple(filled.items())


@lru_cache(_KINDS)
def _texts_around(values: tuple[Any, ...]) -> tuple[str, str, str, str]:
    """The text before and after the sizes, in both texts of a problem: `rest` and str()."""
    given = dict(zip(_OTHERS, values, strict=True))
    unsaid = {name: _IMPLIED[name](given) if name in _IMPLIED else _DEFAULTS[name] for name in _OTHERS}
    said = {name: written(value) for name, value in given.items() if value != unsaid[name]}
    first = "".join(f"{name}={said.pop(name)}," for name in ("family", "batch") if name in said)
    rest = "".join(f",{name}={text}" for name, text in said.items())
    head = "" if given["family"] == "dense" else f"{given['family']}:"
    head += given["dtype"]
    if given["wdtype"] != given["dtype"]:
        head += f"/{given['wdtype']}"
    if given["out_dtype"] != given["dtype"]:
        head += f">{given['out_dtype']}"
    head += f":{given['batch']}x" if given["batch"] != 1 else ":"
    tail = "+bias" if given["bias"] else ""
    tail += "".join(f",{short}={said[name]}" for name, short in SPELLED.items() if name in said)
    return first, rest, head, tail
