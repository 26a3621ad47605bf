"""What moe_decode uses besides ptx.py: votes and matches of a warp, pairs of 16-bit numbers, exponentials.

Written from the PTX ISA (8.7).  What one lane has copied the others of its warp may read behind bar.warp.sync.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from ptx_code import _ALL, _NOBODY, WARP, Array, Wrong
from ptx_cuda import WarpGroups

_FLOATS = {"f32": np.float32, "f16": np.float16}
_UNORDERED = {"ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge", "neu": "ne", "equ": "eq"}


@cache
def _halves_of_e4m3() -> Array:
    """The bits of two numbers of fp16, for those of each two of e4m3."""
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    halves = torch.from_numpy(pairs).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy()
    return halves.view(np.uint32).astype(np.uint64)


class Warps(WarpGroups):
    """A thread block that also votes, matches, shuffles upwards, and computes with pairs."""

    def _together(self, operation: Any) -> int | None:
        if operation[0] in ("vote", "match") or operation[:2] == ("bar", "warp"):
            return WARP
        return super()._together(operation)

    def _bar(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1] != "warp":
            super()._bar(operation, operands, mask)
            return
        for warp in np.flatnonzero(mask[::WARP]):
            mine = (self._by != -1) & (self._by // WARP == warp)
            self._by[mine] = -1
            self._unseen[mine] = _ALL & ~_NOBODY & ~(np.uint32(1) << np.uint32(warp))

    def _vote(self, operation: Any, operands: Any, mask: Array) -> None:
        to, what, _ = operands
        said = self._by_lane(~self._get(what[1:], "pred") if what.startswith("!") else self._get(what, "pred"))
        if operation[2] == "ballot":
            bits = (said.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
            self._set(to, np.repeat(bits, WARP), mask, "u32")
        elif operation[2] in ("any", "all"):
            self._set(to, np.repeat(getattr(said, operation[2])(1), WARP), mask, "pred")
        else:
            raise Wrong(f"{'.'.join(operation)}: not written")

    def _match(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1] != "any":
            raise Wrong(f"{'.'.join(operation)}: not written")
        values = self._by_lane(self._get(operands[1], "u32"))
        same = (values[:, :, None] == values[:, None, :]).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
        self._set(operands[0], same.sum(2).reshape(-1), mask, "u32")

    def _shfl(self, operation: Any, operands: Any, mask: Array) -> None:
        to, _, predicate = operands[0].partition("|")
        if operation[2] != "up":
            super()._shfl(operation, [to, *operands[1:]], mask)
            return
        by = self._by_lane(self._get(operands[2], "u32")).astype(np.int64)
        lanes = np.broadcast_to(np.arange(WARP), by.shape) - by
        inside = lanes >= 0
        values = self._by_lane(self._bits(operands[1]))
        taken = np.take_along_axis(values, np.where(inside, lanes, np.arange(WARP)), 1)
        self._set(to, taken.reshape(-1), mask, "u32")
        if predicate:
            self._set(predicate, inside.reshape(-1), mask, "pred")

    def _popc(self, operation: Any, operands: Any, mask: Array) -> None:
        bits = self._get(operands[1], "u32")
        self._set(operands[0], sum((bits >> np.uint32(i)) & np.uint32(1) for i in range(32)), mask, "u32")

    def _prmt(self, operation: Any, operands: Any, mask: Array) -> None:
        """Each of four selectors picks one of eight bytes, or, with its upper bit, that byte's sign eight times."""
        to, low, high, selector = operands
        bytes_ = np.array([self._bits(low), self._bits(high)]).astype("<u4").view(np.uint8).reshape(2, -1, 4)
        chosen = self._bits(selector)[:, None] >> np.uint64(4) * np.arange(4, dtype=np.uint64)
        which = (chosen & np.uint64(7)).astype(np.int64)
        taken = bytes_[which // 4, np.arange(self._threads)[:, None], which % 4]
        if (chosen & np.uint64(8)).any():
            taken = np.where(chosen & np.uint64(8), np.where(taken >> 7, np.uint8(0xFF), np.uint8(0)), taken)
        self._put(to, taken.view("<u4")[:, 0].astype(np.uint64), mask)

    def _lop3(self, operation: Any, operands: Any, mask: Array) -> None:
        """Each bit of three as the table has it, whose bits are numbered by them, the first highest."""
        to, *given, table = operands
        ones = [self._get(one, "u32") for one in given]
        zeros = [~one for one in ones]
        done = np.zeros_like(ones[0])
        for i in range(8):
            if int(table, 0) >> i & 1:
                a, b, c = (ones[n] if i >> (2 - n) & 1 else zeros[n] for n in range(3))
                done |= a & b & c
        self._put(to, done.astype(np.uint64), mask)

    def _bfi(self, operation: Any, operands: Any, mask: Array) -> None:
        """The lower `length` bits of the first, put into the second at a place."""
        to, what, into, at, length = operands
        place, wide = self._get(at, "u32").astype(np.uint64), int(length)
        bits = np.uint64((1 << wide) - 1) << place
        done = (
            self._get(into, "u32").astype(np.uint64) & ~bits | self._get(what, "u32").astype(np.uint64) << place & bits
        )
        self._set(to, done, mask, "u32")

    # numbers

    def _two(self, operation: Any, operands: Any, mask: Array, act: Any) -> None:
        kind = operation[-1]
        if kind not in ("bf16x2", "f16x2"):
            super()._two(operation, operands, mask, act)
            return
        to, *values = operands
        halves = [self._bits(value).astype("<u4").view("<u2") for value in values]
        with np.errstate(all="ignore"):
            if kind == "f16x2":
                done = act(*(half.view(np.float16).astype(np.float64) for half in halves)).astype(np.float16)
            else:
                floats = ((half.astype(np.uint32) << np.uint32(16)).view(np.float32) for half in halves)
                single = act(*(one.astype(np.float64) for one in floats)).astype(np.float32)
                done = torch.from_numpy(single).bfloat16().view(torch.int16).numpy()
        self._put(to, done.view("<u4").astype(np.uint64), mask)

    def _cvt(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[-1] == "e4m3x2":  # the upper byte is the upper half
            self._put(operands[0], _halves_of_e4m3()[self._get(operands[1], "b16")], mask)
            return
        super()._cvt(operation, operands, mask)

    def _setp(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1] not in _UNORDERED:
            super()._setp(operation, operands, mask)
            return
        to, a, b = operands
        super()._setp(("setp", _UNORDERED[operation[1]], operation[2]), operands, mask)
        left, right = self._get(a, operation[2]), self._get(b, operation[2])
        unordered = (left != left) | (right != right)
        self._set(to, (self._registers[to] != 0) | unordered, mask, "pred")

    def _one(self, operation: Any, operands: Any, mask: Array, act: Any) -> None:
        with np.errstate(all="ignore"):
            value = act(self._get(operands[1], "f32").astype(np.float64)).astype(np.float32)
        self._set(operands[0], value, mask, "f32")

    def _ex2(self, operation: Any, operands: Any, mask: Array) -> None:
        self._one(operation, operands, mask, np.exp2)

    def _abs(self, operation: Any, operands: Any, mask: Array) -> None:
        self._one(operation, operands, mask, np.abs)

    def _copysign(self, operation: Any, operands: Any, mask: Array) -> None:
        """The sign of the first, the size of the second."""
        sign, size = self._get(operands[1], "f32"), self._get(operands[2], "f32")
        self._set(operands[0], np.copysign(size, sign), mask, "f32")

    def _div(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[-1] != "f32":
            super()._div(operation, operands, mask)
            return
        with np.errstate(all="ignore"):
            value = self._get(operands[1], "f32").astype(np.float64) / self._get(operands[2], "f32")
            self._set(operands[0], value.astype(np.float32), mask, "f32")
