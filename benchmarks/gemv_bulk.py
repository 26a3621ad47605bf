"""M = 1 with W brought into shared memory by bulk copies, a warp's own ring of slots, and products by the tensor core.

    python benchmarks/gemv_bulk.py --out FOLDER [--shapes NxK,... --seconds 200]
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch
import triton
import triton.language as tl
from timing import CudaTimer, floor_launches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

PRODUCT = tl.constexpr("""{
.reg .b32 w<4>, x<4>;
.reg .pred in;
ld.shared.v4.b32 {w0, w1, w2, w3}, [$8];
ld.shared.v4.b32 {x0, x1, x2, x3}, [$9];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {w0,w1,w2,w3}, {x0,x1}, {$0,$1,$2,$3};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$4,$5,$6,$7}, {w0,w1,w2,w3}, {x2,x3}, {$4,$5,$6,$7};
}""")
PRODUCT_TAIL = tl.constexpr("""{
.reg .b32 w<4>, x<4>;
.reg .pred in;
setp.ne.s32 in, $18, 0;
mov.b32 w0, 0; mov.b32 w1, 0; mov.b32 w2, 0; mov.b32 w3, 0;
mov.b32 x0, 0; mov.b32 x1, 0; mov.b32 x2, 0; mov.b32 x3, 0;
@in ld.shared.v4.b32 {w0, w1, w2, w3}, [$8];
@in ld.shared.v4.b32 {x0, x1, x2, x3}, [$9];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {w0,w1,w2,w3}, {x0,x1}, {$0,$1,$2,$3};
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$4,$5,$6,$7}, {w0,w1,w2,w3}, {x2,x3}, {$4,$5,$6,$7};
}""")
_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 2 + [str(i) for i in range(8)]))
_TAIL_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 8 + ["r"] * 2 + [str(i) for i in range(8)] + ["r"]))
_PUT = tl.constexpr(
    "{ .reg .pred p<4>; .reg .b32 v<16>; .reg .b32 g<4>; .reg .b64 a<4>; mov.u32 g0, $3; "
    + "".join(f"add.u32 g{i}, g{i - 1}, $5; " for i in (1, 2, 3))
    + "".join(f"setp.lt.u32 p{i}, g{i}, $4; mad.wide.u32 a{i}, g{i}, 16, $2; " for i in range(4))
    + "".join(
        f"@p{i} ld.global.v4.b32 {{v{4 * i}, v{4 * i + 1}, v{4 * i + 2}, v{4 * i + 3}}}, [a{i}]; " for i in range(4)
    )
    + "".join(
        f"mad.lo.u32 g{i}, g{i}, 16, $1; "
        f"@p{i} st.shared.v4.b32 [g{i}], {{v{4 * i}, v{4 * i + 2}, v{4 * i + 1}, v{4 * i + 3}}}; "
        for i in range(4)
    )
    + "mov.u32 $0, 0; }"
)
_EIGHT = tl.constexpr((tl.float32,) * 8)


@triton.jit
def _end():
    return tl.inline_asm_elementwise(
        "{ .reg .u32 size; mov.u32 $0, global_smem; mov.u32 size, %dynamic_smem_size; add.u32 $0, $0, size; }",
        "=r", [], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _lane():
    return tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _warp():
    # the same in all lanes, which the compiler cannot know
    return tl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; shfl.sync.idx.b32 $0, t, 0, 31, 0xffffffff; }",
        "=r", [], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _init(barrier, lane, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p mbarrier.init.shared::cta.b64 [$1], 1; mov.u32 $0, 0; }",
            "=r,r,r", [barrier + 8 * i, lane], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; mov.u32 $0, $1;", "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _copy(to, source, size, barrier, do):
    """Bulk copy of `size` bytes, counted by the barrier; by the threads where `do` is not 0."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 policy;
        setp.ne.u32 p, $5, 0;
        @p createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $3;
        @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$1], [$2], $3, [$4], policy;
        mov.u32 $0, 0;
        }""",
        "=r,r,l,r,r,r", [to, source, size, barrier, do], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _wait(barrier, parity):
    tl.inline_asm_elementwise(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r", [barrier, parity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _warp_sum_to(address, lane, a0, a1, b0, b1):
    """What stands on the diagonal, added up over the warp, to shared memory."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred even, odd, first;
        .reg .b32 row, col;
        .reg .f32 e, o, t;
        shr.u32 row, $2, 2;
        and.b32 col, $2, 3;
        shl.b32 col, col, 1;
        sub.u32 row, row, col;
        setp.eq.u32 even, row, 0;
        setp.eq.u32 odd, row, 1;
        setp.eq.u32 first, $2, 0;
        add.f32 e, $3, $5;
        add.f32 o, $4, $6;
        selp.f32 e, e, 0f00000000, even;
        selp.f32 e, o, e, odd;
        shfl.sync.bfly.b32 t, e, 16, 31, 0xffffffff; add.f32 e, e, t;
        shfl.sync.bfly.b32 t, e, 8, 31, 0xffffffff; add.f32 e, e, t;
        shfl.sync.bfly.b32 t, e, 4, 31, 0xffffffff; add.f32 e, e, t;
        shfl.sync.bfly.b32 t, e, 2, 31, 0xffffffff; add.f32 e, e, t;
        shfl.sync.bfly.b32 t, e, 1, 31, 0xffffffff; add.f32 e, e, t;
        @first st.shared.f32 [$1], e;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,f,f,f,f", [address, lane, a0, a1, b0, b1], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _put_x(to, x, group, GROUPS: tl.constexpr, APART: tl.constexpr):
    """Four groups of 8 values, APART groups from one another, to shared memory; registers 0, 2, 1, 3 of each."""
    tl.inline_asm_elementwise(
        _PUT,
        "=r,r,l,r,r,r", [to, x, group, GROUPS, APART], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _sync_warp(value):
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sync_all(value):
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _read(address):
    return tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [address], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _min(a, b):
    return min(a, b)


@triton.constexpr_function
def _unroll(passes):
    return max([u for u in (8, 7, 6, 5, 4, 3, 2, 1) if passes % u == 0])


@triton.jit
def _product(at, xat, lane, a0, a1, a2, a3, b0, b1, b2, b3, LEFT: tl.constexpr):
    if LEFT >= 256:
        return tl.inline_asm_elementwise(
            PRODUCT, _CONSTRAINTS, [at, xat, a0, a1, a2, a3, b0, b1, b2, b3], dtype=_EIGHT, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            PRODUCT_TAIL, _TAIL_CONSTRAINTS,
            [at, xat, a0, a1, a2, a3, b0, b1, b2, b3, (lane * 8 < LEFT).to(tl.int32)],
            dtype=_EIGHT, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gemv_bulk(
    x, w, y, ldw,
    N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """PARTS of each row to a warp each, CHUNK values at a time; SLOTS chunks of a warp on their way."""
    MOST: tl.constexpr = (N + PROGRAMS - 1) // PROGRAMS  # rows of a program
    PART: tl.constexpr = K // PARTS
    CHUNKS: tl.constexpr = (PART + CHUNK - 1) // CHUNK
    base = _end() - SIZE
    xs = base
    ring = xs + (K * 2 + 127) // 128 * 128
    bars = ring + WARPS * SLOTS * CHUNK * 2
    sums = bars + (WARPS * SLOTS + 1) * 8
    xbar = bars + WARPS * SLOTS * 8
    pid = tl.program_id(0)
    first = pid * N // PROGRAMS
    items = ((pid + 1) * N // PROGRAMS - first) * PARTS
    lane = _lane()
    warp = _warp()
    slots = ring + warp * (SLOTS * CHUNK * 2)
    bar = bars + warp * (SLOTS * 8)
    _init(bar, lane, SLOTS)
    lead = (lane == 0).to(tl.int32)
    for s in tl.static_range(SLOTS):
        item = warp + (s // CHUNKS) * WARPS
        at = w + (first + item // PARTS).to(tl.int64) * ldw + (item % PARTS) * PART + (s % CHUNKS) * CHUNK
        _copy(slots + s * CHUNK * 2, at, _min(CHUNK, PART - (s % CHUNKS) * CHUNK) * 2, bar + s * 8, lead & (item < items).to(tl.int32))
    thread = warp * 32 + lane
    for q in tl.static_range(0, (K // 8 + 128 * WARPS - 1) // (128 * WARPS)):
        _put_x(xs, x, thread + q * (128 * WARPS), K // 8, WARPS * 32)
    turn = tl.min(tl.arange(0, 32 * WARPS), 0)  # 0: Triton's own barrier, and its shared memory is there
    _sync_all(turn)
    for item in range(warp, items, WARPS):
        a0 = 0.0
        a1 = 0.0
        a2 = 0.0
        a3 = 0.0
        b0 = 0.0
        b1 = 0.0
        b2 = 0.0
        b3 = 0.0
        xpart = xs + (item % PARTS) * (PART * 2) + lane * 16
        for c in tl.static_range(CHUNKS):
            slot = turn % SLOTS
            here = slots + slot * (CHUNK * 2)
            _wait(bar + slot * 8, (turn // SLOTS) & 1)
            for p in tl.range(0, _min(CHUNK, PART - c * CHUNK) // 256, loop_unroll_factor=_unroll(_min(CHUNK, PART - c * CHUNK) // 256)):
                a0, a1, a2, a3, b0, b1, b2, b3 = _product(
                    here + lane * 16 + p * 512, xpart + (c * CHUNK + p * 256) * 2, lane, a0, a1, a2, a3, b0, b1, b2, b3, 256
                )  # fmt: skip
            if _min(CHUNK, PART - c * CHUNK) % 256 != 0:
                a0, a1, a2, a3, b0, b1, b2, b3 = _product(
                    here + lane * 16 + _min(CHUNK, PART - c * CHUNK) // 256 * 512,
                    xpart + (c * CHUNK + _min(CHUNK, PART - c * CHUNK) // 256 * 256) * 2,
                    lane, a0, a1, a2, a3, b0, b1, b2, b3, _min(CHUNK, PART - c * CHUNK) % 256,
                )  # fmt: skip
            _sync_warp(lane)
            ahead = turn + SLOTS
            later = warp + (ahead // CHUNKS) * WARPS
            c2 = ahead % CHUNKS
            size = tl.minimum(CHUNK, PART - c2 * CHUNK) * 2
            at = w + (first + later // PARTS).to(tl.int64) * ldw + (later % PARTS) * PART + c2 * CHUNK
            _copy(here, at, size, bar + slot * 8, lead & (later < items).to(tl.int32))
            turn += 1
        _warp_sum_to(sums + item * 4, lane, a0, a1, b2, b3)
    _sync_all(lane)
    i = tl.arange(0, triton.next_power_of_2(MOST))
    inside = i * PARTS < items
    total = _read(sums + tl.minimum(i, MOST - 1) * (4 * PARTS))
    for part in tl.static_range(1, PARTS):
        total += _read(sums + tl.minimum(i, MOST - 1) * (4 * PARTS) + 4 * part)
    tl.store(y + first + i, total.to(y.dtype.element_ty), mask=inside)


def size_of(n: int, k: int, programs: int, c: dict[str, int]) -> int:
    slots = c["warps"] * c["slots"]
    size = -(-k * 2 // 128) * 128 + slots * c["chunk"] * 2 + (slots + 1) * 8 + -(-n // programs) * c["parts"] * 4
    return -(-size // 128) * 128


def space(n: int, k: int) -> list[dict[str, int]]:
    found = []
    for per_unit in (1, 2):
        programs = min(132 * per_unit, n)
        room = (226 << 10) // per_unit - 1024
        rows = -(-n // programs)
        for warps in (4, 8, 16):
            for parts in (1, 2, 4, 8):
                if warps % parts or k % parts or (k // parts) % 8 or k // parts < 512:
                    continue
                part = k // parts
                if rows * parts < warps and parts < 8 and (k // (2 * parts)) % 8 == 0 and k // parts >= 1024:
                    continue  # warps without work
                for chunks in (1, 2, 3, 4, 7, 8):
                    chunk = -(-part // chunks)
                    chunk = -(-chunk // 256) * 256 if chunks > 1 else chunk
                    if -(-part // chunk) != chunks or (chunk < 1024 and chunks > 1) or chunk * 2 > 32768:
                        continue
                    most = -(-rows * parts // warps) * chunks
                    c = {"per_unit": per_unit, "warps": warps, "parts": parts, "chunk": chunk, "slots": 1}
                    while c["slots"] < min(most, 12) and size_of(n, k, programs, c | {"slots": c["slots"] + 1}) <= room:
                        c["slots"] += 1
                    if size_of(n, k, programs, c) > room or (c["slots"] < 2 and most > 1):
                        continue
                    found.append(c)
    return found


def compiled(n: int, k: int, c: dict[str, int]) -> Any:
    programs = min(132 * c["per_unit"], n)
    constants = {
        "N": n, "K": k, "PROGRAMS": programs, "WARPS": c["warps"], "PARTS": c["parts"], "CHUNK": c["chunk"],
        "SLOTS": c["slots"], "SIZE": size_of(n, k, programs, c),
    }  # fmt: skip
    names = gemv_bulk.arg_names
    kinds = {"x": "*bf16", "w": "*bf16", "y": "*bf16", "ldw": "i32"}
    kernel = triton.compile(
        ASTSource(
            fn=gemv_bulk,
            signature={name: kinds.get(name, "constexpr") for name in names},
            constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
            attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("x", "w", "y")},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": c["warps"], "num_stages": 1},
    )
    shared = -(-kernel.metadata.shared // 128) * 128 + constants["SIZE"]
    kernel.metadata = kernel.metadata._replace(shared=shared)
    kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)
    kernel.call = lambda x, w, y: kernel[(programs, 1, 1)](x, w, y, w.stride(0), *constants.values())
    return kernel


def compiles(job: tuple[int, int, dict[str, int]]) -> str:
    try:
        compiled(*job)
    except Exception as err:
        return f"{type(err).__name__}: {str(err)[-300:]}"
    return ""


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--picks", type=Path, required=True)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    began = time.monotonic()
    rows_in = json.loads(args.picks.read_text())["rows"]
    if args.shapes:
        rows_in = [r for r in rows_in if f"{r['n']}x{r['k']}" in args.shapes.split(",")]
    jobs = [(r["n"], r["k"], c) for r in rows_in for c in space(r["n"], r["k"])]
    print(len(jobs), "to compile", flush=True)
    with multiprocessing.get_context("fork").Pool(15) as pool:
        refused = pool.map(compiles, jobs, chunksize=4)
    bad = {json.dumps(job) for job, why in zip(jobs, refused, strict=True) if why}
    print(f"{len(bad)} refused, {[w for w in refused if w][:1]}, {time.monotonic() - began:.0f} s", flush=True)
    import dense

    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.solution import Candidate
    from gemmtuned.daemon.measure import Bench
    from gemmtuned.kernels.backends import BACKENDS

    timer = CudaTimer()
    out: list[dict[str, Any]] = []
    for r in rows_in:
        n, k = r["n"], r["k"]
        if time.monotonic() - began > args.seconds:
            break
        problem = Problem(m=1, n=n, k=k, dtype="bf16", math_mode="reduced")
        with torch.inference_mode():
            bench = Bench(problem, torch.device("cuda"))
            weights = [b.t() for b in bench.weights]
            launches = len(weights) * math.ceil(dense.LAUNCHES / len(weights))
            x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
            exact = x.double() @ weights[0].double().t()
            kernel = BACKENDS["triton"].prepare(Candidate.of("triton", **json.loads(r["gemv"])), problem)
            calls = bench.arm("gemv", kernel, problem).calls
            plain = timer.prepare(lambda i, calls=calls: calls[i % len(calls)](), launches)
            runs, wrong = {}, {}
            for _, _, c in [j for j in jobs if j[:2] == (n, k) and json.dumps(j) not in bad]:
                kern = compiled(n, k, c)
                y = torch.full((1, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                try:
                    kern.call(x, weights[0], y)
                    torch.cuda.synchronize()
                except Exception as err:
                    wrong[json.dumps(c)] = str(err)[:200]
                    print(n, k, c, str(err)[:200], flush=True)
                    if "illegal" in str(err) or "launch" in str(err):
                        os._exit(1)
                    continue
                off = float((y.double() - exact).abs().max() / exact.abs().max())
                if not off < 1e-2:
                    wrong[json.dumps(c)] = f"off by {off}"
                    continue
                runs[json.dumps(c)] = timer.prepare(
                    lambda i, kern=kern, y=y: kern.call(x, weights[i % len(weights)], y), launches
                )
            if not runs:
                print(n, k, "nothing right", list(wrong.items())[:2], flush=True)
                continue
            first = {c: statistics.median(t) / launches for c, t in zip(runs, timer.measure(list(runs.values()), 5), strict=True)}
            order = sorted(first, key=first.__getitem__)[:3]
            floors = floor_launches(timer, weights, launches)
            times = timer.measure([plain, *(runs[c] for c in order), *floors], 23)
            us = [statistics.median(t[2:]) / launches for t in times]
        out.append({
            "n": n, "k": k, "gemv_us": us[0], "bulk_us": us[1 : 1 + len(order)], "floor_us": min(us[1 + len(order) :]),
            "bulk": order, "wrong": wrong, "screened": first,
        })  # fmt: skip
        print(n, k, [round(t, 3) for t in us[: 1 + len(order)]], round(out[-1]["floor_us"], 3), order[0], len(wrong), "wrong", list(wrong.items())[:1], flush=True)
        record.save("gemv_bulk", {"rows": out}, args.out)


if __name__ == "__main__":
    main()
