"""Which errors tell of something that may be there again a minute later, and which do not."""

from __future__ import annotations

import errno
from subprocess import CalledProcessError

import pytest

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.passing import lack_in, lack_of, with_lack


class OutOfMemoryError(RuntimeError):
    """torch's, by its name."""


def wrapped(inner: BaseException) -> RuntimeError:
    """As torch.utils.cpp_extension raises it."""
    try:
        try:
            raise inner
        except type(inner) as err:
            raise RuntimeError("Error building extension 'fused'") from err
    except RuntimeError as err:
        return err


@pytest.mark.parametrize(
    ("err", "lack"),
    [
        (MemoryError(), "memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (CandidateFailed("NVRTC takes no program: NVRTC_ERROR_OUT_OF_MEMORY"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/root/.triton/cache/x.cubin"), "disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
        (wrapped(OSError(errno.ENOSPC, "x")), "disk"),
        (RuntimeError("Error building extension 'x': [1/2] c++\n/tmp/cc.s: No space left on device"), "disk"),
        (OSError(errno.EMFILE, "Too many open files"), "files and processes"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "files and processes"),
        (RuntimeError("can't start new thread"), "files and processes"),
        (wrapped(CalledProcessError(-9, ["nvcc"])), "time to end"),
        (wrapped(CalledProcessError(137, ["ninja"])), "time to end"),
        (RuntimeError("g++: fatal error: Killed signal terminated program cc1plus"), "time to end"),
        (CandidateFailed("its compiler ended by SIGKILL"), "time to end"),
        (
            wrapped(FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/local/cuda/bin/nvcc")),
            "a compiler",
        ),
        (CandidateFailed("nvcc error   : 'cicc' died due to signal 9 (Kill signal)"), "time to end"),
        (RuntimeError("hipErrorOutOfMemory"), "memory"),
        (RuntimeError("cudaErrorMemoryAllocation"), "memory"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"), "disk"),
        (OSError("libgomp.so.1: cannot allocate memory in static TLS block"), ""),
        (RuntimeError("/bin/sh: 1: nvcc: not found"), "a compiler"),
        (OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root."), "a compiler"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "a compiler"),
        (RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"), "a compiler"),
        (AssertionError("Failed to find NVCC"), "a compiler"),
        (RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)"), "a compiler"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
        (RuntimeError("no kernel image is available for execution on the device"), ""),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), ""),
        (RuntimeError("Error building extension 'x': kernel.cu(12): error: expected a \";\""), ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/opt/weights.json"), ""),
        (wrapped(CalledProcessError(1, ["nvcc"])), ""),
        (ValueError("w must be contiguous"), ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_was_wanting_is_told_and_found_again_in_the_line(err: BaseException, lack: str) -> None:
    assert lack_of(err) == lack
    assert lack_in(with_lack(f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}", err)) == lack
    assert lack or with_lack("it refused", err) == "it refused"


def test_an_error_raised_again_apart_from_its_cause_does_not_speak_for_it() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("wrong shape") from None
    except ValueError as err:
        assert lack_of(err) == ""
    endless = RuntimeError("a")
    endless.__cause__ = endless
    assert lack_of(endless) == ""
