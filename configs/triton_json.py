"""AITER's Triton tile files: which tile a kernel takes for M, one file for each N and K and a default for all others.

    gfx942-GEMM-A16W16-N=512-K=7168.json                               flat; the default is without N= and K=
    gfx950/triton/gemm/gemm_a16w16/GEMM-A16W16-N=512-K=7168.json       nested; the default is DEFAULT.json

Keys are `M_LEQ_x`, `M_GEQ_x` and `any`; older files have categories (`small` ... `xlarge`), files for mixtures of
experts `small_M`, `medium_M`, `large_M`.  The look-up rules are AITER's get_gemm_config (e4048607) and, for
categories, those of the branch that had them (4c99eff4b8).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs import aiter_quantised
from gemmtuned.configs.aiter_csv import open_text
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.numbers import odd_count
from gemmtuned.configs.padding import coarse_m
from gemmtuned.configs.problem import MAX_DIM, Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.temporary import put

MAX_BYTES: Final = 4 << 20  # the largest of AITER's has 6 KiB
BOUNDS: Final = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # M_LEQ_x is only found for these x
CATEGORIES: Final = ("small", "medium_M32", "medium_M64", "medium_M128", "large", "xlarge")
MOE_CATEGORIES: Final = ("small_M", "medium_M", "large_M")
_BUCKET: Final = re.compile(r"M_(LEQ|GEQ)_([0-9]{1,9})|any|(small|medium|large|xlarge)(_M[0-9]{0,9})?")
_FILE: Final = re.compile(
    r"(?:(?P<arch>[A-Za-z0-9_]+)-)?(?P<name>(?:FUSED-)?[A-Z_]*GEMM-.+?|FF-.+?|MOE-.+?)(?:-(?P<suffix>[A-Z0-9]+=.*))?"
)
_PRODUCT: Final = re.compile(r"GEMM|^FF-|^MOE-")  # in the names of kernels that multiply
_REMARK: Final = re.compile(r"_.*|comments?|notes?", re.IGNORECASE)  # beside the buckets, for people
_PART: Final = re.compile(r"([A-Z][A-Z0-9]*)=([0-9]{1,10})")
_ARCHS: Final = {"MI300X": "gfx942", "MI350X": "gfx950", "R9700": "gfx1201"}  # file names once began so
Value = int | float | str | bool | None
Config = dict[str, Value]


@dataclass(slots=True)
class TileFile:
    """One file. sizes: what its suffix names (N, K, B ...), empty for a default file.

    buckets: the configs by key, in the file's order; complaints: entries left out; notes: what is no entry.
    """

    path: Path
    arch: str
    name: str  # GEMM-A16W16 ...
    sizes: dict[str, int]
    buckets: dict[str, Config] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_file(path: Path) -> TileFile:
    """Read a tile file; what its name does not tell (nested defaults) its folders do. Raises TableError."""
    pairs: list[tuple[str, Any]] = []  # the object read last, which is the whole: JSON keeps one of equal keys

    def noted(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found
        return dict(found)

    try:
        with open_text(path, limit=MAX_BYTES) as file:
            raw = json.load(file, object_pairs_hook=noted)
    except (OSError, ValueError, RecursionError) as err:
        raise TableError(f"{path}: not a tile file ({err})") from err
    if not is_tiles(raw):
        raise TableError(f"{path}: not a tile file: expected keys M_LEQ_<x>, M_GEQ_<x>, any or small ... xlarge")
    arch, name, sizes = _told_by(path)
    if not _PRODUCT.search(name):
        raise TableError(f"{path}: tiles of kernel {name[:60]!r}, which is no matrix product of AITER's")
    found = TileFile(path, arch, name, sizes)
    for key, count in Counter(key for key, _ in pairs).items():
        found.complaints += [f"{path} entry {key[:40]!r}: stands {count} times, the last is taken"] * (count - 1)
    for key, config in raw.items():
        wrong = _fault(key, config)
        if wrong and isinstance(config, str) and _REMARK.fullmatch(key):
            found.notes.append(f"{path}: {key[:40]}: {config[:200]}")
        elif wrong:
            found.complaints.append(f"{path} entry {key[:40]!r}: {wrong}")
        else:
            found.buckets[key] = config
    return found


def is_tiles(raw: object) -> bool:
    """Whether parsed JSON looks like a tile file: an object, some of whose keys are buckets."""
    return isinstance(raw, dict) and any(_BUCKET.fullmatch(key) for key in raw)


def kernel_files(configs: Path, *, arch: str, name: str) -> list[TileFile]:
    """The files of one kernel (`GEMM-A16W16`) in AITER's `configs` folder, from the layout that AITER takes.

    The first of nested triton, nested gluon and flat whose default file exists; [] when none has one.  Raises
    TableError for a file that cannot be read.
    """
    folder = name.lower().replace("-", "_")
    for at in (configs / arch / backend / "gemm" / folder for backend in ("triton", "gluon")):
        if (at / "DEFAULT.json").is_file():
            return [read_file(at / "DEFAULT.json"), *_special(at, f"{name}-*=*.json", name)]
    for at in (configs / "gemm", configs / "gemm/gluon"):
        default = at / f"{arch}-{name}.json"
        if default.is_file():
            return [read_file(default), *_special(at, f"{arch}-{name}-[A-Z]*=*.json", name)]
    return []


def _special(folder: Path, pattern: str, name: str) -> list[TileFile]:
    """Files for sizes of this kernel: GEMM-A16W16-N=64-K=32, and not GEMM-A16W16-ATOMIC-N=64-K=32."""
    return [read_file(path) for path in sorted(folder.glob(pattern)) if _told_by(path)[1] == name]


def write_file(path: Path, buckets: Mapping[str, Config]) -> None:
    """Write a tile file, keys in the order they are looked up. Raises TableError when the disk refuses."""
    text = json.dumps({key: buckets[key] for key in sorted(buckets, key=_order)}, indent=4) + "\n"
    try:
        put(path, text.encode())
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err


def find(
    files: Iterable[TileFile], *, m: int, n: int, k: int, batch: int | None = None, bounds: Sequence[int] = BOUNDS
) -> tuple[Config, bool] | None:
    """(config, whether it is tuned) that AITER takes, of the files of one kernel and architecture; None: it raises.

    The file for B, N and K, else that for N and K, stands for the whole default file, not bucket by bucket.
    """
    by_sizes = {tuple(sorted(file.sizes.items())): file for file in files}
    default = by_sizes.get(())
    if default is None:
        return None  # AITER insists on one
    wanted: list[dict[str, int]] = [{"N": n, "K": k}]
    if batch is not None:
        wanted.insert(0, {"B": batch, "N": n, "K": k})
    special = next((file for sizes in wanted if (file := by_sizes.get(tuple(sorted(sizes.items()))))), None)
    chosen = special or default
    if set(chosen.buckets) & set(CATEGORIES):
        key = "any" if special is None else category(m)
        return (chosen.buckets[key], key != "any") if key in chosen.buckets else None
    for bound in bounds:
        if m <= bound and f"M_LEQ_{bound}" in chosen.buckets:
            return chosen.buckets[f"M_LEQ_{bound}"], True
    for bound in reversed(bounds):
        if m >= bound and f"M_GEQ_{bound}" in chosen.buckets:
            return chosen.buckets[f"M_GEQ_{bound}"], True
    return (chosen.buckets["any"], False) if "any" in chosen.buckets else None


def category(m: int) -> str:
    """The older files' name for this M."""
    if m < 32:
        return "small"
    if m <= 128:
        return f"medium_M{coarse_m(m, 1)}"
    return "large" if m <= 256 else "xlarge"


