"""Products of X in 16 bits and W in 8 or 4 bits, for M up to 16: W is turned into X's type in registers.

The scales of W multiply the sums, in fp32.

weight_only.cu runs int8 and fp8_e4m3 with one fp32 scale per tensor, row or block of 128x128, int4 with one scale per
32, 64 or 128 values of K, and MXFP4.  Its result is nearer to the exact one than torch's own product of the dequantised
weight, whose numbers are rounded to X's type first.
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
from gemmtuned.configs.launch import PORTABLE_CLUSTER, Axis, KernelLaunch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import WEIGHT_ONLY
from gemmtuned.kernels import weight_only_operands as operands
from gemmtuned.kernels.arch import filled, shared_limit
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.estimates import StreamCosts, fits, largest
from gemmtuned.kernels.own_kernel import Config, Parameter

FITS: Final = fits(__file__, StreamCosts)
NAME: Final = "weight_only"
SOURCE: Final = Path(__file__).with_name("weight_only.cu")
MAX_M: Final = 16
ROWS: Final = (16, 32, 64, 128)  # rows of W per thread block: they divide a block of scales
WARPS: Final = (1, 2, 4, 8)
DEPTHS: Final = (1, 2, 3, 4, 6)
_TYPES: Final = {"bf16": 0, "fp16": 1, "fp32": 2, "e8m0": 3}
_SCALE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "e8m0": 1}
_DECODED: Final = {"i8": 7, "fp8_e4m3": 12, "i4": 11, "fp4_e2m1": 20}  # instructions per 32-bit word of W, roughly
_SYSTEM_BYTES: Final = 1024  # per thread block that CUDA keeps of shared memory


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """One configuration for one problem.

    dtype: the data type of X and Y.  weight: that of W.  scale_type: that of W's scales.  scales: what one scale stands
    for, spelled as in the problem.  rows: rows of W per thread block.  tokens: rows of X that it holds.  parts: slices
    of K, one for each thread block of a cluster.  warps: warps of a thread block, which share its steps of K.  depth:
    steps whose loads are under way at the same time.
    """

    m: int
    n: int
    k: int
    bias: bool
    dtype: str
    weight: str
    scales: str
    scale_type: str
    rows: int
    tokens: int
    parts: int
    warps: int
    depth: int

    @property
    def step(self) -> int:
        """Values of K in one step: those in 128 bytes of a row of W."""
        return 256 if self.weight in ("i4", "fp4_e2m1") else 128

    @property
    def group(self) -> int:
        """Values of K that share a scale; 0 where scales are not per group of K."""
        return int(self.scales.partition("x")[2]) if operands.SCALES[self.scales] == 3 else 0

    @property
    def steps(self) -> int:
        """Steps of K per warp; some warps have one less."""
        return math.ceil(math.ceil(math.ceil(self.k / self.step) / self.parts) / self.warps)

    @property
    def slot(self) -> int:
        """Bytes of one step in shared memory: W, X and scales."""
        scales = self.rows * self.step // self.group * _SCALE_BYTES[self.scale_type] if self.group else 0
        return self.rows * 128 + -(-self.m * self.step * 2 // 512) * 512 + -(-scales // 512) * 512

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks: a whole cluster for each tile of W along the first axis."""
        return -(-self.n // self.rows) * self.parts, 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory per thread block: rings of steps, sums of each warp, received sums, a barrier."""
        values = self.rows * self.tokens
        received = self.parts * -(-values // self.parts)
        return self.warps * self.depth * self.slot + 4 * self.warps * values + -(-received // 2) * 8 + 8

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched, for every M up to this one."""
        bias = ("bias.ptr",) if self.bias else ()
        return KernelLaunch(
            shared=self.shared, threads=32 * self.warps, cluster=self.parts,
            grid=(Axis("w.size0", self.rows), Axis("", 1), Axis("", 1)),
            arguments=(
                "x.ptr", "w.ptr", *bias, "scale_w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0",
                "null" if self.scales == "tensor" else "scale_w.stride0",
            ),
            conditions=operands.conditions(self._problem, self.m),
        )  # fmt: skip

    @property
    def _problem(self) -> Problem:
        return Problem(
            family="weight_only", m=self.m, n=self.n, k=self.k, bias=self.bias, dtype=self.dtype, wdtype=self.weight,
            wscale=self.scales, wscale_dtype=self.scale_type,
        )  # fmt: skip

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "TOKENS": self.tokens, "M": self.m, "PARTS": self.parts,
            "WARPS": self.warps, "DEPTH": self.depth, "DTYPE": _TYPES[self.dtype],
            "WEIGHTS": operands.WEIGHTS[self.weight], "SCALES": operands.SCALES[self.scales],
            "OF_SCALE": _TYPES[self.scale_type], "GROUP": self.group or 32, "BIAS": int(self.bias), "NAME": NAME,
            "CLUSTER": f"__cluster_dims__({self.parts}, 1, 1)" if self.parts > 1 else "",
        }  # fmt: skip
        return "".join(f"#define {name} {value}\n" for name, value in values.items()) + _text()


def check(problem: Problem) -> None:
    """Raise CandidateFailed for a problem that the kernel is not written for."""
    operands.check(problem, NAME, MAX_M)
    group = operands.group_of(problem)
    if group and problem.k // group * _SCALE_BYTES[problem.wscale_dtype] % 4:
        raise CandidateFailed(f"{problem} {NAME}: the scales of a row are a multiple of 4 bytes")


def weight_only(config: Config, problem: Problem) -> WeightOnly:
    """This config for this problem. Raises CandidateFailed when it cannot run it."""
    check(problem)
    one = _configured(problem, **KERNEL.checked(config))
    if one.tokens < problem.m:
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} has no tokens for all of M")
    if one.parts * one.warps > max(1, -(-problem.k // one.step)):
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} has more warps than there are steps of K")
    if one.shared > shared_limit("sm_90"):
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} takes {one.shared} bytes of shared memory")
    return one


def scored(problem: Problem, units: int) -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config), the fastest first; none for a problem that the kernel is not written for.

    units: multiprocessors of the device.
    """
    try:
        check(problem)
    except CandidateFailed:
        return []
    tokens = 8 if problem.m <= 8 else 16
    found: dict[WeightOnly, float] = {}
    for rows, warps, parts, depth in itertools.product(ROWS, WARPS, range(1, PORTABLE_CLUSTER + 1), DEPTHS):
        one = _configured(problem, rows=rows, tokens=tokens, parts=parts, warps=warps, depth=depth)
        all_steps = -(-problem.k // one.step)
        if parts * warps > all_steps or (rows > 16 and rows >= 2 * problem.n) or one.shared > shared_limit("sm_90"):
            continue
        if depth > one.steps:
            continue
        found[one] = estimate_us(one, units)
    return [(us, _config_of(one)) for one, us in sorted(found.items(), key=lambda item: item[1])]


def _config_of(one: WeightOnly) -> dict[str, int]:
    return {name: getattr(one, name) for name in ("rows", "tokens", "parts", "warps", "depth")}


def _configured(problem: Problem, **config: int) -> WeightOnly:
    p = problem
    return WeightOnly(p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.wscale, p.wscale_dtype, **config)


def _at_once(one: WeightOnly) -> int:
    """Thread blocks that fit on a multiprocessor at a time, by shared memory and registers."""
    by_memory = (shared_limit("sm_90") + _SYSTEM_BYTES) // (one.shared + _SYSTEM_BYTES)
    sums = one.rows // 16 * (one.tokens // 8) * 4
    registers = 64 + sums * (1 if one.scales in ("tensor", "row") else 2) + one.rows // 4
    return max(1, min(by_memory, 65536 // (32 * one.warps * registers), 64 // one.warps, 32))


def estimate_us(one: WeightOnly, units: int) -> float:
    """An estimate in microseconds with cold weights, made to order configurations."""
    costs = FITS["all"]
    busiest = -(-one.grid[0] // filled(units, one.parts))
    held = min(busiest, _at_once(one))
    each = one.rows * 128 * one.warps  # bytes of W that a thread block reads in one step
    rate = min(1.15 * costs.bandwidth / units, held * each * min(one.depth, one.steps) / costs.latency_us)
    memory, loads = one.n * one.k * 128 / one.step / costs.bandwidth, busiest * each * one.steps / rate
    issued = busiest * one.warps / 4 * one.steps * _instructions(one) / 1000
    work = largest(memory, loads, costs.issue_us * issued)
    rounds = -(-busiest // held)
    return costs.start_us + work + costs.round_us * (rounds - 1) + costs.sum_us * (one.parts - 1)


def _instructions(one: WeightOnly) -> float:
    """Instructions of a warp in one step, roughly: copies, loads, conversions, products, scales."""
    blocks, sides, products = one.rows // 16, one.tokens // 8, one.step // 128
    groups = one.step // one.group if one.group else 1
    words = 8 * (2 * blocks * (1 + _DECODED[one.weight]) + sides * (1 + 2 * products + blocks * products))
    sums = groups * blocks * (4 * sides + 8) if one.group or one.scales == "128x128" else 0
    copies = 3 * (one.rows // 4 + -(-one.m * one.step // 8 // 32) + 1)
    return 24 + words + sums + copies


def _samples() -> Iterator[str]:
    """Sources for each type and kind of scales: together they have every line of the kernel, for its stamp."""
    for (dtype, weight), kinds in WEIGHT_ONLY.items():
        for scales, scale_type in kinds:
            yield WeightOnly(16, 64, 1024, True, dtype, weight, scales, scale_type, 16, 16, 2, 2, 2).source()


@cache
def _text() -> str:
    """The source, with the file that it includes."""
    return nvrtc.text_of(SOURCE)


KERNEL: Final = CudaKernel(
    name="weight_only",
    families=("weight_only",),
    archs=("sm_90",),
    target="sm_90a",
    parameters=(
        Parameter("rows", 16, 128, power=True),
        Parameter("tokens", 8, 16, power=True),
        Parameter("parts", 1, 8),
        Parameter("warps", 1, 8, power=True),
        Parameter("depth", 1, 8),
    ),
    scored=lambda problem, device: scored(problem, device.units),
    record=weight_only,
    samples=_samples,
)
