"""The headers of AITER's tables, every family and age, and how to tell which one a file has.

A table is *untuned* (shapes to tune: the key columns alone) or *tuned* (with the kernel chosen and its time).  Several
families share a header; then the file's name decides, as it does for AITER, and where that says nothing the caller.
Source: AITER's csrc tuners and aiter/configs at e4048607 (2026-08-22), older files of the same repository, and AMD's
guide to GEMM optimisation.  Readers take headers with columns missing or added; these are what we write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gemmtuned.configs.errors import HeaderError, TableError

DEVICE: Final = ("gfx", "cu_num")
OURS: Final = "gemmtuned"  # a column of ours in tables we export: the whole solution, as JSON
_CK: Final = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")


@dataclass(frozen=True, slots=True)
class AiterFamily:
    """One kind of AITER table.

    name: as in its file names.  key: columns of the untuned table, which are the look-up key together with `device`.
    needs: those no file of the family may lack.  result: what tuning adds, in the order of AITER's newest header.
    """

    name: str
    key: tuple[str, ...]
    result: tuple[str, ...]
    needs: tuple[str, ...]
    device: tuple[str, ...] = DEVICE

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

FAMILIES: Final[dict[str, AiterFamily]] = {
    family.name: family
    for family in (
        AiterFamily(
            "bf16", _BF16,
            ("libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"), _MNK,
        ),
        AiterFamily("a8w8", (*_MNK, "q_dtype_w"), _CK, _MNK),
        AiterFamily("a8w8_bpreshuffle", (*_MNK, "q_dtype_w"), ("libtype", *_CK), _MNK),
        AiterFamily("a8w8_blockscale", _MNK, ("libtype", *_CK), _MNK),
        AiterFamily("a8w8_blockscale_bpreshuffle", _MNK, ("libtype", *_CK), _MNK),
        AiterFamily("a4w4_blockscale", _MNK, _CK, _MNK),
        AiterFamily("batched_bf16", _BMNK, _CK, _BMNK),
        AiterFamily("batched_a8w8", _BMNK, _CK, _BMNK),
        AiterFamily("batched_mxscale", ("b", "m", "n", "k"), ("libtype", *_CK), ("b", "m", "n", "k"), ("gfx",)),
        AiterFamily("fmoe", _MOE, _MOE_RESULT, _MOE[:5]),
        AiterFamily("grouped_fmoe", (*_MOE, "gate_mode"), _MOE_RESULT, _MOE[:5]),
        AiterFamily("fhmoe", (*_MOE, *_SHARED_EXPERT), _MOE_RESULT, _MOE[:5]),
        AiterFamily("gdn", _GDN, ("BV", "us"), ("H", "Hg")),
        AiterFamily("asm_a8w8", (*_MNK, "bias", "outdtype"), ("splitK", "us"), _MNK, ()),
        AiterFamily("hipblaslt_online", _ONLINE, ("algo_index", "kernel_name"), ("algo_index",), ()),
        AiterFamily("guide", _MNK, ("lib", "kernel_name", "tflops", "bandwidth_gb_s"), _MNK, ()),
    )
}  # fmt: skip

# Columns that only a tuned table has
_RESULTS: Final = frozenset({
    "us", "us1", "kernelId", "solidx", "kernelName", "kernelName1", "libtype", "lib", "kernel_name", "algo_index", "BV",
})  # fmt: skip

# Parts of file names, most telling first; AITER writes a8w8_tuned_batched_gemm as well as a8w8_blockscale_..._mm2.5
_NAMES: Final = (
    ("mxscale", "batched_mxscale"),
    ("a8w8_blockscale_bpreshuffle", "a8w8_blockscale_bpreshuffle"),
    ("a8w8_blockscale", "a8w8_blockscale"),
    ("a8w8_bpreshuffle", "a8w8_bpreshuffle"),
    ("a4w4", "a4w4_blockscale"),
    ("a8w8", "a8w8"),
    ("bf16", "bf16"),
    ("a16w16", "bf16"),
)


def kind_of(columns: Sequence[str]) -> str:
    """`tuned` or `untuned`."""
    return "tuned" if _RESULTS & set(columns) else "untuned"


def family_of_name(name: str) -> str:
    """The family a file's name tells, or ""."""
    stem = name.rsplit("/", 1)[-1].lower()
    found = next((family for part, family in _NAMES if part in stem), "")
    if "batched" in stem and found in ("bf16", "a8w8"):
        return f"batched_{found}"
    return found


def is_header(columns: Sequence[str]) -> bool:
    """True when these are the columns of some table of AITER's."""
    has = set(columns)
    return any(has.issuperset(family.needs) for family in FAMILIES.values())


