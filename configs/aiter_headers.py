"""The headers of AITER's tables, every family and age, and how to tell which one a file has.

A table is *untuned* (shapes to tune: the key columns alone) or *tuned* (with the kernel chosen and its time).  Several
families share a header; then the file's name decides, as it does for AITER, and where that says nothing the caller.

Nothing is guessed.  A column of another family's, one that stands twice, and one that nobody knows are refused by name:
any of them could make these rows another product.  Only what cannot (a note, a date, a figure) may be added to a table.
Source: AITER's csrc tuners and aiter/configs at e4048607 (2026-08-22), the 90 headers that the CSV files of that
repository have had, and AMD's guide to GEMM optimisation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gemmtuned.configs.aiter_names import contradiction, family_of_name
from gemmtuned.configs.aiter_remarks import is_index, is_remark
from gemmtuned.configs.errors import HeaderError, TableError

DEVICE: Final = ("gfx", "cu_num")
EVERY: Final = "*"  # columns to ignore: all of a table whose rows are kept as they are, and read as no problem
OURS: Final = "gemmtuned"  # a column of ours in tables we export: the whole solution, as JSON
_CK: Final = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")


@dataclass(frozen=True, slots=True)
class AiterFamily:
    """One kind of AITER table.

    name: as in its file names.  key: columns of the untuned table, which are the look-up key together with `device`.
    needs: those no file of the family may lack.  result: what tuning adds, in the order of AITER's newest header.
    also: key columns of some age or model.  text: no problem of ours, so rows are kept as they are and no column of
    theirs can be read wrong.
    """

    name: str
    key: tuple[str, ...]
    result: tuple[str, ...]
    needs: tuple[str, ...]
    device: tuple[str, ...] = DEVICE
    also: tuple[str, ...] = ()
    text: bool = False

    @property
    def tuned_header(self) -> tuple[str, ...]:
        """AITER's newest header of the tuned table."""
        return (*self.device, *self.key, *self.result)


