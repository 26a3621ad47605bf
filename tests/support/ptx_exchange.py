"""What the threads of a thread block, and the blocks of a cluster, do together: see ptx.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_code import _COLUMNS_OF_SUMS, _NOBODY, _ROWS_OF_SUMS, RANK, WARP, Array, Barrier, Wrong, _places_of_mma
from ptx_memory import MemoryAccess


class Exchange(MemoryAccess):
    """Barriers, shuffles, products of matrices by warps, and what thread blocks of a cluster tell each other."""

    kind_of_barrier: type[Barrier] = Barrier
    may_wait_before_the_first = False  # for the phase before, which is over: what a ring's slots are free by
    _arrivals: Array  # of each thread, at the cluster's barrier
    _refused: Array  # threads that were told that a phase is not over

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
        rows, here = self._by_lane(self._where(where) & 0xFFFFFFFF), self._by_lane(mask).any(1)
        if not here.any():
            return
        rows = np.where(here[:, None], rows, rows[here.argmax()])  # a warp that is elsewhere has no addresses
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
                    data[p[here]] = ((bits >> (16 * j)) & 0xFF)[here]
                    data[p[here] + 1] = ((bits >> (16 * j + 8)) & 0xFF)[here]

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

    def _tell(self, barrier: Barrier, mask: Array) -> None:
        """What threads may read that arrive, those may that have waited."""
        new = np.flatnonzero(self._unseen)
        for warp in set(np.flatnonzero(mask) // WARP):
            barrier.telling.append(new[~self._is_unseen(new, np.full(1, warp))])

    def _mapa(self, operation: Any, operands: Any, mask: Array) -> None:
        to, address, rank = operands
        inside = self._get(address, "u32") & np.uint32((1 << RANK) - 1)
        self._set(to, inside | self._get(rank, "u32") << np.uint32(RANK), mask, "u32")

    def _looked_at(self, operands: Any, mask: Array) -> tuple[Barrier, bool]:
        """(barrier, whether its phase is over) of mbarrier.try_wait.parity."""
        barrier = self._barrier_at(self._where(operands[1])[mask])
        parity = {int(one) for one in self._get(operands[2], "u32")[mask]}
        if len(parity) != 1 or not parity <= {0, 1}:
            raise Wrong(f"waits for phases {parity}")
        if barrier.phase == 0 and 1 in parity and not self.may_wait_before_the_first:
            raise Wrong("waits for the phase before the first")
        return barrier, barrier.phase % 2 not in parity
