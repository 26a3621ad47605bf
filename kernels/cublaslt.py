"""NVIDIA's cuBLASLt, bound with ctypes for the worker: which algorithms there are, and running one of them.

The only Python file that calls it (running programs call it from hooks/native/cublaslt.h).  It is the library that
torch has loaded, so what is measured is what programs have.  Enumerations are those of cublasLt.h, whose documentation
is https://docs.nvidia.com/cuda/cublas/#cublaslt-datatypes-reference.

cuBLASLt thinks in columns: Y[M, N] in rows is a column-major [N, M], so its A is our [K, N] operand and its B our X.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_float, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem

DATA_TYPES: Final = {"fp32": 0, "fp16": 2, "bf16": 14}  # cudaDataType
POINTER_ALIGN: Final = 16  # bytes, promised to the heuristic
MAX_WORKSPACE_BYTES: Final = 32 << 20  # what torch allows on sm_90
COMPUTE_32F, COMPUTE_TF32 = 68, 77  # cublasComputeType_t
_EPILOGUE_BIAS: Final = 4
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS = 3, 4, 7, 8
_PREF_WORKSPACE, _PREF_REDUCTION, _PREF_ALIGN = 1, 3, (5, 6, 7, 8)
# How slices of K are added up, as a mask: in place (atomics, in the output's type), in fp32, in the output's type
_IN_PLACE, _COMPUTE_TYPE, _OUTPUT_TYPE = 1, 2, 4
_ASK: Final = 32  # algorithms a question; the library's answers end sooner
ATTRIBUTES: Final = {  # name: (attribute of an algorithm, its type); the names are those of our configs
    "algo": (0, c_int32), "tile": (1, c_uint32), "split": (2, c_int32), "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32), "custom": (5, c_uint32), "stages": (6, c_uint32), "inner": (7, c_uint16),
    "cluster": (8, c_uint16),
}  # fmt: skip


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of the library's algorithms.

    config: its attributes, by which people and the store know it.  data: the library's own 64 bytes, which its
    documentation allows to be kept and used again with the same version.
    """

    config: tuple[tuple[str, int], ...]
    data: bytes
    workspace_bytes: int


@cache
def library() -> Any | None:
    """The cuBLASLt that torch has loaded, or None."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.partition("/")
        if "libcublasLt.so" in path[2] and not path[2].endswith(" (deleted)"):  # replaced by an upgrade meanwhile
            lib = ctypes.CDLL("/" + path[2])
            lib.cublasLtGetVersion.restype = c_size_t
            return lib
    return None


def version() -> int | None:
    """The library's version, 130002 for 13.0.2; None without it."""
    lib = library()
    return None if lib is None else int(lib.cublasLtGetVersion())


def algorithms(problem: Problem) -> tuple[Algorithm, ...]:
    """What the library's heuristic offers for the problem on the current device, its favourites first.

    Asked with several limits of workspace and ways to reduce, because each question gets only some answers.
    Raises CandidateFailed when the library does not run the problem.
    """
    found: dict[bytes, Algorithm] = {}
    schemes = [_COMPUTE_TYPE]
    if problem.math_mode == "reduced":
        schemes.append(_OUTPUT_TYPE)
    if not problem.deterministic and (problem.math_mode == "reduced" or problem.dtype == "fp32"):
        schemes.append(_IN_PLACE)
    with _described(problem) as call:
        for mask in (sum(schemes), 0, *schemes):
            for workspace_bytes in (MAX_WORKSPACE_BYTES, 4 << 20, 0):
                for one in call.ask(mask, workspace_bytes):
                    found.setdefault(one.data, one)
    by_config: dict[object, Algorithm] = {}
    for one in found.values():
        by_config.setdefault(one.config, one)
    return tuple(by_config.values())


def check(problem: Problem, data: bytes) -> int:
    """Workspace bytes that an algorithm needs for this problem. Raises CandidateFailed when it cannot run it."""
    with _described(problem) as call:
        return call.check(data)


def matmul(
    problem: Problem, data: bytes, operands: tuple[int, int, int, int], ld: tuple[int, int], **space: int
) -> None:
    """Y = X @ W.T + bias on `stream`, by pointers (x, w, bias or 0, y) and leading dimensions of x and w in elements.

    space: `workspace` and `workspace_bytes`, `stream`.  Raises CandidateFailed when the library refuses.
    """
    x, w, bias, y = operands
    with _described(problem, bias=bias, ld=ld) as call:
        call.run(data, x, w, y, **space)


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    lib = library()
    if lib is None:
        raise CandidateFailed("torch has not loaded cuBLASLt")
    _must(lib.cublasLtCreate(byref(handle)), "cublasLtCreate")
    return handle