_MNK: Final = ("M", "N", "K")
_BMNK: Final = ("B", *_MNK)
_BF16: Final = (*_MNK, "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
_MOE: Final = (
    "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type",
    "use_g1u1", "doweight_stage1",
)  # fmt: skip
_MOE_RESULT: Final = (
    "block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage", "xbf16",
    "flat", "tflops", "bw",
)  # fmt: skip
_SHARED_EXPERT: Final = ("shared_expert_id", "hidden_pad", "intermediate_pad", "gate_mode")
_GDN: Final = ("dtype", "K", "V", "BT", "H", "Hg", "is_varlen", "use_h0", "store_fs")
_ONLINE: Final = ("m", "n", "k")
_MIXED: Final = (*_MNK, "a_dtype", "b_dtype")
_SMALL_M: Final = ("n_sub", "k_splits", "use_hip")
_GROUPED_MX: Final = ("use_hip", "hip_us", "triton_us", "speedup")
# Columns of mixtures that some ages and models have; a row where they say anything is another product (aiter_rows.py)
_MOE_ALSO: Final = (
    "bias", "hidden_pad", "intermediate_pad", "swiglu_limit", "ep", "stage", "q_dtype", "wq_dtype",
    "q_dtype_a2", "q_dtype_w2", "q_type2",
)  # fmt: skip

FAMILIES: Final[dict[str, AiterFamily]] = {
    family.name: family
    for family in (
        AiterFamily(
            "bf16", _BF16,
            ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"), _MNK,
        ),
        AiterFamily("a8w8", (*_MNK, "q_dtype_w"), _CK, _MNK),
        AiterFamily("a8w8_bpreshuffle", (*_MNK, "q_dtype_w"), ("libtype", *_CK), _MNK),
        AiterFamily("a8w8_blockscale", _MNK, ("libtype", *_CK), _MNK, also=("q_dtype_w", "preshuffleB")),
        AiterFamily("a8w8_blockscale_bpreshuffle", _MNK, ("libtype", *_CK), _MNK, also=("q_dtype_w",)),
        AiterFamily("a4w4_blockscale", _MNK, _CK, _MNK),
        AiterFamily("a6w6_blockscale", _MNK, _CK, _MNK, text=True),
        AiterFamily("a8w8_mxscale", (*_MNK, "q_dtype_w"), ("libtype", *_CK), _MNK, text=True),
        AiterFamily("a8w8_bpreshuffle_mxfp8", (*_MNK, "q_dtype_w"), ("libtype", *_CK), _MNK, text=True),
        AiterFamily("mxscale_preshuffle", _MIXED, ("libtype", *_CK), _MIXED, text=True),
        AiterFamily("smallm_mxfp8", ("K", "N", "M"), ("kernel", *_SMALL_M), (*_MNK, *_SMALL_M), text=True),
        AiterFamily("grouped_mxfp8", ("case", "tp", "ep", "G", "K", "N", "M"), _GROUPED_MX, (*_MNK, *_GROUPED_MX[:3]),
                    text=True),
        AiterFamily("batched_bf16", _BMNK, _CK, _BMNK),
        AiterFamily("batched_a8w8", _BMNK, _CK, _BMNK),
        AiterFamily("batched_a8w8_blockscale_bpreshuffle", _BMNK, ("libtype", *_CK), _BMNK, text=True),
        AiterFamily("batched_mxscale", ("b", *_ONLINE), ("libtype", *_CK), ("b", *_ONLINE), ("gfx",), text=True),
        AiterFamily("fmoe", _MOE, _MOE_RESULT, _MOE[:5], also=_MOE_ALSO),
        AiterFamily("grouped_fmoe", (*_MOE, "gate_mode"), _MOE_RESULT, _MOE[:5], text=True),
        AiterFamily("fhmoe", (*_MOE, *_SHARED_EXPERT), _MOE_RESULT, _MOE[:5], text=True),
        AiterFamily("gdn", _GDN, ("BV", "us"), ("H", "Hg"), text=True),
        AiterFamily("asm_a8w8", (*_MNK, "bias", "outdtype"), ("splitK", "us"), (*_MNK, "bias", "outdtype"), ()),
        AiterFamily("hipblaslt_online", _ONLINE, ("algo_index", "kernel_name"), ("algo_index",), (), text=True),
        AiterFamily("guide", _MNK, ("lib", "kernel_name", "tflops", "bandwidth_gb_s"), _MNK, ()),
    )
}  # fmt: skip

# Lists of M, N and K alone, in files whose name says no more: AITER gives them to the tuner of any family
SHAPES: Final = AiterFamily("shapes", _MNK, (), _MNK, (), also=("q_dtype_w",))

# Columns that only a tuned table has
_RESULTS: Final = frozenset({
    "us", "us1", "kernelId", "solidx", "kernelName", "kernelName1", "libtype", "lib", "kernel_name", "algo_index", "BV",
    "tile_m", "n_sub", "use_hip",
})  # fmt: skip
# Parameters of kernels, which tuned tables of some ages have beside the kernel's name
_KNOBS: Final = frozenset({
    "block_m2", "use_non_temporal_load1", "use_non_temporal_load2", "tile_m", "tile_n", "tile_k", "lds_stage",
    "use_cshuffle_epilog", "use_async_copy", "waves_per_eu",
})  # fmt: skip
# Other names of columns, in files of other ages
ALIASES: Final = {
    "arch": "gfx", "gfx_arch": "gfx", "gpu_arch": "gfx", "cu": "cu_num", "num_cu": "cu_num", "cu_count": "cu_num",
    "duration": "us", "time_us": "us", "latency_us": "us", "kernel_us": "us", "soltimes": "us", "total_us": "us",
    "errratio": "errRatio",
}  # fmt: skip
_VALUE: Final = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?%?|torch\..*|(?i:true|false|nan|none)")


def kind_of(columns: Sequence[str]) -> str:
    """`tuned` or `untuned`."""
    return "tuned" if _RESULTS & set(columns) else "untuned"


def is_header(columns: Sequence[str]) -> bool:
    """True when these are the columns of some table of AITER's."""
    has = {ALIASES.get(column, column) for column in columns}
    return any(has.issuperset(family.needs) for family in FAMILIES.values())


def family_of_header(columns: Sequence[str], *, name: str, ignore: Sequence[str] = ()) -> AiterFamily:
    """The family of a table with these columns in a file of this name.

    ignore: columns of which somebody says that they do not matter.  Raises HeaderError when it is no table of
    AITER's, TableError when neither header nor name tells which, and for a column that could decide and that nobody
    knows.
    """
    if not is_header(columns):
        shown = ",".join(columns)
        proper = {column.lower(): column for family in FAMILIES.values() for column in family.tuned_header}
        spelled = [proper.get(column.lower(), column) for column in columns]
        if is_header(spelled):
            other, usual = next(pair for pair in zip(columns, spelled, strict=True) if pair[0] != pair[1])
            raise TableError(
                f"{name}: the header is {shown[:200]!r}; column {other} is {usual} in AITER's tables, where capitals "
                "count: rename it"
            )
        raise HeaderError(
            f"{name}: the header is {shown[:200]!r}, expected one of AITER's: M,N,K[,...], B,M,N,K[,...], "
            "token,model_dim,inter_dim,expert,topk[,...] and others"
        )
    has = {column for column in columns if column not in ignore}
    clear = family_of_columns(columns)
    if clear == "bf16":
        _check_name(name)
    family = FAMILIES[clear] if clear else _by_name(has, name)
    _check_columns(columns, family, name=name, ignore=ignore)
    return family


# What the columns of plain products tell by themselves
_OF_DTYPE: Final = frozenset({"fp16", "f16", "fp32", "f32", "fp64", "f64", "float16", "float32", "float64"})


def _check_name(name: str) -> None:
    """Raises TableError for a name that speaks of another product than the columns of plain ones (M, N, K, dtype)."""
    by_name = family_of_name(name)
    odd = by_name if by_name not in ("", "bf16") else "" if by_name else contradiction("bf16", name)
    if odd and odd not in _OF_DTYPE:
        raise TableError(
            f"{name}: its name says {odd!r}, and its columns (dtype) are those of plain products: rename it where they "
            "are, or take the column out"
        )


def family_of_columns(columns: Sequence[str]) -> str:
    """The family that the columns alone tell, or ""."""
    has = {ALIASES.get(column, column) for column in columns}
    if has.issuperset(_MOE[:5]):
        return "fhmoe" if "shared_expert_id" in has else "grouped_fmoe" if has & _GROUPED else "fmoe"
    if {"H", "Hg"} <= has:
        return "gdn"
    if "algo_index" in has:
        return "hipblaslt_online"
    if {"b", "m", "n", "k"} <= has:
        return "batched_mxscale"
    for kept in ("mxscale_preshuffle", "smallm_mxfp8", "grouped_mxfp8"):
        if has.issuperset(FAMILIES[kept].needs):
            return kept
    if {"lib", "kernel_name"} <= has:
        return "guide"
    if has >= {*FAMILIES["asm_a8w8"].key, "splitK", "us"} and not has & {"dtype", "scaleAB", "bpreshuffle"}:
        return "asm_a8w8"
    return "bf16" if "dtype" in has else ""


_GROUPED: Final = frozenset({"gate_mode", "max_m", "grouped_persistent_m"})


def named_family(family: str, columns: Sequence[str], *, name: str, ignore: Sequence[str] = ()) -> AiterFamily:
    """The family somebody says a table is of, unless its header or the file's name tells another.

    AMD's guide's tables are of bf16.  Raises TableError: rows of another family read as these would be wrong
    shapes, and written back they would have lost what they said.
    """
    if family not in FAMILIES:
        raise TableError(f"family {family!r} is not known, expected one of {', '.join(FAMILIES)}")
    missing = [column for column in FAMILIES[family].needs if column not in columns]
    if missing:
        raise TableError(f"{name}: column {missing[0]} is missing, a table of family {family} has it")
    clear = family_of_columns(columns)
    if clear == family or (clear == "guide" and family == "bf16"):
        _check_columns(columns, FAMILIES[clear], name=name, ignore=ignore)
        return FAMILIES[clear]
    if clear:
        raise TableError(f"{name}: the header is that of family {clear}, not of {family}")
    by_name = family_of_name(name)
    # a name may tell less than there is to say: my_a8w8.csv for a8w8_blockscale, my_bf16.csv for batched_bf16
    if by_name and not family.removeprefix("batched_").startswith(by_name.removeprefix("batched_")):
        raise TableError(
            f"{name}: by its name it is of family {by_name}, not of {family}: name the right one, or rename it"
        )
    _check_columns(columns, FAMILIES[family], name=name, ignore=ignore)
    return FAMILIES[family]


def _check_columns(columns: Sequence[str], family: AiterFamily, *, name: str, ignore: Sequence[str] = ()) -> None:
    """Raises TableError for a column that could make the rows another product than this family's."""
    value = next((column for column in columns if _VALUE.fullmatch(column)), "")
    if value and EVERY not in ignore:
        raise TableError(f"{name}: the header holds {value!r}, which is a value: does a row stand on its line?")
    if family.text:
        return
    doubled = next((column for column in columns if column and columns.count(column) > 1), "")
    if doubled and EVERY not in ignore:
        raise TableError(f"{name}: column {doubled} stands twice in the header")
    if family.name == "bf16" and "dtype" not in columns and {"outdtype", "scaleAB", "bpreshuffle", "bias"} & {*columns}:
        raise TableError(f"{name}: column dtype is missing, a table of family bf16 with columns such as bias has it")
    own = {*family.tuned_header, *DEVICE, *family.also, OURS, *ignore, "libtype"}  # libtype: more get it with time
    others = {column for other in FAMILIES.values() for column in (*other.key, *other.also)} - _RESULTS - own
    kernels = {column for other in FAMILIES.values() for column in other.result}
    for position, column in enumerate(columns):
        plain = ALIASES.get(column, column)
        if position == 0 and is_index(column):
            continue
        if not plain or plain in own or plain in _KNOBS or (plain in kernels and family.name == "fmoe"):
            continue
        if plain in others or (plain in kernels and not is_remark(column)):
            raise TableError(
                f"{name}: column {column} is of other families' tables, not of {family.name}'s: name the right one"
            )
        if not is_remark(column) and EVERY not in ignore:
            usual = next((known for known in sorted(own | others | kernels) if _bare(known) == _bare(column)), "")
            if usual and usual not in columns:
                raise TableError(f"{name}: column {column} is {usual} in AITER's tables: rename it")
            raise TableError(
                f"{name}: column {column} is not known and could decide what the product is. Where it does not, say "
                f"{ignoring(column)}, or take it out of the file"
            )


def ignoring(column: str) -> str:
    """The option that has a column read over, as it is typed in a shell.

    Tables are read in programs, too, which may have a shlex.py of their own: torch does not import `shlex`.
    """
    plain = re.fullmatch(r"[A-Za-z0-9_.:+-]+", column)
    word = column if plain else "'" + column.replace("'", "'\"'\"'") + "'"
    return f"--ignore-column {word}"


def _bare(column: str) -> str:
    return column.lower().replace("_", "").replace(" ", "")


def _by_name(has: set[str], name: str) -> AiterFamily:
    """M, N and K with or without B, q_dtype_w and libtype: families share these headers, and the file's name decides.

    Where it does not, a list of shapes is one of any family, and a tuned table is refused.
    """
    by_name = family_of_name(name)
    quantised = "q_dtype_w" in has
    if "B" in has:
        found = next(
            (one for one in (by_name, f"batched_{by_name}") if one.startswith("batched_") and one in FAMILIES), ""
        )
    elif by_name:
        family = FAMILIES[by_name]
        found = by_name if not quantised or "q_dtype_w" in (*family.key, *family.also) else ""
    else:
        found = ""
    text = bool(found) and FAMILIES[found].text
    odd = "" if text else contradiction(found or by_name or ("a8w8" if quantised else ""), name)
    if odd or not has.issuperset(FAMILIES[found].needs if found else SHAPES.needs):
        _ask(name, odd)
    if not found and (by_name or "B" in has or _RESULTS & has):
        _ask(name)
    return FAMILIES[found] if found else SHAPES


def _ask(name: str, odd: str = "") -> None:
    why = f"its name says {odd!r}, and " if odd else ""
    raise TableError(
        f"{name}: {why}neither the header nor the file's name tells the family. Say it with import --family, or name "
        f"the file as AITER does, such as a8w8_blockscale_tuned_gemm.csv; families: {', '.join(FAMILIES)}"
    )


# CU counts that files without a gfx column stand for (AITER's own backfill)
_GFX_OF_UNITS: Final = {256: "gfx950", 80: "gfx942", 304: "gfx942"}


def gfx_of_units(cu_num: int, *, here: str) -> str:
    """The architecture a row without gfx is for: by its CU count, else the one of this machine."""
    return _GFX_OF_UNITS.get(cu_num, here)
