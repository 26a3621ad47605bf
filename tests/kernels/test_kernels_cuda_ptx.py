"""Our kernels in CUDA C++, run on the CPU as PTX: what they compute, what they touch, and that faults in them show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import ptx_code
import ptx_cuda

from gemmtuned.configs.launch_values import arguments_of
from gemmtuned.kernels.cuda import nvrtc, one_shot

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_WARP, LAST_WARP = {"turns": ptx_code.WARP}, {"turns": ptx_code.WARP, "last_first": True}


def config(
    m: int, n: int, blocks: int, rows: int, parts: int, tokens: int, depth: int = 0, *, bias: bool, dtype: str
) -> one_shot.OneShot:
    """blocks: of 64 of K.  depth: those in shared memory at a time, 0 for as many as the kernel takes by itself."""
    kind = type("OfDepth", (one_shot.OneShot,), {"depth": depth}) if depth else one_shot.OneShot
    return kind(m, n, blocks * one_shot.BLOCK_K, bias, dtype, rows, parts, tokens)


def whole_numbers(rows: int, columns: int, *, apart: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, columns] whose products have exact sums in fp32; NaN between rows, and no memory past the last."""
    ld = columns + apart
    found = torch.full(((rows - 1) * ld + columns,), float("nan"), dtype=dtype).as_strided((rows, columns), (ld, 1))
    return found.copy_(torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(seed)))


def run(
    one: one_shot.OneShot, *, apart: int = 8, change: tuple[str, str] = ("", ""), **turns: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, what it should be); change: of the kernel's source."""
    dtype = TYPES[one.dtype]
    x = whole_numbers(one.m, one.k, apart=apart, dtype=dtype, seed=1)
    w = whole_numbers(one.n, one.k, apart=2 * apart, dtype=dtype, seed=2)
    bias = whole_numbers(1, one.n, apart=0, dtype=dtype, seed=3)[0]
    y = torch.full((one.m, one.n), float("nan"), dtype=dtype)
    values = arguments_of(one.launch, {"x": x, "w": w, "bias": bias, "y": y}, pointer=lambda operand: operand)
    exact = x.double() @ w.double().T + (bias.double() if one.bias else 0)
    source = one.source()
    assert change[0] in source

    text = ptx_cuda.compiled(source.replace(*change), one_shot.KERNEL.target)
    how = ptx_cuda.Launch(one.grid, ptx_code.WARP * one.warps, one.shared, one.parts)
    ptx_cuda.run(text, how, values, **turns)

    return y, exact.to(dtype)


AT_ONCE = [
    (16, 8, 1, 8, 1, 16),
    (9, 40, 3, 16, 1, 16),
    (17, 46, 5, 24, 2, 32),
    (33, 24, 7, 24, 7, 48),  # thread blocks that add up two units of sums, one, none
    (64, 40, 4, 40, 4, 64),
    (12, 8, 16, 8, 16, 16),
    (5, 24, 4, 24, 2, 64),  # fewer tokens than it is made for
]
RINGS = [
    (17, 40, 11, 16, 1, 32, 4),
    (64, 36, 13, 24, 2, 64, 4),
    (31, 258, 8, 256, 1, 32),
]
WARP_GROUPS = [
    (70, 40, 4, 16, 2, 80),
    (150, 40, 9, 24, 1, 80, 4),
    (127, 20, 14, 16, 2, 128, 5),
    (129, 70, 4, 40, 2, 128),  # several rounds of copies of W, rows of X apart, a tile of one token
]
TILES_OF_TOKENS = [(100, 24, 6, 24, 3, 48)]


@pytest.mark.part(7)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*AT_ONCE, *RINGS, *WARP_GROUPS, *TILES_OF_TOKENS], ids=str)
def test_sums_are_right_and_nothing_else_is_read_or_written(shape: tuple[int, ...], dtype: str) -> None:
    one = config(*shape, bias=(sum(shape) % 2 == 0) == (dtype == "bf16"), dtype=dtype)
    y, exact = run(one, apart=8 * (shape[0] % 2))
    assert torch.equal(y, exact), one


@pytest.mark.long
@pytest.mark.part(3)
@pytest.mark.parametrize("turns", [FIRST_WARP, LAST_WARP], ids=["first", "last"])
@pytest.mark.parametrize("shape", [AT_ONCE[2], RINGS[0], WARP_GROUPS[0], WARP_GROUPS[1]], ids=str)
def test_warps_may_run_ahead(shape: tuple[int, ...], turns: dict[str, Any]) -> None:
    one = config(*shape, bias=True, dtype="bf16")
    y, exact = run(one, **turns)
    assert torch.equal(y, exact), one


