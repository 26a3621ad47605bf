"""What our kernels for scaled problems have in common: what they run, how they are launched, numbers of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import ZERO_POINTS, Problem
from gemmtuned.configs.tunable import SHUFFLED_TILE, is_shuffled
from gemmtuned.kernels.own_kernel import rows_apart

KINDS: Final = {("tensor", "tensor"): "TENSOR", ("row", "row"): "ROW", ("1x128", "128x128"): "BLOCK"}
WITH_ZERO: Final = {  # for int8 alone
    ("tensor+zero", "tensor"): "TENSOR", ("tensor+zero", "row"): "W_ROW", ("row+zero", "row"): "ROW",
}  # fmt: skip
OUTPUTS: Final = {"bf16": "bf16", "fp16": "f16"}
STEP_K: Final = 128  # values of K per step: bytes of a row that are read together, and what a block's scale covers
K_MULTIPLE: Final = 16  # loads and copies of 16 bytes; also what the leading dimensions must be a multiple of
MAX_K_INT8: Final = (1 << 17) - 16  # products of -128 by -128 add up to less than 2^31
MAX_K_ZERO: Final = 1 << 16  # those of -128 by -255, a code less a zero point, as well
_MAX_K: Final = 1 << 24  # bytes of a row are counted in 32 bits
_ROWS_AT_ONCE_INT8: Final = (8, 24)  # rows of W per wgmma; also multiples of 16 (PTX ISA, 9.7.15.2); fp8: of 8


def check(
    problem: Problem, name: str, max_m: int, types: Sequence[str] = ("fp8_e4m3",), *, shuffled: bool = False
) -> None:
    """Raise CandidateFailed unless it is one of these types by itself into bf16 or fp16, scales of KINDS, up to max_m.

    name: of the kernel, for the message.  shuffled: whether it also reads W in AITER's order.  int8 has no blocks of
    scales, and no more K than sums of 32 bits hold; it alone has zero points.
    """
    p = problem
    has_zero = p.scale in ZERO_POINTS
    states = ("plain", "shuffled") if shuffled else ("plain",)
    if p.family != "scaled" or p.layout != "nt" or p.weight_state not in states or p.batch != 1:
        raise CandidateFailed(f"{p} {name}: it runs scaled problems of layout nt with {' or '.join(states)} weights")
    if p.weight_state == "shuffled" and not is_shuffled(p):
        tile = " rows by ".join(map(str, SHUFFLED_TILE))
        raise CandidateFailed(f"{p} {name}: a shuffled weight is of tiles of {tile} of K, and X has no zero points")
    if p.dtype != p.wdtype or p.dtype not in types or p.out_dtype not in OUTPUTS:
        known = " and ".join(f"{one} by {one}" for one in types)
        raise CandidateFailed(f"{p} {name}: it runs {known} into {' or '.join(OUTPUTS)}")
    most = MAX_K_ZERO if has_zero else MAX_K_INT8
    if p.dtype == "i8" and (p.scale == "1x128" or p.k > most):
        raise CandidateFailed(f"{p} {name}: of int8 it runs scales of rows and tensors, and K up to {most}")
    if has_zero and p.dtype != "i8":
        raise CandidateFailed(f"{p} {name}: it has zero points of int8 alone")
    if kind_of(p) is None or {p.scale_dtype, p.wscale_dtype} != {"fp32"}:
        kinds = ", ".join(f"{x} by {w}" for x, w in (*KINDS, *WITH_ZERO))
        raise CandidateFailed(f"{p} {name}: its scales are fp32 and {kinds}")
    if p.scale == "1x128" and not (p.scale_layout.startswith(("row", "col")) and p.wscale_layout.startswith("row")):
        raise CandidateFailed(f"{p} {name}: scales of X lie in rows or columns, of W in rows of K")
    if p.m > max_m or p.k % K_MULTIPLE or p.k > _MAX_K:
        raise CandidateFailed(f"{p} {name}: it runs M up to {max_m} and K in multiples of {K_MULTIPLE} up to {_MAX_K}")


def kind_of(problem: Problem) -> str | None:
    """What the sources call its scales; None for what none of our kernels has."""
    return (KINDS | WITH_ZERO).get((problem.scale, problem.wscale))


def zero_of(problem: Problem) -> int:
    """What the sources call its zero points: 0 none, 1 one for all of X, 2 one a row."""
    return ("tensor+zero", "row+zero").index(problem.scale) + 1 if problem.scale in ZERO_POINTS else 0


def zero_defines(zero: int) -> dict[str, str | int]:
    """What the sources say of zero points; zero: as zero_of."""
    of, its = (", const int* zx, const int* zero_sums", ", zx, zero_sums") if zero else ("", "")
    return {"ZERO": zero, "OF_ZERO": of, "ITS_ZERO": its}


def by_token(problem: Problem) -> bool:
    """Whether scales of X, of blocks, lie with those of a token next to each other; else with those of a step of K."""
    return problem.scale == "1x128" and problem.scale_layout.startswith("row") and problem.m > 1


def arguments(kind: str, *, bias: bool, by_token: bool, zero: int = 0) -> tuple[str, ...]:
    """The launch record's arguments of a kernel with the parameters x, w, bias, sx, sw, y, m and four distances.

    The distances are those between rows of x, w, sx and sw.  zero: as zero_of; with it zero points and sums of rows
    come behind sw.
    """
    of_x = "scale_x.stride0" if by_token else "scale_x.stride1"
    apart = (of_x, "scale_w.stride0") if kind == "BLOCK" else ("null", "null")
    of_bias = ("bias.ptr",) if bias else ()
    of_zero = ((), ("null", "sums_w.ptr"), ("zero_x.ptr", "sums_w.ptr"))[zero]
    return (
        "x.ptr", "w.ptr", *of_bias, "scale_x.ptr", "scale_w.ptr", *of_zero, "y.ptr",
        "x.size0", "x.stride0", "w.stride0", *apart,
    )  # fmt: skip


def conditions(
    kind: str, m: int, n: int, k: int, *, bias: bool, by_token: bool, zero: int = 0, shuffled: bool = False
) -> tuple[Condition, ...]:  # fmt: skip
    """What such a kernel takes: at most m rows of X without gaps, scales of this kind for all of N and K."""
    found = (*rows_apart(("x", "w", *(("bias",) if bias else ())), K_MULTIPLE, m), *_of_scales(kind, n, k, by_token))
    per_line = (("sums_w", "w"), ("zero_x", "x"))[:zero]
    return (
        *found,
        *((Condition("w.contiguous", "==", 1),) if shuffled else ()),
        *(Condition(f"{name}.numel", "==", f"{of}.size0") for name, of in per_line),
        *(Condition(f"{name}.contiguous", "==", 1) for name, _ in per_line),
    )


def _of_scales(kind: str, n: int, k: int, by_token: bool) -> tuple[Condition, ...]:
    if kind == "TENSOR":
        return tuple(Condition(f"scale_{side}.numel", "==", 1) for side in "xw")
    if kind == "W_ROW":
        of_w = (Condition("scale_w.dim", "==", 2), Condition("scale_w.numel", "==", "w.size0"))
        return (Condition("scale_x.numel", "==", 1), *of_w, Condition("scale_w.contiguous", "==", 1))
    found = [Condition(f"scale_{side}.dim", "==", 2) for side in "xw"]
    found.append(Condition("scale_x.size0", "==", "x.size0"))
    if kind == "ROW":
        found += [Condition(f"scale_{side}.numel", "==", f"{side}.size0") for side in "xw"]
        return (*found, *(Condition(f"scale_{side}.contiguous", "==", 1) for side in "xw"))
    steps, across = -(-k // STEP_K), -(-n // STEP_K)
    found += [Condition(f"scale_{side}.size1", ">=", steps) for side in "xw"]
    found += [Condition("scale_w.size0", "==", across), Condition("scale_w.stride1", "==", 1)]
    return (*found, Condition("scale_x.stride1" if by_token else "scale_x.stride0", "==", 1))


def numbers_of(out: str) -> str:
    """CUDA C++: `pair_of`, two sums as a pair of this type, the first below; `value`, one number of it as fp32."""
    as_float = {
        "bf16": "f = __uint_as_float((u32)bits << 16);",
        "f16": 'asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));',
    }
    return (
        "__device__ __forceinline__ u32 pair_of(float first, float second) {\n  u32 pair;\n"
        f'  asm("cvt.rn.{out}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));\n  return pair;\n}}\n'
        "__device__ __forceinline__ float value(unsigned short bits) {\n  float f;\n"
        f"  {as_float[out]}\n  return f;\n}}"
    )


def at_once(rows: int, *, int8: bool) -> tuple[int, ...]:
    """Rows of W in each wgmma of a warp group that multiplies `rows`: one, or two where int8 has none of so many."""
    whole = not int8 or rows % 16 == 0 or rows in _ROWS_AT_ONCE_INT8
    return (rows,) if whole else (rows - 8, 8)


def product(rows_at_once: Sequence[int], *, int8: bool, row_units: int = STEP_K // 16) -> str:
    """CUDA C++: `mma`, a warp group's product of 64 tokens, 32 of K and its rows of W.

    row_units: of 16 bytes, from one row of W to the next in shared memory.
    """
    types, of_sum, negations = ("s32.s8.s8", "r", "") if int8 else ("f32.e4m3.e4m3", "f", ", 1, 1")
    n = sum(rows_at_once) // 2
    said, operands, row = "", [], 0
    for i, rows in enumerate(rows_at_once):
        registers = ", ".join(f"%{number}" for number in range(row // 2, (row + rows) // 2))
        said += (
            f"wgmma.mma_async.sync.aligned.m64n{rows}k32.{types} {{{registers}}}, %{n}, %{n + 2 + i}, add{negations}; "
        )
        operands.append(f'"l"(b + {row * row_units})' if row else '"l"(b)')
        row += rows
    values = ", ".join(f'"+{of_sum}"(sums[{i}])' for i in range(n))
    return (
        "__device__ __forceinline__ void mma(Sum* sums, u64 a, u64 b, bool add) {\n"
        f'  asm volatile("{{.reg .pred add; setp.ne.u32 add, %{n + 1}, 0; {said.rstrip()}}}"\n'
        f'               : {values} : "l"(a), "r"((u32)add), {", ".join(operands)});\n}}'
    )
