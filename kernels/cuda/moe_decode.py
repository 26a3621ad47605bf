"""A fused mixture of experts at decode sizes in two launches (moe_decode.cu): sm_90, up to some 64 tokens.

Y[T, D] = sum over a token's TOPK experts e of weight * act(X Wg[e]^T, X Wu[e]^T) W2[e]^T, H rounded to X's type between
the two.  X, H and Y are bf16 or fp16; weights are of that type, e4m3, or 4 bits (int4 in groups, MXFP4), with scales in
fp32 (tensor, row, 128x128), of X's type (groups) or e8m0 (MXFP4).  Weights are decoded in registers, activations are
not quantised: an op that quantises them first has more error than this.  Beside MXFP4 values of bf16 X mostly become
whole numbers, 32 of a token with one exponent (moe_columns.cuh): what that leaves out is below 2^-14 of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import PORTABLE_CLUSTER
from gemmtuned.kernels.cuda import nvrtc

UP: Final = "moe_up"
DOWN: Final = "moe_down"
SOURCE: Final = Path(__file__).with_name("moe_decode.cu")
TARGET: Final = "sm_90a"
MAX_PAIRS: Final = 1024  # a pair is a token and one of its experts
MAX_EXPERTS: Final = 1024
MOST_OF_TILE: Final = 8  # columns of the tensor core's product
COLUMN_BYTES: Final = 2176  # what the columns of four tokens take in a step
MOST_KEPT: Final = 32  # steps whose columns a warp keeps
SHARED_BYTES: Final = 227 << 10  # per multiprocessor
WEIGHTS: Final = {"bf16": 0, "fp16": 1, "fp8_e4m3": 2, "int4": 3, "mxfp4": 4}
PER_LANE: Final = {"bf16": 8, "fp16": 8, "fp8_e4m3": 16, "int4": 32, "mxfp4": 32}  # values of K in 16 bytes
SCALES: Final = {"none": 0, "tensor": 1, "row": 2, "128x128": 3, "group": 4}
ACTS: Final = {"silu": 0, "gelu": 1, "swiglu_clamped": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The layer: sizes, types, activation.

    width: of X and Y (D).  inter: columns of H.  weight: a key of WEIGHTS.  scales: a key of SCALES.  group: values of
    K that share a scale in `group`.  act: a key of ACTS; `swiglu_clamped` is gpt-oss's, rows of gate and up in turns.
    """

    width: int
    inter: int
    experts: int
    topk: int
    dtype: str = "bf16"
    weight: str = "bf16"
    scales: str = "none"
    group: int = 0
    act: str = "silu"
    bias: bool = False
    weight_first: bool = False
    long_ids: bool = False

    def check(self) -> None:
        """Raise CandidateFailed where the kernels are not written for this layer."""
        per_lane = PER_LANE.get(self.weight, 0)
        if self.dtype not in ("bf16", "fp16") or not per_lane or (per_lane == 8 and self.weight != self.dtype):
            raise CandidateFailed(f"{self}: X is bf16 or fp16, weights are of X's type or {', '.join(WEIGHTS)}")
        if self.scales not in SCALES or self.act not in ACTS:
            raise CandidateFailed(f"{self}: scales are {', '.join(SCALES)}; activations {', '.join(ACTS)}")
        if (self.scales == "none") != (per_lane == 8) or (self.scales == "group") != (per_lane == 32):
            raise CandidateFailed(f"{self}: {self.weight} weights do not have scales of kind {self.scales}")
        if self.scales == "group" and (
            self.group % 32 or not self.group or self.width % self.group or self.inter % self.group
        ):
            raise CandidateFailed(f"{self}: groups are multiples of 32 and divide both sizes")
        if self.weight == "mxfp4" and self.group != 32:  # a scale of X's columns is added to one of W
            raise CandidateFailed(f"{self}: 32 values of MXFP4 share a scale")
        if self.width % per_lane or self.inter % per_lane or not 1 <= self.topk <= self.experts <= MAX_EXPERTS:
            raise CandidateFailed(f"{self}: both sizes are multiples of {per_lane}, with up to {MAX_EXPERTS} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How one launch is configured.

    warps: of a thread block.  depth: pieces of 128 bytes of each row that a warp has on their way.  tiles: of 16
    columns of the result (in `up` each is 16 rows of gate and 16 of up).  parts: of `up` those that K is cut in, all
    warps or one; of `down` thread blocks of a cluster, which share its columns and deal out the pairs.  pairs: of one
    expert that are computed at once.
    """

    warps: int
    depth: int
    tiles: int
    parts: int = 1
    pairs: int = MOST_OF_TILE


def source(layer: Experts, stage: int, how: Stage, *, most_pairs: int, early: bool = True) -> str:
    """What NVRTC compiles; stage: 1 (up) or 2 (down). Raises CandidateFailed for a layer or size that is none."""
    layer.check()
    if (
        not 0 < most_pairs <= MAX_PAIRS
        or not 1 <= how.warps <= 16
        or not 1 <= how.depth <= 8
        or not 1 <= how.tiles <= 4
        or not 1 <= how.pairs <= MOST_OF_TILE
        or (how.parts not in (1, how.warps) if stage == 1 else not 1 <= how.parts <= PORTABLE_CLUSTER)
    ):
        raise CandidateFailed(f"{how} for {most_pairs} pairs is no configuration")
    if _steps_of_columns(layer, stage, how) > MOST_KEPT:
        raise CandidateFailed(f"{how}: a warp keeps X of {MOST_KEPT} steps of 256 at most, and K is {layer.width}")
    needed = shared_bytes(layer, stage, how, most_pairs) + _routing_bytes(layer, most_pairs)
    if needed > SHARED_BYTES:
        raise CandidateFailed(f"{how} for {most_pairs} pairs: takes {needed} bytes of shared memory of {SHARED_BYTES}")
    values = {
        "STAGE": stage, "D": layer.width, "INTER": layer.inter, "EXPERTS": layer.experts, "TOPK": layer.topk,
        "MOST_PAIRS": most_pairs, "WARPS": how.warps, "DEPTH": how.depth, "TILES": how.tiles,
        "DTYPE": WEIGHTS[layer.dtype], "WEIGHTS": WEIGHTS[layer.weight], "SCALES": SCALES[layer.scales],
        "GROUP": layer.group or 32, "ACT": ACTS[layer.act], "BIAS": int(layer.bias),
        "WEIGHT_FIRST": int(layer.weight_first), "EARLY": int(early), "NAME": UP if stage == 1 else DOWN,
        "ID": "long long" if layer.long_ids else "int", "PARTS": how.parts,
        "CLUSTER": f"__cluster_dims__({cluster(stage, how)}, 1, 1)" if cluster(stage, how) > 1 else "",
        "OF_TILE": how.pairs,
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in values.items()) + text()


def cluster(stage: int, how: Stage) -> int:
    """Thread blocks of one; 1 where there are no clusters."""
    return how.parts if stage == 2 else 1


def grid(layer: Experts, stage: int, how: Stage, tokens: int, units: int) -> tuple[int, int]:
    """Thread blocks, of `down` clusters; of `up` no more than `units` multiprocessors hold: they deal out the work."""
    if stage == 1:
        pairs = tokens * layer.topk
        needed = shared_bytes(layer, stage, how, pairs) + _routing_bytes(layer, pairs)
        held = max(1, min(SHARED_BYTES // needed, 2048 // (32 * how.warps)))
        items = pairs * -(-layer.inter // (16 * how.tiles))
        return min(units * held, items if how.parts > 1 else -(-items // how.warps)), 1
    return -(-layer.width // (16 * how.tiles)), 1


def shared_bytes(layer: Experts, stage: int, how: Stage, most_pairs: int) -> int:
    """Dynamic shared memory of a thread block: rings, and sums of each warp and each part."""
    rows = 16 * how.tiles * (2 if stage == 1 else 1)
    at_once = min(how.pairs, most_pairs)
    steps = _steps_of_columns(layer, stage, how)
    slot = _slot_bytes(layer, stage, rows, 0 if _are_kept(layer, stage, how) else at_once)
    rings = how.warps * (how.depth * slot + steps * COLUMN_BYTES * -(-at_once // 4))
    if stage == 1:
        return rings + (2 * how.warps * rows * MOST_OF_TILE * 4 if how.parts > 1 else 0)
    values = most_pairs // layer.topk * rows
    received = -(-how.parts * -(-values // how.parts) // 2) * 8 + 8 if how.parts > 1 else 0
    return rings + 4 * how.warps * values + received


def _slot_bytes(layer: Experts, stage: int, rows: int, tokens: int) -> int:
    """Bytes of one slot of a ring (moe_ring.cuh): W, tokens, scales."""
    step = 8 * PER_LANE[layer.weight]
    scales = 0
    if layer.scales == "128x128":
        scales = rows // 16 * 4
    elif layer.scales == "group":
        size, group = 1 if layer.weight == "mxfp4" else 2, layer.group
        row = (layer.width if stage == 1 else layer.inter) // group * size
        many = step // group if step % group == 0 else 1 if group % step == 0 else step // group + 2
        in_words = row % 4 == 0 and step % group == 0 and step // group * size % 4 == 0
        scales = rows * ((many * size + (3 if in_words else 6)) // 4) * 4
    return rows * 128 + tokens * step * 2 + -(-scales // 128) * 128


def _are_kept(layer: Experts, stage: int, how: Stage) -> bool:
    """Whether the warps of `up` make a tile's columns of X once (moe_columns.cuh)."""
    return layer.weight == "mxfp4" and layer.dtype == "bf16" and stage == 1 and how.parts > 1


def _steps_of_columns(layer: Experts, stage: int, how: Stage) -> int:
    """How many steps a warp has columns of X for at once."""
    if _are_kept(layer, stage, how):
        steps = -(-layer.width // (8 * PER_LANE[layer.weight]))
        return -(-steps // how.parts)
    return int(layer.weight == "mxfp4" and layer.dtype == "bf16" and stage == 2 and how.pairs <= 2)


def _routing_bytes(layer: Experts, most_pairs: int) -> int:
    """Static shared memory of a thread block, at most: who is routed where."""
    return 4 * layer.experts + 2 * max(256, most_pairs) + 7 * most_pairs + 1024


@cache
def text() -> str:
    """The kernels' source, with its parts where they are included."""
    return nvrtc.text_of(SOURCE)
