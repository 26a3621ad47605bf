"""Registers of a thread block's threads, and the instructions of PTX that move and compute: see ptx.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ptx_code import (
    _BITWISE,
    _COMPARE,
    _CONVERTED,
    _INTEGERS,
    _ROUNDED_ONCE,
    _UNWRITTEN,
    RANK,
    SHARED_BEGINS,
    Array,
    Wrong,
    _cut,
    _number,
    _quotient,
    _read,
)


class Registers:
    """The bits of each thread's value, by register.  Raises Wrong for an instruction that is not written here."""

    _threads: int
    _rank: int
    _everyone: Array  # a mask of all threads
    _registers: dict[str, Array]
    _numbers_read: dict[str, Array]  # those that stand in the text

    def _all(self, value: int) -> Array:
        return np.full(self._threads, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _mask(self, predicate: str) -> Array:
        bits = self._registers[predicate.lstrip("!")] != 0
        return ~bits if predicate.startswith("!") else bits

    def _bits(self, operand: str) -> Array:
        found = self._registers.get(operand)
        if found is None and (found := self._numbers_read.get(operand)) is None:
            found = self._numbers_read[operand] = self._all(_number(operand))
        return found

    def _get(self, operand: str, kind: str) -> Array:
        """As numbers of a type of PTX: u32, s64, f32, b16, bf16, f16, pred."""
        bits = self._bits(operand)
        if kind == "pred":
            return bits != 0
        narrow, seen = _read(kind)
        raw = bits if narrow is None else bits.astype(narrow)  # the lower ones
        if kind == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        if kind == "f16":
            return raw.view(np.float16).astype(np.float32)
        return raw if seen is None else raw.view(seen)

    def _set(self, name: str, value: Array, mask: Array, kind: str = "u64") -> None:
        if name == "_":
            return
        if kind == "pred":
            self._put(name, value, mask)
            return
        if kind == "bf16":
            bits = torch.from_numpy(value.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        elif kind == "f16":
            bits = value.astype(np.float16, copy=False).view(np.uint16)
        elif kind == "f32":
            bits = value.astype(np.float32, copy=False).view(np.uint32)
        else:
            bits = value.astype(np.int64, copy=False).view(np.uint64) if value.dtype.kind == "i" else value
            narrow, _ = _read(kind)
            bits = bits if narrow is None else bits.astype(narrow, copy=False)  # the lower ones
        self._put(name, bits.astype(np.uint64, copy=False), mask)

    def _put(self, name: str, bits: Array, mask: Array) -> None:
        """The 64 bits of each register as they are; no array that was put is changed later."""
        if mask is not self._everyone:
            before = self._registers.get(name)
            bits = np.where(mask, bits, _UNWRITTEN if before is None else before)
        if name != "_":
            self._registers[name] = bits

    def _array(self, operation: Any, operands: Any, mask: Array) -> None:
        """Its name stands for its address, from where it is declared on."""
        name, at = operands
        self._set(name, self._all((self._rank << RANK) + SHARED_BEGINS + at), mask)

    # moving and arithmetic

    def _mov(self, operation: Any, operands: Any, mask: Array) -> None:
        to, what = operands
        kind = operation[1].replace("f", "b") if operation[1] != "pred" else "pred"
        if isinstance(to, list):
            each = int(kind[1:]) // len(to)
            bits = self._bits(what)
            for i, name in enumerate(to):
                self._put(name, bits >> np.uint64(each * i) & _cut(f"b{each}"), mask)
        elif isinstance(what, list):
            each = int(kind[1:]) // len(what)
            bits = self._bits(what[0]) & _cut(f"b{each}")
            for i, name in enumerate(what[1:], 1):
                bits = bits | (self._bits(name) & _cut(f"b{each}")) << np.uint64(each * i)
            self._put(to, bits, mask)
        elif kind == "pred":
            self._set(to, self._get(what, kind), mask, kind)
        else:
            self._put(to, self._bits(what) & _cut(kind), mask)

    def _wraps(self, operation: Any, operands: Any, mask: Array, act: Callable[..., Any]) -> None:
        """As `_two`, of what gives the lower bits of whole numbers whatever lies above them."""
        kind = operation[-1]
        if kind in _INTEGERS and (len(operation) == 2 or operation[1] == "lo"):
            to, *values = operands
            self._put(to, act(*map(self._bits, values)) & _cut(kind), mask)
        else:
            self._two(operation, operands, mask, act)

    def _two(self, operation: Any, operands: Any, mask: Array, act: Callable[..., Any]) -> None:
        """Of two (or three) operands of one type; `wide`: a result of twice the size, `hi`: its upper half."""
        kind = operation[-1]
        to, *values = operands
        way = operation[1]
        if kind == "f32" and len(values) == 2 and act in _ROUNDED_ONCE and set(operation[1:-1]) <= {"rn"}:
            self._set(to, act(*(self._get(v, kind) for v in values)), mask, kind)
            return
        if kind == "f32" and set(operation[1:-1]) <= {"rn"}:
            done = act(*(self._get(v, kind).astype(np.float64) for v in values)).astype(np.float32)
            self._set(to, done, mask, kind)
            return
        if kind not in _INTEGERS or way not in (kind, "lo", "hi", "wide") or (way == "hi" and len(values) != 2):
            raise Wrong(f"{'.'.join(operation)}: not written")
        size = int(kind[1:])
        kinds = [kind] * len(values)
        if way == "wide":
            kinds[2:] = [f"{kind[0]}{2 * size}"] * len(kinds[2:])
        whole: Any = object if way == "hi" and size == 64 else np.int64 if kind[0] == "s" else np.uint64
        done = act(*(self._get(v, k).astype(whole) for v, k in zip(values, kinds, strict=True)))
        done = done >> size if way == "hi" else done
        bits = 2 * size if way == "wide" else size
        done = (done & ((1 << bits) - 1)).astype(np.uint64) if whole is object else done
        self._set(to, done, mask, f"u{bits}")

    def _add(self, operation: Any, operands: Any, mask: Array) -> None:
        self._wraps(operation, operands, mask, operator.add)

    def _sub(self, operation: Any, operands: Any, mask: Array) -> None:
        self._wraps(operation, operands, mask, operator.sub)

    def _mul(self, operation: Any, operands: Any, mask: Array) -> None:
        self._wraps(operation, operands, mask, operator.mul)

    def _mad(self, operation: Any, operands: Any, mask: Array) -> None:
        self._wraps(operation, operands, mask, lambda a, b, c: a * b + c)

    _fma = _mad

    def _div(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[-1] not in _INTEGERS:
            raise Wrong(f"{'.'.join(operation)}: not written")
        self._two(operation, operands, mask, _quotient)

    def _rem(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, lambda a, b: a - b * _quotient(a, b))

    def _min(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, np.fmin if operation[-1] == "f32" else np.minimum)

    def _max(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[-1] == "u16x2":  # of each half
            to, *values = operands
            low, high = (
                np.maximum(*(self._bits(v) >> at & np.uint64(0xFFFF) for v in values)) for at in map(np.uint64, (0, 16))
            )
            self._put(to, low | high << np.uint64(16), mask)
            return
        self._two(operation, operands, mask, np.fmax if operation[-1] == "f32" else np.maximum)

    def _bitwise(self, operation: Any, operands: Any, mask: Array) -> None:
        kind = operation[1]
        to, a, b = operands
        if kind == "pred":
            self._set(to, _BITWISE[operation[0]](self._get(a, kind), self._get(b, kind)), mask, kind)
        else:
            self._put(to, _BITWISE[operation[0]](self._bits(a), self._bits(b)) & _cut(kind), mask)

    _and = _or = _xor = _bitwise

    def _not(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], ~self._get(operands[1], operation[1]), mask, operation[1])

    def _neg(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], -self._get(operands[1], operation[1]), mask, operation[1])

    def _shl(self, operation: Any, operands: Any, mask: Array) -> None:
        value, by = self._bits(operands[1]), self._bits(operands[2]) & _cut("u32")
        shifted = np.where(by < 64, value << np.minimum(by, np.uint64(63)), np.uint64(0))
        self._put(operands[0], shifted & _cut(operation[1]), mask)

    def _shr(self, operation: Any, operands: Any, mask: Array) -> None:
        kind = operation[1]
        if kind[0] == "s":
            shifted = self._get(operands[1], kind).astype(np.int64) >> np.minimum(self._get(operands[2], "u32"), 63)
            self._set(operands[0], shifted, mask, kind.replace("s", "u"))
        else:
            value, by = self._bits(operands[1]) & _cut(kind), self._bits(operands[2]) & _cut("u32")
            self._put(operands[0], np.where(by < 64, value >> np.minimum(by, np.uint64(63)), np.uint64(0)), mask)

    def _bfe(self, operation: Any, operands: Any, mask: Array) -> None:
        to, value, at, length = operands
        wide = int(length)
        if operation[1] not in ("u32", "s32") or (self._get(at, "u32") + wide).max() > 32:
            raise Wrong(f"{'.'.join(operation)} of {wide}: not written")
        part = (self._get(value, "u32").astype(object) >> self._get(at, "u32").astype(object)) & ((1 << wide) - 1)
        if operation[1] == "s32":
            part = np.where(part >> (wide - 1), part - (1 << wide), part)
        self._set(to, (part & 0xFFFFFFFF).astype(np.uint64), mask, "u32")

    def _setp(self, operation: Any, operands: Any, mask: Array) -> None:
        to, a, b = operands
        left, right = self._get(a, operation[2]), self._get(b, operation[2])
        done = _COMPARE[operation[1]](left, right)
        if operation[2][0] not in "usb":
            done = done & (left == left) & (right == right)  # none holds of a NaN
        self._set(to, done, mask, "pred")

    def _selp(self, operation: Any, operands: Any, mask: Array) -> None:
        to, a, b, chosen = operands
        kind = operation[1]
        self._put(to, np.where(self._get(chosen, "pred"), self._bits(a), self._bits(b)) & _cut(kind), mask)

    def _cvt(self, operation: Any, operands: Any, mask: Array) -> None:
        *how, into, of = operation[1:]
        to, *values = operands
        if set(how) - {"rn"} or into.removesuffix("x2") not in _CONVERTED or of not in _CONVERTED:
            raise Wrong(f"{'.'.join(operation)}: not written")
        if into.endswith("x2"):  # the first is the upper half
            for i, value in enumerate(reversed(values)):
                self._set(f"{to}:{i}", self._get(value, of), mask, into[:-2])
            both = self._registers[f"{to}:1"] << np.uint64(16) | self._registers[f"{to}:0"]
            self._set(to, both, mask, "b32")
        else:
            self._set(to, self._get(values[0], of), mask, into)

    def _cvta(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1:3] != ("to", "global"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        self._set(operands[0], self._get(operands[1], "u64"), mask)

    def _createpolicy(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], self._all(0), mask)
