"""What `fragments` and `selected` share: both operands go from memory straight into registers, a warp at a time.

Loads of several steps are kept on their way together, the addresses of sums are made meanwhile.  Candidates: rows of W
a thread block has, warps and thread blocks that cut K, steps ahead, and a limit on registers where without one not all
thread blocks of a multiprocessor would be there at once.  The estimate has the form of to_shared.estimate_us, for loads
that hold registers instead of shared memory; its constants are fitted to timings (lab/fit.py).
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: RUF005  (Triton knows no unpacking)

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import PORTABLE_CLUSTER
from gemmtuned.kernels.arch import filled, has_clusters
from gemmtuned.kernels.estimates import even_steps, largest
from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves

STEP_K: Final = 64  # values of K that a warp takes in a step: 128 bytes of each row
_WASTE: Final = 1.35  # K, with what the last slice computes (and does not read) beyond its end, over K: at most this
# Warps per SM, at most, where thread blocks or warps share K; a config that leaves an SM idle goes where others do not
_MOST: Final = 32
_REGISTERS: Final = 240  # per thread
MOST_TOKENS: Final = 16  # rows of X in the products of a warp
_SQUEEZED: Final = 8  # registers by which the limit may lie below the estimate: the compiler manages with so few less
_UNSURE: Final = 16  # this close to the limit it may have to spill, so it is asked without a limit, too

Config = dict[str, int]


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of one kernel's estimate: bandwidth in bytes per us of the whole device, all else in us.

    latency_us: an SM's rate is its bytes in flight divided by this.  wait_us: for each group of loads in each round of
    thread blocks; round_us: for each round after the first.  beyond_us: for what is computed beyond the end of K, by
    its share of K.  token_us: for each row of X.  load_us: for each load that a thread has on its way together with
    others.
    """

    bandwidth: float
    latency_us: float
    start_us: float
    wait_us: float
    round_us: float
    beyond_us: float
    token_us: float
    load_us: float


_SEND: Final = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
_NO_RESULT: Final = moves("none", range(8), "0")  # an instruction must give a result, and these give none


def _sends(values: int) -> str:
    """PTX that sends the first `values` of a thread's sums to their addresses, in pairs where it can.

    The barriers count what has come.
    """
    first = range(0, values - 1, 2)
    lines = [f"{_SEND}.v2.f32 [$address{i}], {{$sum{i}, $sum{i + 1}}}, [$barrier{i}];" for i in first]
    return "\n".join([*(lines or [f"{_SEND}.f32 [$address0], $sum0, [$barrier0];"]), _NO_RESULT])


_SENDS, _SENDS_OPERANDS = inline_ptx(
    "=r none<8>, r address<8>, r barrier<8>, f sum<8>", {values: _sends(values) for values in (1, 4, 8)}
)


@triton.jit
def send_first(address, barrier, sums, VALUES: tl.constexpr):
    """As cluster.py's `_send`, for the first VALUES of each thread's eight sums: one, or pairs that are neighbours."""
    tl.inline_asm_elementwise(
        _SENDS[VALUES], _SENDS_OPERANDS, [address, barrier, sums], dtype=tl.int32, is_pure=False, pack=8
    )


def _keeps(values: int) -> str:
    """PTX that stores the first `values` of a thread's sums at their addresses, in pairs."""
    lines = [f"st.shared.v2.f32 [$address{i}], {{$sum{i}, $sum{i + 1}}};" for i in range(0, values, 2)]
    return "\n".join([*lines, _NO_RESULT])


_KEEPS, _KEEPS_OPERANDS = inline_ptx(
    "=r none<8>, r address<8>, f sum<8>", {values: _keeps(values) for values in (4, 8)}
)


@triton.jit
def keep_first(address, sums, VALUES: tl.constexpr):
    """Put the first VALUES of each thread's eight sums, pairs side by side, into this thread block's memory."""
    tl.inline_asm_elementwise(_KEEPS[VALUES], _KEEPS_OPERANDS, [address, sums], dtype=tl.int32, is_pure=False, pack=8)


def _sends_kept(warps: int, each: int) -> str:
    """PTX that waits for all warps, adds up the `each` values that each of them has kept, and sends the sums."""
    names = [[f"of{w}_{i}" for i in range(each)] for w in range(warps)]
    kind = ".v2.f32" if each == 2 else ".f32"
    held = ["{" + ", ".join(group) + "}" if each == 2 else group[0] for group in names]
    lines = [f".reg .f32 {', '.join(itertools.chain(*names))};", "bar.sync 0;"]
    lines += [f"ld.shared{kind} {held[w]}, [$kept0 + {w * warps * 32 * each * 4}];" for w in range(warps)]
    lines += [f"add.f32 {names[0][i]}, {names[0][i]}, {names[w][i]};" for w in range(1, warps) for i in range(each)]
    lines.append(f"{_SEND}{kind} [$address0], {held[0]}, [$barrier0];")
    return "{" + "\n".join([*lines, _NO_RESULT]) + "}"


_WAYS = ((2, 2), (4, 1), (4, 2), (8, 1))  # warps, and sums that each thread sends; one number is the key of both
_SENDS_KEPT, _SENDS_KEPT_OPERANDS = inline_ptx(
    "=r none<8>, r kept<8>, r address<8>, r barrier<8>, f sum<8>",
    {10 * warps + each: _sends_kept(warps, each) for warps, each in _WAYS},
)


