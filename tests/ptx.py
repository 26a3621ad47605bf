"""Runs a compiled kernel's PTX on the CPU, as far as our kernels use it, to see whether what they compute is right.

Triton's interpreter knows neither a program's lanes nor PTX written inline; this reads the text that ptxas gets.
Written from the PTX ISA (8.7): what each instruction does, and which lane holds what of a matrix.  All threads of a
program take each step together, so a barrier that is missing shows only behind copies (cp.async); programs of a cluster
take turns where they wait for one another.  Memory that nobody has allotted may not be touched, and what was never
written is NaN.
"""

from __future__ import annotations

import itertools
import operator
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from gemmtuned.kernels.compile import compile_kernel
from gemmtuned.kernels.triton.launch import LaunchRecord

SHARED_BEGINS = 1024  # on sm_90 and later: what lies before is the system's
RANK = 24  # bits of an address within one program's shared memory
Array = Any  # of one value for each thread, or for each lane of each warp
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARE: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_BITWISE: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_INTEGERS = {f"{sign}{size}" for sign in "us" for size in (16, 32, 64)}
_CONVERTED = _INTEGERS | {"f32", "f16", "bf16"}
_MOST = 100_000  # instructions of a program


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero."""
    return np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b))


class Wrong(AssertionError):
    """The kernel does what it may not, or what is not written here."""


def disassembled(cubin: bytes, folder: Path) -> str:
    """What ptxas made of it, as cuobjdump writes it."""
    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-sass", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def launch(
    record: LaunchRecord, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *, arch: str
) -> torch.Tensor:
    """Y [M, N] of the record's kernel, every program in turn; its partial sums are NaN before, its counters zero."""
    kernel = compile_kernel(record, arch)
    y = torch.full((x.shape[0], record.constants["N"]), float("nan"), dtype=x.dtype)
    memory = Memory()
    tensors = {"x": x, "w": w, "bias": bias, "y": y}
    values: dict[str, int] = {name: memory.add(t) for name, t in tensors.items() if t is not None}
    values |= {"m": x.shape[0], "ldx": x.stride(0), "ldw": w.stride(0)}
    if record.workspace_bytes:
        space = torch.full((record.workspace_bytes,), 0xFF, dtype=torch.uint8)
        space[: record.partials_offset].zero_()
        values["counters"] = memory.add(space)
        values["partials"] = values["counters"] + record.partials_offset
    code = Code(kernel.asm["ptx"])
    arguments = [values[name] for name in record.arguments]
    grid = record.grid_size(x.shape[0])
    threads = 32 * record.num_warps
    for z, block_y, block_x in itertools.product(range(grid[2]), range(grid[1]), range(grid[0])):
        cluster: list[Program] = []
        for rank in range(record.cluster):
            at = (block_x * record.cluster + rank, block_y, z)
            program = Program(code, threads, arguments, memory, rank, cluster, kernel.metadata.shared)
            size = (grid[0] * record.cluster, *grid[1:])
            program.place(**{f"%ctaid.{axis}": i for axis, i in zip("xyz", at, strict=True)})
            program.place(**{f"%nctaid.{axis}": i for axis, i in zip("xyz", size, strict=True)})
            cluster.append(program)
        running = [program.run() for program in cluster]
        waits = 0
        while running:
            left = [one for one in running if next(one, None) is not None]
            waits = waits + 1 if len(left) == len(running) else 0
            running = left
            if waits > 100:
                raise Wrong("programs of a cluster wait for ever")
        if not all(program.barrier.is_over() for program in cluster):
            raise Wrong(f"what nobody waited for, or never came: {[p.barrier for p in cluster]}")
    if record.workspace_bytes and space[: record.counters_bytes].any():
        raise Wrong("counters are not zero after a launch")
    return y


