"""Runs a compiled kernel's PTX on the CPU, as far as our kernels use it, to see whether what they compute is right.

Triton's interpreter knows neither lanes nor PTX written inline; this reads the text that ptxas gets.
Written from the PTX ISA (8.7): what each instruction does, and which lane holds what of a matrix.  Threads at the same
step take it together, those furthest behind first; or warps take turns, and each goes as far as it can.  So a barrier
that is missing shows where something was copied (cp.async), stored or sent, and where a warp runs ahead of others.
Thread blocks of a cluster take turns where they wait for one another.  Memory that nobody has allotted may not be
touched, and what was never written is NaN.  ptx_cuda.py has what kernels in CUDA C++ use besides, ptx_tensor_maps.py
what those use that copy with TMA.  Here are the turns; ptx_code.py reads the text, and ptx_registers.py, ptx_memory.py
and ptx_exchange.py have the instructions.
"""

from __future__ import annotations

import itertools
import operator
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from ptx_code import (
    _BITWISE,
    _ENDED,
    _INTEGERS,
    _MOST,
    _STANDS,
    _TOGETHER,
    _TURN,
    _WAITING,
    _WAITS,
    _WHOLE,
    RANK,
    SHARED_BEGINS,
    WARP,
    Array,
    Barrier,
    Code,
    Copies,
    Memory,
    Step,
    Wrong,
    _acts_on_bits,
)
from ptx_exchange import Exchange

from gemmtuned.kernels.compile import compile_kernel
from gemmtuned.kernels.triton.launch import LaunchRecord


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


class ThreadBlock(Exchange):
    """One thread block of a grid.  Registers hold the bits of each thread's value.

    turns: threads of a turn; those of the first one go as far as they can, then the next.  last_first: from the end.
    """

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
