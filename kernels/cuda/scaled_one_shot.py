"""One shot for 8-bit operands with scales, M up to 256 on sm_90 (scaled_one_shot.cu).

Runs fp8_e4m3 by fp8_e4m3 and int8 by int8 into bf16 or fp16, with one scale a tensor or one a row; fp8 also with one
for each block of 128, int8 with zero points of X; W also in AITER's order, and then M up to 1024, since torch has to
turn such a weight back.  Products of fp8 are summed up in fp32 every 128 of K; only where the problem allows the tensor
core's shorter sums (`math_mode` is `reduced`) and a tile has more rows than there are registers for two sums, they are
not.  Sums of int8 are whole numbers of 32 bits; it is offered from M = 9 on, for fewer scaled_fragments.py is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import MAX_CLUSTER, Axis, KernelLaunch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import SHUFFLED_ROWS
from gemmtuned.kernels.arch import filled, shared_limit
from gemmtuned.kernels.cuda import nvrtc, scaled
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.cuda.scaled import KINDS, OUTPUTS, STEP_K
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import Config, Parameter


@dataclass(frozen=True, slots=True)
class Costs:
    """What the estimate adds up, in microseconds.

    start_us: a launch.  read_mb_us: a MB of W.  sums_kb_us: a KB of sums that a thread block receives.
    shared_kcycle_us: 1000 cycles of its shared memory.  promotion_us: 1000 rows of W whose sums are promoted, for one
    step.  scales_us: ten steps with scales.
    """

    start_us: float
    read_mb_us: float
    sums_kb_us: float
    shared_kcycle_us: float
    promotion_us: float
    scales_us: float


FITS: Final = fits(__file__, Costs)
NAME: Final = "scaled_one_shot"
ARCH: Final = "sm_90"  # no other architecture has wgmma
SOURCE: Final = Path(__file__).with_name("scaled_one_shot.cu")
MAX_M: Final = 256
TYPES: Final = ("fp8_e4m3", "i8")
_LEAST_M_INT8: Final = 9
MAX_ROWS: Final = 256  # rows of W per tile
MAX_ROWS_OF_BLOCKS: Final = 128  # rows per tile with scales of blocks: it then meets two of them at most
MAX_PROMOTED: Final = 96  # rows per warp group with promoted sums, which are kept twice: with more, registers spill
MAX_INT8: Final = 224  # rows per warp group with int8, for the same reason
GROUP_TOKENS: Final = 64  # rows of X per warp group: those of one wgmma
MAX_TOKENS: Final = 128  # rows of X per thread block
MAX_GROUPS: Final = 4  # warp groups per thread block
_LEAST_DEPTH: Final = 4  # steps that must fit into shared memory, where a thread block has as many
# A ring of steps has at least so many steps, and so many bytes of W: with fewer, memory idles; with more, thread blocks
# wait for each other
_RING_STEPS: Final = 6
_RING_BYTES: Final = 80 << 10
_LEAST_FILLED: Final = 0.6  # share of the multiprocessors that a configuration must fill
_UNIT_BYTES: Final = 512  # a unit of sums: 16 tokens x 8 rows of W in fp32
MOST_TURNS: Final = 8  # tiles that a multiprocessor computes one after the other, at most
TURN_US: Final = 1.0  # a guess: microseconds from the last store of a thread block to the first product of the next


@dataclass(frozen=True, slots=True)
class ScaledOneShot:
    """One configuration for one problem.

    kind: the kind of scales, as the source names it.  promoted: sums are added up in fp32 every 128 values of K.  rows:
    rows of W in a thread block's tile.  parts: slices of K, one for each thread block of a cluster.  tokens: rows of X
    in a tile.  halves: warp groups that share the rows of a tile.  int8: X and W are int8, else fp8.  by_token, zero:
    how the scales of X lie, and its zero points (scaled.py).  shuffled: W is in AITER's shuffled order.
    """

    m: int
    n: int
    k: int
    bias: bool
    out: str
    kind: str
    promoted: bool
    rows: int
    parts: int
    tokens: int
    halves: int
    int8: bool = False
    by_token: bool = False
    zero: int = 0
    shuffled: bool = False

    @property
    def at_once(self) -> tuple[int, ...]:
        """Rows of W in each wgmma of a warp group: one wgmma, or two where int8 has none with that many rows."""
        return scaled.at_once(self.rows // self.halves, int8=self.int8)

    @property
    def groups(self) -> int:
        """Groups of GROUP_TOKENS tokens in a tile; each has `halves` warp groups."""
        return -(-self.tokens // GROUP_TOKENS)

    @property
    def warps(self) -> int:
        """Warps per thread block."""
        return 4 * self.groups * self.halves

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks: a whole cluster for each tile of W along the first axis, tiles of tokens along the second."""
        return -(-self.n // self.rows) * self.parts, -(-self.m // self.tokens)

    @property
    def most(self) -> int:
        """Steps of K per thread block; some have one less."""
        return math.ceil(math.ceil(self.k / STEP_K) / self.parts)

    @property
    def received(self) -> int:
        """Units of sums that a thread block has room to receive."""
        units = self.tokens // 16 * (self.rows // 8)
        return self.parts * -(-units // self.parts) if self.parts > 1 else 0

    @property
    def fitting(self) -> int:
        """Steps that fit into shared memory, `most` at most; 0 where not even one does."""
        room = (d for d in range(1, self.most + 1) if self._bytes(d) <= shared_limit(ARCH))
        return max(room, default=0)

    @property
    def depth(self) -> int:
        """Steps in shared memory: all of them, or a ring that is filled again and again."""
        if self.fitting == self.most:
            return self.most
        return min(self.fitting, max(_RING_STEPS, -(-_RING_BYTES // (self.rows * STEP_K))))

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a thread block."""
        return self._bytes(self.depth)

    def _bytes(self, depth: int) -> int:
        """Bytes for `depth` steps of W, X and scales, received sums and barriers.

        Each group reads 64 tokens, also past the last one of the tile.
        """
        scales = self.tokens * 4 + 16 if self.kind == "BLOCK" else 0
        steps = depth * ((self.rows + self.tokens) * STEP_K + scales)
        past_the_last_token = (GROUP_TOKENS * self.groups - self.tokens) * STEP_K
        return steps + max(self.received * _UNIT_BYTES + 8 + 8 * depth, past_the_last_token)

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched, for every M up to this one. Its parameters are x, w, bias, sx, sw, y, m and distances."""
        return KernelLaunch(
            shared=self.shared, threads=32 * self.warps, cluster=self.parts,
            grid=(Axis("w.size0", self.rows), Axis("x.size0", self.tokens), Axis("", 1)),
            arguments=scaled.arguments(self.kind, bias=self.bias, by_token=self.by_token, zero=self.zero),
            conditions=scaled.conditions(
                self.kind, self.m, self.n, self.k, bias=self.bias, by_token=self.by_token, zero=self.zero,
                shuffled=self.shuffled,
            ),
        )  # fmt: skip

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "PARTS": self.parts, "DEPTH": self.depth,
            "TOKENS": self.tokens, "GROUPS": self.groups, "HALVES": self.halves, "SCALES": self.kind,
            "PROMOTED": int(self.promoted), "INT8": int(self.int8), **scaled.zero_defines(self.zero),
            "SHUFFLED": int(self.shuffled), "BY_TOKEN": int(self.by_token), "BIAS": int(self.bias), "NAME": NAME,
            "CLUSTER": f"__cluster_dims__({self.parts}, 1, 1)" if self.parts > 1 else "",
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        product = scaled.product(self.at_once, int8=self.int8, row_units=1 if self.shuffled else STEP_K // 16)
        types = f"{product}\n{scaled.numbers_of(OUTPUTS[self.out])}"
        return defines + _text().replace("\nOF_THIS_TYPE\n", f"\n{types}\n")


def check(problem: Problem) -> None:
    """Raise CandidateFailed when the kernel is not written for this problem."""
    most = SHUFFLED_ROWS if problem.weight_state == "shuffled" else MAX_M
    scaled.check(problem, NAME, most, TYPES, shuffled=True)
    if problem.n % 2:
        raise CandidateFailed(f"{problem} {NAME}: it stores two columns at a time, N is no multiple of 2")


def scaled_one_shot(config: Config, problem: Problem) -> ScaledOneShot:
    """This config for this problem. Raises CandidateFailed when it cannot run it."""
    check(problem)
    found = _configured(problem, **KERNEL.checked(config))
    if found is None:
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} is no configuration that it has, or does not fit")
    return found


def scored(problem: Problem, units: int) -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config), the fastest first; none for a problem that the kernel is not written for.

    units: multiprocessors of the device.
    """
    try:
        check(problem)
    except CandidateFailed:
        return []
    if problem.dtype == "i8" and problem.m < _LEAST_M_INT8:
        return []
    found: dict[ScaledOneShot, float] = {}
    for parts in range(1, min(MAX_CLUSTER, -(-problem.k // STEP_K)) + 1):
        for tokens in _tiles_of_tokens(problem.m):
            at_once = max(filled(units, parts) // parts // -(-problem.m // tokens), 1)  # tiles of W
            for one, turns in _of_tiles(problem, parts, tokens, at_once):
                if math.prod(one.grid) >= _LEAST_FILLED * units:
                    found[one] = estimate_us(one, turns)
    return [(us, _config_of(one)) for one, us in sorted(found.items(), key=lambda item: item[1])]


def _of_tiles(problem: Problem, parts: int, tokens: int, at_once: int) -> Iterator[tuple[ScaledOneShot, int]]:
    """(configuration, turns) for the fewest turns whose tiles fit, and, without a cluster, for one turn more.

    turns: how many tiles of W a multiprocessor computes one after the other.  With more turns tiles have fewer rows; a
    turn after the first costs little where memory is the limit.
    """
    enough = 0
    for turns in range(1, MOST_TURNS + 1):
        least = (math.ceil(problem.n / (at_once * turns)) + 7) // 8 * 8
        fitting = {
            _configured(problem, rows=-(-rows // (8 * halves)) * 8 * halves, parts=parts, tokens=tokens, halves=halves)
            for halves in (1, 2)
            for rows in (least, least + 8)
        } - {None}
        yield from ((one, turns) for one in fitting if one is not None)
        enough += bool(fitting)
        if enough == (2 if parts == 1 else 1):
            return


def _config_of(one: ScaledOneShot) -> dict[str, int]:
    return {"rows": one.rows, "parts": one.parts, "tokens": one.tokens, "halves": one.halves}


def _configured(problem: Problem, *, rows: int, parts: int, tokens: int, halves: int) -> ScaledOneShot | None:
    """None where these values make no configuration, or one that does not fit shared memory or registers."""
    p, kind, int8 = problem, scaled.kind_of(problem), problem.dtype == "i8"
    assert kind is not None, "check has let it through"
    # also where the problem allows the tensor core's own sums: promotion costs little, and torch's kernel, which the
    # gate compares with, may promote as well; only what would spill registers goes without
    promoted = not int8 and (kind == "BLOCK" or p.math_mode != "reduced" or rows // halves <= MAX_PROMOTED)
    if not 1 <= halves <= 2 or not 8 <= rows <= MAX_ROWS or rows % (8 * halves):
        return None
    if not 1 <= parts <= min(MAX_CLUSTER, -(-p.k // STEP_K)) or not 16 <= tokens <= MAX_TOKENS or tokens % 16:
        return None
    if (kind == "BLOCK" and rows > MAX_ROWS_OF_BLOCKS) or (promoted and rows // halves > MAX_PROMOTED):
        return None
    if int8 and rows // halves > MAX_INT8:
        return None
    one = ScaledOneShot(
        p.m, p.n, p.k, p.bias, p.out_dtype, kind, promoted, rows, parts, tokens, halves, int8, scaled.by_token(p),
        scaled.zero_of(p), p.weight_state == "shuffled",
    )  # fmt: skip
    if one.groups * halves > MAX_GROUPS or one.fitting < min(one.most, _LEAST_DEPTH):
        return None
    return one


def _tiles_of_tokens(m: int) -> list[int]:
    """Tokens per tile to try: for each number of tiles the smallest multiple of 16 that covers M; one up to M = 64."""
    return sorted({-(-m // (16 * many)) * 16 for many in range(-(-m // MAX_TOKENS), -(-m // GROUP_TOKENS) + 1)})


def estimate_us(one: ScaledOneShot, turns: int = 1) -> float:
    """An estimate in microseconds for an H200 with cold weights, made to order configurations.

    turns: how many thread blocks a multiprocessor runs one after the other; more than one were not timed for the fit.
    """
    costs = FITS["all"]
    given = one.groups * one.halves * 4 * (GROUP_TOKENS * len(one.at_once) + one.rows / one.halves) * 32 / 128
    shared = one.most * (one.rows + one.tokens + given) / 1000  # thousands of cycles of shared memory
    promotion = one.most * one.rows / one.halves * one.groups / 1000 if one.promoted else 0.0
    scales = one.most / 10 if one.kind == "BLOCK" else 0.0
    sums = one.received * _UNIT_BYTES / 1024
    read = one.n * one.k / 1e6
    work = costs.sums_kb_us * sums + costs.shared_kcycle_us * shared
    work += costs.promotion_us * promotion + costs.scales_us * scales
    return costs.start_us + costs.read_mb_us * read + turns * work + (turns - 1) * TURN_US


def _samples() -> Iterator[str]:
    """Sources for each output, kind of scales and type: together they have every line of the kernel, for its stamp."""
    for out in OUTPUTS:
        for kind in KINDS.values():
            yield ScaledOneShot(64, 64, 1024, True, out, kind, kind == "BLOCK", 8, 2, 64, 1).source()
        yield ScaledOneShot(64, 64, 1024, True, out, "ROW", False, 40, 2, 64, 1, int8=True).source()
        for zero, kind in ((1, "W_ROW"), (2, "ROW")):
            yield ScaledOneShot(64, 64, 1024, True, out, kind, False, 40, 2, 64, 1, int8=True, zero=zero).source()
        yield ScaledOneShot(64, 64, 1024, True, out, "BLOCK", True, 8, 2, 64, 1, by_token=True).source()
        yield ScaledOneShot(64, 64, 1024, True, out, "ROW", False, 8, 2, 64, 1, shuffled=True).source()


@cache
def _text() -> str:
    return nvrtc.text_of(SOURCE)


KERNEL: Final = CudaKernel(
    name="scaled_one_shot",
    families=("scaled",),
    archs=("sm_90",),
    target="sm_90a",
    parameters=(
        Parameter("rows", 8, 256, multiple=8),
        Parameter("parts", 1, 16),
        Parameter("tokens", 16, 128, multiple=16),
        Parameter("halves", 1, 2),
    ),
    scored=lambda problem, device: scored(problem, device.units),
    record=scaled_one_shot,
    samples=_samples,
)
