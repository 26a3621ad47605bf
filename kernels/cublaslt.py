"""NVIDIA's cuBLASLt, bound with ctypes for the worker: which algorithms there are, and running one of them.

Only this Python file calls it (running programs call it from hooks/native/cublaslt.h).  We use the library that torch
has loaded, so that we measure what programs run.  Enumerations are those of cublasLt.h, documented at
https://docs.nvidia.com/cuda/cublas/#cublaslt-datatypes-reference.

cuBLASLt is column-major: our row-major Y[M, N] is its [N, M], so its A is our [K, N] operand and its B our X.
Operands are named by their slots: x, w (as torch's calls take it, [K, N]), scale_x, scale_w, bias, c, y.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_float, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import is_int_product, widens

DATA_TYPES: Final = {
    "fp32": 0,
    "fp16": 2,
    "i8": 3,
    "i32": 10,
    "bf16": 14,
    "fp8_e4m3": 28,
    "fp8_e5m2": 29,
}  # cudaDataType
SCALE_MODES: Final = {"tensor": 0, "row": 3, "1x128": 4, "128x128": 5}  # cublasLtMatmulMatrixScale_t, sm_90's
POINTER_ALIGN: Final = 16  # bytes of alignment that we promise to the heuristic
MAX_WORKSPACE_BYTES: Final = 32 << 20  # what torch allows on sm_90
COMPUTES: Final = {"f32": 68, "i32": 72, "tf32": 77}  # cublasComputeType_t
_EPILOGUE_BIAS: Final = 4
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS = 3, 4, 7, 8
_DESC_SCALE_A, _DESC_SCALE_B, _DESC_FAST, _DESC_MODE_A, _DESC_MODE_B = 17, 18, 25, 31, 32
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6
_PREF_WORKSPACE, _PREF_REDUCTION, _PREF_ALIGN = 1, 3, (5, 6, 7, 8)
# Ways to add up slices of K, as a mask: in place (atomics, in the output's type), in fp32, in the output's type
_IN_PLACE, _COMPUTE_TYPE, _OUTPUT_TYPE = 1, 2, 4
_ASK: Final = 32  # algorithms per query; the library returns fewer
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
        if "libcublasLt.so" in path[2] and not path[2].endswith(" (deleted)"):  # an upgrade has replaced it
            lib = ctypes.CDLL("/" + path[2])
            lib.cublasLtGetVersion.restype = c_size_t
            return lib
    return None


def version() -> int | None:
    """The library's version, 130002 for 13.0.2; None without it."""
    lib = library()
    return None if lib is None else int(lib.cublasLtGetVersion())


def algorithms(problem: Problem) -> tuple[Algorithm, ...]:
    """The algorithms of the library's heuristic for the problem on the current device, the best first.

    We query it with several workspace limits and ways to reduce, because each query returns only some algorithms.
    Raises CandidateFailed when the library does not run the problem.
    """
    found: dict[bytes, Algorithm] = {}
    schemes = [_COMPUTE_TYPE]
    reduces = problem.math_mode == "reduced" and problem.scale == "none"  # for scaled products it means fast sums
    exact = is_int_product(problem)
    if reduces or exact:
        schemes.append(_OUTPUT_TYPE)
    if exact or (not problem.deterministic and (reduces or problem.dtype == "fp32")):
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


def matmul(problem: Problem, data: bytes, tensors: Mapping[str, Any], **space: int) -> None:
    """Y = X @ W.T with scales, bias or C as the problem has them, into tensors["y"] on `stream`.

    space: `workspace` and `workspace_bytes`, `stream`.  Raises CandidateFailed when the library refuses.
    """
    with _described(problem, tensors) as call:
        call.run(data, {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}, **space)


def compute_of(problem: Problem) -> str:
    """One of COMPUTES."""
    if is_int_product(problem):
        return "i32"
    return "tf32" if problem.dtype == "fp32" and problem.math_mode == "tf32" else "f32"


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
    c: c_void_p
    d: c_void_p
    number: type[c_float] | type[c_int32]  # what the library reads alpha and beta as

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
            # NOT_SUPPORTED means that there is none under these conditions
            self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.desc, self.a, self.b, self.c, self.d, preference, _ASK, results, byref(count)
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
                self.handle, self.desc, self.a, self.b, self.c, self.d, byref(algo), byref(result)
            ),
            "this algorithm",
        )
        return int(result.workspace_bytes)

    def run(self, data: bytes, at: Mapping[str, int], *, workspace: int, workspace_bytes: int, stream: int) -> None:
        algo = (c_uint64 * 8).from_buffer_copy(data)
        alpha, beta = self.number(1), self.number(1 if "c" in at else 0)
        _must(
            self.lib.cublasLtMatmul(
                self.handle, self.desc, byref(alpha), c_void_p(at["w"]), self.a, c_void_p(at["x"]), self.b, byref(beta),
                c_void_p(at.get("c", at["y"])), self.c, c_void_p(at["y"]), self.d, byref(algo), c_void_p(workspace),
                c_size_t(workspace_bytes), c_void_p(stream),
            ),
            "cublasLtMatmul",
        )  # fmt: skip


