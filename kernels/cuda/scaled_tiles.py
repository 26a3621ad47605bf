"""Tiles of 8-bit operands with scales, for many tokens on sm_90 (scaled_tiles.cu).

Runs fp8_e4m3 by fp8_e4m3 and int8 by int8 into bf16 or fp16, with one scale a tensor, one a row, or, of fp8, one for
each block of 128; int8 also with zero points of X.  Products of fp8 are summed up in fp32 every 128 of K, but where the
problem allows the tensor core's shorter sums (`math_mode` is `reduced`).  Sums of int8 are whole numbers of 32 bits.
It is offered from M = 33 on; for fewer tokens scaled_one_shot.py is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import PORTABLE_CLUSTER, Axis, Condition, KernelLaunch
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.arch import filled, shared_limit
from gemmtuned.kernels.cuda import nvrtc, scaled
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.cuda.scaled import KINDS, OUTPUTS, STEP_K
from gemmtuned.kernels.estimates import fits, largest
from gemmtuned.kernels.own_kernel import Config, Parameter


@dataclass(frozen=True, slots=True)
class Costs:
    """What the estimate adds up, in microseconds.

    start_us: a launch.  multiply_kcycle_us, shared_kcycle_us: 1000 cycles of products, of shared memory.  promotion_us:
    1000 rows of W whose sums are promoted, for one step.  weights_mb_us: a MB of W.  rows_mb_us: a MB of X and Y.
    tile_us: a tile.  store_kb_us: a KB of its results.  parts_us: cutting K.  sums_kb_us: a KB of received sums.
    """

    start_us: float
    multiply_kcycle_us: float
    shared_kcycle_us: float
    promotion_us: float
    weights_mb_us: float
    rows_mb_us: float
    tile_us: float
    store_kb_us: float
    parts_us: float
    sums_kb_us: float


FITS: Final = fits(__file__, Costs)
NAME: Final = "scaled_tiles"
ARCH: Final = "sm_90"  # no other architecture has wgmma
SOURCE: Final = Path(__file__).with_name("scaled_tiles.cu")
MAX_M: Final = 16384
TYPES: Final = ("fp8_e4m3", "i8")
GROUP_TOKENS: Final = 64  # rows of X per warp group: those of one wgmma
MAX_GROUPS: Final = 2  # warp groups that multiply
_REGISTERS: Final = 128  # for sums per thread: those of a step and of all steps, or of all steps alone
_LEAST_DEPTH: Final = 3
_LEAST_M: Final = 33  # with fewer rows of X another kernel is always faster
_DEPTH: Final = 8  # steps whose copies are under way at the same time, at most
_UNIT_BYTES: Final = 512  # a unit of sums: 16 tokens x 8 rows of W in fp32
_PRODUCTS_A_CYCLE: Final = 4096  # products of 8 bits per cycle and multiprocessor
_BYTES_A_CYCLE: Final = 128  # that its shared memory moves


@dataclass(frozen=True, slots=True)
class ScaledTiles:
    """One configuration for one problem.

    kind: the kind of scales, as the source names it.  promoted: sums are added up in fp32 every 128 values of K.  rows:
    rows of W in a thread block's tile.  tokens: rows of X in it.  halves: warp groups that share the rows of a tile.
    share_w, share_x: thread blocks of a cluster that read the same rows of W, or of X, together.  parts: slices of K in
    a cluster.  clusters: how many are launched; each computes one tile after the other.  int8: X and W are int8, else
    fp8.  by_token, zero: how the scales of X lie, and its zero points (scaled.py).
    """

    m: int
    n: int
    k: int
    bias: bool
    out: str
    kind: str
    promoted: bool
    rows: int
    tokens: int
    halves: int
    share_w: int
    share_x: int
    parts: int
    clusters: int
    int8: bool = False
    by_token: bool = False
    zero: int = 0

    @property
    def groups(self) -> int:
        """Groups of GROUP_TOKENS tokens in a tile; each has `halves` warp groups."""
        return self.tokens // GROUP_TOKENS

    @property
    def multiplying(self) -> int:
        """Warp groups that multiply."""
        return self.groups * self.halves

    @property
    def cluster(self) -> int:
        """Thread blocks per cluster."""
        return self.share_w * self.share_x * self.parts

    @property
    def tiles(self) -> int:
        """Tiles of clusters that make up the result."""
        return _tiles(self.m, self.n, self.rows, self.tokens, self.share_w, self.share_x)

    @property
    def turns(self) -> int:
        """Tiles that a cluster computes, at most."""
        return -(-self.tiles // self.clusters)

    @property
    def steps(self) -> int:
        """Steps of K per thread block; some have one less."""
        return math.ceil(math.ceil(self.k / STEP_K) / self.parts)

    @property
    def depth(self) -> int:
        """Steps whose copies are under way at the same time; 0 where none fits."""
        fitting = (d for d in range(1, _DEPTH + 1) if self._bytes(d) <= shared_limit(ARCH))
        return max(fitting, default=0)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        return self._bytes(self.depth)

    @property
    def received(self) -> int:
        """Bytes of received sums, which overwrite the ring of steps."""
        units = self.tokens // 16 * (self.rows // 8)
        return self.parts * -(-units // self.parts) * _UNIT_BYTES if self.parts > 1 else 0

    def _bytes(self, depth: int) -> int:
        """Bytes for `depth` steps of W, X and scales, what results need beside sums, barriers."""
        ring = depth * (self.rows + self.tokens) * STEP_K
        scales = depth * (self.tokens * 4 + 16) if self.kind == "BLOCK" else 0
        pairs = (self.kind != "BLOCK") + (self.zero > 0)  # scales and zero points, of 4 bytes
        epilogue = 4 * (pairs * (self.rows + self.tokens) + self.bias * self.rows)
        return ring + -(-scales // 128) * 128 + epilogue + 16 * depth + 24

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched, for every M up to this one. Its parameters are maps of x and w, bias, sx, sw, y, m and
        distances of scales.
        """
        given = scaled.arguments(self.kind, bias=self.bias, by_token=self.by_token, zero=self.zero)
        maps = {"x.ptr": f"x.map{self.tokens // self.share_x}", "w.ptr": f"w.map{self.rows // self.share_w}"}
        return KernelLaunch(
            shared=self.shared, threads=128 * (self.multiplying + 1), cluster=self.cluster,
            grid=(Axis("", self.clusters), Axis("", 1), Axis("", 1)),
            arguments=tuple(maps.get(name, name) for name in given if name not in ("x.stride0", "w.stride0")),
            conditions=(
                *scaled.conditions(
                    self.kind, self.m, self.n, self.k, bias=self.bias, by_token=self.by_token, zero=self.zero
                ),
                *(Condition(f"{name}.stride0", ">=", self.k) for name in ("x", "w")),  # maps have no rows over others
            ),
        )  # fmt: skip

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "TOKENS": self.tokens, "GROUPS": self.groups,
            "HALVES": self.halves, "SHARE_W": self.share_w, "SHARE_X": self.share_x, "PARTS": self.parts,
            "DEPTH": self.depth, "SCALES": self.kind, "PROMOTED": int(self.promoted),
            "INT8": int(self.int8),
            **scaled.zero_defines(self.zero), "BY_TOKEN": int(self.by_token), "BIAS": int(self.bias), "NAME": NAME,
            "CLUSTER": f"__cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else "",
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        product = scaled.product(scaled.at_once(self.rows // self.halves, int8=self.int8), int8=self.int8)
        types = f"{product}\n{scaled.numbers_of(OUTPUTS[self.out])}"
        return defines + _text().replace("\nOF_THIS_TYPE\n", f"\n{types}\n")


def check(problem: Problem) -> None:
    """Raise CandidateFailed when the kernel is not written for this problem."""
    scaled.check(problem, NAME, MAX_M, TYPES)
    if problem.n % 2:
        raise CandidateFailed(f"{problem} {NAME}: it stores two columns at a time, N is no multiple of 2")


def scaled_tiles(config: Config, problem: Problem) -> ScaledTiles:
    """This config for this problem. Raises CandidateFailed when it cannot run it."""
    check(problem)
    found = _configured(problem, **KERNEL.checked(config))
    if found is None:
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} is no configuration that it has, or does not fit")
    return found


def _configured(
    problem: Problem, *, rows: int, tokens: int, halves: int, share_w: int, share_x: int, parts: int, clusters: int
) -> ScaledTiles | None:
    """None where these values make no configuration, or one that does not fit shared memory or registers."""
    p, kind, int8 = problem, scaled.kind_of(problem), problem.dtype == "i8"
    assert kind is not None, "check has let it through"
    promoted = not int8 and (kind == "BLOCK" or p.math_mode != "reduced")
    one = ScaledTiles(
        p.m, p.n, p.k, p.bias, p.out_dtype, kind, promoted, rows, tokens, halves, share_w, share_x, parts, clusters,
        int8, scaled.by_token(p), scaled.zero_of(p),
    )  # fmt: skip
    if rows % (8 * halves) or rows % (8 * share_w) or tokens % (8 * share_x) or one.multiplying > MAX_GROUPS:
        return None
    if rows // halves // 2 * (2 if promoted else 1) > _REGISTERS or (kind == "BLOCK" and rows > STEP_K):
        return None
    if one.cluster > PORTABLE_CLUSTER or parts > -(-p.k // STEP_K) or one.depth < _LEAST_DEPTH:
        return None
    if parts > 1 and (one.turns > 1 or one.received > one.depth * (rows + tokens) * STEP_K):
        return None
    return one


def estimate_us(one: ScaledTiles) -> float:
    """An estimate in microseconds for an H200 with cold weights, made to order configurations.

    A warp group's product takes both its operands from shared memory, to which copies write as well: 128 bytes a cycle.
    """
    costs = FITS["all"]
    multiply = one.tokens * one.rows * STEP_K / _PRODUCTS_A_CYCLE / 1000
    given = one.multiplying * GROUP_TOKENS + one.groups * one.rows
    shared = (given + one.rows + one.tokens) * STEP_K / _BYTES_A_CYCLE / 1000
    step = largest(costs.multiply_kcycle_us * multiply, costs.shared_kcycle_us * shared)
    step += costs.promotion_us * one.rows / one.halves / 1000 if one.promoted else 0.0
    tile = one.steps * step + costs.tile_us + costs.store_kb_us * one.tokens * one.rows * 2 / 1000
    sums = costs.parts_us + costs.sums_kb_us * one.tokens * one.rows * 4 / 1024 if one.parts > 1 else 0.0
    memory = costs.weights_mb_us * one.n * one.k + costs.rows_mb_us * one.m * (one.k + 2 * one.n)
    return costs.start_us + largest(one.turns * tile + sums, memory / 1e6)


def scored(problem: Problem, units: int) -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config), the fastest first; none for a problem that the kernel is not written for.

    units: multiprocessors of the device.
    """
    try:
        check(problem)
    except CandidateFailed:
        return []
    if problem.m < _LEAST_M:
        return []
    found = []
    for config in _shapes():
        share_w, share_x = config["share_w"], config["share_x"]
        cluster = share_w * share_x * config["parts"]
        tiles = _tiles(problem.m, problem.n, config["rows"], config["tokens"], share_w, share_x)
        one = _configured(problem, **config, clusters=min(tiles, max(filled(units, cluster) // cluster, 1)))
        if one is not None:
            found.append((estimate_us(one), config | {"clusters": one.clusters}))
    return sorted(found, key=lambda item: item[0])


def _tiles(m: int, n: int, rows: int, tokens: int, share_w: int, share_x: int) -> int:
    """As ScaledTiles.tiles."""
    return -(-n // (rows * share_x)) * -(-m // (tokens * share_w))


def _shapes() -> Iterator[dict[str, int]]:
    """All configs, without `clusters`; a problem can be run by some of them."""
    together = [(w, x, parts) for w in (1, 2, 4) for x in (1, 2, 4) for parts in (1, 2, 4) if w * x * parts <= 8]
    for (tokens, halves), rows in itertools.product(((64, 1), (64, 2), (128, 1)), range(32, 257, 8)):
        for share_w, share_x, parts in together:
            yield {
                "rows": rows, "tokens": tokens, "halves": halves, "share_w": share_w, "share_x": share_x, "parts": parts
            }  # fmt: skip


def _samples() -> Iterator[str]:
    """Sources for each output, kind of scales, type and way to share: every line of the kernel, for its stamp."""
    for out in OUTPUTS:
        for kind in KINDS.values():
            yield ScaledTiles(256, 64, 1024, True, out, kind, kind == "BLOCK", 64, 128, 1, 2, 1, 1, 4).source()
        yield ScaledTiles(256, 64, 1024, True, out, "ROW", True, 64, 64, 2, 1, 2, 1, 4).source()
        yield ScaledTiles(256, 64, 1024, True, out, "ROW", False, 64, 128, 1, 1, 1, 2, 4, int8=True).source()
        for zero, kind in ((1, "W_ROW"), (2, "ROW")):
            yield ScaledTiles(
                256, 64, 1024, True, out, kind, False, 64, 128, 1, 1, 1, 2, 4, int8=True, zero=zero
            ).source()
        yield ScaledTiles(256, 64, 1024, True, out, "BLOCK", True, 64, 128, 1, 2, 2, 2, 8, by_token=True).source()


@cache
def _text() -> str:
    return nvrtc.text_of(SOURCE)


KERNEL: Final = CudaKernel(
    name="scaled_tiles",
    families=("scaled",),
    archs=("sm_90",),
    target="sm_90a",
    parameters=(
        Parameter("rows", 8, 256, multiple=8),
        Parameter("tokens", 64, 128, multiple=64),
        Parameter("halves", 1, 2),
        Parameter("share_w", 1, 8),
        Parameter("share_x", 1, 8),
        Parameter("parts", 1, 8),
        Parameter("clusters", 1, 1024),
    ),
    scored=lambda problem, device: scored(problem, device.units),
    record=scaled_tiles,
    alike=lambda config: tuple(config[name] for name in ("rows", "tokens", "halves", "parts")),
    samples=_samples,
)
