"""Build the native hook with the user's own torch and C++ compiler: once per torch, and never inside a host.

`gemmtuned doctor --build`, `gemmtuned run` before the program starts and the daemon build it; a program only looks for
it.  The library needs torch's headers and nothing of Python's, so one build serves every Python.  Its name holds a hash
of the build of torch, the C++ library and the sources.  A file beside it has its length and hash; a library that does
not agree is not mapped, since a power cut, a full disk or an unfinished copy has cut it short.  An error in the sources
is remembered for a week; after any other failure the build is tried again later.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs import bundle, clock
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.open_files import free_bytes, limit_reached, make_folders
from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.settings import Settings, child_env
from gemmtuned.configs.temporary import temporary_path

_FILES: Final = os.listdir(os.path.realpath(f"{__file__}/.."))  # noqa: PTH208  in each start of each program
SOURCES: Final = tuple(sorted(name for name in _FILES if name.endswith((".cpp", ".h", ".map"))))
FLAGS: Final = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-plt", "-fno-semantic-interposition")
_GLIBCXX: Final = rb"GLIBCXX_3\.4\.(\d+)"  # compiled where a library is built, not by each program that starts
MOST_BYTES: Final = 1 << 20  # that are kept of the compiler's output
PIECE_BYTES: Final = 1 << 16
ROOM_BYTES: Final = 32 << 20
LASTING_S: Final = 7 * 86400.0  # how long an error in the sources is believed: the compiler may be upgraded
RETRY_S: Final = 60.0  # after the first failure of another kind; then four times as long, up to
LONGEST_RETRY_S: Final = 86400.0
_OF_SOURCE: Final = r"[^:\s]+\.(?:cpp|h|hpp|cuh):\d+(?::\d+)?: (?:fatal )?error: "  # most processes build nothing
_RTLD_DI_LINKMAP: Final = 2
# What a compiler says of the machine at a line of the sources: glibc's words, whatever tongue this program speaks
_OF_MACHINE: Final = (
    "No such file or directory", "Input/output error", "Cannot allocate memory", "Resource temporarily unavailable",
    "Permission denied", "Too many open files", "No space left on device", "Disk quota exceeded",
    "Read-only file system", "Stale file handle", "Transport endpoint is not connected", "Interrupted system call",
)  # fmt: skip
COMPILERS: Final = ("g++", "c++", "clang++")


class BuildFailed(GemmtunedError):
    """The native hook could not be built; nothing is counted or routed without it."""


class Closed(BuildFailed):
    """The folder of the library cannot be looked into."""


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
    for line in (folder / "version.py").read_text("utf-8").splitlines():
        name, _, value = line.partition(" = ")
        if name == "__version__" and value[:1] in ("'", '"'):
            return value[1:].partition(value[0])[0] or "unknown"
    return "unknown"


def library_path(cache: Path) -> Path | None:
    """Where the library for this torch and these sources belongs; None without torch."""
    folder = torch_folder()
    if folder is None:
        return None
    digest = sha256()
    here = str(_here())
    for name in SOURCES:
        with open(f"{here}/{name}", "rb", buffering=0) as file:  # noqa: PTH123  in each start of each program
            digest.update(file.read())
    for part in (" ".join(FLAGS), (folder / "version.py").read_text("utf-8"), _abi(folder), _libstdcxx()):
        digest.update(part.encode())  # version.py has the commit of torch's source and its CUDA, or none
    version = "".join(c if c.isascii() and (c.isalnum() or c in ".+-") else "-" for c in torch_version(folder))
    return cache / "native" / f"capture-{version}-{os.uname().machine}-{digest.hexdigest()[:12]}.so"


def find_built(cache: Path) -> Path | None:
    """The built library, or None. Refuses one that somebody else could have written: it becomes code in this process.

    Raises BuildFailed with the way out when it is refused.
    """
    path = library_path(cache)
    try:
        if path is None or not path.is_file():
            return None
        failpoints.point("library.open")
        both = [(what, what.stat()) for what in (path, path.parent)]
    except PermissionError as err:
        raise Closed(f"{cache / 'native'} is closed to uid {os.geteuid()}. Open it, or set GEMMTUNED_CACHE") from err
    for what, facts in both:
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildFailed(f"{what} can be written by others or is not yours: refused. Delete it, it is built anew")
    return path if is_whole(path) else None


def is_whole(path: Path) -> bool:
    """Whether the library is what was built, to the last byte."""
    try:
        facts = json.loads(read_small(_facts(path)))
        return bool(facts["bytes"] == path.stat().st_size and facts["sha256"] == _sha256_of(path))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _sha256_of(path: Path) -> str:
    """The hash of a file, read in small pieces: each program that starts asks for that of the library."""
    digest, room = sha256(), memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        while count := file.readinto(room):
            digest.update(room[:count])
    return digest.hexdigest()


def failure(cache: Path) -> str | None:
    """Why the last build of these sources failed, or None."""
    trouble = _trouble(library_path(cache))
    return trouble["reason"] if trouble is not None else None


def may_try(cache: Path) -> bool:
    """Whether a build is worth trying: the last failure was no error in the sources, and it was some time ago."""
    trouble = _trouble(library_path(cache))
    if trouble is None:
        return True
    wait_s = LASTING_S if trouble["lasting"] else min(RETRY_S * 4 ** (trouble["tries"] - 1), LONGEST_RETRY_S)
    return not 0 <= clock.now_s() - trouble["at_s"] < wait_s


def missing(cache: Path) -> str:
    """What to tell the user of a program that found no library."""
    path, why = library_path(cache), failure(cache)
    if path is not None and path.is_file() and not is_whole(path):
        return f"nothing is counted or routed: {path} is not what was built. Run: gemmtuned doctor --build"
    if why is not None:
        return f"nothing is counted or routed: the native hook does not build: {why}. See: gemmtuned doctor"
    if path is not None and _in_work(path):
        return "nothing is counted or routed yet: the native hook is being built, and is used here once it is there"
    return (
        "nothing is counted or routed: the native hook is not built for this torch yet. Run: gemmtuned doctor --build"
    )


def _in_work(path: Path) -> bool:
    """Whether a process builds the library at this moment, such as a daemon that has just been started."""
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def build(cache: Path) -> Path:
    """Build the library, or return the one that is there; takes about 15 s.

    Waits for another process that is building the same.  Raises BuildFailed.
    """
    path = library_path(cache)
    folder = torch_folder()
    if path is None or folder is None:
        raise BuildFailed("torch is not installed in this environment")
    try:
        make_folders(path.parent)
        path.parent.chmod(0o755)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        full = limit_reached(err)
        if full:
            raise BuildFailed(f"{path.parent}: cannot be written: {full}") from err
        raise BuildFailed(f"{path.parent}: cannot be written ({err.strerror}). Set GEMMTUNED_CACHE") from err
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = find_built(cache) or _compile(path, folder)
        with suppress(OSError):  # programs start without it, too
            bundle.write(cache)
        return made
    finally:
        os.close(lock)


def _compile(path: Path, torch: Path) -> Path:
    cxx = compiler()
    if cxx is None:
        raise BuildFailed(f"no C++ compiler (tried {', '.join(COMPILERS)}). Install g++ for the native hook")
    free = free_bytes(path.parent)
    if free is not None and free < ROOM_BYTES:
        raise BuildFailed(f"{path.parent}: {free >> 10} KiB are free, a build needs {ROOM_BYTES >> 20} MiB")
    temporary = temporary_path(path)
    command = [
        cxx, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={_abi(torch)}",
        f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}",
        str(_here() / "c_api.cpp"), "-o", str(temporary), f"-Wl,--version-script={_here() / 'exports.map'}",
        f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", *_cuda_flags(torch),
    ]  # fmt: skip
    try:
        env = child_env(LC_ALL="C")  # its errors are told apart by their words
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=env)
        if done.returncode != 0:
            reason = _remember(path, done.stderr)
            raise BuildFailed(
                f"the native hook does not compile with {cxx}: {reason} (all in {path.with_suffix('.log')})"
            )
        temporary.chmod(0o755)
        facts = {"bytes": temporary.stat().st_size, "sha256": _sha256_of(temporary)}
        _put(temporary, path)
        facts_file = temporary.with_name(f"{temporary.name}.json")
        facts_file.write_text(json.dumps(facts), encoding="utf-8")
        _put(facts_file, _facts(path))
    except OSError as err:
        raise BuildFailed(f"{path.parent}: the native hook was not kept ({err.strerror})") from err
    finally:
        temporary.unlink(missing_ok=True)
    for old in (path.with_suffix(".log"), _trouble_file(path)):
        old.unlink(missing_ok=True)
    return path


def _put(new: Path, path: Path) -> None:
    """Rename it into place, so that it is there whole or not at all, also after a power cut."""
    for what, then in ((new, lambda: new.replace(path)), (path.parent, lambda: None)):
        fd = os.open(what, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        then()


def _remember(path: Path, said: str) -> str:
    """Keep the compiler's output and whether the sources are at fault; returns its first line that names an error."""
    lines = said.splitlines()
    of_source = next((line for line in lines if re.match(_OF_SOURCE, line)), None)
    reason = of_source or next((line for line in lines if "error" in line), lines[0] if lines else "no word of why")
    before = _trouble(path)
    trouble = {
        "reason": reason,
        "at_s": clock.now_s(),
        "tries": before["tries"] + 1 if before is not None else 1,
        "lasting": of_source is not None and not any(words in said for words in _OF_MACHINE),
    }
    with suppress(OSError):  # then the next try comes sooner
        path.with_suffix(".log").write_text(said, encoding="utf-8")
        _trouble_file(path).write_text(json.dumps(trouble), encoding="utf-8")
    return reason