def bucket_of(m: int) -> str:
    """The bucket that AITER looks up first for this M."""
    return next((f"M_LEQ_{bound}" for bound in BOUNDS if m <= bound), f"M_GEQ_{BOUNDS[-1]}")


def most_common(files: Iterable[TileFile]) -> dict[str, Config]:
    """A default file as AITER derives one: for each bucket the config that most files have, the first of equals."""
    counts: dict[str, Counter[str]] = {}
    for file in files:
        for key, config in file.buckets.items():
            counts.setdefault(key, Counter())[json.dumps(config, sort_keys=True)] += 1
    return {key: json.loads(counts[key].most_common(1)[0][0]) for key in sorted(counts, key=_order)}


Times = Mapping[str, Mapping[str, Mapping[str, float]]]  # bucket -> shape -> config as sorted JSON -> microseconds


def least_regret(times: Times) -> dict[str, Config]:
    """A default file by what was measured: for each bucket the config that loses least against each shape's own best.

    The loss is the mean over shapes of time / best time of that shape.  A config that was not run on a shape counts
    there as its slowest one, so that few measurements are no advantage; of equals the first by name.
    """
    chosen = {}
    for bucket, shapes in times.items():
        configs = sorted({config for shape in shapes.values() for config in shape})

        def loss(config: str, shapes: Mapping[str, Mapping[str, float]] = shapes) -> float:
            return sum(run.get(config, max(run.values())) / min(run.values()) for run in shapes.values() if run)

        if configs:
            chosen[bucket] = json.loads(min(configs, key=loss))
    return {key: chosen[key] for key in sorted(chosen, key=_order)}


