"""Who has done what before whom, between warps of a cluster whose thread blocks write into each other's shared memory.

Each warp counts its own steps, from barrier to barrier, and knows of each other warp up to which step it has come.  It
knows that by barriers alone: what a warp knew when it arrived, those know who have waited.  So a write shows whose
writer does not know that a read or a write of another warp is over, in whatever order they come here.  A barrier shows
as well that is used by who does not know it to be set up, and a thread block that leaves before it knows that nobody
arrives at its barriers any more.

Written from the PTX ISA (8.7): mbarrier (9.7.13.15), barrier.cluster (9.7.13.4), setmaxnreg (9.7.17.5).  What is stored
is seen as ptx.py has it.  An arrival at another thread block's barrier says what has been read, not what has been
stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from ptx import ThreadBlock
from ptx_code import RANK, WARP, Array, Barrier, Wrong
from ptx_warps import Warps

_MOST_BLOCKS: Final = 16  # of a cluster
_PIECE: Final = 16  # bytes of which a read is known
_UNDER_WAY: Final = 1 << 30  # a step that nobody knows to be over
_REGISTERS: Final = 1 << 16  # of a multiprocessor
_GROUP: Final = 128  # threads of a warp group


@dataclass
class OrderedBarrier(Barrier):
    """An mbarrier that also says what its arrivals had come after."""

    by: tuple[int, int] = (0, 0)  # (warp of the cluster, its step) that has set it up
    known: Array = field(default=0, repr=False)  # of each warp of the cluster, to who has waited for the last phase
    knowing: Array = field(default=0, repr=False)  # and to who waits for this one
    is_waited_for: bool = False  # somebody has
    sent: list[Array] = field(default_factory=list, repr=False)  # places that other thread blocks have stored to

    def arrive(self, times: int = 1, *, size: int = 0) -> None:
        before = self.phase
        super().arrive(times, size=size)
        if self.phase != before:
            self.known, self.knowing = self.knowing, np.zeros_like(self.knowing)

    def is_over(self) -> bool:
        """Nobody has to wait for it where nothing comes: a ring may have more slots than there are steps."""
        is_whole = self.arrivals == self.expected and self.size == 0
        return (is_whole or not self.is_waited_for) and not self.coming


class Ordered(Warps):
    """A thread block that knows what other warps of its cluster have read, and which registers its warps have."""

    kind_of_barrier = OrderedBarrier
    may_wait_before_the_first = True

    def __init__(self, code: Any, threads: int, *rest: Any, **how: Any) -> None:
        super().__init__(code, threads, *rest, **how)
        self._warps = threads // WARP
        self._first = self._rank * self._warps  # of its warps, in the cluster
        own = np.arange(self._warps)
        self._steps = np.zeros((self._warps, _MOST_BLOCKS * self._warps), np.int64)  # what each warp knows of all
        self._steps[own, self._first + own] = 1
        self._last_read = np.zeros((self._warps, -(-len(self.shared) // _PIECE)), np.int64)  # by each warp, its step
        self._is_barrier = np.zeros(self._last_read.shape[1], bool)
        self._met: dict[int, Array] = {}  # what those knew who have come to the cluster's barrier, by how many times
        self._told_by: list[tuple[int, int]] = []  # (warp of the cluster, its step) that has arrived here
        at_most = int(found[1]) if (found := re.search(r"\.maxntid (\d+)", code.head)) else threads
        self._at_launch = _REGISTERS // at_most // 8 * 8
        self._has = np.full(self._warps, self._at_launch)  # registers of each thread

    def run(self) -> Iterator[bool]:
        yield from super().run()
        if self._has.sum() > self._at_launch * self._warps:
            raise Wrong(f"warps wait for registers for ever: {self._has} for {self._at_launch} at the launch")

    def check_its_end(self) -> None:
        known = self._steps.max(0)
        for warp, step in self._told_by:
            if known[warp] < step:
                raise Wrong("leaves while another thread block may still arrive at its barrier")

    def _together(self, operation: Any) -> int | None:
        return _GROUP if operation[0] == "setmaxnreg" else super()._together(operation)

    def _warps_of(self, mask: Array) -> list[int]:
        return [int(warp) for warp in np.flatnonzero(mask.reshape(-1, WARP).any(1))]

    def _setmaxnreg(self, operation: Any, operands: Any, mask: Array) -> None:
        many, warps = int(operands[0]), self._warps_of(mask)
        grows = operation[1] == "inc"
        if many % 8 or not 24 <= many <= 256 or any((self._has[warp] < many) != grows for warp in warps):
            raise Wrong(f"setmaxnreg.{operation[1]} {many} of {self._has[warps]} registers")
        self._has[warps] = many

    # what a warp knows

    def _step_of(self, warp: int) -> int:
        return int(self._steps[warp, self._first + warp])

    def _arrives(self, warp: int) -> Array:
        """What this warp knows when it arrives somewhere; what it does from then on is of its next step."""
        knew = self._steps[warp].copy()
        self._steps[warp, self._first + warp] += 1
        return knew

    def _learns(self, warp: int, known: Array) -> None:
        np.maximum(self._steps[warp], known, out=self._steps[warp])

    def _check_known(self, barrier: Barrier, warp: int) -> None:
        """That this warp knows a barrier, of whichever thread block, to be there."""
        assert isinstance(barrier, OrderedBarrier)
        by, step = barrier.by
        if by != self._first + warp and self._steps[warp, by] < step:
            raise Wrong("uses a barrier that it does not know to be set up")

    def _bar(self, operation: Any, operands: Any, mask: Array) -> None:
        super()._bar(operation, operands, mask)
        if operation[1] != "warp":
            self._steps[:] = np.max([self._arrives(warp) for warp in range(self._warps)], 0)
            own = np.arange(self._warps)
            self._steps[own, self._first + own] += 1

    def _barrier(self, operation: Any, operands: Any, mask: Array) -> None:
        super()._barrier(operation, operands, mask)
        shared = self._cluster[0]
        assert isinstance(shared, Ordered)
        for warp in self._warps_of(mask):
            time = int(self._arrivals[warp * WARP])
            if operation[2] == "arrive":
                shared._met[time] = np.maximum(shared._met.get(time, 0), self._arrives(warp))
            else:
                self._learns(warp, shared._met[time])

    def _mbarrier(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[:3] == ("mbarrier", "arrive", "shared_cluster"):
            self._tell_others(self._where(operands[1]) & 0xFFFFFFFF, mask)
            return
        super()._mbarrier(operation, operands, mask)
        if not mask.any():
            return
        barrier = self._barrier_at(self._where(operands[0] if operation[1] == "init" else operands[1])[mask])
        assert isinstance(barrier, OrderedBarrier)
        for warp in self._warps_of(mask):
            if operation[1] == "init":
                barrier.by = (self._first + warp, self._step_of(warp))
                barrier.known = barrier.knowing = np.zeros(self._steps.shape[1], np.int64)
                _, at = self._shared_at(self._where(operands[0])[mask] & 0xFFFFFFFF, 8)
                self._is_barrier[at // _PIECE] = True
            elif operation[1] == "try_wait":
                barrier.is_waited_for = True
                self._check_known(barrier, warp)
                if not self._refused[mask].any():
                    self._learns(warp, barrier.known)
                    for places in () if "cluster" in operation else barrier.sent:  # it is told of its own block alone
                        self._unseen[places] |= np.uint32(1 << warp)

    def _tell(self, barrier: Barrier, mask: Array) -> None:
        super()._tell(barrier, mask)
        self._tell_of_reads(barrier, mask)

    def _tell_of_reads(self, barrier: Barrier, mask: Array) -> None:
        assert isinstance(barrier, OrderedBarrier)
        for warp in self._warps_of(mask):
            self._check_known(barrier, warp)
            barrier.knowing = np.maximum(barrier.knowing, self._arrives(warp))

    def _tell_others(self, addresses: Array, mask: Array) -> None:
        """mbarrier.arrive.shared::cluster: at barriers of any thread blocks of the cluster, others for each thread."""
        for address in sorted({int(one) for one in addresses[mask]}):
            owner = self._block_at(address)
            barrier = owner.barriers.get(address)
            if barrier is None:
                raise Wrong("arrives at another place than a barrier")
            some = mask & (addresses == address)
            owner._told_by += [(self._first + warp, self._step_of(warp)) for warp in self._warps_of(some)]
            self._tell_of_reads(barrier, some)
            barrier.arrive(int(some.sum()))

    def _block_at(self, address: int) -> Ordered:
        rank = address >> RANK
        if rank >= len(self._cluster):
            raise Wrong(f"there is no thread block {rank} in the cluster")
        owner = self._cluster[rank]
        assert isinstance(owner, Ordered)
        if owner.has_ended:
            raise Wrong("sends to a thread block that has ended")
        return owner

    # what is read and written

    def _reads(self, warp: int, places: Array, *, is_over: bool = True) -> None:
        self._last_read[warp, places.reshape(-1) // _PIECE] = self._step_of(warp) if is_over else _UNDER_WAY

    def _writes(self, owner: ThreadBlock, places: Array, warp: int) -> None:
        """That this warp may write to these places in the shared memory of a thread block, as far as it knows."""
        assert isinstance(owner, Ordered)
        pieces = np.unique(places // _PIECE)
        if owner._is_barrier[pieces].any():
            raise Wrong("writes over a barrier")
        last = owner._last_read[:, pieces].max(1)
        known = self._steps[warp, owner._first :][: owner._warps].copy()
        if owner is self:
            known[warp] = _UNDER_WAY - 1  # its own reads have their values, but for products
        if (last > known).any():
            raise Wrong("writes to what others may still read or write")

    def _ld(self, operation: Any, operands: Any, mask: Array) -> None:
        super()._ld(operation, operands, mask)
        if operation[1].startswith("shared") and mask.any():
            names = len(operands[0]) if isinstance(operands[0], list) else 1
            size = int(operation[-1][1:]) // 8 * names
            for warp, places in self._by_warps(operation, operands[1], mask, size):
                self._reads(warp, places)

    def _st(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1].startswith("shared") and mask.any():
            names = len(operands[1]) if isinstance(operands[1], list) else 1
            size = int(operation[-1][1:]) // 8 * names
            for warp, places in self._by_warps(operation, operands[0], mask, size):
                self._writes(self, places, warp)
                self._reads(warp, places)  # others may not write there either
        super()._st(operation, operands, mask)

    def _by_warps(self, operation: Any, where: Any, mask: Array, size: int) -> Iterator[tuple[int, Array]]:
        """(warp, places of its bytes), of which any in a piece stands for it."""
        for warp in self._warps_of(mask):
            some = mask & (np.arange(self._threads) // WARP == warp)
            _, at = self._places(operation, where, some, size)
            yield warp, (at[:, None] + np.arange(0, size, min(size, _PIECE))).reshape(-1)

    def _send(self, operands: Any, mask: Array) -> None:
        where, what, told_at = operands
        to, barriers = self._where(where) & 0xFFFFFFFF, self._where(told_at) & 0xFFFFFFFF
        size = 4 * (len(what) if isinstance(what, list) else 1)
        for warp in self._warps_of(mask):
            some = mask & (np.arange(self._threads) // WARP == warp)
            for rank in sorted({int(one) for one in to[some] >> RANK}):
                owner = self._block_at(rank << RANK)
                there = some & (to >> RANK == rank)
                _, at = self._shared_at(to[there], size, owner)
                self._writes(owner, at, warp)
                for address in {int(one) for one in barriers[there]} & set(owner.barriers):
                    barrier = owner.barriers[address]
                    assert isinstance(barrier, OrderedBarrier)
                    self._check_known(barrier, warp)
                    barrier.sent.append((at[:, None] + np.arange(size)).reshape(-1))
        super()._send(operands, mask)

    def _cp(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[2] in ("ca", "cg") and mask.any():
            for warp, places in self._by_warps(("shared",), operands[0], mask, int(operands[2], 0)):
                self._writes(self, places, warp)
        super()._cp(operation, operands, mask)

    def _begin(self, operation: Any, operands: Any, warp: int) -> None:
        super()._begin(operation, operands, warp)
        product = self._under_way[warp][-1][-1]
        for places in (product.a, product.b):
            self._reads(warp, places, is_over=False)

    def _finish(self, warp: int, but: int) -> None:
        before = self._under_way[warp]
        super()._finish(warp, but)
        for group in before[: len(before) - len(self._under_way[warp])]:
            for one in group:
                self._reads(warp, one.a)
                self._reads(warp, one.b)