def family_of_header(columns: Sequence[str], *, name: str) -> AiterFamily:
    """The family of a table with these columns in a file of this name.

    Raises HeaderError when it is no table of AITER's, TableError when neither header nor name tells which.
    """
    has = set(columns)
    if not is_header(columns):
        shown = ",".join(columns)
        raise HeaderError(
            f"{name}: the header is {shown[:200]!r}, expected one of AITER's: M,N,K[,...], B,M,N,K[,...], "
            "token,model_dim,inter_dim,expert,topk[,...] and others"
        )
    found = family_of_columns(columns) or _by_name(has, name)
    return FAMILIES[found]


def family_of_columns(columns: Sequence[str]) -> str:
    """The family that the columns alone tell, or ""."""
    has = set(columns)
    if has.issuperset(_MOE[:5]):
        return "fhmoe" if "shared_expert_id" in has else "grouped_fmoe" if "gate_mode" in has else "fmoe"
    if {"H", "Hg"} <= has:
        return "gdn"
    if "algo_index" in has:
        return "hipblaslt_online"
    if {"b", "m", "n", "k"} <= has:
        return "batched_mxscale"
    if {"lib", "kernel_name"} <= has:
        return "guide"
    if "outdtype" in has and "dtype" not in has:
        return "asm_a8w8"
    return "bf16" if "dtype" in has else ""


def named_family(family: str, columns: Sequence[str], *, name: str) -> AiterFamily:
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
        return FAMILIES[clear]
    if clear:
        raise TableError(f"{name}: the header is that of family {clear}, not of {family}")
    odd = _columns_of_others(columns, family)
    if odd:
        raise TableError(f"{name}: column {odd[0]} is of other families' tables, not of {family}'s: name the right one")
    told = family_of_name(name)
    # a name may tell less than there is to say: my_a8w8.csv for a8w8_blockscale, my_bf16.csv for batched_bf16
    if told and not family.removeprefix("batched_").startswith(told.removeprefix("batched_")):
        raise TableError(
            f"{name}: by its name it is of family {told}, not of {family}: name the right one, or rename it"
        )
    return FAMILIES[family]


def _columns_of_others(columns: Sequence[str], family: str) -> list[str]:
    """Columns that this family's tables never have and another's do. libtype: more families get it with time."""
    own = {*FAMILIES[family].tuned_header, *DEVICE, "libtype"}
    if "a8w8" in family:  # a blockscale list of one model names the dtype as well
        own.add("q_dtype_w")
    others = {column for other in FAMILIES.values() for column in other.tuned_header}
    return [column for column in columns if column in others - own]


def _by_name(has: set[str], name: str) -> str:
    """M, N and K with or without B, q_dtype_w and libtype: quantised families share these headers."""
    told = family_of_name(name)
    if "B" in has:
        return told if told.startswith("batched_") else f"batched_{told}" if told in ("bf16", "a8w8") else _ask(name)
    if "q_dtype_w" in has:
        if told.startswith("a8w8"):  # a blockscale list of one model names the dtype as well
            return told
        return "a8w8_bpreshuffle" if "libtype" in has else "a8w8"
    if told and not told.startswith("batched_"):
        return told
    # gradlib's first lists were M,N,K alone
    return "bf16" if not _RESULTS & has else _ask(name)


def _ask(name: str) -> str:
    raise TableError(
        f"{name}: neither the header nor the file's name tells the family. Say it with --family, or name the file as "
        f"AITER does, for example a8w8_blockscale_tuned_gemm.csv; families: {', '.join(FAMILIES)}"
    )


def canonical_name(family: str, kind: str) -> str:
    """AITER's file name for a family's table: bf16_tuned_gemm.csv, a8w8_untuned_batched_gemm.csv, tuned_fmoe.csv ..."""
    if "moe" in family:
        return f"{kind}_{family}.csv"
    if family == "batched_mxscale":
        return f"batched_gemm_a8w8_blockscale_mxscale_{kind}.csv"
    if family.startswith("batched_"):
        return f"{family.removeprefix('batched_')}_{kind}_batched_gemm.csv"
    if family == "gdn":
        return f"chunk_gdn_h_opt_{kind}.csv"
    return f"{family}_{kind}_gemm.csv"


# CU counts that files without a gfx column stand for (AITER's own backfill)
_GFX_OF_UNITS: Final = {256: "gfx950", 80: "gfx942", 304: "gfx942"}


def gfx_of_units(cu_num: int, *, here: str) -> str:
    """The architecture a row without gfx is for: by its CU count, else the one of this machine."""
    return _GFX_OF_UNITS.get(cu_num, here)
