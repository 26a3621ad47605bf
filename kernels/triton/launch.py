"""How a compiled kernel is launched: the record that travels from tuning to the program that calls it.

The native hook launches from this record alone, without Triton: grid from the shape, arguments by name in the
kernel's own order, one workspace.  Python launches the same compiled binary, so that what was measured and
checked is what is published.

The workspace is one buffer: COUNTERS_BYTES of counters (int32, one a tile of Y), then the partial sums (fp32, tile
after tile, in each the slices of K in order).  The counters must be zero before the first launch and each launch leaves
them zero.  They lie at the same offset of every kernel's workspace, so that launches that follow one another can share
one, whatever they are; launches that may run at the same time need a workspace each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gemmtuned.configs import launch as configs
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.own_kernel import COUNTERS_BYTES, PARAMETERS, check_plain_dense, rows_apart

MAX_GRID_YZ: Final = 65535
EXCHANGE_PAD: Final = 8  # values behind each line: what a warp sends at once lies in different banks
BARRIER_BYTES: Final = 16
SHARED_BEGINS: Final = 1024  # address of a thread block's shared memory from sm_90 on: the system's lies before


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the grid: ceil(size of `over` / block), or `block` itself when over is empty."""

    over: str  # "m", "n" or ""
    block: int

    def size(self, m: int, n: int) -> int:
        """Thread blocks, or clusters, along this axis for this shape."""
        if not self.over:
            return self.block
        return -(-(m if self.over == "m" else n) // self.block)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The sums of a tile that meet in the shared memory of a cluster (cluster.py).

    Each thread block sends `copies` of lines x wide fp32 values, and gets those of its own lines from all.  own: values
    that it keeps for itself, in front of those.
    """

    lines: int
    wide: int
    copies: int
    own: int = 0

    @property
    def values(self) -> int:
        """What a thread block sends."""
        return self.lines * self.wide * self.copies

    def bytes(self, split: int) -> int:
        """Bytes of shared memory per thread block in a cluster of `split`: for the sums, and for its barrier."""
        sent = -(-self.lines // split) * (self.wide + EXCHANGE_PAD) * split * self.copies
        return (sent + self.own) * 4 + BARRIER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """All that is needed to compile one candidate, and then to launch its binary.

    arguments: names of what the binary takes, in its order; `m`, `ldx`, `ldw` are int32 (leading dimensions in
    elements), the others pointers.
    types: of pointers that are not of `dtype`, by name.
    words: what each of them is, in the words of configs/launch.py.  conditions: on the operands; without any, those of
    rows_apart.
    ld_multiple: leading dimensions must be a multiple of this; pointers of POINTER_ALIGN bytes.
    cluster: thread blocks that a tile's slices of K are cut over in one cluster, along the grid's first axis, which
    then has that many times the thread blocks; 1 without.  exchange: what they send one another there.
    own_ptx: it has products or barriers written in PTX (mma.m16n8k16, bar.red).
    max_registers: per thread, for the compiler to keep to; 0: it chooses.
    counters_bytes: of the counters in use.  partials_offset, workspace_bytes: for an M up to `max_m`.
    """

    kernel: str
    dtype: str
    grid: tuple[Axis, Axis, Axis]
    num_warps: int
    num_stages: int
    constants: dict[str, int] = field(hash=False)
    arguments: tuple[str, ...]
    ld_multiple: int
    max_m: int
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    words: Mapping[str, str] = field(default_factory=lambda: PARAMETERS, hash=False)
    conditions: tuple[configs.Condition, ...] = ()
    cluster: int = 1
    exchange: Exchange | None = None
    own_ptx: bool = False
    max_registers: int = 0
    counters_bytes: int = 0
    partials_offset: int = 0
    workspace_bytes: int = 0

    @property
    def launch(self) -> configs.KernelLaunch:
        """The same in the words of configs/launch.py, but for what the compiler tells."""
        over = {"m": "x.size0", "n": "w.size0", "": ""}
        x, y, z = (configs.Axis(over[axis.over], axis.block) for axis in self.grid)
        return configs.KernelLaunch(
            shared=0, threads=32 * self.num_warps, cluster=self.cluster, grid=(x, y, z),
            arguments=tuple(self.words[name] for name in self.arguments),
            conditions=self.conditions or rows_apart(self.arguments, self.ld_multiple, self.max_m),
            counters_bytes=self.counters_bytes, partials_offset=self.partials_offset,
            workspace_bytes=self.workspace_bytes,
        )  # fmt: skip

    def grid_size(self, m: int) -> tuple[int, int, int]:
        """The launch grid for this many rows of X; along its first axis it counts clusters, where there are any."""
        n = self.constants["N"]
        x, y, z = (axis.size(m, n) for axis in self.grid)
        return x, y, z


def make_record(
    kernel: str,
    problem: Problem,
    *,
    grid: tuple[Axis, Axis, Axis],
    num_warps: int,
    num_stages: int,
    constants: dict[str, int],
    split: int,
    tile_values: int,
    drop: tuple[str, ...] = (),
    exchange: Exchange | None = None,
    own_ptx: bool = False,
    max_registers: int = 0,
) -> LaunchRecord:
    """LaunchRecord for a problem of layout nt; `drop` names arguments this kernel does not have.

    tile_values: values of Y a thread block makes, so the size of its partial sum.  exchange: None when slices of K meet
    in the workspace.

    Raises CandidateFailed when no kernel of ours can run the problem.
    """
    check_plain_dense(problem)
    m, n, k = problem.m, problem.n, problem.k
    x, y, z = (axis.size(m, n) for axis in grid)
    if y > MAX_GRID_YZ or z > MAX_GRID_YZ:
        raise CandidateFailed(f"{problem} {kernel}: grid {x}x{y}x{z} is larger than a device takes")
    most = configs.PORTABLE_CLUSTER
    if exchange and not 1 < split <= most:
        raise CandidateFailed(f"{problem} {kernel}: a cluster of {split} thread blocks, expected 2 to {most}")
    in_memory = split > 1 and not exchange
    absent = {*drop, *(() if problem.bias else ("bias",)), *(() if in_memory else ("partials", "counters"))}
    counters_bytes = 4 * x * z if in_memory else 0
    if counters_bytes > COUNTERS_BYTES:
        raise CandidateFailed(f"{problem} {kernel}: {x * z} tiles are too many to cut K")
    offset = COUNTERS_BYTES if in_memory else 0
    cluster = split if exchange else 1
    return LaunchRecord(
        kernel=kernel,
        dtype=problem.dtype,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        constants={"N": n, "K": k, **constants, "SPLIT": split, "CLUSTER": cluster},
        arguments=tuple(name for name in PARAMETERS if name not in absent),
        ld_multiple=min(8, k & -k),  # 8 values of 2 bytes are the widest load
        max_m=m,
        cluster=cluster,
        exchange=exchange,
        own_ptx=own_ptx,
        max_registers=max_registers,
        counters_bytes=counters_bytes,
        partials_offset=offset,
        workspace_bytes=offset + 4 * split * tile_values * x * z if in_memory else 0,
    )
