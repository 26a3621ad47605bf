"""What kernels in CUDA C++ use besides what ptx.py has: products of warp groups, and a launch with a grid of its own.

wgmma.mma_async (9.7.15): a warp has 16 of the 64 rows of A and of the sums; its group's other warps may be elsewhere.
It reads its operands when it begins and once more when it waits for the product, as late as may be: what is not there,
what it may not read yet, and what is not the same by then, is NaN in the sums.  Their registers hold NaN until then;
sums of int8, which has none, hold a number that is far from any sum, and it counts as NaN.
Proxies are not modelled: nothing here needs a fence between copies and products.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch
from fake_cuda_build import KEPT
from ptx import ThreadBlock, run_together
from ptx_code import _UNSIGNED, RANK, WARP, Array, Code, Memory, Wrong, _cut

from gemmtuned.configs.tensor_maps import ByteMatrix
from gemmtuned.kernels.cuda import nvrtc

_KEPT: Final = KEPT / "ptx"
_MOST_KEPT: Final = 2000
_SWIZZLE_128 = 1  # in the upper two bits of a descriptor
_POISON = {1: np.uint8(0xFF), 2: np.uint16(0xFFFF)}  # by bytes: NaN in all types of so many
_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "s8": 1}
_NO_SUM = -0x7ABCDEF1  # of int8


@dataclass(frozen=True)
class Launch:
    """Thread blocks along the grid's first two axes, clusters along the first; shared: bytes."""

    grid: tuple[int, int]
    threads: int
    shared: int
    cluster: int


def run(
    text: str,
    how: Launch,
    arguments: list[torch.Tensor | ByteMatrix | int],
    *,
    turns: int = 0,
    last_first: bool = False,
    kind: type[ThreadBlock] | None = None,
) -> None:
    """Every block of the kernel in this PTX, cluster after cluster; turns, last_first: as of ptx.ThreadBlock.

    kind: what knows the instructions, WarpGroups where it is None.
    """
    code = _code(text)
    _check_launch(code, how)
    memory = Memory()
    values = [_added(memory, one) for one in arguments]
    for y, first in itertools.product(range(how.grid[1]), range(0, how.grid[0], how.cluster)):
        cluster: list[ThreadBlock] = []
        for rank in range(how.cluster):
            block = (kind or WarpGroups)(
                code, how.threads, values, memory, rank, cluster, how.shared, turns=turns, last_first=last_first
            )
            block.place(**{"%ctaid.x": first + rank, "%ctaid.y": y, "%ctaid.z": 0})
            block.place(**{"%nctaid.x": how.grid[0], "%nctaid.y": how.grid[1], "%nctaid.z": 1})
            cluster.append(block)
        run_together(cluster[::-1] if last_first else cluster)


def _added(memory: Memory, argument: torch.Tensor | ByteMatrix | int) -> int:
    if isinstance(argument, torch.Tensor):
        return memory.add(argument)
    return memory.add_map(argument) if isinstance(argument, ByteMatrix) else argument