@triton.jit
def send_kept(kept, address, barrier, sums, WARPS: tl.constexpr, EACH: tl.constexpr):
    """Add up what the warps have kept, and send it: each thread sends one value, or a pair.

    kept, address, barrier: the first of the eight values that a thread holds of each is used.  sums: not read; they
    give the others the layout in which eight values side by side belong to one thread.
    """
    tl.inline_asm_elementwise(
        _SENDS_KEPT[10 * WARPS + EACH], _SENDS_KEPT_OPERANDS, [kept, address, barrier, sums],
        dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip


@triton.jit
def rows_of_w(w, ldw, tile, line, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the rows of W of a tile: for each eight rows the even row of a lane's pair, then the odd one."""
    rows = ()
    for b in tl.static_range(BLOCK_N // 4):
        row = tile * BLOCK_N + (b // 2) * 8 + 2 * line + b % 2
        # rows past the end read the last row again: no mask but for K, and their sums are never stored
        read = tl.minimum(row, N - 1) if N % BLOCK_N != 0 else row
        rows = rows + (w + read.to(tl.int64)[:, None] * ldw,)
    return rows


@triton.jit
def load_steps(
    rows, even, odd, end, group, STEP: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr
):
    """Load what a group of steps takes of all `rows`, step after step: at k `even`, of every second row at k `odd`."""
    found = ()
    for u in tl.static_range(AHEAD):
        for i in tl.static_range(len(rows)):
            k = (odd if i % 2 else even) + (group * AHEAD + u) * STEP
            if WHOLE:
                found = found + (tl.load(rows[i] + k, eviction_policy=POLICY),)
            else:
                found = found + (tl.load(rows[i] + k, mask=k < end, other=0.0, eviction_policy=POLICY),)
    return found


@triton.jit
def begun(sums, nothing, COUNT: tl.constexpr):
    """sums + nothing, a zero: products that are added to them cannot begin before it is known."""
    later = ()
    for i in tl.static_range(COUNT):
        later = later + (sums[i] + nothing,)
    return later


def check_registers(kernel: str, config: Any) -> None:
    """Raise CandidateFailed where the config's limit on registers is one that the compiler does not take."""
    registers, warps = config["registers"], config["warps"]
    most = min(255, 65536 // (32 * warps))
    if registers and not 28 <= registers <= most:
        raise CandidateFailed(f"{kernel}: registers is {registers}, expected 28 to {most}, or 0 for no limit")


def scored(
    n: int,
    k: int,
    units: int,
    *,
    arch: str,
    rows: Sequence[int],
    config_of: Callable[[int, int, int, int], Config],
    registers_of: Callable[[int, Config], int],
    fit: Fit,
) -> list[tuple[float, Config]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first.

    config_of: makes the config of rows, split, warps and steps ahead, without a limit on registers.  registers_of:
    about how many registers a thread takes, of K and a config.
    """
    splits = range(1, (PORTABLE_CLUSTER if has_clusters(arch) else 1) + 1)
    found = []
    for each, warps, split in itertools.product(rows, (1, 2, 4, 8), splits):
        steps = -(-k // (STEP_K * warps * split))
        busy = -(-n // each) * split * warps / units
        if steps * STEP_K * warps * split > max(_WASTE * k, k + STEP_K) or (busy > _MOST and split * warps > 2):
            continue
        for ahead in {even_steps(steps, most) for most in (2, 4, 8)}:
            config = config_of(each, split, warps, ahead)
            needed = registers_of(k, config)
            if needed > _REGISTERS:
                continue
            most = _registers_for(busiest(n, units, config) * warps)
            limits = [0] if needed > most - _UNSURE else []  # first: it does not spill
            limits += [most] if needed <= most + _SQUEEZED else []
            for limit in limits:
                us = estimate_us(n, k, units, config, limit or needed, fit)
                found.append((us, busy, config | {"registers": limit}))
    enough = min(1.0, max((busy for _, busy, _ in found), default=0.0))
    return sorted(((us, config) for us, busy, config in found if busy >= enough), key=lambda item: item[0])


def _registers_for(warps: int) -> int:
    """The most registers per thread where an SM holds this many warps at once: each of its four parts has 16,384."""
    return min(255, 512 // max(1, -(-warps // 4)) // 8 * 8)


def busiest(n: int, units: int, config: Mapping[str, int]) -> int:
    """How many thread blocks the busiest SM runs, if there is room for all at once."""
    at_once = filled(units, config["split"])
    return -(-(-(-n // config["rows"]) * config["split"]) // at_once)


def room(registers: int, warps: int) -> int:
    """How many thread blocks of `warps` warps, with `registers` per thread, an SM holds at once."""
    each = -(-registers // 8) * 8
    return max(1, min(32, 4 * (512 // each) // warps))


def estimate_us(n: int, k: int, units: int, config: Mapping[str, int], registers: int, fit: Fit) -> float:
    """Device time in us of a config whose threads take this many registers."""
    rows, split, warps, ahead = (config[key] for key in ("rows", "split", "warps", "ahead"))
    step_k = STEP_K * warps * split
    steps = -(-k // step_k)
    groups = -(-steps // ahead)
    blocks = busiest(n, units, config)
    at_once = room(registers, warps)
    rounds = -(-blocks // at_once)
    memory = n * k * 2 / fit.bandwidth
    in_flight = min(blocks, at_once) * rows * warps * STEP_K * 2 * min(ahead, steps)
    rate = min(1.15 * fit.bandwidth / units, in_flight / fit.latency_us)
    loads = blocks * rows * steps * warps * STEP_K * 2 / rate
    waits = fit.wait_us * rounds * groups + fit.round_us * (rounds - 1)
    beyond = groups * ahead * step_k / k - 1
    tokens = config.get("tokens", MOST_TOKENS)
    issue = fit.token_us * tokens + fit.load_us * min(ahead, steps) * (rows + tokens) / 4
    return fit.start_us + largest(memory, loads) + waits + fit.beyond_us * beyond + issue