class Memory:
    """The device's memory: tensors at addresses far apart; views of them are reached within their storage."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Any]] = []
        self._next = 1 << 20

    def add(self, tensor: torch.Tensor) -> int:
        storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        begin = self._next
        self._parts.append((begin, storage.numpy()))
        self._next += (storage.numel() // 4096 + 2) * 4096
        return begin + tensor.storage_offset() * tensor.element_size()

    def at(self, addresses: Array, size: int) -> tuple[Any, Array]:
        """(bytes of one part, places in it) for these addresses, none of which may lie outside of it."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for begin, data in self._parts:
            if begin <= low < begin + len(data):
                if high > begin + len(data):
                    break
                return data, (addresses - begin).astype(np.int64)
        raise Wrong(f"no tensor from {low:#x} to {high:#x}")


@dataclass
class Barrier:
    """The one mbarrier of a program (9.7.13.15), in its first phase."""

    at: int | None = None
    arrivals: int = 0  # still to come
    size: int = 0  # bytes still to come
    fenced: bool = False  # others may be told of it

    def is_over(self) -> bool:
        return self.arrivals == 0 and self.size == 0


class Code:
    """(predicate, operation, operands) of each instruction, in order; where each label stands."""

    def __init__(self, text: str) -> None:
        self.parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)\b", text[: text.index("{")])
        body = text[text.index("{") : text.rindex("ret;") + 4]
        body = re.sub(r"//.*|^\s*\.(?:loc|file|section|pragma)\b.*", "", body, flags=re.MULTILINE)
        body = re.sub(r"\.reg\s[^;]*;", "", body)
        self.static_bytes = 0  # of shared memory, for arrays with a name
        self.steps: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self.labels: dict[str, list[int]] = {}
        for piece in body.split(";"):
            piece = re.sub(r"^[\s{}]+", "", piece)  # scopes; names in them are used anew
            while (label := re.match(r"(\$?\w+):(?!:)\s*", piece)) is not None:
                self.labels.setdefault(label[1], []).append(len(self.steps))
                piece = re.sub(r"^[\s{}]+", "", piece[label.end() :])
            if not piece.strip():
                continue
            if (array := re.match(r"\.shared \.align 16 \.b32 (\w+)\[(\d+)\]", piece)) is not None:
                self.steps.append(("", ("array",), [array[1], self.static_bytes]))
                self.static_bytes += -(-4 * int(array[2]) // 16) * 16
                continue
            found = re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", piece, re.DOTALL)
            if found is None:
                raise Wrong(f"not understood: {piece}")
            self.steps.append((found[1] or "", tuple(found[2].replace("::", "_").split(".")), _operands(found[3])))

    def target(self, label: str, here: int) -> int:
        """The nearest place of this name before an instruction, else the first after it."""
        places = self.labels[label]
        return max((at for at in places if at <= here), default=places[0])


def _operands(text: str) -> list[Any]:
    """Names and numbers, lists of them for {..}, [address] as ("[", name, offset)."""
    found: list[Any] = []
    for piece in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}]+", text):
        if piece.startswith("{"):
            found.append([part.strip() for part in piece.strip("{} ").split(",")])
        elif piece.startswith("["):
            name, _, offset = piece.strip("[] ").replace(" ", "").partition("+")
            found.append(("[", name, int(offset or "0", 0)))
        else:
            found.append(piece)
    return found


