"""NVIDIA's runtime compiler, bound with ctypes: CUDA C++ to a binary, with or without a GPU here.

The only file that calls it.  Every torch for CUDA brings the library; it is found without importing torch, and its
version is read off its files without loading it.  What was compiled before is kept in the user's cache folder and read
from there with the checks of published binaries: it is code.  https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed, Declined, GemmtunedError
from gemmtuned.configs.manifest import check_owner, make_folder, read_trusted, write_whole
from gemmtuned.configs.settings import Settings

Version = tuple[int, int]

FOLDER: Final = "nvrtc"  # in the cache folder
KEPT: Final = 4096  # binaries there, of some 20 KB
LEAST: Final[Version] = (12, 1)  # the first with PTX ISA 8.1, in which our kernels are written
_HAS_CACHE: Final[Version] = (12, 9)  # a cache of its own, which keeps no log; the log tells of spills
_INCLUDE: Final = re.compile(r'^#include "(\w+\.cuh)".*$', re.MULTILINE)
_OPTIONS: Final = ("--std=c++17", "--ptxas-options=-v")
_PACKAGES: Final = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib")  # for CUDA 13 and later, for CUDA 12
_SYSTEM: Final = ("libnvrtc.so.13", "libnvrtc.so.12")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's binary (cubin). registers: per thread. spill_bytes: per thread, in local memory."""

    data: bytes
    registers: int
    spill_bytes: int


@cache
def version() -> str | None:
    """`13.0`, as the library's files say; of a system's library as it says itself.  None without one that will do."""
    found = _installed()
    if found is not None:
        return f"{found[0][0]}.{found[0][1]}"
    lib = library()
    if lib is None:
        return None
    major, minor = c_int(), c_int()
    lib.nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}" if (major.value, minor.value) >= LEAST else None


@cache
def library() -> Any | None:
    """The library, or None."""
    found = _installed()
    for name in (*((str(found[1]),) if found else ()), *_SYSTEM):
        with contextlib.suppress(OSError):
            if found and name == str(found[1]):  # it asks for this one by its bare name
                ctypes.CDLL(str(found[2]))
            lib = ctypes.CDLL(name)
            lib.nvrtcGetErrorString.restype = c_char_p
            return lib
    return None


@cache
def _installed() -> tuple[Version, Path, Path] | None:
    """(version, library, its builtins) of the oldest Python package that will do: what it makes every driver loads."""
    found = []
    for folder in dict.fromkeys(sys.path):
        for package in _PACKAGES:
            for builtins in Path(folder or ".").glob(f"{package}/libnvrtc-builtins.so.*"):
                said = re.fullmatch(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)", builtins.name)
                library = builtins.with_name(f"libnvrtc.so.{said[1]}") if said else None
                if said and library and library.is_file() and (int(said[1]), int(said[2])) >= LEAST:
                    found.append(((int(said[1]), int(said[2])), library, builtins))
    return min(found, default=None)


def compiled(
    source: str, arch: str, *, called: Mapping[str, str] | None = None, kept: bool = False
) -> Compiled:  # fmt: skip
    """The binary of this source for `sm_90a` or the like, from the cache when it was compiled before.

    called: what names of the source are in the binary.  kept: from the cache alone, nothing is compiled.

    Raises CandidateFailed with the compiler's reason, or when there is no compiler; Declined for what is not kept.
    """
    lib_version = _needed_version()
    renames = [f"--define-macro={name}={of}" for name, of in (called or {}).items()]
    key = sha256("\n".join((lib_version, arch, *_OPTIONS, *renames, source)).encode()).hexdigest()
    folder = Settings.from_env().cache / FOLDER
    path = folder / key
    with contextlib.suppress(GemmtunedError, OSError, ValueError, KeyError, TypeError, RecursionError):
        check_owner(folder)
        head, _, data = read_trusted(path).partition(b"\n")
        facts = json.loads(head)
        if facts["key"] == key and facts["sha256"] == sha256(data).hexdigest():
            return Compiled(data, int(facts["registers"]), int(facts["spill_bytes"]))
    if kept:
        raise Declined("not compiled yet")
    made = _compile(source, arch, lib_version, renames)
    facts = {
        "key": key, "sha256": sha256(made.data).hexdigest(), "registers": made.registers,
        "spill_bytes": made.spill_bytes,
    }  # fmt: skip
    with contextlib.suppress(GemmtunedError, OSError):  # it only saves time
        make_folder(folder)
        check_owner(folder)
        write_whole(path, json.dumps(facts).encode() + b"\n" + made.data)
        _prune(folder)
    return made


def _prune(folder: Path) -> None:
    """Remove the older half where there are more than KEPT: what is published has a copy of its own."""
    names = list(folder.iterdir())
    if len(names) > KEPT:
        for path in sorted(names, key=lambda path: path.stat().st_mtime)[: KEPT // 2]:
            path.unlink(missing_ok=True)


def text_of(source: Path) -> str:
    """A kernel's source with its parts where it includes them: NVRTC is given one text. They lie in the same folder."""
    return _INCLUDE.sub(lambda found: source.with_name(found[1]).read_text(), source.read_text())


def ptx(source: str, arch: str) -> str:
    """What the binary for `sm_90a` or the like is assembled from, for tests that run it without a GPU.

    Raises CandidateFailed with the compiler's reason, or when there is no compiler.  Nothing is kept.
    """
    text, _ = _made(source, arch.replace("sm_", "compute_"), _needed_version(), "PTX")
    return text.rstrip(b"\0").decode()


def _needed_version() -> str:
    found = version()
    if found is None:
        raise CandidateFailed(
            f"NVRTC {LEAST[0]}.{LEAST[1]} or later is not there: torch's builds for CUDA bring it (pip install "
            "nvidia-cuda-nvrtc, for CUDA 12 nvidia-cuda-nvrtc-cu12)"
        )
    return found


def _compile(source: str, arch: str, of: str, more: Sequence[str]) -> Compiled:
    data, log = _made(source, arch, of, "CUBIN", more)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    if registers is None or spills is None:
        raise CandidateFailed(f"NVRTC does not tell what it used of registers: {' '.join(log.split())[:200]}")
    return Compiled(data, int(registers[1]), max(int(spills[1]), int(spills[2])))


def _made(source: str, arch: str, of: str, what: str, more: Sequence[str] = ()) -> tuple[bytes, str]:
    """(what the compiler calls `CUBIN` or `PTX`, its log)."""
    lib = library()
    if lib is None:
        found = _installed()
        where = f" ({found[1]})" if found else ""
        raise CandidateFailed(f"NVRTC {of} does not load{where}: install its package (nvidia-cuda-nvrtc) anew")
    with _program(lib, source) as program:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *_options(of), *more)]
        error = lib.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        log = _text(lib, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if error:
            wrong = next(
                (line for line in log.splitlines() if "error" in line), lib.nvrtcGetErrorString(error).decode()
            )
            raise CandidateFailed(f"does not compile for {arch}: {' '.join(wrong.split())[:300]}")
        return _text(lib, what, program), log


def _options(of: str) -> tuple[str, ...]:
    major, minor = map(int, of.split("."))
    return (*_OPTIONS, "--no-cache") if (major, minor) >= _HAS_CACHE else _OPTIONS


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
