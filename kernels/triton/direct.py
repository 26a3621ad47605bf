"""M <= 32 on NVIDIA: W goes from memory straight into the registers the tensor core reads, past shared memory.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  Each weight is used once by one warp, so a copy in shared memory buys nothing and
costs a barrier a step.  Here each thread loads 16 bytes (8 neighbours along K) of the rows it multiplies: the
tensor core then sees K in another order, the same for W and X, which a sum does not mind (`k_width` 8 of the
operand layouts).  As in warp_split_k.py the warps share out K and meet once at the end, and `split` > 1 cuts K
over programs too, the last one of a tile adding up in the order of the slices.

Written in Gluon, Triton's lower level, for its control of layouts.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record

NAME: Final = "direct"
KEYS: Final = ("rows", "tokens", "block_k", "split", "warps", "prefetch", "evict")
MAX_M: Final = 32


@gluon.jit
def direct(
    x,
    w,
    bias,
    y,
    partials,
    counters,
    m,
    ldx,
    ldw,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr,
    WARPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    EVICT: gl.constexpr,
):
    STEPS: gl.constexpr = (K + BLOCK_K * WARPS * SPLIT - 1) // (BLOCK_K * WARPS * SPLIT)
    EVEN_K: gl.constexpr = K == STEPS * BLOCK_K * WARPS * SPLIT
    STRIDE: gl.constexpr = BLOCK_K * WARPS
    EVICTION: gl.constexpr = "evict_first" if EVICT else ""
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 8)
    tile = gl.program_id(0)
    part = gl.program_id(1)

    # W as [warp, row, k]; rows past the end read the last row again, and their sums are never stored
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    row = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    if N % BLOCK_N != 0:
        row = gl.minimum(row, N - 1)
    k_left = warp * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    k_left = part * (STEPS * STRIDE) + k_left
    w_at = w + (row.to(gl.int64) * ldw + k_left)
    # X as [warp, k, token]
    warp_r = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None]
    k_right = warp_r * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    k_right = part * (STEPS * STRIDE) + k_right
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    x_at = x + (token.to(gl.int64) * ldx + k_right)
    real = (token < m) & (k_right >= 0)

    if PREFETCH:
        # ask for this program's whole share of W at once: more in flight to L2 than registers could hold
        LANES: gl.constexpr = WARPS * 32 // BLOCK_N  # threads a row
        SHARE: gl.constexpr = STEPS * STRIDE * 2  # bytes a row
        PIECE: gl.constexpr = (SHARE // LANES + 127) // 128 * 128
        thread = gl.arange(0, WARPS * 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
        begin = part * SHARE + thread % LANES * PIECE
        end = gl.minimum(part * SHARE + SHARE, K * 2 // 16 * 16)
        size = gl.minimum(end - begin, PIECE)
        ask = gl.minimum(tile * BLOCK_N + thread // LANES, N - 1).to(gl.int64) * ldw * 2 + begin + w.to(gl.int64)
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [ask, size],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    acc = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, product)
    if EVEN_K:
        wt = gl.load(w_at, eviction_policy=EVICTION)
        xt = gl.load(x_at, mask=real, other=0.0)
    else:  # both sides masked: 0 * NaN of the other side's padding would be NaN
        wt = gl.load(w_at, mask=(k_left < K) & (row >= 0), other=0.0, eviction_policy=EVICTION)
        xt = gl.load(x_at, mask=real & (k_right < K), other=0.0)
    for step in gl.static_range(1, STEPS):
        at = step * STRIDE
        if EVEN_K:
            w_next = gl.load(w_at + at, eviction_policy=EVICTION)
            x_next = gl.load(x_at + at, mask=real, other=0.0)
        else:
            w_next = gl.load(w_at + at, mask=(k_left + at < K) & (row >= 0), other=0.0, eviction_policy=EVICTION)
            x_next = gl.load(x_at + at, mask=real & (k_right + at < K), other=0.0)
        acc = mma_v2(wt, xt, acc)
        wt = w_next
        xt = x_next
    acc = mma_v2(wt, xt, acc)

    total = gl.sum(acc, 0)
    flat: gl.constexpr = gl.SliceLayout(0, product)  # every warp holds a copy, one stores
    first = tile * BLOCK_N
    if SPLIT == 1:
        rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, flat))[:, None]
        tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, flat))[None, :]
        if bias is not None:
            total += gl.load(bias + (first + rows), mask=first + rows < N, other=0.0).to(gl.float32)
        inside = (first + rows < N) & (tokens < m)
        gl.store(y + (tokens * N + first + rows), total.to(y.dtype.element_ty), mask=inside)
    else:
        SIZE: gl.constexpr = BLOCK_N * BLOCK_M
        rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, flat))[:, None]
        tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, flat))[None, :]
        sums = partials + tile.to(gl.int64) * (SPLIT * SIZE)
        gl.store(sums + (part * SIZE + rows * BLOCK_M + tokens), total)
        gl.thread_barrier()  # all threads' stores before the one atomic
        last = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            EACH: gl.constexpr = 1 if SIZE <= WARPS * 32 else (2 if SIZE <= WARPS * 64 else 4)
            spread: gl.constexpr = gl.BlockedLayout(
                [1, EACH], [32 * EACH // BLOCK_M, BLOCK_M // EACH], [WARPS, 1], [1, 0]
            )
            row_s = gl.arange(0, BLOCK_N, gl.SliceLayout(1, spread))[:, None]
            token_s = gl.arange(0, BLOCK_M, gl.SliceLayout(0, spread))[None, :]
            added = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, spread)
            for i in gl.static_range(SPLIT):
                added += gl.load(sums + (i * SIZE + row_s * BLOCK_M + token_s), cache_modifier=".cg")
            if bias is not None:
                added += gl.load(bias + (first + row_s), mask=first + row_s < N, other=0.0).to(gl.float32)
            inside_s = (first + row_s < N) & (token_s < m)
            gl.store(y + (token_s * N + first + row_s), added.to(y.dtype.element_ty), mask=inside_s)
            gl.store(counters + tile, 0)


KERNEL: Final = direct


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.k % 8 or problem.k >= 1 << 29:
        raise CandidateFailed(f"{problem} {NAME}: K must be a multiple of 8, for loads of 16 bytes")
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "WARPS": config["warps"],
            "PREFETCH": config["prefetch"],
            "EVICT": config["evict"],
        },
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def configs(m: int, n: int, k: int, units: int, *, arch: str = "sm_90", limit: int = 48) -> list[dict[str, int]]:
    """At most `limit` candidates for a device with this many units, the cheapest by the cost model first."""
    if m > MAX_M or k % 8 or not arch.startswith("sm_"):
        return []
    tokens = max(8, 1 << (m - 1).bit_length())
    bulk = int(arch[3:]) >= 90  # the instruction that prefetches
    scored = []
    for rows in (16, 32, 64):
        for block_k in (64, 128, 256, 512):
            held = (rows + tokens) * block_k // 64  # registers of one step's loads
            for warps in (1, 2, 4, 8, 16):
                if held + rows * tokens // 32 > (96 if warps == 16 else 192):
                    continue
                for split in (1, 2, 3, 4, 5, 6, 7, 8, 14):
                    steps = -(-k // (block_k * warps * split))
                    waste = steps * block_k * warps * split / k
                    programs = -(-n // rows) * split
                    if (
                        waste > 1.3
                        or steps > 32
                        or programs * warps > 48 * units
                        or (split > 1 and programs > 8 * units)
                    ):
                        continue
                    cost = _cost_us(n, k, units, rows, block_k, m, split, warps, steps, held, rows * tokens // 32)
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
                    scored.append((cost, {**config, "prefetch": 0, "evict": 1}))
                    if bulk:
                        scored.append((cost + 0.1, {**config, "prefetch": 1, "evict": 1}))
    scored.sort(key=lambda item: item[0])
    return [config for _, config in scored[:limit]]


def _cost_us(
    n: int, k: int, units: int, rows: int, block_k: int, m: int, split: int, warps: int, steps: int, held: int, acc: int
) -> float:
    """Estimated device time: streaming bounded by loads in flight and by L2, plus start and reduction."""
    programs = -(-n // rows) * split
    resident = max(1, min(16, 65536 // ((held + acc + 40) * 32 * warps)))
    busiest = -(-programs // units)
    here = min(busiest, resident)
    in_flight = here * warps * rows * block_k * 2 * 0.8
    rate = min(4.4e6 / units, in_flight / 0.9)
    w_bytes = busiest * rows * steps * warps * block_k * 2
    x_bytes = busiest * m * steps * warps * block_k * 2
    stream = max(w_bytes / rate, (w_bytes + x_bytes) / (7e6 / units))
    reduce = (0.9 + 8 * split * m * n / 3e6) if split > 1 else 0.0
    return 2.0 + stream + 0.1 * steps * busiest / here + 0.02 * warps + reduce


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
