"""cuBLASLt with an algorithm of our choice: torch takes the first one that its heuristic names, often not the fastest.

A solution is the algorithm itself (its attributes as config, the library's 64 bytes in the launch record), valid for
the library version that offered it.  Running programs call the library from the native hook, without Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition, LibraryLaunch
from gemmtuned.configs.problem import DTYPE_BYTES, Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import cublaslt, stamps
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.launched import bound

_FEW_M: Final = 64  # up to here the library's first choices, which are its own for the size, are enough
_Config = tuple[tuple[str, int], ...]
# By problem but for its M: every algorithm it was offered.  The first one of a config stands for it at all sizes, so
# that what is raced, checked and published is the same 64 bytes
_known: dict[tuple[Problem, _Config], cublaslt.Algorithm] = {}


@dataclass(frozen=True, slots=True)
class CublasLt:
    """Dense, added, batched and scaled products on NVIDIA GPUs, in any layout with unit strides."""

    name: str = "cublaslt"
    order: int = 50

    def stamps(self, device: Device) -> dict[str, str]:
        """The library's version and the architecture; none on a device that is not NVIDIA's."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """The library's own choice of algorithms for the current device, its favourites first."""
        try:
            found = _algorithms(problem)
        except CandidateFailed:
            return
        for config in dict.fromkeys(algorithm.config for algorithm in found):
            yield Candidate.of(self.name, **dict(config))

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed when the library does not know the algorithm, or it cannot run the problem."""
        algorithm = _find(candidate, problem)
        return _Chosen(problem, algorithm.data, cublaslt.check(problem, algorithm.data))

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes | None]:
        """As LaunchedBackend.launch_of; there is no binary: the library has it."""
        algorithm = _find(candidate, problem)
        return record_of(problem, algorithm.data, cublaslt.check(problem, algorithm.data)).text(), None


def record_of(problem: Problem, algo: bytes, workspace_bytes: int) -> LibraryLaunch:
    """The launch record of an algorithm for the problem and every smaller M."""
    p = problem
    first = 1 if p.family.startswith("batched") else 0  # axis of M and N
    multiple = _ld_multiple(p)
    conditions = [Condition(f"x.size{first}", "<=", p.m)]
    # X [M, K], W [N, K] and C [M, N]: the axis along which each lies without gaps
    units = {"x": p.layout[0] == "n", "w": p.layout[1] == "t", **({"c": True} if p.family.endswith("_add") else {})}
    for name, by_row in units.items():
        unit, lead = (first + 1, first) if by_row else (first, first + 1)
        apart = multiple if name != "c" else min(_most_apart(p.out_dtype), p.n & -p.n)
        conditions += [
            Condition(f"{name}.stride{unit}", "==", 1), Condition(f"{name}.stride{lead}", "%", apart),
            Condition(f"{name}.stride{lead}", ">=", f"{name}.size{unit}"),
            Condition(f"{name}.ptr", "%", cublaslt.POINTER_ALIGN),
            *([Condition(f"{name}.stride0", "%", apart)] if first else ()),
        ]  # fmt: skip
    if p.bias:
        conditions += [Condition("bias.stride0", "==", 1), Condition("bias.ptr", "%", cublaslt.POINTER_ALIGN)]
    scaled = p.scale != "none"
    if scaled:
        conditions += [*_of_scale("x", p.scale, p), *_of_scale("w", p.wscale, p)]
    return LibraryLaunch(
        library="cublaslt", algo=algo.hex(), layout=p.layout, compute=cublaslt.compute_of(p),
        types={"x": p.dtype, "w": p.wdtype, "y": p.out_dtype, "bias": p.out_dtype}, workspace_bytes=workspace_bytes,
        scale_x=p.scale if scaled else "", scale_w=p.wscale if scaled else "",
        fast=scaled and p.math_mode == "reduced", conditions=tuple(conditions),
    )  # fmt: skip


def _of_scale(operand: str, kind: str, problem: Problem) -> Iterator[Condition]:
    """How the library wants the scales of X [M, K] or W [N, K] to lie: cublasLt.h, cublasLtMatmulMatrixScale_t."""
    scale = f"scale_{operand}"
    yield Condition(f"{scale}.ptr", "%", cublaslt.POINTER_ALIGN)
    if kind == "tensor":
        yield Condition(f"{scale}.numel", "==", 1)
    elif kind == "row":
        yield Condition(f"{scale}.size0", "==", f"{operand}.size0")
        yield Condition(f"{scale}.contiguous", "==", 1)
    elif kind == "1x128":  # those of one block of K side by side
        yield Condition(f"{scale}.size0", "==", f"{operand}.size0")
        yield Condition(f"{scale}.stride0", "==", 1)
        yield Condition(f"{scale}.stride1", "==", f"{operand}.size0")
    else:  # 128x128: those of one row of blocks side by side, with room for a multiple of 4 of them
        yield Condition(f"{scale}.stride1", "==", 1)
        yield Condition(f"{scale}.stride0", "==", -(-problem.k // 512) * 4)


class _Chosen:
    """One algorithm; operands that it was not asked for go to torch, as they do in a running program."""

    def __init__(self, problem: Problem, data: bytes, workspace_bytes: int) -> None:
        self._problem, self._data, self._workspace_bytes = problem, data, workspace_bytes

    def bind(self, *weights: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        problem, data, size = self._problem, self._data, self._workspace_bytes

        def launch(operands: dict[str, Any]) -> None:
            x = operands["x"]
            space = torch.empty(size, dtype=torch.uint8, device=x.device)
            cublaslt.matmul(
                problem if x.shape[-2] == problem.m else problem.with_m(x.shape[-2]),
                data,
                {name: t for name, t in operands.items() if t is not None} | {"w": weights[0]},
                workspace=space.data_ptr(),
                workspace_bytes=size,
                stream=torch.cuda.current_stream().cuda_stream,
            )

        return bound(problem, weights, record_of(problem, data, size).conditions, launch)


def _ld_multiple(problem: Problem) -> int:
    """Leading dimensions keep this alignment in elements, which the heuristic saw: that of all dense operands."""
    most = _most_apart(problem.dtype)
    leading = [
        problem.m if problem.layout[0] == "t" else problem.k,
        problem.k if problem.layout[1] == "t" else problem.n,
    ]
    return min(most, *(size & -size for size in leading))


def _most_apart(dtype: str) -> int:
    return cublaslt.POINTER_ALIGN // int(DTYPE_BYTES[dtype])


@lru_cache(256)
def _algorithms(problem: Problem) -> tuple[cublaslt.Algorithm, ...]:
    cublaslt.check_problem(problem)
    found = (*cublaslt.algorithms(problem), *_of_other_sizes(problem))
    for algorithm in found:
        _known.setdefault((problem.with_m(1), algorithm.config), algorithm)
    return found


def _of_other_sizes(problem: Problem) -> Iterator[cublaslt.Algorithm]:
    """What the heuristic names for M near this one and this one can run, too: a handful of answers is all it gives."""
    if problem.m <= _FEW_M:
        return
    for m in (problem.m // 2, problem.m * 2, problem.m * 3 // 4):
        try:
            offered = cublaslt.algorithms(problem.with_m(m))
        except CandidateFailed:
            continue
        for algorithm in offered:
            try:
                workspace_bytes = cublaslt.check(problem, algorithm.data)
            except CandidateFailed:
                continue
            if workspace_bytes <= cublaslt.MAX_WORKSPACE_BYTES:  # the limit was asked for with the other M
                yield replace(algorithm, workspace_bytes=workspace_bytes)


def _find(candidate: Candidate, problem: Problem) -> cublaslt.Algorithm:
    """The algorithm with this config, offered for this problem or for another size of it."""
    try:
        wanted = json.loads(candidate.config)
        config = tuple((name, wanted[name]) for name in cublaslt.ATTRIBUTES if name in wanted)
    except (ValueError, TypeError) as err:
        raise CandidateFailed(f"{candidate}: its config is not a set of attributes") from err
    _algorithms(problem)
    found = _known.get((problem.with_m(1), config))
    if found is None:
        raise CandidateFailed(f"{candidate}: cuBLASLt {cublaslt.version()} does not offer it for {problem}")
    return found


CUBLASLT: Final = CublasLt()
BACKENDS: Final = (CUBLASLT,)
