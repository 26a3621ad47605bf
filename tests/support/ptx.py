"""Runs a compiled kernel's PTX on the CPU, as far as our kernels use it, to see whether what they compute is right.

Triton's interpreter knows neither lanes nor PTX written inline; this reads the text that ptxas gets.
Written from the PTX ISA (8.7): what each instruction does, and which lane holds what of a matrix.  Threads at the same
step take it together, those furthest behind first; or warps take turns, and each goes as far as it can.  So a barrier
that is missing shows where something was copied (cp.async), stored or sent, and where a warp runs ahead of others.
Thread blocks of a cluster take turns where they wait for one another.  Memory that nobody has allotted may not be
touched, and what was never written is NaN.  ptx_cuda.py has what kernels in CUDA C++ use besides, ptx_tensor_maps.py
what those use that copy with TMA.
"""

from __future__ import annotations

import itertools
import operator
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from gemmtuned.kernels.compile import compile_kernel
from gemmtuned.kernels.triton.launch import LaunchRecord

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

    def step(block: ThreadBlock, mask: Array) -> None:
        bits = act(*map(block._bits, names))
        block._put(to, bits if cut is None else bits & cut, mask)

    return step


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
    """Y [M, N] of the record's kernel, by all thread blocks in turn; partial sums are NaN before, counters zero."""
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
        cluster: list[ThreadBlock] = []
        for rank in range(record.cluster):
            at = (block_x * record.cluster + rank, block_y, z)
            block = ThreadBlock(code, threads, arguments, memory, rank, cluster, kernel.metadata.shared)
            size = (grid[0] * record.cluster, *grid[1:])
            block.place(**{f"%ctaid.{axis}": i for axis, i in zip("xyz", at, strict=True)})
            block.place(**{f"%nctaid.{axis}": i for axis, i in zip("xyz", size, strict=True)})
            cluster.append(block)
        run_together(cluster)
    if record.workspace_bytes and space[: record.counters_bytes].any():
        raise Wrong("counters are not zero after a launch")
    return y


def run_together(cluster: list[ThreadBlock]) -> None:
    """The thread blocks of a cluster in turns, to their end."""
    running = [block.run() for block in cluster]
    while running:
        went = [next(one, None) for one in running]
        if not any(one or one is None for one in went):
            raise Wrong("thread blocks of a cluster wait for ever")
        running = [one for one, how in zip(running, went, strict=True) if how is not None]
    barriers = [barrier for block in cluster for barrier in block.barriers.values()]
    if not all(barrier.is_over() for barrier in barriers):
        raise Wrong(f"what nobody waited for, or never came: {barriers}")
    for block in cluster:
        block.check_its_end()


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
        body = text[text.index("{") : text.rindex("ret;") + 4]
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


