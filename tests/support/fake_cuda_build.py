"""Builds the native hook with its CUDA half, against a driver and a torch library that are fakes (fake_cuda/).

What runs is the hook's own code, all of it: operators, look-up, launches, scratch memory, blame.  What is missing is a
device.  Kept by the hash of all that goes into it, in build/tests of the checkout; `make install` builds it by running
this file.
"""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

from gemmtuned.hooks.native import build

KEPT = Path(__file__).resolve().parents[2] / "build" / "tests"
FAKES = Path(__file__).resolve().parent / "fake_cuda"
NATIVE = Path(build.__file__).resolve().parent
# How programs on the fakes begin; arguments: the folder built, and the driver's folder in it
PRELUDE = """
    import ctypes, json, os, sys, threading, torch
    from pathlib import Path
    from gemmtuned.configs.problem import Problem
    from gemmtuned.configs.launch import Axis, Condition, KernelLaunch
    from gemmtuned.hooks import native
    from gemmtuned.hooks.native import launches as packed

    folder, driver = Path(sys.argv[1]), sys.argv[2]
    cuda = ctypes.CDLL(str(folder / driver / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    cuda.fake_shape.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_float)
    cuda.fake_capture.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p)
    cuda.fake_stream_id.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    cuda.fake_graph_gone.argtypes = (ctypes.c_void_p,)
    for counter in (cuda.fake_calls, cuda.fake_allocated):
        counter.restype = ctypes.c_long
    fake = ctypes.CDLL(str(folder / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
    fake.fake_stream.argtypes = (ctypes.c_void_p,)
    fake.fake_register()

    def to_gpu(*tensors):
        return [torch.ops.fake.on_gpu(t) for t in tensors]

    x, w = torch.randn(4, 16), torch.randn(8, 16)
    right = x @ w.t()
    gx, gw = to_gpu(x, w)
    cuda.fake_shape(8, 16, 1.0)
    hook = native.Native(folder / "capture.so")
    problem = Problem(m=4, n=8, k=16, dtype="fp32")
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("", 1),) * 3,
        arguments=("x.ptr", "w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0", "counters"),
        conditions=(Condition("x.size0", "<=", 64), Condition("x.stride1", "==", 1), Condition("w.stride1", "==", 1)),
        partials_offset=1 << 16, workspace_bytes=1 << 17,
    )
    launch = packed.kernel_launch(record, 0x3000, 2)

    def lt_launch(workspace_bytes=0):
        return packed.LtLaunch(workspace_bytes=workspace_bytes, w_turned=1)

    def begin(*launches):
        hook.install()
        rows = [
            native.Row(
                problem, "exact", mode, 7, 6 if isinstance(one, packed.LtLaunch) else 5, "cuda:0", one,
                packed.conditions(record.checked, 2),
            )
            for one in launches or (launch,) for mode in ("eager", "graph")
        ]
        hook.load(rows, 1)
        hook.set_switches(native.CAPTURE | native.DISPATCH)

    def product():
        return torch.ops.fake.on_host(torch.mm(gx, gw.t()))

    def call():
        y = product()
        assert torch.allclose(y, right, atol=1e-4), (y, right)
        return [s.outcome for s in hook.drain()]

    def calls(name):
        return cuda.fake_calls(name.encode())

    def launched():
        # of the last launch: its grid; threads, bytes of shared memory and the cluster
        numbers = (ctypes.c_uint * 10).in_dll(cuda, "fake_launched")[:]
        return numbers[:3], numbers[3:]

    def fail(name, code):
        cuda.fake_set(name.encode(), code)
"""


def build_fakes(kept: Path) -> Path:
    """The folder with libcuda.so.1, libtorch_cuda.so and capture.so; skips the test where torch has a CUDA half itself.

    old/libcuda.so.1 is a driver of before CUDA 11.3, less/libcuda.so.1 lacks a function that we need.
    """
    if torch.version.cuda is not None:
        import pytest

        pytest.skip("the fakes stand in for the CUDA half of torch, which this torch has")
    torch_at = build.torch_folder()
    cxx = build.compiler()
    assert torch_at is not None
    assert cxx is not None
    digest = sha256(build.torch_version(torch_at).encode())
    for source in (*(NATIVE / name for name in build.SOURCES), *sorted(FAKES.glob("*.*")), Path(__file__)):
        digest.update(source.read_bytes())
    folder = kept / "fake_cuda" / digest.hexdigest()[:12]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:  # compiled once for all forks: half a minute of CPU time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(folder, torch_at, cxx)
    return folder


def _build(folder: Path, torch_at: Path, cxx: str) -> None:
    """All of it, or nothing."""
    shared = [cxx, "-std=c++20", "-O0", "-fPIC", "-shared"]
    uses = [f"-I{torch_at / 'include'}", f"-I{torch_at / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch_at / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        for kind in ("old", "less"):
            (made / kind).mkdir(parents=True)
        driver = [*shared, str(FAKES / "libcuda.cpp"), "-Wl,-soname,libcuda.so.1"]
        _run([*driver, "-o", str(made / "libcuda.so.1")])
        _run([*driver, "-DFAKE_OLD", "-o", str(made / "old/libcuda.so.1")])
        _run([*driver, "-DFAKE_LESS", "-o", str(made / "less/libcuda.so.1")])
        hook = made / "capture.o"
        _run([*shared[:-1], "-c", "-DGEMMTUNED_CUDA", *uses, str(NATIVE / "c_api.cpp"), "-o", str(hook)])
        library = made / "torch_cuda.o"
        _run([*shared[:-1], "-c", *uses, f"-I{NATIVE}", str(FAKES / "libtorch_cuda.cpp"), "-o", str(library)])
        rest = made / "rest.s"
        missing = _symbols(hook, "--undefined-only") - _symbols(library, "--defined-only")
        rest.write_text(
            "".join(f".globl {s}\n{s}: jmp fake_not_here@PLT\n" for s in sorted(missing) if "2at4cuda" in s)
        )
        _run([*shared, str(library), str(rest), *links, "-o", str(made / "libtorch_cuda.so")])
        here = [f"-L{made}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-ltorch_cuda", "-ldl"]
        _run([*shared, str(hook), *links, *here, "-o", str(made / "capture.so")])
        for leftover in (hook, library, rest):
            leftover.unlink()
        made.rename(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _symbols(file: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", which, str(file)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line.strip()}


if __name__ == "__main__" and build.compiler() is not None:
    build_fakes(KEPT)
