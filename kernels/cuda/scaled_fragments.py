"""8-bit operands straight into the registers that the tensor core multiplies, with scales, M up to 16.

scaled_fragments.cu runs fp8_e4m3 by fp8_e4m3 and int8 by int8 into bf16 or fp16, with one scale a tensor or a row; fp8
also with one for each block of 128, int8 with zero points of X; W also in AITER's order.  Sums of fp8 are of fp32, so
it serves problems that allow shorter sums and those that do not; those of int8 are whole numbers of 32 bits.
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
from gemmtuned.kernels.arch import filled
from gemmtuned.kernels.cuda import nvrtc, scaled
from gemmtuned.kernels.cuda.kernel import CudaKernel
from gemmtuned.kernels.cuda.scaled import KINDS, OUTPUTS, STEP_K
from gemmtuned.kernels.estimates import StreamCosts, even_steps, fits, largest
from gemmtuned.kernels.own_kernel import Config, Parameter

FITS: Final = fits(__file__, StreamCosts)
NAME: Final = "scaled_fragments"
SOURCE: Final = Path(__file__).with_name("scaled_fragments.cu")
MAX_M: Final = 16
TYPES: Final = ("fp8_e4m3", "i8")
ROWS: Final = (8, 16, 32)  # rows of W per thread block; multiples of eight that divide a block of scales
WARPS: Final = (1, 2, 4, 8)
_GROUP: Final = 4  # tokens per tensor-core product
_AHEAD: Final = (2, 3, 4, 6, 8)
_FEW: Final = 4  # steps ahead; with more, steps left over at the end cost registers
_WASTE: Final = 1.35  # steps of all warps, over those of K, at most: warps with one less wait for the others
_MOST_REGISTERS: Final = 232  # per thread; the estimate is right to within some 20
_UNSURE: Final = 16  # registers that the compiler may take more than the estimate says
_MOST_BUSY: Final = 48  # warps per multiprocessor; with more, each has little to read
_MOST_RESIDENT: Final = 16


@dataclass(frozen=True, slots=True)
class ScaledFragments:
    """One configuration for one problem.

    kind: the kind of scales, as the source names it.  rows: rows of W per thread block.  tokens: rows of X that it
    holds.  parts: slices of K, one for each thread block of a cluster.  warps: warps of a thread block, which share its
    steps of K.  ahead: steps whose loads are under way at the same time.  resident: thread blocks that a multiprocessor
    must hold at a time: the compiler limits registers by it.  int8: X and W are int8, else fp8.  by_token, zero: how
    the scales of X lie, and its zero points (scaled.py).  shuffled: W is in AITER's shuffled order.
    """

    m: int
    n: int
    k: int
    bias: bool
    out: str
    kind: str
    rows: int
    tokens: int
    parts: int
    warps: int
    ahead: int
    resident: int
    int8: bool = False
    by_token: bool = False
    zero: int = 0
    shuffled: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Thread blocks: a whole cluster for each tile of W along the first axis."""
        return -(-self.n // self.rows) * self.parts, 1

    @property
    def steps(self) -> int:
        """Steps of K per warp; some warps have one less."""
        return math.ceil(math.ceil(math.ceil(self.k / STEP_K) / self.parts) / self.warps)

    @property
    def shared(self) -> int:
        """Bytes of shared memory per thread block: sums of each warp, received sums, a barrier."""
        values = self.rows * self.tokens
        received = self.parts * -(-values // self.parts) if self.parts > 1 else 0
        return 4 * self.warps * values + -(-received // 2) * 8 + 8

    @property
    def registers(self) -> int:
        """Registers per thread, roughly: for loads under way, for decoded values, for sums."""
        rows, sides = self.rows // 4, self.tokens // _GROUP
        loads = min(self.ahead, self.steps) * (4 * (rows + sides) + (1 + sides if self.kind == "BLOCK" else 0))
        return 34 + loads + 4 * rows * sides + 2 * (rows + sides)

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched, for every M up to this one. Its parameters are x, w, bias, sx, sw, y, m and distances."""
        return KernelLaunch(
            shared=self.shared, threads=32 * self.warps, cluster=self.parts,
            grid=(Axis("w.size0", self.rows), Axis("", 1), Axis("", 1)),
            arguments=scaled.arguments(self.kind, bias=self.bias, by_token=self.by_token, zero=self.zero),
            conditions=scaled.conditions(
                self.kind, min(self.m, self.tokens), self.n, self.k, bias=self.bias, by_token=self.by_token,
                zero=self.zero, shuffled=self.shuffled,
            ),
        )  # fmt: skip

    def source(self) -> str:
        """What NVRTC compiles."""
        values = {
            "N": self.n, "K": self.k, "ROWS": self.rows, "TOKENS": self.tokens, "PARTS": self.parts,
            "WARPS": self.warps, "AHEAD": self.ahead, "RESIDENT": self.resident, "SCALES": self.kind,
            "BY_TOKEN": int(self.by_token), "INT8": int(self.int8), **scaled.zero_defines(self.zero),
            "SHUFFLED": int(self.shuffled), "BIAS": int(self.bias), "NAME": NAME,
            "CLUSTER": f"__cluster_dims__({self.parts}, 1, 1)" if self.parts > 1 else "",
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        return defines + _text().replace("\nOF_THIS_TYPE\n", f"\n{scaled.numbers_of(OUTPUTS[self.out])}\n")


def scaled_fragments(config: Config, problem: Problem) -> ScaledFragments:
    """This config for this problem. Raises CandidateFailed when it cannot run it."""
    scaled.check(problem, NAME, MAX_M, TYPES, shuffled=True)
    one = _configured(problem, **KERNEL.checked(config))
    if one.rows not in ROWS or one.tokens < problem.m:
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} has tiles of {ROWS} rows, and tokens for all of M")
    if one.parts * one.warps > -(-problem.k // STEP_K):
        raise CandidateFailed(f"{problem} {NAME}: {dict(config)} has more warps than there are steps of K")
    return one


def scored(problem: Problem, units: int) -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config), the fastest first; none for a problem that the kernel is not written for.

    units: multiprocessors of the device.
    """
    try:
        scaled.check(problem, NAME, MAX_M, TYPES, shuffled=True)
    except CandidateFailed:
        return []
    tokens, all_steps = -(-problem.m // _GROUP) * _GROUP, -(-problem.k // STEP_K)
    found: dict[ScaledFragments, float] = {}
    for rows, warps, parts in itertools.product(ROWS, WARPS, range(1, PORTABLE_CLUSTER + 1)):
        steps = math.ceil(math.ceil(all_steps / parts) / warps)
        many = -(-problem.n // rows) * parts * warps
        if parts * warps > all_steps or steps * parts * warps > max(_WASTE * all_steps, all_steps + 1):
            continue
        if many > _MOST_BUSY * units and parts * warps > 2:
            continue
        for ahead in {even_steps(steps, most) for most in _AHEAD}:
            if steps > ahead > _FEW and steps % ahead:
                continue
            one = _configured(problem, rows=rows, tokens=tokens, parts=parts, warps=warps, ahead=ahead, resident=1)
            if one.registers <= _MOST_REGISTERS:
                one = _configured(problem, **_config_of(one) | {"resident": _at_once(one, units)})
                found[one] = estimate_us(one, units)
    return [(us, _config_of(one)) for one, us in sorted(found.items(), key=lambda item: item[1])]


def _busiest(one: ScaledFragments, units: int) -> int:
    """Thread blocks that the busiest multiprocessor runs, over all rounds."""
    return -(-one.grid[0] // filled(units, one.parts))


def _at_once(one: ScaledFragments, units: int) -> int:
    """Thread blocks that a multiprocessor holds at a time."""
    each = -(-(one.registers + _UNSURE) // 8) * 8  # each quarter of it has 512 registers per lane
    room = 512 // each * 4 // one.warps
    return max(1, min(_busiest(one, units), room, _MOST_RESIDENT))


def _config_of(one: ScaledFragments) -> dict[str, int]:
    names = ("rows", "tokens", "parts", "warps", "ahead", "resident")
    return {name: getattr(one, name) for name in names}


def _configured(problem: Problem, **config: int) -> ScaledFragments:
    p = problem
    kind = scaled.kind_of(p)
    assert kind is not None, "check has let it through"
    return ScaledFragments(
        p.m, p.n, p.k, p.bias, p.out_dtype, kind, **config, int8=p.dtype == "i8", by_token=scaled.by_token(p),
        zero=scaled.zero_of(p), shuffled=p.weight_state == "shuffled",
    )  # fmt: skip


def estimate_us(one: ScaledFragments, units: int) -> float:
    """An estimate in microseconds with cold weights, made to order configurations."""
    costs = FITS["all"]
    busiest = _busiest(one, units)
    rounds = -(-busiest // one.resident)
    each = one.rows * one.warps * STEP_K  # bytes of W that a thread block reads in one step
    in_flight = one.resident * each * min(one.ahead, one.steps)
    rate = min(1.15 * costs.bandwidth / units, in_flight / costs.latency_us)
    memory, loads = one.n * one.k / costs.bandwidth, busiest * each * one.steps / rate
    issued = busiest * one.warps / 4 * one.steps * _instructions(one) / 1000
    work = largest(memory, loads, costs.issue_us * issued)
    return costs.start_us + work + costs.round_us * (rounds - 1) + costs.sum_us * (one.parts - 1)


def _instructions(one: ScaledFragments) -> float:
    """Instructions of a warp in one step, roughly: loads, conversions, products, scales."""
    rows, sides = one.rows // 4, one.tokens // _GROUP
    scales = 1 + sides * (2 + 2 * rows) if one.kind == "BLOCK" else 0
    if one.int8:
        return 10 + rows + sides + rows * sides
    return 10 + 9 * (rows + sides) + 2 * rows * sides + scales


def _samples() -> Iterator[str]:
    """Sources for each output, kind of scales and type: together they have every line of the kernel, for its stamp."""
    for out in OUTPUTS:
        for kind in KINDS.values():
            yield ScaledFragments(16, 64, 1024, True, out, kind, 8, 16, 2, 2, 2, 1).source()
        yield ScaledFragments(16, 64, 1024, True, out, "ROW", 8, 16, 2, 2, 2, 1, int8=True).source()
        for zero, kind in ((1, "W_ROW"), (2, "ROW")):
            yield ScaledFragments(16, 64, 1024, True, out, kind, 8, 16, 2, 2, 2, 1, int8=True, zero=zero).source()
        yield ScaledFragments(16, 64, 1024, True, out, "BLOCK", 8, 16, 2, 2, 2, 1, by_token=True).source()
        yield ScaledFragments(16, 64, 1024, True, out, "ROW", 8, 16, 2, 2, 2, 1, shuffled=True).source()


@cache
def _text() -> str:
    return nvrtc.text_of(SOURCE)


KERNEL: Final = CudaKernel(
    name="scaled_fragments",
    families=("scaled",),
    archs=("sm_90",),
    target="sm_90a",
    parameters=(
        Parameter("rows", 8, 32, multiple=8),
        Parameter("tokens", 4, 16, multiple=4),
        Parameter("parts", 1, 8),
        Parameter("warps", 1, 8, power=True),
        Parameter("ahead", 1, 8),
        Parameter("resident", 1, 16),
    ),
    scored=lambda problem, device: scored(problem, device.units),
    record=scaled_fragments,
    samples=_samples,
)
