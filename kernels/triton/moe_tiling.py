"""How moe_tiles.py runs a mixture of experts: its tiles, what is worth trying, and its launches, compiled.

Without torch and without a GPU, and without Triton for all but compiling: the daemon compiles before a device is used,
and programs that have no solution of these kernels import none of this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar

from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.arch import at_least_sm, is_among, shared_limit
from gemmtuned.kernels.cuda.moe_compile import described
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.own_kernel import symbol
from gemmtuned.kernels.triton.kernel import is_interpreted
from gemmtuned.kernels.triton.source import code_of

AnyTile = TypeVar("AnyTile")
NAME: Final = "moe_tiles"
ARCHS: Final = ("sm_80+",)
LEAST_PAIRS: Final = 128  # (a token and one of its experts): below, moe_decode is what there is to beat
MOST_PAIRS: Final = 1 << 19  # for each 16 of which the grid has a block
AT_ONCE: Final = 2048  # ids, or columns, that one thread block of a small launch looks at, at once
PADDING: Final = 256  # rows that meet coded weights are padded to multiples of it: of the longest step of K
WEIGHTS: Final = {"bf16": 0, "fp16": 0, "fp8_e4m3": 1, "int4": 2, "mxfp4": 3}  # as the kernels number them
SCALES: Final = {"none": 0, "tensor": 1, "row": 2, "128x128": 3, "group": 4}
ACTS: Final = {"silu": 0, "gelu": 1, "swiglu_clamped": 2}
_BYTES: Final = {"bf16": 2.0, "fp16": 2.0, "fp8_e4m3": 1.0, "int4": 0.5, "mxfp4": 0.5}
# (rows of W, tokens, K of a step, warps, stages): of plain weights, and of coded ones in the first and second product,
# those that were the fastest of some layer on an H200
_PLAIN_UP: Final = (
    (128, 16, 128, 4, 3), (128, 16, 128, 4, 4), (128, 32, 64, 4, 4), (256, 32, 64, 8, 4), (256, 64, 64, 8, 4),
    (128, 64, 64, 4, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3),
)  # fmt: skip
_PLAIN_DOWN: Final = (
    (128, 16, 128, 4, 3), (128, 16, 128, 4, 4), (128, 32, 128, 4, 4), (128, 64, 64, 4, 4), (256, 64, 64, 8, 4),
    (128, 64, 128, 4, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3),
)  # fmt: skip
_CODED_UP: Final = (
    (64, 16, 256, 4, 3), (64, 16, 128, 4, 4), (128, 16, 128, 4, 4), (128, 32, 128, 4, 4), (64, 32, 128, 4, 4),
    (128, 64, 128, 8, 4), (128, 64, 128, 4, 3), (128, 64, 128, 8, 2), (256, 64, 128, 8, 3),
)  # fmt: skip
_CODED_DOWN: Final = (
    (128, 16, 128, 4, 3), (128, 16, 128, 4, 2), (128, 16, 256, 4, 1), (128, 32, 128, 4, 2), (128, 32, 256, 4, 1),
    (128, 32, 128, 4, 4), (128, 64, 128, 4, 3), (128, 64, 256, 8, 1), (128, 64, 128, 8, 2),
)  # fmt: skip
RACED: Final = 5  # configurations of each launch
SHORT: Final = 12  # steps of K: a tile of the second product with no more of them is soon done
TURNS: Final = 4  # such tiles in turn, measured on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one of the two products is cut: rows of W, tokens, values of K of a step; warps, and steps on their way."""

    rows: int
    tokens: int
    block_k: int
    warps: int
    stages: int

    def text(self) -> str:
        """As tile_of reads it."""
        return f"{self.rows}.{self.tokens}.{self.block_k}.{self.warps}.{self.stages}"


def tile_of(text: str) -> Tile:
    """Raises ValueError for what is no tile."""
    rows, tokens, block_k, warps, stages = map(int, text.split("."))
    if any(value < 1 or value & (value - 1) for value in (rows, tokens, block_k, warps)) or not 0 < stages <= 8:
        raise ValueError(f"{text} is no tile: powers of two, and 1 to 8 stages")
    if not (32 <= rows <= 512 and 16 <= tokens <= 256 and 32 <= block_k <= PADDING and warps <= 16):
        raise ValueError(f"{text} is no tile that is compiled")
    return Tile(rows=rows, tokens=tokens, block_k=block_k, warps=warps, stages=stages)


def tiles_of(candidate: Candidate) -> tuple[Tile, Tile]:
    """The tiles of both products. Raises CandidateFailed for a config that is none."""
    return both_of(candidate, tile_of)


