"""cuBLASLt with an algorithm of our choice: torch takes the first one that its heuristic names, often not the fastest.

A solution is the algorithm itself (its attributes as config, the library's 64 bytes in the launch record), valid for
the library version that offered it.  Running programs call the library from the native hook, without Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import DTYPE_BYTES, Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import cublaslt
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import family_of

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
        version = cublaslt.version() if device.kind == "cuda" else None
        return {self.name: f"{version}/{device.arch}"} if version else {}

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
        if problem.family != "dense":
            raise CandidateFailed(f"{candidate}: {problem.family} products have no launch record yet")
        algorithm = _find(candidate, problem)
        facts = {
            "library": self.name,
            "algo": algorithm.data.hex(),
            "dtype": problem.dtype,
            "layout": problem.layout,
            "tf32": problem.dtype == "fp32" and problem.math_mode == "tf32",
            "max_m": problem.m,
            "workspace_bytes": cublaslt.check(problem, algorithm.data),
            "ld_multiple": _ld_multiple(problem),
            "pointer_align": cublaslt.POINTER_ALIGN,
        }
        return json.dumps(facts, sort_keys=True, separators=(",", ":")), None


class _Chosen:
    """One algorithm; operands that it was not asked for go to torch, as they do in a running program."""

    def __init__(self, problem: Problem, data: bytes, workspace_bytes: int) -> None:
        self._problem, self._data, self._workspace_bytes = problem, data, workspace_bytes
        family = family_of(problem)
        self._stock = family.default(problem)
        self._out = torch_dtype(problem.out_dtype)
        self._weights = [o.name for o in family.operands if o.weight]
        self._activations = [o.name for o in family.operands if not o.weight and not o.result]

    def bind(self, *weights: Tensor) -> Run:
        problem, data, size, names = self._problem, self._data, self._workspace_bytes, self._activations
        bound = dict(zip(self._weights, weights, strict=True))
        stock, w = self._stock.bind(*weights), weights[0]

        def run(*activations: Tensor | None) -> Tensor:
            tensors = {name: t for name, t in zip(names, activations, strict=True) if t is not None} | bound
            if not _takes(problem, tensors):
                return stock(*activations)
            x = tensors["x"]
            y = torch.empty((*x.shape[:-1], w.shape[-1]), dtype=self._out, device=x.device)
            space = torch.empty(size, dtype=torch.uint8, device=x.device)
            cublaslt.matmul(
                problem if x.shape[-2] == problem.m else problem.with_m(x.shape[-2]),
                data,
                tensors | {"y": y},
                workspace=space.data_ptr(),
                workspace_bytes=size,
                stream=torch.cuda.current_stream().cuda_stream,
            )
            return y

        return run


def _takes(problem: Problem, tensors: Mapping[str, Tensor]) -> bool:
    """Whether operands lie as the library was told when it named the algorithm."""
    multiple = _ld_multiple(problem)
    letters = {"x": problem.layout[0], "w": problem.layout[1], "c": "n"}
    for name, t in tensors.items():
        if t.data_ptr() % cublaslt.POINTER_ALIGN:
            return False
        if name == "bias" and t.stride(0) != 1:
            return False
        if name in letters:
            unit, lead = (-1, -2) if letters[name] == "n" else (-2, -1)
            if t.stride(unit) != 1 and t.shape[unit] > 1:
                return False
            if t.shape[lead] > 1 and (t.stride(lead) % multiple or t.stride(lead) < t.shape[unit]):
                return False
    return True


def _ld_multiple(problem: Problem) -> int:
    """Leading dimensions keep this alignment in elements, which the heuristic saw: that of all dense operands."""
    most = cublaslt.POINTER_ALIGN // int(DTYPE_BYTES[problem.dtype])
    leading = [
        problem.m if problem.layout[0] == "t" else problem.k,
        problem.k if problem.layout[1] == "t" else problem.n,
    ]
    return min(most, *(size & -size for size in leading))


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
