"""Copies of boxes by tensor maps that a kernel makes itself (TMA), in two dimensions, for one or more thread blocks.

Written from the PTX ISA (8.7): tensor maps (5.5.8), tensormap.replace (9.7.9.28), tensormap.cp_fenceproxy
(9.7.13.16.4), cp.async.bulk.tensor (9.7.9.27.1.2).  A map's 128 bytes are opaque: they hold a mark, and its fields lie
beside them.  A box comes as late as may be, when a thread of the block that it goes to waits for it; what was there
before is gone, for everybody, as soon as it has been asked for.  ptx_order.py knows what it may not write over.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
from ptx_code import _ALL, RANK, WARP, Array, Barrier, Wrong
from ptx_order import Ordered

_MAP_BYTES: Final = 128
_MARK: Final = 0x5A  # each byte of a map that has fields
# fields by ordinal, with the only values that are written here: two dimensions, bytes, swizzled by 128, zeros outside
_FIELDS: Final = {
    "rank": {"": 1}, "elemtype": {"": 0}, "interleave_layout": {"": 0}, "swizzle_mode": {"": 3}, "fill_mode": {"": 0},
    "element_stride": {"0": 1, "1": 1},
}  # fmt: skip
_OTHER_FIELDS: Final = (
    ("global_address", ""), ("global_stride", "0"),
    *((name, ordinal) for name in ("box_dim", "global_dim") for ordinal in "01"),
)  # fmt: skip
_BOX_MOST: Final = 256  # elements of a dimension
_SWIZZLED: Final = 128  # bytes of a row of a box, when it is swizzled by so many
Fields = dict[tuple[str, str], int]


class TensorMaps(Ordered):
    """A thread block that makes maps of bytes, swizzled by 128, and copies boxes by them."""

    def __init__(self, *rest: Any, **how: Any) -> None:
        super().__init__(*rest, **how)
        self._maps: dict[int, Fields] = {}  # in shared memory, by place
        self._copied: dict[int, Fields] = {}  # in global memory, by address: those of this thread block
        self._acquired: set[tuple[int, int]] = set()  # (warp, address) of maps that it may use

    def _together(self, operation: Any) -> int | None:
        return WARP if operation[:2] == ("tensormap", "cp_fenceproxy") else super()._together(operation)

    def _tensormap(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1] == "cp_fenceproxy":
            self._copy_map(operands, mask)
            return
        if operation[1:3] != ("replace", "tile") or operation[4:6] != ("shared_cta", "b1024"):
            raise Wrong(f"{'.'.join(operation)}: not written")
        if not mask.any():
            return
        where, *ordinal, what = operands
        value = self._get(what, operation[-1].replace("b", "u"))[mask]
        at = self._map_at(where, mask)
        if len(value) != 1:
            raise Wrong(f"{len(value)} threads replace a field of a map")
        for warp in self._warps_of(mask):
            if self._is_unseen(np.arange(at, at + _MAP_BYTES), np.full(1, warp)).any():
                raise Wrong("replaces a field of a map before others have cleared it")
            self._writes(self, np.arange(at, at + _MAP_BYTES), warp)
            self._reads(warp, np.arange(at, at + _MAP_BYTES))
        found = self.shared[at : at + _MAP_BYTES]
        if at not in self._maps and found.any():
            raise Wrong("replaces a field of a map that was never cleared")
        found[:] = _MARK
        self._maps.setdefault(at, {})[operation[3], ordinal[0] if ordinal else ""] = int(value[0])

    def _map_at(self, where: Any, mask: Array) -> int:
        addresses = set(self._where(where)[mask].tolist())
        if len(addresses) != 1 or min(addresses) % _MAP_BYTES:
            raise Wrong(f"a map at {addresses}, not aligned to {_MAP_BYTES} bytes or not one")
        _, at = self._shared_at(np.array(list(addresses)) & 0xFFFFFFFF, _MAP_BYTES)
        return int(at[0])

    def _copy_map(self, operands: Any, mask: Array) -> None:
        """From shared to global memory, by a warp, for the accelerator."""
        for warp in self._warps_of(mask):
            some = mask & (np.arange(self._threads) // WARP == warp)
            to, of = self._where(operands[0])[some], self._map_at(operands[1], some)
            if len(set(to.tolist())) != 1 or to[0] % _MAP_BYTES or operands[2] != str(_MAP_BYTES):
                raise Wrong("tensormap.cp_fenceproxy: other places, or not aligned to 128 bytes")
            fields = self._maps.get(of, {})
            _check_fields(fields)
            if (self.shared[of : of + _MAP_BYTES] != _MARK).any():
                raise Wrong("a map that has been written over")
            data, at = self._memory.at(to[:1], _MAP_BYTES)
            if (data[at[0] : at[0] + _MAP_BYTES] == _MARK).all():
                raise Wrong("a map where another thread block has one")
            data[at[0] : at[0] + _MAP_BYTES] = _MARK
            self._copied[int(to[0])] = dict(fields)
            self._acquired = {one for one in self._acquired if one[1] != to[0]}

    def _fence(self, operation: Any, operands: Any, mask: Array) -> None:
        if operation[1:4] != ("proxy", "tensormap_generic", "acquire"):
            super()._fence(operation, operands, mask)
            return
        for thread in np.flatnonzero(mask):
            address = int(self._where(operands[0])[thread])
            if address in self._copied:
                self._acquired.add((int(thread), address))

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
            box = self._box(address, k, row, thread)
            into, told = (int(self._where(one)[thread]) & 0xFFFFFFFF for one in (to, barrier))
            bits = int(self._get(blocks[0], "u16")[thread]) if is_shared else 1 << (into >> RANK)
            if into >> RANK != self._rank or told >> RANK != self._rank or bits == 0:
                raise Wrong("a box that goes to another thread block than this, or to none")
            for rank in (rank for rank in range(16) if bits >> rank & 1):
                self._ask_for(box, rank, into, told, int(thread) // WARP)

    def _box(self, address: int, k: int, row: int, thread: int) -> Array:
        """[rows, bytes] of a box; zeros where the matrix has nothing."""
        fields = self._copied.get(address)
        if fields is None or (thread, address) not in self._acquired:
            raise Wrong("copies by a map that is not there, or not known to be there")
        data, at = self._memory.at(np.array([address]), _MAP_BYTES)
        if (data[at[0] : at[0] + _MAP_BYTES] != _MARK).any():
            raise Wrong("copies by a map that has been written over")
        box = np.zeros((fields["box_dim", "1"], fields["box_dim", "0"]), np.uint8)
        rows = np.arange(row, row + box.shape[0])
        columns = np.arange(k, k + box.shape[1])
        rows, columns = (
            one[(one >= 0) & (one < fields["global_dim", ordinal])] for one, ordinal in ((rows, "1"), (columns, "0"))
        )
        if len(rows) and len(columns):
            places = fields["global_address", ""] + rows[:, None] * fields["global_stride", "0"] + columns
            data, at = self._memory.at(places, 1)
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


def _check_fields(fields: Fields) -> None:
    """Raise Wrong unless these are all fields of a map of a matrix of bytes, as far as it is written here."""
    expected = {(name, ordinal) for name, values in _FIELDS.items() for ordinal in values} | set(_OTHER_FIELDS)
    if set(fields) != expected:
        raise Wrong(f"fields of a map: {sorted(set(fields) ^ expected)} lack, or are not written")
    for name, values in _FIELDS.items():
        if any(fields[name, ordinal] != value for ordinal, value in values.items()):
            raise Wrong(f"{name} of a map: {[fields[name, ordinal] for ordinal in values]}: not written")
    if fields["global_address", ""] % 16 or fields["global_stride", "0"] % 16:
        raise Wrong("a matrix whose address, or whose distance of rows, is no multiple of 16")
    if fields["box_dim", "0"] != _SWIZZLED or not 1 <= fields["box_dim", "1"] <= _BOX_MOST:
        raise Wrong("a box that is too large, or not as wide as its swizzle")
    if not (fields["global_dim", "0"] and fields["global_dim", "1"]):
        raise Wrong("a map of nothing")
