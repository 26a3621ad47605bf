"""Builds the native hook with its CUDA half, against a driver and a torch library that are fakes (tests/fake_cuda).

What runs is the hook's own code, all of it: operators, look-up, launches, scratch memory, blame.  What is missing is a
device.  Kept by the hash of all that goes into it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from gemmtuned.hooks.native import build

FAKES = Path(__file__).resolve().parent / "fake_cuda"
NATIVE = Path(build.__file__).resolve().parent


def build_fakes(kept: Path) -> Path:
    """The folder with libcuda.so.1, libtorch_cuda.so and capture.so.

    old/libcuda.so.1 is a driver of before CUDA 11.3, less/libcuda.so.1 lacks a function that we need.
    """
    torch = build.torch_folder()
    cxx = build.compiler()
    assert torch is not None
    assert cxx is not None
    digest = sha256(build.torch_version(torch).encode())
    for source in (*(NATIVE / name for name in build.SOURCES), *sorted(FAKES.glob("*.*")), Path(__file__)):
        digest.update(source.read_bytes())
    folder = kept / "fake_cuda" / digest.hexdigest()[:12]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    shared = [cxx, "-std=c++20", "-O0", "-fPIC", "-shared"]
    uses = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
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
        _run([*shared[:-1], "-c", *uses, str(FAKES / "libtorch_cuda.cpp"), "-o", str(library)])
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
        try:
            made.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(made)
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _symbols(file: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", which, str(file)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if line.strip()}