ONCE, RING, GROUPS = AT_ONCE[2], RINGS[0], WARP_GROUPS[1]
LOAD = "load(my, w, x, ws + i * W_BYTES, xs + i * X_BYTES, i);"
ARRIVE = "arrive_when_loaded(loaded + 8 * i);"
COPIES = {
    "are not waited for": (ONCE, "wait_for_all_but<MOST - 1 - STEP>();", "", "far off"),
    "of one block too few": (ONCE, "<MOST - 1 - STEP>", "<MOST - STEP>", "far off"),
    "of other threads": (ONCE, "all_here();\n      multiply(", "multiply(", "far off"),
    "swizzled otherwise": (ONCE, "(from & 7)", "(from & 3)", "far off"),
    "of rows past the last": (ONCE, "N % ROWS == 0 || i * ROUND < my.rows", "true", "no tensor"),
    "of tokens past the last": (AT_ONCE[6], "min(from + i * ROUND, m - 1)", "(from + i * ROUND)", "no tensor"),
    "of rows of W a round before": (
        WARP_GROUPS[3],
        "my.w[i] = (u64)(from + i * ROUND)",
        "my.w[i] = (u64)(from + i * 16)",
        "far off",
    ),
    "of tokens that lie apart": (WARP_GROUPS[3], "first_token * ldx", "first_token * K", "far off"),
    "of another tile's tokens": (TILES_OF_TOKENS[0], "blockIdx.y * TOKENS", "blockIdx.y * 64", "far off"),
}
PRODUCTS = {
    "of a part of K": (ONCE, "i < 4; i++) mma", "i < 3; i++) mma", "far off"),
    "of different parts of K": (ONCE, "a + 2 * i, b + 2 * i", "a + 2 * i, b + 6 - 2 * i", "far off"),
    "of rows further apart": (ONCE, "0x4000004000010000", "0x4000008000010000", "shared memory from"),
    "of rows nobody has swizzled": (ONCE, "0x4000004000010000", "0x0000004000010000", "far off"),
    "of rows swizzled by 64": (ONCE, "0x4000004000010000", "0x8000004000010000", "described by"),
    "of one group's tokens": (GROUPS, "thread / 128 * 64 * 128", "0", "far off"),
    "without a fence": (ONCE, 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", "without a fence"),
    "not waited for": (ONCE, 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");', "", "far off"),
    "left open": (ONCE, 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");', "", "far off"),
}
SUMS = {
    "past the last token": (ONCE, "token >= m", "token > m", "no tensor"),
    "past the last row": (ONCE, "row >= N", "row > N", "no tensor"),
    "with a neighbour's bias": (ONCE, "[row + 1])", "[row])", "far off"),
    "with fewer bytes": (ONCE, "(PARTS - 1) * UNIT_BYTES)", "(PARTS - 1) * UNIT_BYTES / 2)", "wait for ever"),
    "with more bytes": (ONCE, "(PARTS - 1) * UNIT_BYTES)", "PARTS * UNIT_BYTES)", "wait for ever"),
    "with an arrival too few": (ONCE, "expect(all_sums, 1 +", "expect(all_sums, ", "more arrivals"),
    "with an arrival too many": (ONCE, "expect(all_sums, 1 +", "expect(all_sums, 2 +", "wait for ever"),
    "sent too early": (ONCE, 'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");', "", "has not begun"),
    "without a fence": (ONCE, 'asm volatile("fence.mbarrier_init.release.cluster;");', "", "before it is set up"),
    "looked for once": (ONCE, '"@!done bra again;}" ::"r"(all_sums)', '"}" ::"r"(all_sums)', "without a barrier"),
    "at another's place": (ONCE, "unit - owner * EACH)", "unit)", "shared memory from"),
    "in another order": (ONCE, "+ lane * 16;", "+ (lane ^ 1) * 16;", "far off"),
    "told to oneself": (ONCE, "owners[i] + (all_sums - others)", "all_sums", "another barrier"),
}
RING_FAULTS = {
    "blocks are not waited for": (RING, "wait_for(loaded + 8 * slot, phase);", "", "nobody waited for"),
    "one warp waits": (RING, "wait_for(loaded + 8 * slot, phase);", "if (warp == 0) \\0", "far off"),
    "the phase before": (RING, "slot = 0, phase ^= 1", "slot = 0", "nobody waited for"),
    "a product is under way": (RING, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;", "far off"),
    "the block after": (RING, "free = DEPTH - 2", "free = DEPTH - 1", "wait for ever"),
    "half of the threads": (RING, "expect(loaded + 8 * i, THREADS)", "expect(loaded + 8 * i, 64)", "more arrivals"),
    "a thread too many": (RING, "expect(loaded + 8 * i, THREADS)", "expect(loaded + 8 * i, 129)", "wait for ever"),
    "nobody tells": (RING, "arrive_when_loaded(loaded + 8 * free);", "", "wait for ever"),
    "told before": (RING, f"{LOAD}\n      {ARRIVE}", f"{ARRIVE} {LOAD}", "far off"),
}
AHEAD = {
    "others multiply that block": (RING, "all_here();  // and done with that step", "", "far off"),
    "the other group does": (GROUPS, "all_here();  // and done with that step", "", "far off"),
    "barriers are not set up": (RING, "if (!ONCE) {\n    all_here();", "if (!ONCE) {", "another barrier"),
}


@pytest.mark.parametrize(
    ("shape", "what", "instead", "seen", "turns"),
    [(*fault, {}) for faults in (COPIES, PRODUCTS, SUMS, RING_FAULTS) for fault in faults.values()]
    + [(*fault, LAST_WARP) for fault in AHEAD.values()],
    ids=[
        f"{of}: {name}"
        for of, faults in {
            "copies": COPIES, "products": PRODUCTS, "sums": SUMS, "ring": RING_FAULTS, "ahead": AHEAD
        }.items()
        for name in faults
    ],
)  # fmt: skip
@pytest.mark.part(8)
def test_a_fault_is_seen(shape: tuple[int, ...], what: str, instead: str, seen: str, turns: dict[str, Any]) -> None:
    one = config(*shape, bias=True, dtype="bf16")
    with pytest.raises(ptx_code.Wrong, match=seen):
        y, exact = run(one, change=(what, instead.replace("\\0", what)), **turns)
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")
