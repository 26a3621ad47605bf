"""M up to 256 on sm_90: a thread block requests all its W and X at once, and a cluster adds up the sums.

What goes through an SM's shared memory decides the time, so clusters are large, and tiles have as few rows of W as one
wave of thread blocks allows.  Above 64 tokens a thread block takes a tile of them, with a warp group for each 64.
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
from gemmtuned.kernels.arch import filled, shared_limit
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import PARAMETERS, Config, Parameter, by_size, check_plain_dense, rows_apart


@dataclass(frozen=True, slots=True)
class Costs:
    """What the estimate adds up, in microseconds.

    start_us: a launch.  byte_us: a byte of W, read by 132 multiprocessors.  w_kb_us, sums_kb_us: a KB of W, and of
    sums, that a thread block receives.  shared_kcycle_us: 1000 cycles of its shared memory.
    """

    start_us: float
    byte_us: float
    w_kb_us: float
    sums_kb_us: float
    shared_kcycle_us: float


NAME: Final = "one_shot"  # the function in the source has it, too
ARCH: Final = "sm_90"  # no other architecture has wgmma
SOURCE: Final = Path(__file__).with_name("one_shot.cu")
MIN_M, MAX_M = 9, 256  # with fewer rows, kernels that read X fewer times are faster
BLOCK_K: Final = 64  # values of K per block: 128 bytes of a row, which is also how wide the swizzle is
MAX_ROWS: Final = 256  # rows of W per tile: those of the largest wgmma
GROUP_TOKENS: Final = 64  # rows of X per warp group: those of one wgmma
MAX_TOKENS: Final = 128  # per thread block
GROUP_WARPS: Final = 4
LD_MULTIPLE: Final = 8  # copies of 16 bytes
_MAX_K: Final = 1 << 24  # bytes of a row are counted in 32 bits
_MOST_DEPTH: Final = 80  # more blocks of 8 rows and 16 tokens than shared memory has room for
_LEAST_DEPTH: Final = 4  # blocks that must fit into shared memory, where a thread block has as many
# A ring has at least so many blocks, and so many bytes of W: with fewer, memory idles; with more, thread blocks wait
# for each other
_RING_BLOCKS: Final = 6
_RING_BYTES: Final = 80 << 10
_LEAST_FILLED: Final = 0.6  # share of the SMs that a configuration must fill
_PIECE_BYTES: Final = 512  # a piece of sums: 16 tokens x 8 rows of W in fp32
# Above so many rows of X, and so many results per SM, the library's large tiles are faster
_FEW_ROWS: Final = 64
_MOST_OF_Y: Final = 4096
FITS: Final = fits(__file__, Costs)
_TYPES: Final = {"bf16": "bf16", "fp16": "f16"}


@dataclass(frozen=True, slots=True)
class OneShot:
    """One configuration for one problem.

    rows: rows of W per thread block.  parts: slices of K, one for each thread block of a cluster.  tokens: rows of X
    that a thread block takes at most, 16 for each warp of a wgmma.
    """

    m: int
    n: int
    k: int
    bias: bool
    dtype: str
    rows: int
    parts: int
    tokens: int

    @property
    def groups(self) -> int:
        """Warp groups per thread block."""
        return -(-self.tokens // GROUP_TOKENS)

    @property
    def warps(self) -> int:
        """Warps per thread block."""
        return GROUP_WARPS * self.groups

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks: a whole cluster for each tile of W, along the first axis; tiles of tokens along the second."""
        return -(-self.n // self.rows) * self.parts, -(-self.m // self.tokens)

    @property
    def thread_blocks(self) -> int:
        """Thread blocks in all."""
        return math.prod(self.grid)

    @property
    def most(self) -> int:
        """Blocks of K per thread block; some have one less."""
        return -(-(self.k // BLOCK_K) // self.parts)

    @property
    def received(self) -> int:
        """Pieces of sums that a thread block receives at most, its own among them."""
        pieces = self.tokens // 16 * (self.rows // 8)
        return self.parts * -(-pieces // self.parts) if self.parts > 1 else 0

    @property
    def takes_kb(self) -> tuple[float, float]:
        """(KiB of W, KiB of sums) that each thread block receives."""
        return self.most * BLOCK_K * 2 * self.rows / 1024, self.received * _PIECE_BYTES / 1024

    @property
    def shared_kcycles(self) -> float:
        """Thousands of cycles in which shared memory takes blocks in and gives operands, 128 bytes in each.

        The tensor core reads 64 tokens and all rows for each 16 of K that a group multiplies.
        """
        given = self.groups * (BLOCK_K // 16) * (GROUP_TOKENS + self.rows) * 16 * 2 / 128
        return self.most * (self.rows + self.tokens + given) / 1000

    @property
    def fitting(self) -> int:
        """Blocks of K that fit into shared memory, `most` at most; 0 where not even one does."""
        room = (d for d in range(1, min(self.most, _MOST_DEPTH) + 1) if self._bytes(d) <= shared_limit(ARCH))
        return max(room, default=0)

    @property
    def depth(self) -> int:
        """Blocks of K in shared memory: all of them, or a ring that is filled again and again."""
        if self.fitting == self.most:
            return self.most
        return min(self.fitting, max(_RING_BLOCKS, -(-_RING_BYTES // (self.rows * BLOCK_K * 2))))

    @property
    def shared(self) -> int:
        """Bytes of shared memory per thread block."""
        return self._bytes(self.depth)

    def _bytes(self, depth: int) -> int:
        """Bytes for `depth` blocks of W and X, received sums and barriers.

        Each group reads 64 tokens, also past the last one of the tile.
        """
        blocks = depth * (self.rows + self.tokens) * BLOCK_K * 2
        barriers = 8 + 8 * depth
        return blocks + max(
            self.received * _PIECE_BYTES + barriers, (GROUP_TOKENS * self.groups - self.tokens) * BLOCK_K * 2
        )

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched, for every M up to this one."""
        parameters = ("x", "w", *(("bias",) if self.bias else ()), "y", "m", "ldx", "ldw")
        return KernelLaunch(
            shared=self.shared, threads=32 * self.warps, cluster=self.parts,
            grid=(Axis("w.size0", self.rows), Axis("x.size0", self.tokens), Axis("", 1)),
            arguments=tuple(PARAMETERS[name] for name in parameters),
            conditions=rows_apart(parameters, LD_MULTIPLE, self.m),
        )  # fmt: skip

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "PARTS": self.parts, "DEPTH": self.depth,
            "TOKENS": self.tokens, "GROUPS": self.groups, "BIAS": int(self.bias), "NAME": NAME,
            "CLUSTER": f"__cluster_dims__({self.parts}, 1, 1)" if self.parts > 1 else "",
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        return defines + _text().replace("\nOF_THIS_TYPE\n", f"\n{_of_type(_TYPES[self.dtype], self.rows)}\n")


def runs(m: int, n: int, k: int) -> bool:
    """Whether the kernel is written for this size."""
    return m <= MAX_M and not k % BLOCK_K and k <= _MAX_K and not n % 2


def one_shot(config: Config, problem: Problem) -> OneShot:
    """This config for this problem. Raises CandidateFailed when it cannot run it."""
    check_plain_dense(problem)
    config = KERNEL.checked(config)
    rows, parts, tokens = config["rows"], config["parts"], config["tokens"]
    if not runs(problem.m, problem.n, problem.k):
        raise CandidateFailed(
            f"{problem} {NAME}: it runs M up to {MAX_M}, K in multiples of {BLOCK_K} up to {_MAX_K}, and N in "
            "multiples of 2"
        )
    if parts > problem.k // BLOCK_K:
        raise CandidateFailed(f"{problem} {NAME}: K in {parts} parts, each has at least {BLOCK_K} of it")
    found = OneShot(problem.m, problem.n, problem.k, problem.bias, problem.dtype, rows, parts, tokens)
    if found.fitting < min(found.most, _LEAST_DEPTH):
        raise CandidateFailed(
            f"{problem} {NAME}: {rows} rows and {tokens} tokens in {parts} parts do not fit shared memory"
        )
    return found


def scored(m: int, n: int, k: int, units: int, *, arch: str = ARCH) -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config), the fastest first: for each number of parts the lowest two tiles that fit at once."""
    if arch != ARCH or m < MIN_M or not runs(m, n, k):
        return []
    found = []
    for parts in range(1, min(MAX_CLUSTER, k // BLOCK_K) + 1):
        for tokens in _tiles_of_tokens(m):
            high = filled(units, parts) // parts // -(-m // tokens)  # tiles of W that fit at once
            least = (math.ceil(n / max(high, 1)) + 7) // 8 * 8
            for rows in (least, least + 8):
                one = OneShot(m, n, k, False, "bf16", rows, parts, tokens)
                if (
                    rows > MAX_ROWS
                    or one.fitting < min(one.most, _LEAST_DEPTH)
                    or one.thread_blocks < _LEAST_FILLED * units
                ):
                    continue
                config = {"rows": rows, "parts": parts, "tokens": tokens}
                found.append((estimate(FITS[fit_of(config)], m, n, k, units, config), config))
    return sorted(found, key=lambda item: item[0])


def _tiles_of_tokens(m: int) -> list[int]:
    """Tokens per tile to try: for each number of tiles the smallest multiple of 16 that covers M; one up to M = 64."""
    return sorted({-(-m // (16 * many)) * 16 for many in range(-(-m // MAX_TOKENS), -(-m // GROUP_TOKENS) + 1)})


def fit_of(config: Config) -> str:
    """As estimates.py says."""
    return "all"


def estimate(costs: Costs, m: int, n: int, k: int, units: int, config: Config, *, arch: str = ARCH) -> float:
    """An estimate in microseconds for cold weights: reading W, the traffic of shared memory, and received sums."""
    one = OneShot(m, n, k, False, "bf16", config["rows"], config["parts"], config["tokens"])
    w, sums = one.takes_kb
    read = costs.byte_us * one.n * one.k * 132 / units
    return (
        costs.start_us
        + read
        + costs.w_kb_us * w
        + costs.sums_kb_us * sums
        + costs.shared_kcycle_us * one.shared_kcycles
    )


def _worth_trying(m: int, n: int, k: int, units: int, *, arch: str) -> list[tuple[float, dict[str, int]]]:
    return [] if m > _FEW_ROWS and m * n > _MOST_OF_Y * units else scored(m, n, k, units, arch=arch)


def _samples() -> Iterator[str]:
    """Sources for each type: together they have every line of the kernel, for its stamp."""
    for dtype in _TYPES:
        yield OneShot(64, 64, 1024, True, dtype, 8, 2, 64).source()


@cache
def _text() -> str:
    return SOURCE.read_text()


def _of_type(ptx: str, rows: int) -> str:
    """CUDA C++ of three functions for a type: `mma`, a warp group's product; `pair_of` two sums; `value` as fp32.

    mma: of 64 tokens, 16 values of K and `rows` rows of W.
    """
    n = rows // 2
    registers = ", ".join(f"%{i}" for i in range(n))
    values = ", ".join(f'"+f"(sums[{i}])' for i in range(n))
    as_float = {
        "bf16": "f = __uint_as_float((u32)bits << 16);",
        "f16": 'asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));',
    }
    return (
        "__device__ __forceinline__ void mma(float* sums, u64 a, u64 b) {\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{ptx}.{ptx} {{{registers}}}, %{n}, %{n + 1}, '
        f'1, 1, 1, 0, 0;"\n               : {values} : "l"(a), "l"(b));\n}}\n'
        "__device__ __forceinline__ u32 pair_of(float first, float second) {\n  u32 pair;\n"
        f'  asm("cvt.rn.{ptx}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));\n  return pair;\n}}\n'
        "__device__ __forceinline__ float value(unsigned short bits) {\n  float f;\n"
        f"  {as_float[ptx]}\n  return f;\n}}"
    )


KERNEL: Final = CudaKernel(
    name="one_shot",
    families=("dense",),
    archs=("sm_90",),
    target="sm_90a",
    parameters=(
        Parameter("rows", 8, 256, multiple=8),
        Parameter("parts", 1, 16),
        Parameter("tokens", 16, 128, multiple=16),
    ),
    scored=by_size(_worth_trying),
    record=one_shot,
    samples=_samples,
)
