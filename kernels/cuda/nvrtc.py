"""NVIDIA's runtime compiler, bound with ctypes: CUDA C++ to a binary, with or without a GPU here.

The only file that calls it.  Every torch for CUDA brings the library; it is found without importing torch.  What was
compiled before is kept in the user's cache folder and read from there with the checks of published binaries: it is
code.  https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed, TableError
from gemmtuned.configs.manifest import make_folder, read_trusted, write_whole
from gemmtuned.configs.settings import Settings

FOLDER: Final = "nvrtc"  # in the cache folder
# Its own cache is off: it keeps no log, which tells of spills
_OPTIONS: Final = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
_PATTERNS: Final = ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*", "torch/lib/libnvrtc*.so*")
_SYSTEM: Final = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's binary (cubin). registers: of a thread. spill_bytes: a thread's, in local memory."""

    data: bytes
    registers: int
    spill_bytes: int


def is_here() -> bool:
    """Whether the library is there, as far as can be seen without loading it."""
    return _path() is not None or library() is not None


@cache
def library() -> Any | None:
    """The library, or None."""
    path = _path()
    for name in (str(path),) if path else _SYSTEM:
        with contextlib.suppress(OSError):
            if path:  # it asks for this one by its bare name
                for builtins in path.parent.glob("libnvrtc-builtins*.so*"):
                    if ".alt." not in builtins.name:
                        ctypes.CDLL(str(builtins))
            lib = ctypes.CDLL(name)
            lib.nvrtcGetErrorString.restype = c_char_p
            return lib
    return None


@cache
def _path() -> Path | None:
    """Where Python packages keep it: beside the torch that would be imported."""
    for folder in dict.fromkeys(sys.path):
        for pattern in _PATTERNS:
            found = [path for path in Path(folder or ".").glob(pattern) if ".alt." not in path.name]
            plain = sorted(path for path in found if "builtins" not in path.name)
            if plain:
                return plain[-1]
    return None


def version() -> str | None:
    """`13.0`; None without the library."""
    lib = library()
    if lib is None:
        return None
    major, minor = c_int(), c_int()
    lib.nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(source: str, arch: str) -> Compiled:
    """The binary of this source for `sm_90a` or the like, from the cache when it was compiled before.

    Raises CandidateFailed with the compiler's reason, or when there is no compiler.
    """
    lib_version = version()
    if lib_version is None:
        raise CandidateFailed("NVRTC is not there: torch's builds for CUDA bring it (pip install nvidia-cuda-nvrtc)")
    key = sha256("\n".join((lib_version, arch, *_OPTIONS, source)).encode()).hexdigest()
    folder = Settings.from_env().cache / FOLDER
    path = folder / key
    with contextlib.suppress(TableError, ValueError, KeyError):
        head, _, data = read_trusted(path).partition(b"\n")
        facts = json.loads(head)
        if sha256(data).hexdigest() == facts["sha256"]:
            return Compiled(data, int(facts["registers"]), int(facts["spill_bytes"]))
    made = _compile(source, arch)
    facts = {
        "sha256": sha256(made.data).hexdigest(), "registers": made.registers, "spill_bytes": made.spill_bytes,
    }  # fmt: skip
    with contextlib.suppress(OSError):  # it only saves time
        make_folder(folder)
        write_whole(path, json.dumps(facts).encode() + b"\n" + made.data)
    return made


def _compile(source: str, arch: str) -> Compiled:
    lib = library()
    assert lib is not None
    with _program(lib, source) as program:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *_OPTIONS)]
        error = lib.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        log = _text(lib, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if error:
            wrong = next(
                (line for line in log.splitlines() if "error" in line), lib.nvrtcGetErrorString(error).decode()
            )
            raise CandidateFailed(f"does not compile for {arch}: {' '.join(wrong.split())[:300]}")
        data = _text(lib, "CUBIN", program)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    if registers is None or spills is None:
        raise CandidateFailed(f"NVRTC does not tell what it used of registers: {' '.join(log.split())[:200]}")
    return Compiled(data, int(registers[1]), max(int(spills[1]), int(spills[2])))


@contextlib.contextmanager
def _program(lib: Any, source: str) -> Iterator[c_void_p]:
    program = c_void_p()
    error = lib.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if error:
        raise CandidateFailed(f"NVRTC takes no program: {lib.nvrtcGetErrorString(error).decode()}")
    try:
        yield program
    finally:
        lib.nvrtcDestroyProgram(byref(program))


def _text(lib: Any, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, text)
    return text.raw