@dataclass(frozen=True, slots=True)
class _Call:
    """Descriptors of one problem, alive inside `_described`."""

    lib: Any
    handle: c_void_p
    desc: c_void_p
    a: c_void_p
    b: c_void_p
    d: c_void_p

    def ask(self, reduction_mask: int, workspace_bytes: int) -> Iterator[Algorithm]:
        preference = c_void_p()
        _must(self.lib.cublasLtMatmulPreferenceCreate(byref(preference)), "preference")
        try:
            settings: list[tuple[int, Any]] = [
                (_PREF_WORKSPACE, c_uint64(workspace_bytes)),
                (_PREF_REDUCTION, c_uint32(reduction_mask)),
            ]
            settings += [(which, c_uint32(POINTER_ALIGN)) for which in _PREF_ALIGN]
            for which, value in settings:
                self.lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, which, byref(value), c_size_t(ctypes.sizeof(value))
                )
            results = (_Heuristic * _ASK)()
            count = c_int32()
            # NOT_SUPPORTED is its way to say "none under these conditions"
            self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.desc, self.a, self.b, self.d, self.d, preference, _ASK, results, byref(count)
            )
            for result in results[: count.value]:
                if result.state == 0:
                    data = bytes(result.algo)
                    yield Algorithm(self._config(data), data, int(result.workspace_bytes))
        finally:
            self.lib.cublasLtMatmulPreferenceDestroy(preference)

    def _config(self, data: bytes) -> tuple[tuple[str, int], ...]:
        algo = (c_uint64 * 8).from_buffer_copy(data)
        found = []
        for name, (which, kind) in ATTRIBUTES.items():
            value, written = kind(), c_size_t()
            status = self.lib.cublasLtMatmulAlgoConfigGetAttribute(
                byref(algo), which, byref(value), c_size_t(ctypes.sizeof(value)), byref(written)
            )
            if status == 0:
                found.append((name, int(value.value)))
        return tuple(found)

    def check(self, data: bytes) -> int:
        algo = (c_uint64 * 8).from_buffer_copy(data)
        result = _Heuristic()
        _must(
            self.lib.cublasLtMatmulAlgoCheck(
                self.handle, self.desc, self.a, self.b, self.d, self.d, byref(algo), byref(result)
            ),
            "this algorithm",
        )
        return int(result.workspace_bytes)

    def run(self, data: bytes, x: int, w: int, y: int, *, workspace: int, workspace_bytes: int, stream: int) -> None:
        algo = (c_uint64 * 8).from_buffer_copy(data)
        one, zero = c_float(1), c_float(0)
        _must(
            self.lib.cublasLtMatmul(
                self.handle, self.desc, byref(one), c_void_p(w), self.a, c_void_p(x), self.b, byref(zero),
                c_void_p(y), self.d, c_void_p(y), self.d, byref(algo), c_void_p(workspace), c_size_t(workspace_bytes),
                c_void_p(stream),
            ),
            "cublasLtMatmul",
        )  # fmt: skip


@contextmanager
def _described(problem: Problem, *, bias: int = 0, ld: tuple[int, int] | None = None) -> Iterator[_Call]:
    """Descriptors of a problem with dense operands, or with leading dimensions `ld` of x and w."""
    import torch

    if problem.dtype not in DATA_TYPES or problem.layout not in ("nn", "nt", "tn", "tt"):
        raise CandidateFailed(f"{problem}: cuBLASLt is asked for fp32, fp16 and bf16 operands without gaps only")
    lib = library()
    if lib is None or not torch.cuda.is_available():
        raise CandidateFailed("cuBLASLt is not loaded in this process")
    handle = _handle(torch.cuda.current_device())
    kind = DATA_TYPES[problem.dtype]
    m, n, k = problem.m, problem.n, problem.k
    x_turned, w_turned = problem.layout[0] == "t", problem.layout[1] == "t"
    ldx, ldw = ld or (m if x_turned else k, k if w_turned else n)
    with ExitStack() as stack:

        def made(create: str, destroy: str, *arguments: Any) -> c_void_p:
            out = c_void_p()
            _must(getattr(lib, create)(byref(out), *arguments), create)
            stack.callback(getattr(lib, destroy), out)
            return out

        def layout(rows: int, columns: int, leading: int) -> c_void_p:
            sizes = (c_int32(kind), c_uint64(rows), c_uint64(columns), ctypes.c_int64(leading))
            return made("cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", *sizes)

        compute = COMPUTE_TF32 if problem.dtype == "fp32" and problem.math_mode == "tf32" else COMPUTE_32F
        desc = made("cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", c_int32(compute), c_int32(0))
        settings: list[tuple[int, Any]] = [
            (_DESC_TRANSA, c_int32(int(w_turned))),
            (_DESC_TRANSB, c_int32(int(x_turned))),
        ]
        if problem.bias:
            settings += [(_DESC_EPILOGUE, c_int32(_EPILOGUE_BIAS)), (_DESC_BIAS, c_void_p(bias))]
        for which, value in settings:
            size = c_size_t(ctypes.sizeof(value))
            _must(lib.cublasLtMatmulDescSetAttribute(desc, which, byref(value), size), "descriptor")
        a = layout(k, n, ldw) if w_turned else layout(n, k, ldw)
        b = layout(m, k, ldx) if x_turned else layout(k, m, ldx)
        yield _Call(lib, handle, desc, a, b, layout(n, m, n))


def _must(status: int, what: str) -> None:
    if status != 0:
        name = {
            3: "out of memory",
            7: "invalid value",
            8: "architecture mismatch",
            13: "execution failed",
            15: "not supported",
        }
        raise CandidateFailed(f"cuBLASLt refuses {what}: {name.get(status, 'status')} ({status})")