@contextmanager
def _described(problem: Problem, tensors: Mapping[str, Any] | None = None) -> Iterator[_Call]:
    """Descriptors of a problem with dense operands, or with these."""
    import torch

    check_problem(problem)
    lib = library()
    if lib is None or not torch.cuda.is_available():
        raise CandidateFailed("cuBLASLt is not loaded in this process")
    handle = _handle(torch.cuda.current_device())
    p, given = problem, tensors or {}
    with ExitStack() as stack:

        def made(create: str, destroy: str, *arguments: Any) -> c_void_p:
            out = c_void_p()
            _must(getattr(lib, create)(byref(out), *arguments), create)
            stack.callback(getattr(lib, destroy), out)
            return out

        def layout(name: str, dtype: str, rows: int, columns: int, turned: bool = False) -> c_void_p:
            """The library's layout of a matrix with this many rows, which are its columns."""
            rows, columns = (columns, rows) if turned else (rows, columns)
            leading, batch_stride = _distances(given.get(name), turned, rows, columns)
            sizes = (c_int32(DATA_TYPES[dtype]), c_uint64(columns), c_uint64(rows), ctypes.c_int64(leading))
            out = made("cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", *sizes)
            if p.batch > 1:
                set_(lib.cublasLtMatrixLayoutSetAttribute, out, _LAYOUT_BATCH_COUNT, c_int32(p.batch))
                set_(lib.cublasLtMatrixLayoutSetAttribute, out, _LAYOUT_BATCH_STRIDE, ctypes.c_int64(batch_stride))
            return out

        def set_(setter: Any, of: c_void_p, which: int, value: Any) -> None:
            _must(setter(of, which, byref(value), c_size_t(ctypes.sizeof(value))), "a descriptor")

        compute = compute_of(p)
        scale_type = DATA_TYPES["i32" if compute == "i32" else "fp32"]
        types = c_int32(COMPUTES[compute]), c_int32(scale_type)
        desc = made("cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", *types)
        for which, value in _settings(p, given):
            set_(lib.cublasLtMatmulDescSetAttribute, desc, which, value)
        x = layout("x", p.dtype, p.m, p.k, p.layout[0] == "t")
        w = layout("w", p.wdtype, p.k, p.n, p.layout[1] == "t")
        y = layout("y", p.out_dtype, p.m, p.n)
        c = layout("c", p.out_dtype, p.m, p.n) if p.family.endswith("_add") else y
        yield _Call(lib, handle, desc, w, x, c, y, c_int32 if compute == "i32" else c_float)


def check_problem(problem: Problem) -> None:
    """Raise CandidateFailed for problems that we do not run with the library."""
    p = problem
    if p.threads or p.weight_state != "plain" or p.layout not in ("nn", "nt", "tn", "tt"):
        raise CandidateFailed(f"{p}: cuBLASLt is asked for plain operands without gaps, on a GPU")
    if is_int_product(p):
        return
    if p.scale == "none":
        known = p.family in ("dense", "dense_add", "batched", "batched_add") and p.dtype in ("fp32", "fp16", "bf16")
        if not known or not (p.dtype == p.wdtype == p.out_dtype or widens(p)):
            raise CandidateFailed(f"{p}: cuBLASLt is asked for dense and batched products of fp32, fp16 or bf16")
    elif (
        p.family != "scaled"
        or p.dtype == "i8"
        or p.layout != "nt"
        or p.scale not in SCALE_MODES
        or p.wscale not in SCALE_MODES
    ):
        raise CandidateFailed(
            f"{p}: cuBLASLt is asked for scaled products of fp8 of layout nt, scales {list(SCALE_MODES)}"
        )
    elif not (_is_read(p.scale, p.scale_layout, p.m, p.k) and _is_read(p.wscale, p.wscale_layout, p.n, p.k)):
        raise CandidateFailed(f"{p}: cuBLASLt reads scales of blocks that lie otherwise")


def _is_read(scale: str, lies: str, rows: int, k: int) -> bool:
    """Whether the library reads scales with this layout: 1x128 column by column, 128x128 in rows of a multiple of 4."""
    if scale == "1x128":
        return rows == 1 or lies == "col"
    if scale == "128x128":
        return rows <= 128 or lies == "row_padded" or (lies == "row" and -(-k // 128) % 4 == 0)
    return True


def _settings(p: Problem, given: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Attributes of the product; of what is not given the address is one that is aligned as theirs will be."""

    def address(name: str) -> c_void_p:
        return c_void_p(given[name].data_ptr() if given.get(name) is not None else 256)

    yield _DESC_TRANSA, c_int32(int(p.layout[1] == "t"))
    yield _DESC_TRANSB, c_int32(int(p.layout[0] == "t"))
    if p.bias:
        yield _DESC_EPILOGUE, c_int32(_EPILOGUE_BIAS)
        yield _DESC_BIAS, address("bias")
    if p.scale != "none":
        for mode, scale in ((_DESC_MODE_A, p.wscale), (_DESC_MODE_B, p.scale)):
            if SCALE_MODES[scale]:  # older libraries have no modes, only one scale per tensor
                yield mode, c_int32(SCALE_MODES[scale])
        yield _DESC_SCALE_A, address("scale_w")
        yield _DESC_SCALE_B, address("scale_x")
        if p.math_mode == "reduced":
            yield _DESC_FAST, ctypes.c_int8(1)


def _distances(t: Any | None, turned: bool, rows: int, columns: int) -> tuple[int, int]:
    """(elements from row to row, from matrix to matrix of a batch); turned: rows are the tensor's last axis."""
    if t is None:
        return columns, rows * columns
    leading = t.stride(-1 if turned else -2) if t.shape[-1 if turned else -2] > 1 else columns
    return int(leading), int(t.stride(0)) if t.dim() > 2 else 0


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