def both_of(candidate: Candidate, read: Callable[[str], AnyTile]) -> tuple[AnyTile, AnyTile]:
    """The same for tiles of any kind. read: a tile's text, raises ValueError for another."""
    try:
        config = json.loads(candidate.config)
        return read(config["up"]), read(config["down"])
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{candidate} has no tiles of two products") from err


def layer_of(problem: Problem) -> Experts | None:
    """What the kernels are compiled for; None where they are not written for the problem, or its size."""
    return described(problem) if LEAST_PAIRS <= problem.m * (problem.topk or 1) <= MOST_PAIRS else None


def runs_on(arch: str, layer: Experts) -> bool:
    """Whether this architecture has what the kernels of the layer need: e4m3 in hardware begins with sm_89."""
    return is_among(arch, ARCHS) and (layer.weight != "fp8_e4m3" or at_least_sm(arch, 89))


def candidates(problem: Problem, arch: str) -> Iterator[Candidate]:
    """Pairs of tiles that are worth trying, those that are likely for both first."""
    layer = layer_of(problem)
    if layer is None or not runs_on(arch, layer):
        return
    ups, downs = (list(likely(layer, problem.m, arch, stage)) for stage in (1, 2))
    yield from in_pairs(NAME, [tile.text() for tile in ups], [tile.text() for tile in downs])


def in_pairs(name: str, ups: Sequence[str], downs: Sequence[str]) -> Iterator[Candidate]:
    """Candidates of the backend of that name, of tiles that are likely for both products first."""
    both = product(enumerate(ups), enumerate(downs))
    for (_, up), (_, down) in sorted(both, key=lambda pair: pair[0][0] + pair[1][0]):
        yield Candidate.of(name, up=up, down=down)


def likely(layer: Experts, tokens: int, arch: str, stage: int) -> Iterator[Tile]:
    """Tiles of a product that are worth trying, those near to what an expert has of so many tokens first."""
    coded = WEIGHTS[layer.weight] > 0
    tiles = (_CODED_UP if coded else _PLAIN_UP) if stage == 1 else _CODED_DOWN if coded else _PLAIN_DOWN
    named = (Tile(rows=r, tokens=t, block_k=k, warps=w, stages=s) for r, t, k, w, s in tiles)
    fit = [tile for tile in named if takes(layer, tile) and _shared(layer, tile) <= shared_limit(arch)]
    wanted = min(max(16.0, 1.5 * tokens * layer.topk / layer.experts), 128.0)
    yield from sorted(fit, key=lambda tile: max(tile.tokens / wanted, wanted / tile.tokens))[:RACED]


def takes(layer: Experts, tile: Tile) -> bool:
    """Whether a step of K has whole blocks or groups of scales, and every warp has whole rows of codes."""
    if not WEIGHTS[layer.weight]:
        return True
    if tile.rows % (16 * tile.warps) or tile.block_k % (64 if layer.weight == "fp8_e4m3" else 128):
        return False
    return tile.block_k % 128 == 0 if layer.scales == "128x128" else layer.scales != "group" or 128 % layer.group == 0


def _shared(layer: Experts, tile: Tile) -> float:
    return tile.stages * tile.block_k * (tile.rows * _BYTES[layer.weight] + tile.tokens * 2)


