"""How moe_fp8_tiles.py runs a mixture of experts: its tiles, what is worth trying, and its launches, compiled.

Without torch and without a GPU, as moe_tiling.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.arch import is_among, shared_limit
from gemmtuned.kernels.cuda.moe_compile import described
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.own_kernel import symbol
from gemmtuned.kernels.triton.moe_tiling import ACTS, AT_ONCE, MOST_PAIRS, Compiled, both_of, in_pairs
from gemmtuned.kernels.triton.source import code_of

NAME: Final = "moe_fp8_tiles"
ARCHS: Final = ("sm_89+",)  # the first with e4m3 in its matrix instructions
LEAST_PAIRS: Final = 128  # (a token and one of its experts): below, moe_decode reads weights as fast as memory gives
# (columns of H, tokens, warps, stages) of the first product, (columns of Y, tokens, tiles in turn, warps, stages) of
# the second: those that were the fastest of some layer on an H200
_UP: Final = (
    (128, 16, 8, 3), (64, 16, 4, 4), (128, 32, 8, 3), (64, 32, 4, 4), (128, 64, 8, 4), (64, 64, 4, 3),
)  # fmt: skip
_DOWN: Final = (
    (128, 16, 4, 4, 4), (128, 16, 1, 4, 4), (128, 32, 4, 4, 4), (128, 64, 4, 4, 3), (64, 64, 8, 4, 3),
)  # fmt: skip
RACED: Final = 4  # configurations of each launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product is cut: columns of its result, tokens, tiles that a thread block makes in turn, warps, stages.

    The columns of the first product's tile are the groups in which H is quantised, and steps of the second's K.
    """

    columns: int
    tokens: int
    turns: int
    warps: int
    stages: int

    def text(self) -> str:
        """As tile_of reads it."""
        return f"{self.columns}.{self.tokens}.{self.turns}.{self.warps}.{self.stages}"


def tile_of(text: str) -> Tile:
    """Raises ValueError for what is no tile."""
    columns, tokens, turns, warps, stages = map(int, text.split("."))
    if any(value < 1 or value & (value - 1) for value in (columns, tokens, warps)):
        raise ValueError(f"{text} is no tile: columns, tokens and warps are powers of two")
    if not (columns in (64, 128) and 16 <= tokens <= 256 and 1 <= turns <= 64 and warps <= 16 and 0 < stages <= 8):
        raise ValueError(f"{text} is no tile that is compiled")
    return Tile(columns=columns, tokens=tokens, turns=turns, warps=warps, stages=stages)


def tiles_of(candidate: Candidate) -> tuple[Tile, Tile]:
    """The tiles of both products. Raises CandidateFailed for a config that is none."""
    return both_of(candidate, tile_of)


def layer_of(problem: Problem) -> Experts | None:
    """What the kernels are compiled for; None where they may not run the problem, or are not written for it."""
    if problem.scale != "1x128" or not LEAST_PAIRS <= problem.m * (problem.topk or 1) <= MOST_PAIRS:
        return None
    layer = described(problem)
    return layer if layer is not None and is_cut(layer) else None


def is_cut(layer: Experts) -> bool:
    """Whether the layer has whole groups of X and of H."""
    if layer.weight != "fp8_e4m3" or layer.scales != "128x128" or layer.bias or layer.act == "swiglu_clamped":
        return False
    return layer.width % 128 == 0 and layer.inter % 64 == 0


def runs_on(arch: str, layer: Experts) -> bool:
    """Whether this architecture multiplies e4m3, and the layer is of it."""
    return is_among(arch, ARCHS) and is_cut(layer)


def candidates(problem: Problem, arch: str) -> Iterator[Candidate]:
    """Pairs of tiles that are worth trying, those that are likely for both first."""
    layer = layer_of(problem)
    if layer is None or not runs_on(arch, layer):
        return
    ups, downs = (list(likely(layer, problem.m, arch, stage)) for stage in (1, 2))
    yield from in_pairs(NAME, [tile.text() for tile in ups], [tile.text() for tile in downs])