class ThreadBlock:
    """One thread block of a grid.  Registers hold the bits of each thread's value.

    turns: threads of a turn; those of the first one go as far as they can, then the next.  last_first: from the end.
    """

    kind_of_barrier: type[Barrier] = Barrier
    may_wait_before_the_first = False  # for the phase before, which is over: what a ring's slots are free by

    def __init__(
        self, code: Code, threads: int, arguments: list[int], memory: Memory, rank: int,
        cluster: list[ThreadBlock], shared_bytes: int, *, turns: int = 0, last_first: bool = False,
    ) -> None:  # fmt: skip
        self._code = code
        self._threads = threads
        self._arguments = dict(zip(code.parameters, arguments, strict=False))  # more of them are Triton's own, unused
        self._memory = memory
        self._cluster = cluster
        self._rank = rank
        self.shared = np.full(code.static_bytes + shared_bytes, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.has_ended = False
        self._arrivals = np.zeros(threads, np.int64)  # at the cluster's barrier
        self._refused = np.zeros(threads, bool)  # told that a phase is not over
        self._copies: list[Copies] = []  # that have not come
        self._closed = np.zeros(threads, np.int64)  # groups of copies
        self._by = np.full(len(self.shared), -1, np.int32)  # threads whose copies have come since the last barrier
        self._unseen = np.zeros(len(self.shared), np.uint32)  # which warps may not read yet what was stored or has come
        self._everyone = np.ones(threads, bool)
        self._methods: dict[str, Callable[..., None]] = {}  # methods by operations
        self._plan = code.plans.setdefault(type(self), [None] * len(code.steps))
        self._plain: dict[int, bool] = {}  # steps that each thread may take on its own
        lanes = np.arange(threads, dtype=np.uint64)
        turn = np.arange(threads) // (turns or threads)
        self._turn = (turn.max() - turn if last_first else turn) * _TURN
        here = (rank << RANK) + SHARED_BEGINS + code.static_bytes
        self._numbers_read: dict[str, Array] = {}  # those that stand in the text
        self._registers: dict[str, Array] = {
            "%tid.x": lanes, "%laneid": lanes % WARP, "%dynamic_smem_size": self._all(shared_bytes),
            "%cluster_ctarank": self._all(rank), **dict.fromkeys(code.dynamic, self._all(here)),
        }  # fmt: skip

    @property
    def begun(self) -> int:
        """How many times all of it has arrived at the cluster's barrier."""
        return int(self._arrivals.min())

    def place(self, **where: int) -> None:
        """Set registers that say which thread block this is."""
        self._registers |= {name: self._all(value) for name, value in where.items()}

    def check_its_end(self) -> None:
        """Raise Wrong where something is not as it has to be when all of the cluster has ended."""

    def run(self) -> Iterator[bool]:
        """Gives way where it waits for another thread block of its cluster, and says whether it has come on before."""
        place = np.zeros(self._threads, np.int64)
        held = np.zeros(self._threads, np.int64)
        has_moved = has_come_on = True
        for _ in range(_MOST):
            if not self._turn.any() and not held.any() and (place == place[0]).all():
                self._abreast(place)
            order = place + self._turn + held
            first = int(order.min())
            if first >= _ENDED:
                self.has_ended = True
                return
            if first >= _STANDS:
                name = ".".join(self._code.steps[place[order.argmin()]][1])
                raise Wrong(f"{name} by a part of the threads")
            if first >= _WAITS:
                if not has_moved:
                    yield has_come_on
                    has_come_on = False
                has_come_on |= has_moved
                has_moved = False
                held[:] = 0
                continue
            here = first % _TURN
            at = order == first
            if self._is_plain(here):
                place[at] += self._alone(here, at, order, first)
                has_moved = True
                continue
            predicate, operation, operands = self._code.steps[here]
            if (many := self._together(operation)) is not None:
                there = (place == here).reshape(-1, many or self._threads)
                all_there = there.all(1) & at.reshape(there.shape).any(1)
                held[at] = _STANDS
                at = np.repeat(all_there, there.shape[1])
                held[at] = 0
                if not at.any():
                    continue
            mask = self._mask(predicate) & at if predicate else at
            if operation[0] in _WAITING and mask.any() and self._has_to_wait(operation, operands, mask):
                held[at] = _WAITS
                continue
            has_moved = True
            place[at] += 1
            if operation[0] == "ret":
                place[mask] = _ENDED
            elif operation[0] == "bra":
                place[mask] = self._code.target(operands[0], here)
            else:
                self._step(operation)(operation, operands, mask)
        raise Wrong(f"a thread block of more than {_MOST} instructions")

    def _abreast(self, place: Array) -> None:
        """All threads from a step that they are all at, as long as they stay together and none has to wait or ends."""
        everyone, plan = self._everyone, self._plan
        here = int(place[0])
        for _ in range(_MOST):
            if here >= _ENDED:
                break
            predicate, stops, target, act = plan[here] or self._planned(here)
            if stops:
                break
            mask = self._mask(predicate) if predicate else everyone
            if target is None:
                act(self, mask)
                here += 1
            elif mask.all():
                here = target
            elif mask.any():
                place[:] = np.where(mask, target, here + 1)
                return
            else:
                here += 1
        place[:] = here

    def _planned(self, here: int) -> Step:
        predicate, operation, operands = self._code.steps[here]
        target = self._code.target(operands[0], here) if operation[0] == "bra" else None
        step = Step(
            predicate, operation[0] in _WAITING or operation[0] == "ret", target, self._act(operation, operands)
        )
        self._plan[here] = step
        return step

    def _act(self, operation: Any, operands: Any) -> Callable[[Any, Array], None]:
        """What a step does, for any thread block of this kind; what most steps are is spelled out."""
        kind = operation[-1]
        whole = _WHOLE.get(operation[0])
        if whole is not None and kind in _INTEGERS and (len(operation) == 2 or operation[1] == "lo"):
            return _acts_on_bits(whole, operands, kind)
        if operation[0] in _BITWISE and operation[1] != "pred":
            return _acts_on_bits(_BITWISE[operation[0]], operands, operation[1])
        if operation[0] == "shl" and operands[2].isdecimal() and int(operands[2]) < 64:
            by = np.uint64(int(operands[2]))
            return _acts_on_bits(lambda bits: bits << by, operands[:2], operation[1])
        if operation[0] == "mov" and operation[1] != "pred" and all(isinstance(one, str) for one in operands):
            return _acts_on_bits(operator.pos, operands, operation[1])
        return lambda block, mask: block._step(operation)(operation, operands, mask)

    def _is_plain(self, here: int) -> bool:
        """Whether each thread may take the step without the others, and goes on with the next one."""
        found = self._plain.get(here)
        if found is None:
            operation = self._code.steps[here][1]
            found = self._together(operation) is None and operation[0] not in (*_WAITING, "ret", "bra")
            self._plain[here] = found
        return found

    def _alone(self, here: int, at: Array, order: Array, first: int) -> int:
        """Plain steps of threads that are behind all others, until they are where others are; how many."""
        others = order[~at]
        most = min(int(others.min()) - first, _MOST) if len(others) else _MOST
        for taken in range(most):
            if not self._is_plain(here + taken):
                return taken
            predicate, _, _, act = self._plan[here + taken] or self._planned(here + taken)
            act(self, self._mask(predicate) & at if predicate else at)
        return most

    def _step(self, operation: Any) -> Callable[..., None]:
        step = self._methods.get(operation[0])
        if step is None:
            step = getattr(self, "_" + operation[0], None)
            if step is None:
                raise Wrong(f"{'.'.join(operation)}: not written")
            self._methods[operation[0]] = step
        return step

    def _together(self, operation: Any) -> int | None:
        """Threads beside each other that take it as one; 0 for all; None where each may on its own."""
        return _TOGETHER.get(operation[0])

    def _has_to_wait(self, operation: Any, operands: Any, mask: Array) -> bool:
        """Once it has been told that a phase is not over; copies come no sooner than they have to."""
        if operation[:3] == ("barrier", "cluster", "wait"):
            return min(block.begun for block in self._cluster) < int(self._arrivals[mask].max())
        if operation[:2] != ("mbarrier", "try_wait") or not self._refused[mask].all():
            return False
        barrier, is_over = self._looked_at(operands, mask)
        while not is_over and barrier.coming:
            barrier.coming.pop(0)()
            barrier, is_over = self._looked_at(operands, mask)
        return not is_over

    def _have_come(self, barrier: Barrier, threads: Array, copies: list[Copies]) -> None:
        """What these threads have asked for is there, and they arrive."""
        for some in copies:
            places, _ = self._come(some, threads[some.threads])
            self._by[places] = -1
            self._unseen[places] = _ALL
            barrier.telling.append(places)
        barrier.arrive(int(threads.sum()))

    def _looked_at(self, operands: Any, mask: Array) -> tuple[Barrier, bool]:
        """(barrier, whether its phase is over) of mbarrier.try_wait.parity."""
        barrier = self._barrier_at(self._where(operands[1])[mask])
        parity = {int(one) for one in self._get(operands[2], "u32")[mask]}
        if len(parity) != 1 or not parity <= {0, 1}:
            raise Wrong(f"waits for phases {parity}")
        if barrier.phase == 0 and 1 in parity and not self.may_wait_before_the_first:
            raise Wrong("waits for the phase before the first")
        return barrier, barrier.phase % 2 not in parity

    def _come(self, copies: Copies, which: Array) -> tuple[Array, Array]:
        """(places, threads) of those that had not come: now they are there."""
        now = which & ~copies.come
        copies.come |= now
        self.shared[copies.places[now]] = copies.data[now]
        return copies.places[now], copies.threads[now]

    # registers

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

    def _prefetch(self, operation: Any, operands: Any, mask: Array) -> None:
        for address in self._where(operands[0])[mask]:  # of what is there alone; lanes may ask for different tensors
            self._memory.at(address, 1)

    # memory

    def _where(self, operand: Any) -> Array:
        _, name, offset = operand
        return (self._bits(name).astype(np.int64) + offset).astype(np.int64)

    def _shared_at(self, addresses: Array, size: int, owner: ThreadBlock | None = None) -> tuple[Any, Array]:
        block = owner or self
        at = addresses - (block._rank << RANK) - SHARED_BEGINS
        if at.min() < 0 or at.max() + size > len(block.shared):
            raise Wrong(f"shared memory from {at.min()} to {at.max() + size}, there are {len(block.shared)} bytes")
        return block.shared, at

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
            self._may_read(at, each * len(names), mask)
        of_names = _as_unsigned(data, each)[at[None] // each + np.arange(len(names))[:, None]].astype(np.uint64)
        if mask is not self._everyone:
            of_all = np.zeros((len(names), self._threads), np.uint64)
            of_all[:, mask] = of_names
            of_names = of_all
        for name, value in zip(names, of_names, strict=True):
            self._put(name, value, mask)

    def _may_read(self, at: Array, size: int, mask: Array) -> None:
        """Raises Wrong where a thread reads what it cannot know to be there; from places aligned to so many bytes."""
        some = slice(int(at.min()), int(at.max()) + size)
        copied, stored = (self._by[some] != -1).any(), self._unseen[some].any()
        if not copied and not stored:
            return
        places, threads = at[:, None] + np.arange(size), np.flatnonzero(mask)[:, None]
        by = self._by[places]
        if ((by != -1) & (by != threads)).any():
            raise Wrong("reads what another thread has copied, without a barrier")
        if self._is_unseen(places, threads // WARP).any():
            raise Wrong("reads what others have stored, without a barrier")

    def _is_unseen(self, places: Array, warps: Array) -> Array:
        unseen = self._unseen[places]
        if not unseen.any():
            return unseen != 0
        return (unseen >> warps.astype(np.uint32) | unseen >> np.uint32(31)) & np.uint32(1) != 0

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
        places = at[None] // each + np.arange(len(names))[:, None]
        _as_unsigned(data, each)[places] = np.array([self._bits(name)[mask] for name in names]).astype(_UNSIGNED[each])
        if data is self.shared:
            own = np.uint32(1) << (np.flatnonzero(mask) // WARP).astype(np.uint32)
            self._unseen[at[:, None] + np.arange(each * len(names))] = (_ALL & ~_NOBODY & ~own)[:, None]

    def _cp(self, operation: Any, operands: Any, mask: Array) -> None:
        """cp.async: what is asked for is there when it has been waited for, for other threads behind a barrier."""
        if operation[2:5] == ("mbarrier", "arrive", "noinc"):
            if mask.any():
                barrier = self._barrier_at(self._where(operands[0])[mask])
                copies = [some for some in self._copies if not some.come.all()]
                barrier.coming.append(partial(self._have_come, barrier, mask, copies))
            return
        if operation[2] == "commit_group":
            self._closed[mask] += 1
            return
        if operation[2] == "wait_group":
            last = self._closed - int(operands[0])
            for some in self._copies:
                places, threads = self._come(some, mask[some.threads] & (some.groups < last[some.threads]))
                self._by[places] = threads[:, None]
                self._unseen[places] = 0
            self._copies = [some for some in self._copies if not some.come.all()]
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
        threads = np.flatnonzero(mask)
        self._copies.append(Copies(threads, self._closed[threads], places, bytes_, np.zeros(len(threads), bool)))

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
        taken = {"bfly": lanes ^ chosen % 32, "idx": chosen % 32}[operation[2]]
        self._set(to, np.take_along_axis(self._by_lane(self._bits(what)), taken, 1).reshape(-1), mask, "u32")

    def _bar(self, operation: Any, operands: Any, mask: Array) -> None:
        self._by[:] = -1
        self._unseen &= _NOBODY
        if operation[1:3] == ("red", "popc"):
            self._set(operands[0], self._all(int(self._get(operands[-1], "pred").sum())), mask, "u32")

    def _mma(self, operation: Any, operands: Any, mask: Array) -> None:
        """m16n8k16 (9.7.14.5.8): lane 4 g + t holds rows g and g + 8, values or columns 2 t and 2 t + 1.

        Of int8 m16n8k32 (9.7.14.5.10): the same with four values side by side, 4 t to 4 t + 3, and sums of 32 bits.
        With sparse A m16n8k32 (9.7.14.6.2): of four values of a row side by side A has the two that four bits of a
        number name; those of the first 16 are with lanes t = 0, of the rest with t = 1, rows g + 8 in the higher half.
        """
        sparse = operation[1] == "sp_ordered_metadata"
        shape = operation[4] if sparse else operation[3]
        of, each = operation[-2], 4 if operation[-2] == "s8" else 2
        if shape != ("m16n8k32" if sparse or each == 4 else "m16n8k16") or operation[-6:-4] != ("row", "col"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        to, a, b, c = operands[:4]
        of_a, of_b, of_sums = _places_of_mma(each, len(a) // 4, len(b), self._threads // WARP)
        left, right = (self._values(operation, names, of, places) for names, places in ((a, of_a), (b, of_b)))
        sums = self._summands(c, operation[-1]).reshape(-1)[of_sums]
        if sparse:
            left = self._spread(left, self._by_lane(self._get(operands[4], "b32")), operands[5])
        done = left @ right + sums
        if operation[-1] == "f32":  # all four registers at once, which is most of the time
            bits = done[:, _ROWS_OF_SUMS, _COLUMNS_OF_SUMS].astype(np.float32).view(np.uint32).astype(np.uint64)
            for i, name in enumerate(to):
                self._put(name, bits[:, i].reshape(-1), mask)
            return
        for i, name in enumerate(to):
            self._set(name, done[:, _ROWS_OF_SUMS[i], _COLUMNS_OF_SUMS[i]].reshape(-1), mask, operation[-1])

    def _summands(self, names: list[str], kind: str) -> Array:
        """[register, thread] of what is added to, in fp64."""
        if kind == "f32":
            return np.array([self._bits(name) for name in names]).astype(np.uint32).view(np.float32).astype(np.float64)
        return np.array([self._get(name, kind) for name in names], np.float64)

    def _values(self, operation: Any, names: list[str], of: str, places: Array) -> Array:
        """The values of registers of 32 bits that lie at these places, which count registers, threads, values."""
        read = np.array([self._bits(name) for name in names]).astype(np.uint32).reshape(-1)
        if of == "s8":
            return read.view(np.int8)[places].astype(np.float64)
        if of == "f16":
            return read.view(np.float16)[places].astype(np.float64)
        if of == "bf16":
            return (read.view(np.uint16)[places].astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        raise Wrong(f"{'.'.join(operation)}: not written")

    def _spread(self, left: Array, where: Array, selector: str) -> Array:
        """[warp, 16 rows, 32 values] of the 16 that are not zero."""
        if selector not in ("0", "0x0"):
            raise Wrong(f"mma.sp: selector {selector} is not written")
        row, i = np.arange(16)[:, None], np.arange(0, 16, 2)
        bits = where[:, 4 * (row % 8) + i // 8] >> (16 * (row // 8) + 2 * (i % 8)).astype(np.uint32)
        first, second = (bits & np.uint32(3)).astype(np.int64), (bits >> np.uint32(2) & np.uint32(3)).astype(np.int64)
        if not (first < second).all():
            raise Wrong("mma.sp: values out of order")
        spread = np.zeros((len(left), 16, 8, 4))
        np.put_along_axis(spread, first[..., None], left[:, :, 0::2, None], 3)
        np.put_along_axis(spread, second[..., None], left[:, :, 1::2, None], 3)
        return spread.reshape(len(left), 16, 32)

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

    # between thread blocks of a cluster

    def _barrier(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[:3] == ("barrier", "cluster", "wait"):
            return
        if operation[:3] != ("barrier", "cluster", "arrive"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        if not all(barrier.fenced for barrier in self.barriers.values()):
            raise Wrong("others may see the barrier before it is set up")
        self._arrivals[mask] += 1

    def _fence(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation != ("fence", "mbarrier_init", "release", "cluster"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        for barrier in self.barriers.values():
            barrier.fenced |= bool(mask.any())

    def _mbarrier(self, operation: Any, operands: Any, mask: Array) -> None:
        if not mask.any():
            return
        begins = operation[1] == "init"
        at = self._where(operands[0] if begins else operands[1])[mask]
        if begins or operation[:3] == ("mbarrier", "arrive", "expect_tx"):
            if mask.sum() != 1:
                raise Wrong(f"{'.'.join(operation)} by {mask.sum()} threads")
            value = int(self._get(operands[1 if begins else 2], "u32")[mask][0])
            if begins:
                self._shared_at(at, 8)
                self.barriers[int(at[0])] = self.kind_of_barrier(value, value)
            else:
                self._tell(self._barrier_at(at), mask)
                self._barrier_at(at).arrive(1, size=-value)
        elif operation[:2] == ("mbarrier", "arrive") and operation[2].startswith("shared"):
            self._tell(self._barrier_at(at), mask)
            self._barrier_at(at).arrive(int(mask.sum()))
        elif operation[:3] == ("mbarrier", "try_wait", "parity"):
            barrier, is_over = self._looked_at(operands, mask)
            if is_over:
                own = np.bitwise_or.reduce(np.uint32(1) << (np.flatnonzero(mask) // WARP).astype(np.uint32))
                for places in barrier.told:
                    self._unseen[places] &= ~(own | _NOBODY)
            self._refused[mask] = not is_over
            self._set(operands[0], self._all(is_over), mask, "pred")
        else:
            raise Wrong(f"{'.'.join(operation)}: not written")

    def _barrier_at(self, addresses: Array) -> Barrier:
        at = {int(address) for address in addresses}
        if len(at) != 1 or not at <= set(self.barriers) or min(at) % 8:
            raise Wrong("waits at another barrier, or tells one")
        return self.barriers[at.pop()]

    def _tell(self, barrier: Barrier, mask: Array) -> None:
        """What threads may read that arrive, those may that have waited."""
        new = np.flatnonzero(self._unseen)
        for warp in set(np.flatnonzero(mask) // WARP):
            barrier.telling.append(new[~self._is_unseen(new, np.full(1, warp))])

    def _mapa(self, operation: Any, operands: Any, mask: Array) -> None:
        to, address, rank = operands
        inside = self._get(address, "u32") & np.uint32((1 << RANK) - 1)
        self._set(to, inside | self._get(rank, "u32") << np.uint32(RANK), mask, "u32")

    def _send(self, operands: Any, mask: Array) -> None:
        """st.async: values, up to four side by side, and their bytes to a barrier of the same thread block."""
        where, what, told_at = operands
        names = what if isinstance(what, list) else [what]
        to, barriers = self._where(where) & 0xFFFFFFFF, self._where(told_at) & 0xFFFFFFFF
        if (to[mask] % (4 * len(names))).any():
            raise Wrong("st.async: not aligned")
        for rank in sorted({int(one) for one in to[mask] >> RANK}):
            owner = self._cluster[rank]
            some = mask & (to >> RANK == rank)
            if not owner.begun or owner.has_ended:
                raise Wrong(f"sends to a thread block that {'has ended' if owner.has_ended else 'has not begun'}")
            told = {int(one) for one in barriers[some]}
            if len(told) != 1 or not told <= set(owner.barriers):
                raise Wrong("tells another barrier than that of the thread block it sends to")
            data, at = self._shared_at(to[some], 4 * len(names), owner)
            places = at[:, None] + np.arange(4 * len(names))
            data[places] = np.stack([self._get(name, "b32")[some] for name in names], 1).view(np.uint8)
            owner._unseen[places] = _ALL
            barrier = owner.barriers[told.pop()]
            barrier.telling.append(places)
            barrier.arrive(0, size=places.size)
