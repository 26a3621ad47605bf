"""The text of a kernel's PTX as steps, memory, barriers, and what types and operands mean: see ptx.py."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from gemmtuned.configs.tensor_maps import ByteMatrix

MAP_BYTES, MAP_MARK = 128, 0x5A  # of a tensor map
SHARED_BEGINS = 1024  # on sm_90 and later: what lies before is the system's
RANK = 24  # bits of an address within one thread block's shared memory
WARP = 32
Array = Any  # of one value for each thread, or for each lane of each warp
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARE: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_BITWISE: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_WHOLE: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c
}  # fmt: skip
_ROUNDED_ONCE = {operator.add, operator.sub, operator.mul, np.fmin, np.fmax}  # in fp64 and then to fp32, too
_INTEGERS = {f"{sign}{size}" for sign in "us" for size in (16, 32, 64)}
_CONVERTED = _INTEGERS | {"f32", "f16", "bf16"}
_MOST = 100_000  # instructions of a thread block
_TOGETHER = {"bar": 0} | dict.fromkeys(("barrier", "mma", "shfl", "ldmatrix", "stmatrix"), WARP)  # threads, 0 for all
_WAITING = {"barrier", "mbarrier"}
_TURN, _WAITS, _STANDS, _ENDED = (1 << bit for bit in (32, 50, 51, 52))  # added to a thread's step: the least goes on
_UNWRITTEN = np.uint64(0xFFFFFFFFFFFFFFFF)
_ALL = np.uint32(0xFFFFFFFF)  # a bit for each warp, and
_NOBODY = np.uint32(1 << 31)  # for what nobody has waited for
# of each register of sums of mma and each lane
_ROWS_OF_SUMS = np.arange(WARP) // 4 + np.array([0, 0, 8, 8])[:, None]
_COLUMNS_OF_SUMS = 2 * (np.arange(WARP) % 4) + np.array([0, 1, 0, 1])[:, None]


@cache
def _number(operand: str) -> int:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        return int(operand[2:], 16)
    try:
        return int(operand.removesuffix("U"), 0)
    except ValueError:
        raise Wrong(f"{operand}: read before it was written") from None


@cache
def _read(kind: str) -> tuple[Any, Any]:
    """What the bits of a register are cut to and then read as, for a type; None for what they are."""
    size = _size(kind)
    seen = {"f32": np.float32, "s16": np.int16, "s32": np.int32, "s64": np.int64}.get(kind)
    return None if size == 8 else _UNSIGNED[size], seen


@cache
def _size(kind: str) -> int:
    """Bytes."""
    return int(re.sub(r"\D+", "", kind)) // 8


@cache
def _cut(kind: str) -> Any:
    """The bits that a type has, of 64."""
    return np.uint64((1 << 8 * _size(kind)) - 1)


@cache
def _places_of_mma(each: int, more: int, many: int, warps: int) -> tuple[Array, Array, Array]:
    """Of an mma with so many values a register: where A [16, K], B [K, 8] and the sums [16, 8] of each warp are.

    Places count registers, threads, values in turn. more: fours of registers that A has. many: registers of B.
    """
    row, column, k = np.arange(16)[:, None], np.arange(8), np.arange(4 * each * many)
    warp, threads = WARP * np.arange(warps)[:, None, None], WARP * warps
    lane_of_k, register_of_k, value_of_k = k % (4 * each) // each, k // (4 * each), k % each
    of_a = ((2 * register_of_k + row // 8) * threads + warp + row % 8 * 4 + lane_of_k) * each + value_of_k
    of_b = (register_of_k[:, None] * threads + warp + lane_of_k[:, None] + column * 4) * each + value_of_k[:, None]
    of_sums = (row // 8 * 2 + column % 2) * threads + warp + row % 8 * 4 + column // 2
    return of_a[:, :, : 8 * each * more], of_b, of_sums


def _as_unsigned(data: Array, size: int) -> Array:
    """Bytes as numbers of so many, but those at the end that make no whole one."""
    return data[: len(data) // size * size].view(_UNSIGNED[size])


def _acts_on_bits(act: Callable[..., Array], operands: list[str], kind: str) -> Callable[[Any, Array], None]:
    """A step that gives the lower bits of what `act` makes of all bits of its operands."""
    to, *names = operands
    cut = None if _size(kind) == 8 else _cut(kind)

    def step(block: Any, mask: Array) -> None:
        bits = act(*map(block._bits, names))
        block._put(to, bits if cut is None else bits & cut, mask)

    return step


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero."""
    return np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b))


class Wrong(AssertionError):
    """The kernel does what it may not, or what is not written here."""