def likely(layer: Experts, tokens: int, arch: str, stage: int) -> Iterator[Tile]:
    """Tiles of a product that are worth trying, those near to what an expert has of so many tokens first."""
    named = [(c, t, 1, w, s) for c, t, w, s in _UP] if stage == 1 else _DOWN
    tiles = (Tile(columns=c, tokens=t, turns=r, warps=w, stages=s) for c, t, r, w, s in named)
    fit = [tile for tile in tiles if takes(layer, tile, stage) and _shared(tile, stage) <= shared_limit(arch)]
    wanted = min(max(16.0, 1.5 * tokens * layer.topk / layer.experts), 128.0)
    yield from sorted(fit, key=lambda tile: max(tile.tokens / wanted, wanted / tile.tokens))[:RACED]


def takes(layer: Experts, tile: Tile, stage: int) -> bool:
    """Whether H has whole tiles of so many columns."""
    return stage == 2 or layer.inter % tile.columns == 0


def _shared(tile: Tile, stage: int) -> int:
    return tile.stages * 128 * ((2 if stage == 1 else 1) * tile.columns + tile.tokens)


def compiled(layer: Experts, up: Tile, down: Tile, arch: str) -> dict[str, Compiled]:
    """All launches of a layer by name, for any number of tokens.

    Raises CandidateFailed where one does not compile, or keeps values of a thread in memory.
    """
    if not is_cut(layer) or not takes(layer, up, 1):
        raise CandidateFailed(f"{up} does not cut {layer}")
    ours, others = _kernels()
    value = f"*{layer.dtype}"
    kinds = {
        **dict.fromkeys(("x", "parts", "y"), value), **dict.fromkeys(("codes", "w", "h"), "*fp8e4nv"),
        **dict.fromkeys(("scales", "scale", "h_scales", "gates"), "*fp32"),
        **dict.fromkeys(("order", "tiles", "up_tiles", "down_tiles"), "*i32"),
        **dict.fromkeys(("pairs", "places", "up_places", "down_places"), "i32"),
        "ids": "*i64" if layer.long_ids else "*i32",
    }  # fmt: skip
    common = {
        "D": layer.width, "INTER": layer.inter, "EXPERTS": layer.experts, "TOPK": layer.topk, "BLOCK": AT_ONCE,
        "ACT": ACTS[layer.act], "WEIGHTED": int(layer.weight_first), "UP_TOKENS": up.tokens, "DOWN_TOKENS": down.tokens,
        "GROUP": up.columns,
    }  # fmt: skip
    small = Tile(columns=1, tokens=1, turns=1, warps=8, stages=1)

    def made(function: Any, n: int, k: int, tile: Tile) -> Compiled:
        cut = {"BLOCK_N": tile.columns, "BLOCK_M": tile.tokens, "RUN": tile.turns}
        name = symbol(f"{NAME}_{function.__name__}", n, k, tile.tokens)
        return Compiled(function, kinds, {**common, **cut}, name, arch, warps=tile.warps, stages=tile.stages)

    return {
        "begin": made(ours.begin, layer.experts, layer.width, small),
        "up": made(ours.up, 2 * layer.inter, layer.width, up),
        "down": made(ours.down, layer.width, layer.inter, down),
        "add": made(others.add, layer.width, layer.topk, small),
    }


def compile_candidate(candidate: Candidate, problem: Problem, arch: str) -> None:
    """All that may serve calls of the problem, into Triton's cache. Raises CandidateFailed with the reason."""
    layer = layer_of(problem)
    if layer is None or not runs_on(arch, layer):
        raise CandidateFailed(f"{candidate} does not run {problem}")
    for long_ids in (False, True):
        compiled(replace(layer, long_ids=long_ids), *tiles_of(candidate), arch)


@cache
def source_hash() -> str:
    """The hash of what is compiled and how it is launched, without comments; 12 hex digits."""
    here = Path(__file__)
    names = (
        "moe_tiles.py", "moe_tiling.py", "moe_fp8_tiles.py", here.name, "moe_fp8_launch.py", "moe_launch.py",
    )  # fmt: skip
    return sha256("".join(code_of(here.with_name(name).read_text()) for name in names).encode()).hexdigest()[:12]


def _kernels() -> tuple[Any, Any]:
    ours, others = (import_module(f"gemmtuned.kernels.triton.{name}") for name in ("moe_fp8_tiles", "moe_tiles"))
    return ours, others
