"""Build the native hook with the user's own torch and C++ compiler: once per torch, and never inside a host.

`gemmtuned doctor --build`, `gemmtuned run` before the program starts and the daemon build it; a program only looks for
it.  The library needs torch's headers and nothing of Python's, so one build serves every Python.  Builds are keyed by
torch version and source, done in a temporary name and renamed, under a lock; a failed build leaves its compiler
output beside it and is not tried again until the sources or torch change.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.priority import give_way
from gemmtuned.configs.settings import Settings

SOURCES: Final = (
    "capture.cpp", "captures.h", "call.h", "context.h", "counters.h", "cpu.h", "cublaslt.h", "cuda.h", "cuda_launch.h",
    "first_count.h", "operators.h", "problem.h", "routes.h",
)  # fmt: skip
FLAGS: Final = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-plt", "-fno-semantic-interposition")
COMPILERS: Final = ("g++", "c++", "clang++")


class BuildFailed(GemmtunedError):
    """The native hook could not be built; nothing is counted or routed without it."""


def compiler() -> str | None:
    """Path of a C++ compiler, or None."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def torch_folder() -> Path | None:
    """Where torch is installed, found without importing it."""
    module = sys.modules.get("torch")
    if module is not None and module.__file__:
        return Path(module.__file__).parent
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def torch_version(folder: Path) -> str:
    """torch.__version__, read from torch/version.py."""
    text = (folder / "version.py").read_text()
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else "unknown"


def library_path(cache: Path) -> Path | None:
    """Where the library for this torch and these sources belongs; None without torch."""
    folder = torch_folder()
    if folder is None:
        return None
    digest = sha256()
    for name in SOURCES:
        digest.update((_here() / name).read_bytes())
    digest.update(" ".join(FLAGS).encode())
    version = re.sub(r"[^A-Za-z0-9.+-]", "-", torch_version(folder))
    return cache / "native" / f"capture-{version}-{os.uname().machine}-{digest.hexdigest()[:12]}.so"


def find_built(cache: Path) -> Path | None:
    """The built library, or None. Refuses one that somebody else could have written: it becomes code in this process.

    Raises BuildFailed with the way out when it is refused.
    """
    path = library_path(cache)
    if path is None or not path.is_file():
        return None
    for what in (path, path.parent):
        facts = what.stat()
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildFailed(f"{what} can be written by others or is not yours: refused. Delete it, it is built anew")
    return path


def failure(cache: Path) -> str | None:
    """The first error line of the last failed build of these sources, or None."""
    path = library_path(cache)
    log = path.with_suffix(".log") if path else None
    if log is None or not log.is_file():
        return None
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "unknown error")


def missing(cache: Path) -> str:
    """What to tell the user of a program that found no library."""
    why = failure(cache)
    if why is not None:
        return f"nothing is counted or routed: the native hook does not build: {why}. See: gemmtuned doctor"
    return (
        "nothing is counted or routed: the native hook is not built for this torch yet. Run: gemmtuned doctor --build"
    )


def build(cache: Path) -> Path:
    """Build the library, or return the one that is there; takes about 15 s.

    Waits for another process that is building the same.  Raises BuildFailed.
    """
    path = library_path(cache)
    folder = torch_folder()
    if path is None or folder is None:
        raise BuildFailed("torch is not installed in this environment")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o755)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise BuildFailed(f"{path.parent}: cannot be written ({err.strerror}). Set GEMMTUNED_CACHE") from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find_built(cache)
        return found or _compile(path, folder)
    finally:
        os.close(lock)


def _compile(path: Path, torch: Path) -> Path:
    cxx = compiler()
    if cxx is None:
        raise BuildFailed(f"no C++ compiler (tried {', '.join(COMPILERS)}). Install g++ for the native hook")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    command = [
        cxx, *FLAGS,
        f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}",
        str(_here() / "capture.cpp"), "-o", str(temporary),
        f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", *_cuda_flags(torch),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        log = path.with_suffix(".log")
        log.write_text(done.stderr)
        raise BuildFailed(f"the native hook does not compile with {cxx}: {failure(path.parent.parent)} (all in {log})")
    temporary.chmod(0o755)
    temporary.replace(path)
    path.with_suffix(".log").unlink(missing_ok=True)
    return path


def _cuda_flags(torch: Path) -> tuple[str, ...]:
    if not (torch / "lib/libtorch_cuda.so").is_file():
        return ()
    return ("-DGEMMTUNED_CUDA", "-Wl,--no-as-needed", "-ltorch_cuda", "-ldl")


def _here() -> Path:
    return Path(__file__).resolve().parent


def _main(arguments: list[str]) -> int:
    if "--nice" in arguments:
        give_way(19)
    try:
        build(Settings.from_env().cache)
    except GemmtunedError as err:
        sys.stderr.write(f"gemmtuned: {err}\n")
        return err.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
