"""Compile a candidate for an architecture, with or without such a device here.

Triton's wheel brings all tools for NVIDIA and AMD, so candidates are compiled and judged (registers, spills,
shared memory) before a GPU is idle.  The binary that comes out is the one that is measured, published and
launched.  Compile in a process of its own where that matters: a compiler's failed assertion writes to stderr.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels import catalog
from gemmtuned.kernels.arch import has_clusters, shared_limit
from gemmtuned.kernels.own_kernel import POINTER_ALIGN, symbol
from gemmtuned.kernels.triton.diagonal import has_diagonal
from gemmtuned.kernels.triton.launch import BARRIER_BYTES, LaunchRecord

_POINTERS: Final = ("x", "w", "bias", "y")
_ANYWHERE: Final = ("offs", "scale_x", "scale_w")  # torch lets them begin at any element
_TRITONS: Final = {"fp8_e4m3": "fp8e4nv"}  # data types that Triton has another name for


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A compiled kernel: what a driver loads, and what is known of it.

    name: the symbol in `data` (cubin or hsaco).  shared_bytes: dynamic shared memory of a launch.
    threads: per thread block.  registers: per thread.  spill_bytes: stack per thread, 0 when all is in registers.
    These two are None when no tool could tell.  null_pointers: how many null pointers it takes after the record's own
    arguments (Triton's scratch memories, which our kernels do not use; their number changes with its version).
    """

    name: str
    arch: str
    data: bytes
    num_warps: int
    threads: int
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    null_pointers: int

    @property
    def sha256(self) -> str:
        """Content hash, the file name it is published under."""
        return sha256(self.data).hexdigest()


def target(arch: str) -> GPUTarget:
    """Triton's target for `sm_90`, `gfx942` ... Raises CandidateFailed for any other spelling."""
    if re.fullmatch(r"sm_[0-9]{2,3}", arch):
        return GPUTarget("cuda", int(arch[3:]), 32)
    if re.fullmatch(r"gfx9[0-9a-f]+", arch):
        return GPUTarget("hip", arch, 64)
    raise CandidateFailed(f"{arch}: not an architecture we compile for (sm_NN or gfx9NN)")


def source(record: LaunchRecord) -> ASTSource:
    """The record's kernel with its constants and what may be assumed of its arguments."""
    known = catalog.kernels("triton")
    if record.kernel not in known:
        raise CandidateFailed(f"{record.kernel}: no such kernel, expected one of {', '.join(known)}")
    kernel = _named(known[record.kernel], record)
    types = {**dict.fromkeys(_POINTERS, record.dtype), "partials": "fp32", "counters": "i32", "offs": "i32"}
    types |= record.types
    kinds = {name: f"*{_TRITONS.get(dtype, dtype)}" for name, dtype in types.items()}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    assumed: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name not in record.arguments:
            signature[name] = "constexpr"
            constants[(index,)] = record.constants.get(name)
            continue
        signature[name] = kinds.get(name, "i32")
        if name in kinds and name not in _ANYWHERE:
            assumed[(index,)] = [["tt.divisibility", POINTER_ALIGN]]
        elif name.startswith("ld") and record.ld_multiple > 1:
            assumed[(index,)] = [["tt.divisibility", record.ld_multiple]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=assumed)


def _named(own: Any, record: LaunchRecord) -> Any:
    """The kernel's function, under the name that its binary shall have.

    Triton asks for the name beside the source, so neither the source's hash nor what was published before changes.
    """
    sizes = record.constants
    name = symbol(own.name, sizes["N"], sizes["K"], sizes.get("BLOCK_M", own.tokens))
    return triton.jit(own.function.fn, repr=lambda _: name)


def compile_kernel(record: LaunchRecord, arch: str) -> Any:
    """Triton's CompiledKernel, from its cache when it was compiled before.

    Raises CandidateFailed with the compiler's reason, or when it needs clusters or more shared memory than there is.
    """
    where = target(arch)
    if record.exchange is not None and not has_clusters(arch):
        raise CandidateFailed(f"{record.kernel} {record.constants} on {arch}: no clusters there")
    if record.own_ptx and not has_diagonal(arch):
        raise CandidateFailed(f"{record.kernel} {record.constants} on {arch}: no mma.m16n8k16 or bar.red there")
    try:
        options = {"num_warps": record.num_warps, "num_stages": record.num_stages}
        if record.max_registers:
            options["maxnreg"] = record.max_registers
        kernel = triton.compile(source(record), target=where, options=options)
    except CandidateFailed:
        raise
    except Exception as err:  # the compiler raises RuntimeError, its own errors, and what the tools it calls raise
        reason = _reason(err)
        raise CandidateFailed(f"{record.kernel} {record.constants} on {arch}: does not compile: {reason}") from err
    if record.exchange is not None:
        _give_room_to_exchange(kernel, record, arch)
    if kernel.metadata.shared > shared_limit(arch):
        raise CandidateFailed(
            f"{record.kernel} {record.constants} on {arch}: needs {kernel.metadata.shared} bytes of shared memory, "
            f"there are {shared_limit(arch)}"
        )
    return kernel


def _reason(err: BaseException) -> str:
    """What the compiler objects to, and the line it does so at.

    Triton tells of each function on the way there, with the source above the call: the innermost one is meant.
    """
    reason, line = "", ""
    inner: BaseException | None = err
    while inner is not None:
        text = getattr(inner, "error_message", None) if isinstance(inner, CompilationError) else str(inner)
        reason = text or reason
        if isinstance(inner, CompilationError) and inner.src and hasattr(inner.node, "lineno"):
            line = inner.src.splitlines()[inner.node.lineno - 1].strip()
        inner = inner.__cause__
    reason = " ".join(reason.split())[:300] or type(err).__name__
    return f"{reason}, at: {line[:120]}" if line else reason