def _trouble(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(read_small(_trouble_file(path), MOST_BYTES))
        return {
            "reason": str(found["reason"]), "at_s": float(found["at_s"]), "tries": max(1, min(int(found["tries"]), 20)),
            "lasting": bool(found["lasting"]),
        }  # fmt: skip
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):
        return None


def _trouble_file(path: Path) -> Path:
    return path.with_suffix(".failed.json")


def _facts(path: Path) -> Path:
    return path.with_suffix(".json")


def _abi(torch: Path) -> str:
    """Which of the two ABIs of libstdc++ this torch was built with."""
    try:
        text = (torch / "share/cmake/Torch/TorchConfig.cmake").read_text("utf-8")
    except OSError:
        return "1"
    values = (after[:1] for after in text.split("_GLIBCXX_USE_CXX11_ABI=")[1:])
    return next((one for one in values if one in ("0", "1")), "1")


def _libstdcxx() -> str:
    """The file name of the C++ library that this process has or would load: it ends with the newest GLIBCXX it knows.

    Homes and their caches are shared by machines of different age.  A program that PyInstaller made has a copy under
    the name that is asked for, so the number is looked for in it.
    """
    try:
        return _loaded_libstdcxx()
    except (OSError, AttributeError, ValueError):
        return ""


@cache
def _loaded_libstdcxx() -> str:
    library = ctypes.CDLL("libstdc++.so.6")
    record = ctypes.c_void_p()
    ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(record))
    name = ctypes.cast((record.value or 0) + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))[0]
    path = Path(os.fsdecode(name or b"")).resolve()
    if path.name != "libstdc++.so.6":
        return path.name
    newest = max(map(int, re.findall(_GLIBCXX, path.read_bytes())), default=0)
    return f"{path.name}.0.{newest}"


def _cuda_flags(torch: Path) -> tuple[str, ...]:
    if not (torch / "lib/libtorch_cuda.so").is_file():
        return ()
    return ("-DGEMMTUNED_CUDA", "-Wl,--no-as-needed", "-ltorch_cuda", "-ldl")


@cache
def _here() -> Path:
    return Path(__file__).resolve().parent


def _main(arguments: list[str]) -> int:
    if "--nice" in arguments:
        from gemmtuned.configs.priority import give_way  # a program that only looks for the library needs it not

        give_way(19)
    try:
        build(Settings.from_env().cache)
    except GemmtunedError as err:
        sys.stderr.write(f"gemmtuned: {err}\n")
        return err.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