def problem_or_reason(file: TileFile, key: str) -> Problem | str:
    """The problem of an entry at the bound of its bucket, or why there is none: a default, a category, not ours."""
    kind = _KINDS.get(re.sub(r"[-_](ATOMIC|PRESHUFFLED)$", "", file.name))
    bound = re.fullmatch(r"M_[LG]EQ_([0-9]+)", key)
    if kind is None and "A8W8" in file.name and "BLOCKSCALE" not in file.name:
        return f"kernel {file.name} multiplies int8 or fp8, and its files do not say which"
    if kind is None:
        return f"kernel {file.name} is no problem of gemmtuned's yet"
    odd = _odd_part(file.path)
    if odd:
        return f"{odd} in the file's name is not known"
    if not {"N", "K"} <= set(file.sizes):
        return f"a tile of kernel {file.name} for every N and K"
    if bound is None:
        return f"a tile of kernel {file.name} for a range of M without a bound"
    if ("B" in file.sizes) != file.name.startswith("BATCHED_"):
        how_many = "a number" if "B" in file.sizes else "every number"
        return f"a tile of kernel {file.name} for {how_many} of matrices (B)"
    values: dict[str, Any] = {**kind, "batch": file.sizes.get("B", 1)}
    if file.name.endswith("PRESHUFFLED"):
        values["weight_state"] = "shuffled"
    if file.arch == "gfx942" and values.get("dtype") == "fp8_e4m3":
        values["dtype"] = "fp8_e4m3fnuz"
    try:
        return Problem(m=int(bound[1]), n=file.sizes["N"], k=file.sizes["K"], **values)
    except ProblemError as err:
        return str(err)


def candidate_of(config: Mapping[str, Value]) -> Candidate | None:
    """An entry as a candidate of our own Triton kernel with these tiles; None where that lacks a parameter."""
    try:
        ours = {name: _integer(config.get(theirs, usual)) for name, (theirs, usual) in _TILES.items()}
    except (TypeError, ValueError):
        return None
    return Candidate.of("triton", kernel="tiles", swap=0, **ours)


def config_of(candidate: Candidate) -> Config | None:
    """A candidate of our tile kernel as an entry of AITER's files; None for our other kernels and backends."""
    config = json.loads(candidate.config)
    if candidate.backend != "triton" or config.get("kernel") != "tiles":
        return None
    entry: Config = {theirs: config[name] for name, (theirs, _) in _TILES.items()}
    # what our kernel leaves to the compiler, at the value by which Triton's AMD backend does so
    return {**entry, "waves_per_eu": 0, "matrix_instr_nonkdim": 0, "kpack": 1, "cache_modifier": None}