class Memory:
    """The device's memory: tensors at addresses far apart; views of them are reached within their storage."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Any]] = []
        self._next = 1 << 20
        self.maps: dict[int, ByteMatrix] = {}  # tensor maps, by address

    def add(self, tensor: torch.Tensor) -> int:
        storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        begin = self._next
        self._parts.append((begin, storage.numpy()))
        self._next += (storage.numel() // 4096 + 2) * 4096
        return begin + tensor.storage_offset() * tensor.element_size()

    def add_map(self, of: ByteMatrix) -> int:
        """A tensor map of a matrix, whose `address` is its tensor. Its 128 bytes hold a mark: they are opaque."""
        if of.stride % 16 or of.stride < of.columns or not (of.rows and of.columns) or not 0 < of.box_rows <= 256:
            raise Wrong(f"the driver makes no map of {of}")
        matrix = of._replace(address=self.add(of.address))
        if matrix.address % 16:
            raise Wrong("a map of a matrix that is not aligned to 16 bytes")
        found = self.add(torch.full((MAP_BYTES,), MAP_MARK, dtype=torch.uint8))
        self.maps[found] = matrix
        return found

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
    """An mbarrier of a thread block (9.7.13.15)."""

    expected: int  # arrivals of a phase
    arrivals: int  # still to come in this one
    size: int = 0  # bytes still to come in this one
    phase: int = 0  # how many are over
    fenced: bool = False  # others may be told of it
    # what comes, each by a call, when somebody waits for it
    coming: list[Callable[[], None]] = field(default_factory=list, repr=False)
    # places in shared memory that those who waited may read, and that they may after this phase
    told: list[Array] = field(default_factory=list, repr=False)
    telling: list[Array] = field(default_factory=list, repr=False)

    def arrive(self, times: int = 1, *, size: int = 0) -> None:
        """That many arrivals, and bytes that have come (less than none: that are to come)."""
        self.arrivals -= times
        self.size -= size
        if self.arrivals < 0:
            raise Wrong("more arrivals than the barrier expects")
        if self.arrivals == 0 and self.size == 0:
            self.arrivals = self.expected
            self.phase += 1
            self.told, self.telling = self.telling, []

    def is_over(self) -> bool:
        return self.phase > 0 and self.arrivals == self.expected and self.size == 0 and not self.coming


@dataclass
class Copies:
    """What threads have asked for with one cp.async, a row of bytes each."""

    threads: Array
    groups: Array  # of each: how many it had closed
    places: Array  # in shared memory, [threads, bytes]
    data: Array
    come: Array  # those that are there


class Step(NamedTuple):
    """An instruction as `_abreast` takes it.  act: is given the thread block and a mask.  target: of a branch."""

    predicate: str  # with its !
    stops: bool  # it may wait, or end
    target: int | None
    act: Callable[[Any, Array], None]


class Code:
    """(predicate, operation, operands) of each instruction, in order; where each label stands."""

    def __init__(self, text: str) -> None:
        self.head = text[: text.index("{")]
        self.parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)\b", self.head)
        body = text[text.index("{") : text.index("\n}", text.index("{"))]  # blocks may stand behind the last ret
        body = re.sub(r"//.*|^\s*\.(?:loc|file|section|pragma)\b.*", "", body, flags=re.MULTILINE)
        body = re.sub(r"\.reg\s[^;]*;", "", body)
        self.static_bytes = 0  # of shared memory, for arrays with a name
        self.dynamic = re.findall(r"\.extern \.shared [^;]*?(\w+)\[\]", self.head)  # its name, where it has one
        self.steps: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self.plans: dict[type, list[Step | None]] = {}  # by kinds of thread blocks: what each step is for them
        self.labels: dict[str, list[int]] = {}
        for piece in body.split(";"):
            piece = re.sub(r"^[\s{}]+", "", piece)  # scopes; names in them are used anew
            while (label := re.match(r"(\$?\w+):(?!:)\s*", piece)) is not None:
                self.labels.setdefault(label[1], []).append(len(self.steps))
                piece = re.sub(r"^[\s{}]+", "", piece[label.end() :])
            if not piece.strip():
                continue
            if (array := re.match(r"\.shared \.align \d+ \.b(8|32) (\w+)\[(\d+)\]", piece)) is not None:
                self.steps.append(("", ("array",), [array[2], self.static_bytes]))
                self.static_bytes += -(-int(array[1]) // 8 * int(array[3]) // 128) * 128
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
    """Names and numbers, lists of them for {..}, [address] as ("[", name, offset), [map, {..}] as ("[", name, [..])."""
    found: list[Any] = []
    for piece in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}]+", text):
        if piece.startswith("{"):
            found.append([part.strip() for part in piece.strip("{} ").split(",")])
        elif piece.startswith("["):
            name, *coordinates = re.split(r"[,{}]+", piece.strip("[] ").replace(" ", ""))
            name, _, offset = name.partition("+")
            found.append(("[", name, [one for one in coordinates if one] or int(offset or "0", 0)))
        else:
            found.append(piece)
    return found
