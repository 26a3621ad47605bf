"""Loads, stores, copies and what threads may read of shared memory: see ptx.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from ptx_code import (
    _ALL,
    _NOBODY,
    _UNSIGNED,
    RANK,
    SHARED_BEGINS,
    WARP,
    Array,
    Barrier,
    Copies,
    Memory,
    Wrong,
    _as_unsigned,
)
from ptx_registers import Registers


class MemoryAccess(Registers):
    """What reads and writes memory.  Raises Wrong where none was allotted, or a thread cannot know what is there."""

    _memory: Memory
    _arguments: dict[str, int]
    _cluster: list[Any]  # its thread blocks
    _copies: list[Copies]  # that have not come
    _closed: Array  # groups of copies, of each thread
    _by: Array  # threads whose copies have come since the last barrier
    _unseen: Array  # which warps may not read yet what was stored or has come
    shared: Array
    barriers: dict[int, Barrier]

    def _prefetch(self, operation: Any, operands: Any, mask: Array) -> None:
        for address in self._where(operands[0])[mask]:  # of what is there alone; lanes may ask for different tensors
            self._memory.at(address, 1)

    def _where(self, operand: Any) -> Array:
        _, name, offset = operand
        return (self._bits(name).astype(np.int64) + offset).astype(np.int64)

    def _shared_at(self, addresses: Array, size: int, owner: MemoryAccess | None = None) -> tuple[Any, Array]:
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

    def _have_come(self, barrier: Barrier, threads: Array, copies: list[Copies]) -> None:
        """What these threads have asked for is there, and they arrive."""
        for some in copies:
            places, _ = self._come(some, threads[some.threads])
            self._by[places] = -1
            self._unseen[places] = _ALL
            barrier.telling.append(places)
        barrier.arrive(int(threads.sum()))

    def _come(self, copies: Copies, which: Array) -> tuple[Array, Array]:
        """(places, threads) of those that had not come: now they are there."""
        now = which & ~copies.come
        copies.come |= now
        self.shared[copies.places[now]] = copies.data[now]
        return copies.places[now], copies.threads[now]

    def _barrier_at(self, addresses: Array) -> Barrier:
        at = {int(address) for address in addresses}
        if len(at) != 1 or not at <= set(self.barriers) or min(at) % 8:
            raise Wrong("waits at another barrier, or tells one")
        return self.barriers[at.pop()]

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