# our parameter: (theirs, its value where an entry does not say)
_TILES: Final[dict[str, tuple[str, int | None]]] = {
    "tokens": ("BLOCK_SIZE_M", None),
    "rows": ("BLOCK_SIZE_N", None),
    "block_k": ("BLOCK_SIZE_K", None),
    "group": ("GROUP_SIZE_M", 1),
    "split": ("NUM_KSPLIT", 1),
    "warps": ("num_warps", 4),
    "stages": ("num_stages", 2),
}
_LEAST: Final = {theirs: int(theirs != "num_stages") for theirs, _ in _TILES.values()}
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "GEMM-A16W16": {},
    "BATCHED_GEMM-A16W16": {"family": "batched"},
    "GEMM-A8W8_BLOCKSCALE": {"family": "scaled", "scale": "1x128", "dtype": "fp8_e4m3", "out_dtype": "bf16"},
    "GEMM-AFP4WFP4": aiter_quantised.columns("a4w4_blockscale", "fp4_e2m1", "bf16", "plain"),
    "BATCHED_GEMM-AFP4WFP4": {"family": "scaled", "scale": "1x32", "dtype": "fp4_e2m1", "out_dtype": "bf16"},
}


def _integer(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DIM:
        raise ValueError(value)
    return value


def _fault(key: str, config: object) -> str:
    if not _BUCKET.fullmatch(key):
        return "not a bucket, expected M_LEQ_<x>, M_GEQ_<x>, any or small ... xlarge"
    if not isinstance(config, dict) or not config:
        return f"is {type(config).__name__}, expected an object of parameters"
    plain = (int, float, str, bool, type(None))
    odd = [name for name, value in config.items() if not isinstance(value, plain) and name != "env_vars"]
    return f"parameter {odd[0][:40]} is no plain value" if odd else odd_count(config, _LEAST)


def _told_by(path: Path) -> tuple[str, str, dict[str, int]]:
    """(arch, kernel's name, sizes) from the file's name and, in the nested layout, its folders."""
    folders = " ".join(path.parent.parts[-4:])
    match = _FILE.fullmatch(path.stem)
    arch = (match["arch"] if match else "") or next(iter(re.findall(r"gfx[0-9a-f]+", folders)), "")
    name = match["name"] if match else ""
    if not match and path.stem == "DEFAULT":  # in .../gemm_a8w8_blockscale
        name = _upper(re.sub(r"^.*?((batched_|fused_)?gemm_)", r"\1", path.parent.name))
    elif not match:
        name = path.stem
    sizes = {part: int(size) for part, size in _PART.findall(match["suffix"] or "")} if match else {}
    return _ARCHS.get(arch, arch), name, sizes


def _odd_part(path: Path) -> str:
    """What a file's name says beside N, K and a batch, and so perhaps of the product; "" where it says no more."""
    match = _FILE.fullmatch(path.stem)
    parts = (match["suffix"] or "").split("-") if match else []
    return next((part[:40] for part in parts if part and not re.fullmatch(r"[BNK]=[0-9]{1,10}", part)), "")


def _upper(folder: str) -> str:
    """batched_gemm_a16w16 is BATCHED_GEMM-A16W16."""
    head, gemm, tail = folder.partition("gemm_")
    return f"{head}{gemm[:-1]}".upper() + f"-{tail.upper()}" if gemm else folder.upper()


def _order(key: str) -> tuple[int, int]:
    bound = re.fullmatch(r"M_(LEQ|GEQ)_([0-9]+)", key)
    if bound:
        return (0, int(bound[2])) if bound[1] == "LEQ" else (1, -int(bound[2]))
    names = (*CATEGORIES, *MOE_CATEGORIES, "any")
    return 2, names.index(key) if key in names else len(names)