@lru_cache(8)  # a source may run on other operands, too
def compiled(source: str, arch: str) -> str:
    """Its PTX, which is kept by what it is made of: NVRTC takes 0.2 s of CPU time for each."""
    of = nvrtc.version() or ""
    key = sha256("\n".join((of, arch, *(nvrtc._options(of) if of else ()), source)).encode()).hexdigest()
    with suppress(OSError):
        return (_KEPT / key).read_text()
    text = nvrtc.ptx(source, arch)
    _KEPT.mkdir(parents=True, exist_ok=True)
    making = _KEPT / f"{key}-{os.getpid()}"
    making.write_text(text)
    making.rename(_KEPT / key)
    with suppress(OSError):  # another may have renamed or removed one
        names = sorted(_KEPT.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in names[: len(names) // 2] if len(names) > _MOST_KEPT else ():
            path.unlink()
    return text


_code = lru_cache(8)(Code)


def _check_launch(code: Code, how: Launch) -> None:
    most = re.search(r"\.maxntid (\d+)", code.head)
    cluster = re.search(r"\.reqnctapercluster (\d+)", code.head)
    if most is not None and how.threads > int(most[1]):
        raise Wrong(f"{how.threads} threads, compiled for {most[1]}")
    if how.cluster != (int(cluster[1]) if cluster else 1) or how.grid[0] % how.cluster:
        raise Wrong(f"a grid of {how.grid} in clusters of {how.cluster}, compiled for {cluster and cluster[1]}")


@dataclass
class Product:
    """A warp's part of a wgmma under way, and its operands as they were when it began."""

    sums: tuple[str, ...]
    adds: bool
    kind: str
    a: Array  # places of bytes, [16 rows, 32 bytes of K]
    b: Array  # [columns, 32 bytes of K]
    of_a: Array
    of_b: Array


class WarpGroups(ThreadBlock):
    """A thread block with wgmma: sums in fp32, of int8 in s32; operands in shared memory, K-major."""

    def __init__(self, code: Code, threads: int, *rest: Any, **how: Any) -> None:
        super().__init__(code, threads, *rest, **how)
        warps = range(threads // WARP)
        self._under_way: list[list[list[Product]]] = [[[]] for _ in warps]  # in groups, the last still open
        self._sums: list[dict[tuple[str, ...], Array]] = [{} for _ in warps]  # of those, [16, columns]
        self._begun: list[list[Any]] = [[] for _ in warps]  # all that warps of a group begin alike
        self._is_fenced = np.zeros(threads // WARP, bool)
        self._unwritten = self._all(-1)
        self._places_known: dict[tuple[int, int, int], Array] = {}  # by descriptor, rows, bytes of a value

    def run(self) -> Iterator[bool]:
        """As of ThreadBlock; its warp groups have begun each product as a whole."""
        yield from super().run()
        for warp, begun in enumerate(self._begun):
            if begun != self._begun[warp // 4 * 4]:
                raise Wrong("warps of a group multiply other things")

    def _together(self, operation: Any) -> int | None:
        return WARP if operation[0] == "wgmma" else super()._together(operation)

    def _wgmma(self, operation: Any, operands: Any, mask: Array) -> None:
        warps = np.flatnonzero(mask[::WARP])
        if operation[1] == "fence":
            self._is_fenced[warps] = True
        elif operation[1] == "commit_group":
            for warp in warps:
                self._under_way[warp].append([])
        elif operation[1] == "wait_group":
            for warp in warps:
                self._finish(warp, int(operands[0]))
        else:
            for warp in warps:
                self._begin(operation, operands, warp)

    def _begin(self, operation: Any, operands: Any, warp: int) -> None:
        kind = operation[-1]
        size = _BYTES.get(kind, 0)
        shape = re.fullmatch(rf"m64n(\d+)k{32 // size if size else 0}", operation[4])
        names, a, b, adds, *scales_and_transposed = operands
        int8 = kind == "s8"
        if shape is None or operation[-3:] != ("s32" if int8 else "f32", kind, kind):
            raise Wrong(f"{'.'.join(operation)}: not written")
        if int(shape[1]) % (8 if not int8 or int(shape[1]) in (8, 24) else 16) or not 8 <= int(shape[1]) <= 256:
            raise Wrong(f"{'.'.join(operation)}: there is no such size")
        expected = [] if int8 else ["1", "1", "0", "0"][: 2 * size]
        if scales_and_transposed != expected or len(names) != int(shape[1]) // 2:
            raise Wrong(f"{'.'.join(operation)} of {len(names)} sums, {scales_and_transposed}: not written")
        if not self._is_fenced[warp]:
            raise Wrong("a product without a fence before the first")
        of_warp = slice(warp * WARP, (warp + 1) * WARP)
        of_lanes = [self._get(one, "u64")[of_warp] for one in (a, b)]
        of_lanes.append(self._get(adds, "pred" if adds.startswith("%") else "u32")[of_warp])
        descriptor_a, descriptor_b, is_added = (int(one[0]) for one in of_lanes)
        if any((one != one[0]).any() for one in of_lanes):
            raise Wrong("lanes of a warp multiply other things")
        sums = tuple(names)
        if sums not in self._sums[warp]:
            if any(set(sums) & set(others) for others in self._sums[warp]):
                raise Wrong("sums of a product under way")
            self._sums[warp][sums] = self._taken(sums, warp, operation[-3], read=bool(is_added))
        self._begun[warp].append((operation, sums, descriptor_a, descriptor_b, is_added))
        places_a = self._places_of(descriptor_a, 64, size)[warp % 4 * 16 :][:16]
        places_b = self._places_of(descriptor_b, int(shape[1]), size)
        of_a, of_b = (self._seen(places, warp, size) for places in (places_a, places_b))
        self._under_way[warp][-1].append(Product(sums, bool(is_added), kind, places_a, places_b, of_a, of_b))

    def _places_of(self, descriptor: int, rows: int, size: int) -> Array:
        """[rows, 32 bytes of K, by value] of a matrix whose rows are 128 bytes, swizzled by 128, or not swizzled.

        Without it, 16 bytes of each of eight rows lie together.  The descriptor is that of 9.7.15.5.1.2.
        """
        found = self._places_known.get((descriptor, rows, size))
        if found is not None:
            return found
        begin, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        swizzle = descriptor >> 62
        if swizzle not in (0, _SWIZZLE_128) or descriptor >> 49 & 7 or (swizzle and begin & 0x380):
            raise Wrong(f"a matrix described by {descriptor:#x}: not written")
        row, byte = np.arange(rows)[:, None], np.arange(0, 32, size)
        if swizzle:
            address = begin + row // 8 * stride + row % 8 * 128 + byte
            address ^= (address >> 7 & 7) << 4
        else:
            to_next_16 = (descriptor >> 16 & 0x3FFF) << 4
            address = begin + row // 8 * stride + row % 8 * 16 + byte // 16 * to_next_16 + byte % 16
        _, at = self._shared_at(address + (self._rank << RANK), size)
        self._places_known[descriptor, rows, size] = at
        return at

    def _seen(self, places: Array, warp: int, size: int) -> Array:
        """Bits of the values of this size there, as far as this warp may know them."""
        bits = self.shared.view(_UNSIGNED[size])[places // size]
        unknown = self._is_unknown(places, warp)
        return np.where(unknown, _POISON[size], bits) if unknown.any() else bits

    def _is_unknown(self, places: Array, warp: int) -> Array:
        some = slice(int(places.min()), int(places.max()) + 1)
        if not (self._by[some] != -1).any() and not self._unseen[some].any():
            return np.False_
        return (self._by[places] != -1) | self._is_unseen(places, np.full(1, warp))

    def _finish(self, warp: int, but: int) -> None:
        """All groups of products of a warp but the last ones; sums with none left are in their registers."""
        groups = self._under_way[warp]
        many = max(len(groups) - 1 - but, 0)
        done, self._under_way[warp] = groups[:many], groups[many:]
        kinds = {one.sums: one.kind for one in itertools.chain(*done)}
        for one in itertools.chain(*done):
            a, b = (
                self._numbers(places, before, warp, one.kind)
                for places, before in ((one.a, one.of_a), (one.b, one.of_b))
            )
            sums = self._sums[warp]
            sums[one.sums] = a @ b.T + (sums[one.sums] if one.adds else 0)
        left = {one.sums for one in itertools.chain(*self._under_way[warp])}
        for names in set(self._sums[warp]) - left:
            self._given(names, warp, self._sums[warp].pop(names), "s32" if kinds[names] == "s8" else "f32")

    def _numbers(self, places: Array, before: Array, warp: int, kind: str) -> Array:
        size = _BYTES[kind]
        same = self._seen(places, warp, size) == before
        bits = np.where(same, before, _POISON[size])
        if kind == "s8":  # without a number that could stand for NaN
            return np.where(same & ~self._is_unknown(places, warp), bits.view(np.int8).astype(np.float64), np.nan)
        if kind == "e4m3":
            return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).double().numpy()
        if kind == "f16":
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)

    def _taken(self, names: tuple[str, ...], warp: int, kind: str, *, read: bool) -> Array:
        """[16, columns] of sums in registers, which hold NaN from then on; zeros where what they hold is not read."""
        sums = np.zeros((16, 2 * len(names)))
        own = slice(warp * WARP, (warp + 1) * WARP)
        if read:
            held = np.array([self._bits(name)[own] for name in names]).astype(np.uint32)
            if kind == "s32":
                whole = held.view(np.int32)
                sums[_places_in_sums(len(names))] = np.where(whole == _NO_SUM, np.nan, whole)
            else:
                sums[_places_in_sums(len(names))] = held.view(np.float32)
        self._fill(names, own, np.uint64((_NO_SUM if kind == "s32" else -1) & (1 << 64) - 1))
        return sums

    def _given(self, names: tuple[str, ...], warp: int, sums: Array, kind: str) -> None:
        values = sums[_places_in_sums(len(names))]
        if kind == "s32":
            bits = np.where(np.isnan(values), _NO_SUM, values).astype(np.int64).view(np.uint64) & _cut(kind)
        else:
            bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        self._fill(names, slice(warp * WARP, (warp + 1) * WARP), bits)

    def _fill(self, names: tuple[str, ...], own: slice, bits: Array) -> None:
        """The registers of one warp, [register, lane] or all alike; no array that was put is changed."""
        held = np.array([self._registers.get(name, self._unwritten) for name in names])
        held[:, own] = bits
        self._registers |= dict(zip(names, held, strict=True))


@cache
def _places_in_sums(many: int) -> tuple[Array, Array]:
    """(row, column) of each of so many sums and each lane: 9.7.15.5.1.1, matrix D."""
    i, lane = np.arange(many)[:, None], np.arange(WARP)
    return lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2
