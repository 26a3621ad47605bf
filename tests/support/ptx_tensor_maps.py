"""Copies of boxes by tensor maps that a launch brings (TMA), in two dimensions, for one or more thread blocks.

Written from the PTX ISA (8.7): tensor maps (5.5.8), cp.async.bulk.tensor (9.7.9.27.1.2); and from the CUDA driver API:
cuTensorMapEncodeTiled.  A map's 128 bytes are opaque: they hold a mark, and what it is made of lies beside them
(ptx_code.Memory).  A box comes as late as may be, when a thread of the block that it goes to waits for it; what was
there before is gone, for everybody, as soon as it has been asked for.  ptx_order.py knows what it may not write over.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from ptx_code import _ALL, MAP_BYTES, MAP_MARK, RANK, WARP, Array, Barrier, Wrong
from ptx_order import Ordered

_SWIZZLED: Final = 128  # bytes of a row of a box, which is swizzled by so many


class TensorMaps(Ordered):
    """A thread block that copies boxes by maps of bytes, swizzled by 128, among its arguments."""

    def __init__(self, *rest: Any, **how: Any) -> None:
        super().__init__(*rest, **how)
        self.place(**{name: value for name, value in self._arguments.items() if value in self._memory.maps})

    def _cvta(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1:2] == ("param",):
            self._set(operands[0], self._get(operands[1], "u64"), mask)
        else:
            super()._cvta(operation, operands, mask)

    def _cp(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[2] != "bulk":
            super()._cp(operation, operands, mask)
            return
        plain = ("tensor", "2d", "shared_cluster", "global", "tile", "mbarrier_complete_tx_bytes")
        is_shared = operation[-1] == "multicast_cluster"
        if operation[3:] != (*plain, *(("multicast_cluster",) if is_shared else ())):
            raise Wrong(f"{'.'.join(operation)}: not written")
        for thread in np.flatnonzero(mask):
            to, (_, map_, coordinates), barrier, *blocks = operands
            k, row = (int(self._get(one, "s32")[thread]) for one in coordinates)
            address = int(self._get(map_, "u64")[thread])
            box = self._box(address, k, row)
            into, told = (int(self._where(one)[thread]) & 0xFFFFFFFF for one in (to, barrier))
            bits = int(self._get(blocks[0], "u16")[thread]) if is_shared else 1 << (into >> RANK)
            if into >> RANK != self._rank or told >> RANK != self._rank or bits == 0:
                raise Wrong("a box that goes to another thread block than this, or to none")
            for rank in (rank for rank in range(16) if bits >> rank & 1):
                self._ask_for(box, rank, into, told, int(thread) // WARP)

    def _box(self, address: int, k: int, row: int) -> Array:
        """[rows, bytes] of a box; zeros where the matrix has nothing."""
        of = self._memory.maps.get(address)
        if of is None:
            raise Wrong("copies by a map that is not there")
        data, at = self._memory.at(np.array([address]), MAP_BYTES)
        if (data[at[0] : at[0] + MAP_BYTES] != MAP_MARK).any():
            raise Wrong("copies by a map that has been written over")
        box = np.zeros((of.box_rows, _SWIZZLED), np.uint8)
        rows, columns = (np.arange(first, first + size) for first, size in zip((row, k), box.shape, strict=True))
        rows, columns = (one[(one >= 0) & (one < most)] for one, most in ((rows, of.rows), (columns, of.columns)))
        if len(rows) and len(columns):
            data, at = self._memory.at(of.address + rows[:, None] * of.stride + columns, 1)
            box[np.ix_(rows - row, columns - k)] = data[at]
        return box

    def _ask_for(self, box: Array, rank: int, into: int, told: int, warp: int) -> None:
        """A box for one thread block, at the same place in it as here."""
        owner = self._block_at(rank << RANK)
        assert isinstance(owner, TensorMaps)
        inside = (1 << RANK) - 1
        begin, barrier = (into & inside) | rank << RANK, owner.barriers.get(told & inside | rank << RANK)
        if barrier is None:
            raise Wrong("a box tells another place than a barrier")
        if begin % _SWIZZLED:
            raise Wrong("a box whose place is not aligned to 128 bytes")
        self._check_known(barrier, warp)
        address = begin + np.arange(box.shape[0])[:, None] * _SWIZZLED + np.arange(box.shape[1])
        address ^= (address >> 7 & 7) << 4
        _, places = self._shared_at(address, 1, owner)
        self._writes(owner, places, warp)
        owner.shared[places] = 0xFF  # until it has come
        owner._unseen[places] = _ALL
        barrier.coming.append(partial(owner._has_come, barrier, places, box))

    def _has_come(self, barrier: Barrier, places: Array, box: Array) -> None:
        self.shared[places] = box
        self._unseen[places] = _ALL
        barrier.telling.append(places)
        barrier.arrive(0, size=box.size)
