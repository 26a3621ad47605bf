"""The key of a scaled product: both scales, told by shapes, strides and dtypes of both, or by the recipe."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gemmtuned.configs import key
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import native
from gemmtuned.hooks.native.build import build

FP8, FP4, E8M0 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
TENSOR, ROW, BLOCK_16, BLOCK_32, BLOCK_128, SQUARE = 0, 1, 2, 3, 4, 5  # torch.nn.functional.ScalingType
K, N = 512, 576  # N is no multiple of 128


class Call(NamedTuple):
    """Sizes, both scales as (shape, strides or None for row-major, dtype), recipes or none, and the key's text."""

    m: int
    n: int
    k: int
    a: Any
    b: Any
    said: str
    recipes: tuple[int, int] | None = None
    swizzled: bool = False
    dtype: torch.dtype = FP8


def f32(*shape: int, strides: tuple[int, ...] | None = None) -> Any:
    return shape, strides, torch.float32


def up(size: int, to: int) -> int:
    return -(-size // to) * to


def mx(rows: int, k: int, depth: int, dtype: torch.dtype) -> Any:
    """Scales as the hardware reads them: tiles of 128 rows and 4 blocks of K."""
    return (up(rows, 128) * up(-(-k // depth), 4),), None, dtype


L = K // 128
BLOCKS_A = f32(16, L, strides=(1, 16))
BLOCKS_B = f32(L, -(-N // 128), strides=(1, L))  # torch has b's blocks by K first
CALLS = [
    # one scale each, and one a row: M = 1 and N = 1 are told by the other scale
    Call(16, N, K, f32(), f32(), "scale=tensor"),
    Call(16, N, K, f32(1), f32(1), "scale=tensor"),
    Call(16, N, K, f32(1, 1), f32(1, 1), "scale=tensor"),
    Call(1, N, K, f32(), f32(), "scale=tensor"),
    Call(1, N, K, f32(1, 1), f32(1, 1), "scale=tensor"),
    Call(16, N, K, f32(16, 1), f32(1, N), "scale=row"),
    Call(1, N, K, f32(1, 1), f32(1, N), "scale=row"),
    Call(16, 16, K, f32(16, 1), f32(1, 16), "scale=row"),
    Call(16, N, 128, f32(16, 1), f32(1, N), "scale=row"),
    Call(1, N, 128, f32(1, 1), f32(1, N), "scale=row"),
    # blocks of 128 of K: with K = 128 there is one a row, and W's shape tells
    Call(16, N, K, BLOCKS_A, BLOCKS_B, "scale=1x128,scalelayout=col"),
    Call(16, N, K, f32(16, L), BLOCKS_B, "scale=1x128"),
    Call(1, N, K, f32(1, L), BLOCKS_B, "scale=1x128"),
    Call(1, N, K, f32(1, L, strides=(1, 4)), BLOCKS_B, "scale=1x128,scalelayout=col_padded"),
    Call(17, N, K, f32(17, L, strides=(1, 20)), BLOCKS_B, "scale=1x128,scalelayout=col_padded"),
    Call(16, N, 128, f32(16, 1), f32(1, 5, strides=(1, 1)), "scale=1x128"),
    Call(16, N, 640, f32(16, 5, strides=(1, 16)), f32(5, 5, strides=(1, 5)), "scale=1x128,scalelayout=col"),
    Call(16, N, 640, f32(16, 5, strides=(1, 16)), f32(8, 5, strides=(1, 8)),
         "scale=1x128,scalelayout=col,wscalelayout=row_padded"),
    Call(16, N, K, BLOCKS_A, f32(L, N, strides=(N, 1)), "scale=1x128,wscale=1x128,scalelayout=col,wscalelayout=col"),
    Call(16, N, K, BLOCKS_A, f32(L, N, strides=(1, L)), "scale=1x128,wscale=1x128,scalelayout=col"),
    Call(1, N, K, f32(1, L), f32(L, N, strides=(N, 1)), "scale=1x128,wscale=1x128,wscalelayout=col"),
    Call(1, N, K, f32(1, L), f32(L, N, strides=(1, L)), "scale=1x128,wscale=1x128"),
    Call(1, N, 640, f32(1, 8, strides=(8, 1)), f32(5, N, strides=(N, 1)),
         "scale=128x128,wscale=1x128,scalelayout=row_padded,wscalelayout=col"),
    Call(2, N, K, f32(1, L), f32(L, N, strides=(N, 1)), "scale=128x128,wscale=1x128,wscalelayout=col"),
    Call(256, N, K, f32(2, L, strides=(L, 1)), f32(L, N, strides=(N, 1)),
         "scale=128x128,wscale=1x128,wscalelayout=col"),
    # e8m0 for each 32, e4m3 for each 16
    Call(16, N, K, mx(16, K, 32, E8M0), mx(N, K, 32, E8M0), "scale=1x32,scalelayout=swizzled,wscalelayout=swizzled"),
    Call(1, N, K, mx(1, K, 32, E8M0), mx(N, K, 32, E8M0), "scale=1x32,scalelayout=swizzled,wscalelayout=swizzled"),
    Call(16, N, K, mx(16, K, 16, FP8), mx(N, K, 16, FP8), "scale=1x16,scalelayout=swizzled,wscalelayout=swizzled",
         dtype=FP4),
    # the same by recipe: what the caller says is so
    Call(16, N, K, f32(), f32(), "scale=tensor", (TENSOR, TENSOR)),
    Call(1, N, K, f32(1, 1), f32(1, 1), "scale=tensor", (TENSOR, TENSOR)),
    Call(1, N, K, f32(1, 1), f32(1, N), "scale=row", (ROW, ROW)),
    Call(1, 1, K, f32(1, 1), f32(1, 1), "scale=row", (ROW, ROW)),
    Call(16, N, 128, f32(16, 1), f32(1, N), "scale=row", (ROW, ROW)),
    Call(16, N, 128, f32(16, 1), f32(1, 5), "scale=1x128", (BLOCK_128, SQUARE)),
    Call(16, N, K, BLOCKS_A, BLOCKS_B, "scale=1x128,scalelayout=col", (BLOCK_128, SQUARE)),
    Call(1, N, K, f32(1, L), BLOCKS_B, "scale=1x128", (BLOCK_128, SQUARE)),
    Call(16, N, K, BLOCKS_A, f32(L, N, strides=(1, L)), "scale=1x128,wscale=1x128,scalelayout=col",
         (BLOCK_128, BLOCK_128)),
    Call(1, N, K, f32(1, L), f32(L, N), "scale=1x128,wscale=1x128,wscalelayout=col", (BLOCK_128, BLOCK_128)),
    Call(256, N, K, f32(2, L), f32(L, N), "scale=128x128,wscale=1x128,wscalelayout=col", (SQUARE, BLOCK_128)),
    Call(16, N, K, mx(16, K, 32, E8M0), mx(N, K, 32, E8M0), "scale=1x32,scalelayout=swizzled,wscalelayout=swizzled",
         (BLOCK_32, BLOCK_32), True),
    Call(16, N, K, ((16, K // 32), None, E8M0), ((N, K // 32), None, E8M0), "scale=1x32", (BLOCK_32, BLOCK_32)),
    Call(16, N, K, mx(16, K, 16, FP8), mx(N, K, 16, FP8), "scale=1x16,scalelayout=swizzled,wscalelayout=swizzled",
         (BLOCK_16, BLOCK_16), True, FP4),
    Call(16, N, K, ((16, K // 16), None, FP8), ((N, K // 16), None, FP8), "scale=1x16", (BLOCK_16, BLOCK_16),
         dtype=FP4),
    Call(16, N, K, f32(16, 1), f32(), "scale=row,wscale=tensor", (ROW, TENSOR)),
    Call(16, N, K, f32(), f32(1, N), "scale=tensor,wscale=row", (TENSOR, ROW)),
]  # fmt: skip


@pytest.fixture(scope="module")
def hook(native_cache: Path) -> native.Native:
    one = native.Native(build(native_cache))
    one._lib.gt_prepare(ctypes.create_string_buffer(500), 500)  # defines the operator that says a key
    return one


def made(what: Any) -> torch.Tensor:
    shape, strides, dtype = what
    if strides is None:
        return torch.empty(shape, dtype=dtype)
    return torch.empty_strided(shape, strides, dtype=dtype)


def key_of(call: Call) -> Problem | None:
    """As the native hook tells it, from tensors of these shapes."""
    wide = call.k // 2 if call.dtype is FP4 else call.k
    a, b = torch.empty(call.m, wide, dtype=call.dtype), torch.empty(call.n, wide, dtype=call.dtype).t()
    return key_of_tensors(a, b, made(call.a), made(call.b), recipes=call.recipes, swizzled=call.swizzled)


def key_of_tensors(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.dtype = torch.bfloat16,
    *, recipes: tuple[int, int] | None = None, swizzled: bool = False,
) -> Problem | None:  # fmt: skip
    """The same of tensors."""
    by_recipe = [[one] for one in recipes] if recipes else [[], []]
    swizzle = [int(swizzled)]
    said = torch.ops.gemmtuned.scaled_key(a, b, [scale_a], by_recipe[0], swizzle, [scale_b], by_recipe[1], swizzle, out)
    if not said:
        return None
    return native.unpack(native.PackedProblem.from_buffer_copy(bytes(said)))


@pytest.mark.parametrize("call", CALLS, ids=lambda c: f"{c.m}x{c.n}x{c.k}-{c.said}-{'v2' if c.recipes else 'v1'}")
def test_each_call_has_the_key_of_its_scales(hook: native.Native, call: Call) -> None:
    types = {FP8: "fp8_e4m3", FP4: "fp4_e2m1"}[call.dtype]

    assert str(key_of(call)) == f"scaled:{types}>bf16:{call.m}x{call.n}x{call.k},{call.said}"


def test_45_calls_are_in_the_table_and_no_two_kinds_share_a_key(hook: native.Native) -> None:
    assert len(CALLS) == 45
    keys = {(call.m, call.n, call.k, call.said): key_of(call) for call in CALLS}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (f32(16, 1), f32()),
        (f32(3, 1), f32(1, N)),
        (f32(16, L + 1), BLOCKS_B),
        (f32(16, 1), f32(1, N + 1)),
        (f32(0), f32()),
    ],
)
def test_scales_that_torch_refuses_have_no_key(hook: native.Native, a: Any, b: Any) -> None:
    assert key_of(Call(16, N, K, a, b, "")) is None


STEPS = (0, 1, 2, 3, 4, 5, 8, 16, 20)


@pytest.mark.parametrize("k", [128, 512, 640])
@pytest.mark.parametrize("m", [1, 2, 16])
def test_a_layout_is_named_where_scales_lie_so_and_by_no_other_strides(hook: native.Native, m: int, k: int) -> None:
    """Expanded ones among them, whose values share memory."""
    cols, w = -(-k // 128), f32(-(-k // 128), -(-N // 128), strides=(1, -(-k // 128)))
    for of_row, of_col in product(STEPS, STEPS):
        found = key_of(Call(m, N, k, f32(m, cols, strides=(of_row, of_col)), w, "", (BLOCK_128, SQUARE)))
        assert found is not None
        by_row = (cols == 1 or of_col == 1) and (m == 1 or of_row >= cols)
        by_col = (m == 1 or of_row == 1) and (cols == 1 or of_col >= m)
        fits = {
            "row": by_row and (m == 1 or of_row == cols),
            "row_padded": by_row,
            "col": by_col and (cols == 1 or of_col == m),
            "col_padded": by_col,
            "other": not by_row and not by_col,
        }
        assert fits[found.scale_layout], (of_row, of_col, found.scale_layout)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("types", [(FP8, torch.float8_e5m2), (torch.float8_e5m2, FP8), (torch.float8_e4m3fnuz,) * 2])
def test_types_of_operands_and_result_are_in_the_key(
    hook: native.Native, types: tuple[torch.dtype, torch.dtype], out: torch.dtype
) -> None:
    a, b = torch.empty(16, K, dtype=types[0]), torch.empty(N, K, dtype=types[1]).t()
    keys = [key_of_tensors(a, b, made(f32(*s)), made(f32(*t)), out) for s, t in (((), ()), ((16, 1), (1, N)))]

    for found, scale in zip(keys, ("tensor", "row"), strict=True):
        assert found is not None
        names = {FP8: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.float8_e4m3fnuz: "fp8_e4m3fnuz"}
        outs = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        assert (found.dtype, found.wdtype, found.out_dtype) == (names[types[0]], names[types[1]], outs[out])
        assert (found.scale, found.wscale, found.layout) == (scale, scale, "nt")
    row_major = key_of_tensors(a, b.contiguous(), made(f32()), made(f32()), out)
    assert row_major is not None and row_major.layout == "nn"


def test_scales_that_do_not_lie_as_the_hardware_reads_them_are_no_swizzled_ones(hook: native.Native) -> None:
    there, _, dtype = mx(16, K, 32, E8M0)
    expanded = (there, (0,), dtype)

    assert key_of(Call(16, N, K, expanded, mx(N, K, 32, E8M0), "")) is None, "torch refuses it"
    assert key_of(Call(16, N, K, mx(16, K, 16, FP8), mx(N, K, 16, FP8), "")) is None, "e4m3 scales are those of fp4"


@pytest.mark.parametrize(
    ("recipe", "depth", "dtype", "said"), [(BLOCK_32, 32, E8M0, "1x32"), (BLOCK_16, 16, FP8, "1x16")]
)
def test_fp4_by_recipe_is_told_by_its_blocks(
    hook: native.Native, recipe: int, depth: int, dtype: torch.dtype, said: str
) -> None:
    scales = mx(16, K, depth, dtype), mx(N, K, depth, dtype)

    found = key_of(Call(16, N, K, *scales, "", (recipe, recipe), True, FP4))

    assert str(found) == f"scaled:fp4_e2m1>bf16:16x{N}x{K},scale={said},scalelayout=swizzled,wscalelayout=swizzled"


def test_the_key_has_room_and_is_written_by_its_table() -> None:
    there = Path(native.__file__).resolve().parent / "problem.gen.h"

    assert there.read_text() == key.header(), "run `python -m gemmtuned.configs.key`"
    assert ctypes.sizeof(native.PackedProblem) <= key.MAX_BYTES == 48


def test_a_key_packs_and_unpacks_everything_a_problem_says() -> None:
    said = (
        "moe:fp8_e4m3/fp4_e2m1>bf16:16x2048x2048,scale=1x128,wscale=1x32,weight=shuffled,packing=16x16,experts=256,"
        "topk=8,inter=512,act=silu_gated",
        "grouped:bf16:128x4096x1536x7168,math=reduced",
        "bf16/i4>bf16:8x64x64,wscale=1x128,weight=packed,packing=marlin",
    )
    for text in said:
        problem = Problem.parse(text)
        assert native.unpack(native.pack(problem)) == problem, text


def test_two_members_that_are_swapped_are_noticed(hook: native.Native, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = native.LAYOUT.splitlines()
    first, second = (next(i for i, line in enumerate(lines) if f".{name}:" in line) for name in ("math", "layout"))
    lines[first], lines[second] = lines[first].replace(".math", ".layout"), lines[second].replace(".layout", ".math")
    monkeypatch.setattr("gemmtuned.hooks.native.library.LAYOUT", "\n".join(lines) + "\n")

    with pytest.raises(native.NativeError, match="built from other sources"):
        native.Native(Path(hook._lib._name))