class Program:
    """One program of a grid.  Registers hold the bits of each thread's value."""

    def __init__(
        self, code: Code, threads: int, arguments: list[int], memory: Memory, rank: int,
        cluster: list[Program], shared_bytes: int,
    ) -> None:  # fmt: skip
        self._code = code
        self._threads = threads
        self._arguments = dict(zip(code.parameters, arguments, strict=False))  # more of them are Triton's own, unused
        self._memory = memory
        self._cluster = cluster
        self._rank = rank
        self.shared = np.full(code.static_bytes + shared_bytes, 0xFF, np.uint8)
        self.barrier = Barrier()
        self.has_begun = False
        self._groups: list[list[Any]] = [[]]  # of copies, the last still open
        self._by = np.full(len(self.shared), -1, np.int32)  # threads whose copies have come since the last barrier
        self._stored_by = np.full(len(self.shared), -1, np.int32)  # warps that have stored since the last barrier
        lanes = np.arange(threads, dtype=np.uint64)
        here = (rank << RANK) + SHARED_BEGINS + code.static_bytes
        self._registers: dict[str, Array] = {
            "%tid.x": lanes, "%laneid": lanes % 32, "global_smem": self._all(here),
            "%dynamic_smem_size": self._all(shared_bytes), "%cluster_ctarank": self._all(rank),
        }  # fmt: skip

    def place(self, **where: int) -> None:
        """Set registers that say which program this is."""
        self._registers |= {name: self._all(value) for name, value in where.items()}

    def run(self) -> Iterator[bool]:
        """Gives way where it waits for another program of its cluster."""
        here = 0
        for _ in range(_MOST):
            predicate, operation, operands = self._code.steps[here]
            mask = self._mask(predicate)
            here += 1
            if operation[0] in ("ret", "bra"):
                if mask.any() != mask.all():
                    raise Wrong("threads of one program go different ways")
                if mask.all() and operation[0] == "ret":
                    return
                if mask.all():
                    here = self._code.target(operands[0], here - 1)
            elif operation[:3] == ("barrier", "cluster", "wait"):
                while not all(program.has_begun for program in self._cluster):
                    yield True
            elif operation[:3] == ("mbarrier", "try_wait", "parity"):
                if set(self._where(operands[1])) != {self.barrier.at} or self._bits(operands[2]).any():
                    raise Wrong("waits at another barrier, or for the phase before the first")
                while not self.barrier.is_over():
                    yield True
                self._set(operands[0], self._all(1), mask)
            else:
                step = getattr(self, "_" + operation[0], None)
                if step is None:
                    raise Wrong(f"{'.'.join(operation)}: not written")
                step(operation, operands, mask)
        raise Wrong(f"a program of more than {_MOST} instructions")

    # registers

    def _all(self, value: int) -> Array:
        return np.full(self._threads, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _mask(self, predicate: str) -> Array:
        if not predicate:
            return np.ones(self._threads, bool)
        bits = self._registers[predicate.lstrip("!")] != 0
        return ~bits if predicate.startswith("!") else bits

    def _bits(self, operand: str) -> Array:
        if operand in self._registers:
            return self._registers[operand]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return self._all(int(operand[2:], 16))
        try:
            return self._all(int(operand.removesuffix("U"), 0))
        except ValueError:
            raise Wrong(f"{operand}: read before it was written") from None

    def _get(self, operand: str, kind: str) -> Array:
        """As numbers of a type of PTX: u32, s64, f32, b16, bf16, f16, pred."""
        bits = self._bits(operand)
        if kind == "pred":
            return bits != 0
        size = int(re.sub(r"\D+", "", kind)) // 8
        raw = (bits & np.uint64((1 << 8 * size) - 1)).astype(_UNSIGNED[size])
        if kind == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        if kind == "f16":
            return raw.view(np.float16).astype(np.float32)
        return raw.view(
            {"f32": np.float32, "s16": np.int16, "s32": np.int32, "s64": np.int64}.get(kind, _UNSIGNED[size])
        )

    def _set(self, name: str, value: Array, mask: Array, kind: str = "u64") -> None:
        if name == "_":
            return
        if kind == "pred":
            bits = value.astype(np.uint64)
        elif kind == "bf16":
            bits = torch.from_numpy(value.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        elif kind == "f16":
            bits = value.astype(np.float16).view(np.uint16)
        elif kind == "f32":
            bits = value.astype(np.float32).view(np.uint32)
        else:
            size = int(kind[1:]) // 8
            bits = value.astype(np.int64).view(np.uint64) if value.dtype.kind == "i" else value.astype(np.uint64)
            bits = bits & np.uint64((1 << 8 * size) - 1)
        before = self._registers.get(name, self._all(-1))
        self._registers[name] = np.where(mask, bits.astype(np.uint64), before)

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
            for i, name in enumerate(to):
                self._set(name, self._get(what, kind) >> _UNSIGNED[int(kind[1:]) // 8](each * i), mask, f"b{each}")
        elif isinstance(what, list):
            each = int(kind[1:]) // len(what)
            parts = [
                self._get(name, f"b{each}").astype(np.uint64) << np.uint64(each * i) for i, name in enumerate(what)
            ]
            self._set(to, np.bitwise_or.reduce(parts), mask, kind)
        else:
            self._set(to, self._get(what, kind), mask, kind)

    def _two(self, operation: Any, operands: Any, mask: Array, act: Callable[..., Any]) -> None:
        """Of two (or three) operands of one type; `wide`: a result of twice the size, `hi`: its upper half."""
        kind = operation[-1]
        to, *values = operands
        way = operation[1]
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
        done = act(*(self._get(v, k).astype(object) for v, k in zip(values, kinds, strict=True)))
        done = done >> size if way == "hi" else done
        bits = 2 * size if way == "wide" else size
        self._set(to, (done & ((1 << bits) - 1)).astype(np.uint64), mask, f"u{bits}")

    def _add(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, operator.add)

    def _sub(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, operator.sub)

    def _mul(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, operator.mul)

    def _mad(self, operation: Any, operands: Any, mask: Array) -> None:
        self._two(operation, operands, mask, lambda a, b, c: a * b + c)

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
        self._two(operation, operands, mask, np.fmax if operation[-1] == "f32" else np.maximum)

    def _bitwise(self, operation: Any, operands: Any, mask: Array) -> None:
        kind = operation[1]
        to, a, b = operands
        self._set(to, _BITWISE[operation[0]](self._get(a, kind), self._get(b, kind)), mask, kind)

    _and = _or = _xor = _bitwise

    def _not(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], ~self._get(operands[1], operation[1]), mask, operation[1])

    def _neg(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], -self._get(operands[1], operation[1]), mask, operation[1])

    def _shl(self, operation: Any, operands: Any, mask: Array) -> None:
        value = self._get(operands[1], operation[1]).astype(object) << self._get(operands[2], "u32").astype(object)
        self._set(operands[0], (value & 0xFFFFFFFFFFFFFFFF).astype(np.uint64), mask, operation[1])

    def _shr(self, operation: Any, operands: Any, mask: Array) -> None:
        value = self._get(operands[1], operation[1]).astype(object) >> self._get(operands[2], "u32").astype(object)
        self._set(operands[0], (value & 0xFFFFFFFFFFFFFFFF).astype(np.uint64), mask, operation[1].replace("s", "u"))

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
        done = _COMPARE[operation[1]](left, right) & (left == left) & (right == right)  # none holds of a NaN
        self._set(to, done, mask, "pred")

    def _selp(self, operation: Any, operands: Any, mask: Array) -> None:
        to, a, b, chosen = operands
        kind = operation[1]
        self._set(to, np.where(self._get(chosen, "pred"), self._get(a, kind), self._get(b, kind)), mask, kind)

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

    def _createpolicy(self, operation: Any, operands: Any, mask: Array) -> None:
        self._set(operands[0], self._all(0), mask)

    # memory

    def _where(self, operand: Any) -> Array:
        _, name, offset = operand
        return (self._bits(name).astype(np.int64) + offset).astype(np.int64)

    def _shared_at(self, addresses: Array, size: int, owner: Program | None = None) -> tuple[Any, Array]:
        program = owner or self
        at = addresses - (program._rank << RANK) - SHARED_BEGINS
        if at.min() < 0 or at.max() + size > len(program.shared):
            raise Wrong(f"shared memory from {at.min()} to {at.max() + size}, there are {len(program.shared)} bytes")
        return program.shared, at

    def _places(self, operation: Any, operand: Any, mask: Array, size: int) -> tuple[Any, Array]:
        addresses = self._where(operand)[mask]
        if (addresses % size).any():
            raise Wrong(f"{'.'.join(operation)}: not aligned to {size} bytes")
        if any(part.startswith("shared") for part in operation):
            return self._shared_at(addresses & 0xFFFFFFFF, size)
        return self._memory.at(addresses, size)

    def _ld(self, operation: Any, operands: Any, mask: Array) -> None:
        to, where, *_ = operands
        kind = operation[-1]
        if operation[1] == "param":
            self._set(to, self._all(self._arguments.get(where[1], 0)), mask, f"u{kind[1:]}")
            return
        if not mask.any():
            return
        names = to if isinstance(to, list) else [to]
        each = int(kind[1:]) // 8
        data, at = self._places(operation, where, mask, each * len(names))
        if data is self.shared:
            by = self._by[at[:, None] + np.arange(each * len(names))]
            if ((by != -1) & (by != np.flatnonzero(mask)[:, None])).any():
                raise Wrong("reads what another thread has copied, without a barrier")
            warps = self._stored_by[at[:, None] + np.arange(each * len(names))]
            if ((warps != -1) & (warps != np.flatnonzero(mask)[:, None] // 32)).any():
                raise Wrong("reads what another warp has stored, without a barrier")
        for i, name in enumerate(names):
            raw = data[at[:, None] + i * each + np.arange(each)].copy().view(_UNSIGNED[each])[:, 0]
            value = self._all(0)
            value[mask] = raw
            self._set(name, value, mask, f"u{8 * each}")

    def _st(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1] == "async":
            self._send(operands, mask)
            return
        where, what, *_ = operands
        if not mask.any():
            return
        names = what if isinstance(what, list) else [what]
        each = int(operation[-1][1:]) // 8
        data, at = self._places(operation, where, mask, each * len(names))
        for i, name in enumerate(names):
            raw = self._get(name, f"b{8 * each}")[mask]
            data[at[:, None] + i * each + np.arange(each)] = raw.view(np.uint8).reshape(-1, each)
            if data is self.shared:
                self._stored_by[at[:, None] + i * each + np.arange(each)] = np.flatnonzero(mask)[:, None] // 32

    def _cp(self, operation: Any, operands: Any, mask: Array) -> None:
        """cp.async: what is asked for is there when it has been waited for, for other threads behind a barrier."""
        if operation[2] == "commit_group":
            self._groups.append([])
            return
        if operation[2] == "wait_group":
            open_ = self._groups.pop()
            left = int(operands[0])
            arrived, self._groups = self._groups[: len(self._groups) - left], self._groups[len(self._groups) - left :]
            for data, places, bytes_, threads in itertools.chain(*arrived):
                data[places] = bytes_
                self._by[places] = threads[:, None]
            self._groups.append(open_)
            return
        to, where, whole, *rest = operands
        size = int(whole, 0)
        taken = self._get(rest[0], "u32") if rest else np.full(self._threads, size)
        if not mask.any():
            return
        if not set(taken[mask]) <= {0, size}:
            raise Wrong("copies a part of a load")
        data, at = self._places(("shared",), to, mask, size)
        bytes_ = np.zeros((len(at), size), np.uint8)
        some = mask & (taken > 0)
        if some.any():
            of, there = self._places(("global",), where, some, size)
            bytes_[some[mask]] = of[there[:, None] + np.arange(size)]
        places = at[:, None] + np.arange(size)
        data[places] = 0xFF  # until it has come
        self._groups[-1].append((data, places, bytes_, np.flatnonzero(mask)))

    def _atom(self, operation: Any, operands: Any, mask: Array) -> None:
        to, where, what = operands
        if operation[-2:] != ("add", "u32"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        value = self._all(0)
        for thread in np.flatnonzero(mask):
            only = np.arange(self._threads) == thread
            data, at = self._places(operation, where, only, 4)
            before = data[at[0] : at[0] + 4].view(np.uint32)
            value[thread] = before[0]
            before[0] += self._get(what, "u32")[thread]
        self._set(to, value, mask, "u32")

    # between threads

    def _by_lane(self, values: Array) -> Array:
        return values.reshape(-1, 32)

    def _shfl(self, operation: Any, operands: Any, mask: Array) -> None:
        to, what, way, *_ = operands
        lanes = np.broadcast_to(np.arange(32), (self._threads // 32, 32))
        chosen = self._by_lane(self._get(way, "u32")).astype(np.int64)
        taken = {"bfly": lanes ^ chosen, "idx": chosen % 32}[operation[2]]
        self._set(to, np.take_along_axis(self._by_lane(self._bits(what)), taken, 1).reshape(-1), mask, "u32")

    def _bar(self, operation: Any, operands: Any, mask: Array) -> None:
        self._by[:] = self._stored_by[:] = -1
        if operation[1:3] == ("red", "popc"):
            self._set(operands[0], self._all(int(self._get(operands[-1], "pred").sum())), mask, "u32")

    def _mma(self, operation: Any, operands: Any, mask: Array) -> None:
        """m16n8k16 (9.7.14.5.8): lane 4 g + t holds rows g and g + 8, values or columns 2 t and 2 t + 1.

        With sparse A m16n8k32 (9.7.14.6.2): of four values of a row side by side A has the two that four bits of a
        number name; those of the first 16 are with lanes t = 0, of the rest with t = 1, rows g + 8 in the higher half.
        """
        sparse = operation[1] == "sp_ordered_metadata"
        shape = operation[4] if sparse else operation[3]
        if shape != ("m16n8k32" if sparse else "m16n8k16") or operation[-6:-4] != ("row", "col"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        of = operation[-2]
        to, a, b, c = operands[:4]
        g, t = np.arange(32) // 4, np.arange(32) % 4
        warps = self._threads // 32
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 8 * len(b), 8))
        sums = np.zeros((warps, 16, 8))

        def halves(name: str) -> tuple[Array, Array]:
            bits = self._get(name, "b32")
            self._registers["$low"], self._registers["$high"] = bits.astype(np.uint64), (bits >> 16).astype(np.uint64)
            return self._by_lane(self._get("$low", of)), self._by_lane(self._get("$high", of))

        for i, name in enumerate(a):
            for j, half in enumerate(halves(name)):
                left[:, g + 8 * (i % 2), 2 * t + j + 8 * (i // 2)] = half
        for i, name in enumerate(b):
            for j, half in enumerate(halves(name)):
                right[:, 2 * t + j + 8 * i, g] = half
        for i, name in enumerate(c):
            sums[:, g + 8 * (i // 2), 2 * t + i % 2] = self._by_lane(self._get(name, "f32"))
        if sparse:
            left = self._spread(left, self._by_lane(self._get(operands[4], "b32")), operands[5])
        done = left @ right + sums
        for i, name in enumerate(to):
            self._set(name, done[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1), mask, "f32")

    def _spread(self, left: Array, where: Array, selector: str) -> Array:
        """[warp, 16 rows, 32 values] of the 16 that are not zero."""
        if selector not in ("0", "0x0"):
            raise Wrong(f"mma.sp: selector {selector} is not written")
        spread = np.zeros((len(left), 16, 32))
        for row, i in itertools.product(range(16), range(0, 16, 2)):
            bits = where[:, 4 * (row % 8) + i // 8] >> (16 * (row // 8) + 2 * (i % 8))
            first, second = bits & 3, bits >> 2 & 3
            if not (first < second).all():
                raise Wrong("mma.sp: values out of order")
            spread[np.arange(len(left)), row, 2 * i + first] = left[:, row, i]
            spread[np.arange(len(left)), row, 2 * i + second] = left[:, row, i + 1]
        return spread

    def _matrix(self, operation: Any, names: list[str], where: Any, mask: Array, *, load: bool) -> None:
        """ldmatrix, stmatrix (9.7.14.5.15): eight lanes after another have the rows of each 8 x 8 values of 16 bits."""
        rows = self._by_lane(self._where(where) & 0xFFFFFFFF)
        if (rows % 16).any():
            raise Wrong(f"{'.'.join(operation)}: not aligned to 16 bytes")
        transposed = "trans" in operation
        g, t = np.arange(32) // 4, np.arange(32) % 4
        for i, name in enumerate(names):
            data, at = self._shared_at(rows[:, 8 * i : 8 * i + 8], 16)
            places = at[:, :, None] + 2 * np.arange(8)  # [warps, row, column]
            if load and (self._by[places] != -1).any():
                raise Wrong("reads what another thread has copied, without a barrier")
            pairs = [(places[:, 2 * t + j, g] if transposed else places[:, g, 2 * t + j]) for j in (0, 1)]
            if load:
                low, high = (data[p].astype(np.uint64) | data[p + 1].astype(np.uint64) << np.uint64(8) for p in pairs)
                self._set(name, (low | high << np.uint64(16)).reshape(-1), mask, "b32")
            else:
                bits = self._by_lane(self._get(name, "b32"))
                for j, p in enumerate(pairs):
                    data[p] = (bits >> (16 * j)) & 0xFF
                    data[p + 1] = (bits >> (16 * j + 8)) & 0xFF

    def _ldmatrix(self, operation: Any, operands: Any, mask: Array) -> None:
        self._matrix(operation, operands[0], operands[1], mask, load=True)

    def _stmatrix(self, operation: Any, operands: Any, mask: Array) -> None:
        self._matrix(operation, operands[1], operands[0], mask, load=False)

    # between programs of a cluster

    def _barrier(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[:3] != ("barrier", "cluster", "arrive"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        if self.barrier.at is not None and not self.barrier.fenced:
            raise Wrong("others may see the barrier before it is set up")
        self.has_begun = True

    def _fence(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation != ("fence", "mbarrier_init", "release", "cluster"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        self.barrier.fenced = bool(mask.any())

    def _mbarrier(self, operation: Any, operands: Any, mask: Array) -> None:
        if mask.sum() != 1:
            raise Wrong(f"{'.'.join(operation)} by {mask.sum()} threads")
        begins = operation[1] == "init"
        at = int(self._where(operands[0] if begins else operands[1])[mask][0])
        self._shared_at(np.array([at]), 8)
        if begins:
            self.barrier = Barrier(at, arrivals=int(operands[1]))
        elif operation[:3] == ("mbarrier", "arrive", "expect_tx") and at == self.barrier.at and at % 8 == 0:
            self.barrier.size += int(self._get(operands[2], "u32")[mask][0])
            self.barrier.arrivals -= 1
        else:
            raise Wrong(f"{'.'.join(operation)}: another barrier, or not written")

    def _mapa(self, operation: Any, operands: Any, mask: Array) -> None:
        to, address, rank = operands
        inside = self._get(address, "u32") & np.uint32((1 << RANK) - 1)
        self._set(to, inside | self._get(rank, "u32") << np.uint32(RANK), mask, "u32")

    def _send(self, operands: Any, mask: Array) -> None:
        """st.async: values, one or two side by side, and their bytes to the barrier of the same program."""
        where, what, barrier = operands
        names = what if isinstance(what, list) else [what]
        to, barriers = self._where(where) & 0xFFFFFFFF, self._where(barrier) & 0xFFFFFFFF
        if (to[mask] % (4 * len(names))).any():
            raise Wrong("st.async: not aligned")
        for thread in np.flatnonzero(mask):
            owner = self._cluster[int(to[thread]) >> RANK]
            if not owner.has_begun:
                raise Wrong("sends to a program that has not begun")
            if int(barriers[thread]) != owner.barrier.at:
                raise Wrong("tells another barrier than that of the program it sends to")
            values = np.stack([self._get(name, "b32") for name in names], 1)[thread]
            data, at = self._shared_at(to[thread : thread + 1], 4 * len(names), owner)
            data[at[0] : at[0] + 4 * len(names)] = values.view(np.uint8)
            owner.barrier.size -= 4 * len(names)