def turns(layer: Experts, down: Tile) -> int:
    """Tiles that a thread block of the second product makes in turn: several where each alone is soon done."""
    short = not WEIGHTS[layer.weight] and -(-layer.inter // down.block_k) <= SHORT
    return TURNS if short and down.tokens >= 32 else 1


def padded(layer: Experts) -> tuple[int, int]:
    """Columns that rows of X and of H have where weights meet them."""
    sizes = layer.width, layer.inter
    if not WEIGHTS[layer.weight]:
        return sizes
    width, inter = (-(-k // PADDING) * PADDING for k in sizes)
    return width, inter


class Compiled:
    """One launch: a function with its constants, for an architecture, or for Triton's interpreter.

    function: of Triton, whose arguments are among kinds and constants.  Raises CandidateFailed where it does not
    compile, or keeps values of a thread in memory.
    """

    def __init__(
        self, function: Any, kinds: Mapping[str, str], constants: Mapping[str, int], name: str, arch: str, *,
        warps: int, stages: int,
    ) -> None:  # fmt: skip
        self._function = function
        self._names = self._function.arg_names
        self._constants = {name: constants[name] for name in self._names if name in constants}
        self._options = {"num_warps": warps, "num_stages": stages}
        self._kernel: Any = None
        if is_interpreted(self._function):
            return
        from gemmtuned.kernels.compile import compile_function

        signature = {n: "constexpr" if n in self._constants else kinds[n] for n in self._names}
        self._kernel = compile_function(
            self._function, signature, self._constants, name=name, arch=arch, **self._options
        )

    def load(self) -> None:
        """On the current device. Raises CandidateFailed where the driver refuses, Declined for lack of memory."""
        if self._kernel is None:
            return
        try:
            self._kernel._init_handles()
        except Exception as err:  # out of resources, or the driver refuses the binary
            if "out of memory" in str(err) or "Triton Error [" in str(err):  # what the driver says after others' faults
                raise Declined(str(err)) from err
            raise CandidateFailed(f"{self._function.__name__} {self._constants}: does not load: {err}") from err

    def __call__(self, grid: tuple[int, int, int], values: Mapping[str, Any]) -> None:
        """Launch it with these tensors and numbers by name; what it does not have is None."""
        if self._kernel is not None:
            self._kernel[grid](*[self._constants.get(name, values.get(name)) for name in self._names])
            return
        given = {name: values.get(name) for name in self._names if name not in self._constants}
        # the interpreter takes no None for a pointer; what is not there is never read
        there = next(value for value in given.values() if hasattr(value, "data_ptr"))
        given = {name: there if value is None else value for name, value in given.items()}
        self._function[grid](**given, **self._constants, **self._options)


def compiled(layer: Experts, up: Tile, down: Tile, arch: str) -> dict[str, Compiled]:
    """All launches of a layer by name, for any number of tokens; `ready` is only there for coded weights.

    Raises CandidateFailed where one does not compile, or keeps values of a thread in memory.
    """
    for tile in (up, down):
        if not takes(layer, tile):
            raise CandidateFailed(f"{tile} does not cut weights of {layer}")
    value, coded = f"*{layer.dtype}", WEIGHTS[layer.weight] > 0
    made_ready = "*fp16" if layer.weight == "fp8_e4m3" else value
    scale = {"none": value, "group": "*u8" if layer.weight == "mxfp4" else value}.get(layer.scales, "*fp32")
    kinds = {
        "x": value, "h": value, "y": value, "bias": value, "parts": value, "to": made_ready, "scale": scale,
        "w": "*u8" if coded else value, "ids": "*i64" if layer.long_ids else "*i32", "gates": "*fp32",
        "factor": "*fp32", **dict.fromkeys(("order", "tiles", "up_tiles", "down_tiles"), "*i32"),
        **dict.fromkeys(("pairs", "places", "up_places", "down_places"), "i32"),
    }  # fmt: skip
    common = {
        "D": layer.width, "INTER": layer.inter, "EXPERTS": layer.experts, "TOPK": layer.topk, "BLOCK": AT_ONCE,
        "WEIGHT": WEIGHTS[layer.weight], "SCALES": SCALES[layer.scales], "GROUP": layer.group or 32,
        "ACT": ACTS[layer.act], "INTERLEAVED": int(layer.act == "swiglu_clamped"), "WEIGHTED": int(layer.weight_first),
        "BIAS": int(layer.bias), "UP_TOKENS": up.tokens, "DOWN_TOKENS": down.tokens,
        "ASM": int(arch.startswith("sm_") and not is_interpreted(_kernels("up", coded=coded).up)),
    }  # fmt: skip
    width, inter = padded(layer)
    small = Tile(rows=1, tokens=1, block_k=1, warps=8, stages=1)

    def made(function: str, n: int, k: int, tile: Tile, more: Mapping[str, str] = {}, **values: int) -> Compiled:
        cut = {"BLOCK_N": tile.rows, "BLOCK_M": tile.tokens, "BLOCK_K": tile.block_k, "WARPS": tile.warps}
        name = symbol(f"{NAME}_{function}", n, k, tile.tokens)
        return Compiled(
            getattr(_kernels(function, coded=coded), function), {**kinds, **more}, {**common, **cut, **values}, name,
            arch, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    found = {
        "begin": made("begin", layer.experts, layer.width, small, K=layer.width, PADDED=width),
        "up": made("up", 2 * layer.inter, layer.width, up, {"x": made_ready}, PADDED=width),
        "down": made("down", layer.width, layer.inter, down, {"h": made_ready}, PADDED=inter, RUN=turns(layer, down)),
        "add": made("add", layer.width, layer.topk, small),
    }
    if coded:
        found["ready"] = made("ready", 1, layer.inter, small, K=layer.inter, PADDED=inter)
    return found


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
    names = ("inline_ptx.py", "coded_weights.py", "moe_tiles.py", "moe_plain_tiles.py", here.name, "moe_launch.py")
    return sha256("".join(code_of(here.with_name(name).read_text()) for name in names).encode()).hexdigest()[:12]


def _kernels(function: str, *, coded: bool) -> Any:
    plain = not coded and function in ("up", "down")
    return import_module(f"gemmtuned.kernels.triton.{'moe_plain_tiles' if plain else 'moe_tiles'}")