def _give_room_to_exchange(kernel: Any, record: LaunchRecord, arch: str) -> None:
    """Make Triton launch clusters, with shared memory for what their thread blocks send one another.

    Raises CandidateFailed when a thread block would send more or less than the others wait for.
    """
    assert record.exchange is not None
    sends = re.findall(r"st\.async[^;]*?bytes(\.v2)?\.f32", kernel.asm.get("ptx", ""))  # .v2: a pair
    sent = sum(2 if pair else 1 for pair in sends) * 32 * record.num_warps
    if sent != record.exchange.values:
        raise CandidateFailed(
            f"{record.kernel} {record.constants} on {arch}: it sends {sent} sums of {record.exchange.values}"
        )
    shared = -(-kernel.metadata.shared // BARRIER_BYTES) * BARRIER_BYTES + record.exchange.bytes(record.cluster)
    # Triton's launcher multiplies the grid's first axis by num_ctas, before 3.6 by cluster_dims
    changed: dict[str, Any] = {"shared": shared, "num_ctas": record.cluster}
    if hasattr(kernel.metadata, "cluster_dims"):
        changed["cluster_dims"] = (record.cluster, 1, 1)
    kernel.metadata = kernel.metadata._replace(**changed)
    kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)


def compile_function(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, int],
    *,
    name: str,
    num_warps: int,
    num_stages: int,
    arch: str,
) -> Any:
    """Triton's CompiledKernel of a function that is no KERNEL, called `name`; from its cache where it is there.

    signature: by parameter its type, as Triton spells it, `constexpr` for those in constants.  Pointers to integers of
    32 and 64 bits may be anything, others are taken to be aligned to POINTER_ALIGN.  Raises CandidateFailed as
    compile_record does.
    """
    named = triton.jit(function.fn, repr=lambda _: name)
    positions = {parameter: (index,) for index, parameter in enumerate(function.arg_names)}
    aligned = [p for p, kind in signature.items() if kind.startswith("*") and kind not in ("*i32", "*i64")]
    made = ASTSource(
        fn=named,
        signature=dict(signature),
        constexprs={positions[p]: value for p, value in constants.items()},
        attrs={positions[p]: [["tt.divisibility", POINTER_ALIGN]] for p in aligned},
    )
    what = f"{name} {dict(constants)} on {arch}"
    try:
        kernel = triton.compile(made, target=target(arch), options={"num_warps": num_warps, "num_stages": num_stages})
    except CandidateFailed:
        raise
    except Exception as err:  # as in compile_kernel
        raise CandidateFailed(f"{what}: does not compile: {_reason(err)}") from err
    if kernel.metadata.shared > shared_limit(arch):
        raise CandidateFailed(f"{what}: needs {kernel.metadata.shared} bytes of shared memory")
    spilled = _resources(kernel)[1]
    if spilled:
        raise CandidateFailed(f"{what}: spills {spilled} bytes a thread")
    return kernel


def compile_record(record: LaunchRecord, arch: str) -> Binary:
    """Compile one candidate for `arch` (`sm_80`, `sm_90`, `gfx942`).

    Raises CandidateFailed when it does not compile, does not fit, or spills registers to memory: such a kernel is
    slower than its neighbours, so it is not worth device time.
    """
    kernel = compile_kernel(record, arch)
    meta = kernel.metadata
    if getattr(meta, "global_scratch_size", 0) or getattr(meta, "profile_scratch_size", 0):
        raise CandidateFailed(f"{record.kernel} on {arch}: needs scratch memory of the launcher")
    registers, spill_bytes = _resources(kernel)
    if spill_bytes:
        raise CandidateFailed(f"{record.kernel} {record.constants} on {arch}: spills {spill_bytes} bytes per thread")
    return Binary(
        name=meta.name,
        arch=arch,
        data=kernel.kernel,
        num_warps=meta.num_warps,
        threads=meta.num_warps * meta.target.warp_size,
        shared_bytes=meta.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        null_pointers=_null_pointers(kernel, record),
    )


def _null_pointers(kernel: Any, record: LaunchRecord) -> int:
    """Parameters of the binary beyond the record's; two, as in Triton 3.6, for code that does not tell (AMD's)."""
    text = kernel.asm.get("ptx")
    if text is None:
        return 2
    head = text[text.index(f".entry {kernel.metadata.name}(") :]
    extra = head[: head.index(")")].count(".param") - len(record.arguments)
    if not 0 <= extra <= 3:
        raise CandidateFailed(f"{record.kernel}: takes {extra} arguments more than its launch record has")
    return int(extra)


def _resources(kernel: Any) -> tuple[int | None, int | None]:
    """(registers per thread, stack bytes per thread) of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {key: re.search(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "private_segment_fixed_size")}
        registers, stack = (int(match[1]) if match else None for match in found.values())
        return registers, stack
    tool = _cuobjdump()
    if tool is None:
        return None, None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.kernel)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60)
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout + done.stderr)
    if match is None:
        return None, None
    return int(match[1]), max(int(match[2]), int(match[3]))


def _cuobjdump() -> str | None:
    path = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(path) if path.is_file() else None
