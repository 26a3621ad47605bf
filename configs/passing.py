"""Whether an error comes from something missing that may be there again soon: memory, room on a disk, a compiler.

Libraries that compile at a first call wrap such an error in one of their own, with pages of a compiler's output.  So
the errors behind an error are looked at as well, and all that they say.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import Final

MEMORY: Final = "memory"
_LACKS: Final = (
    (MEMORY, r"out.?of.?(host.|device.)?memory|can(no|')t allocate memory(?! in static TLS)|MemoryError"
     r"|ErrorMemoryAllocation|not enough memory|bad_alloc|ALLOC_FAILED|virtual memory exhausted|insufficient memory"),
    ("disk", r"no space left on device|no usable temporary directory|disk quota exceeded|read-only file system"
     r"|input/output error|stale file handle"),
    ("files and processes", r"too many open files|resource temporarily unavailable|can't start new thread"),
    ("time to end", r"killed signal terminated|died with <Signals\.SIG(KILL|TERM)|ended by SIG(KILL|TERM)"
     r"|died due to signal (9|15)\b|exit (status|code):? (137|143|-9|-15)\b|cannot be killed: it is stuck"),
    ("a compiler", r"\b(nvcc|ninja|ptxas|cicc|gcc|g\+\+|cc|c\+\+|clang|clang\+\+): (command )?not found"
     r"|no such file or directory: '([^']*/)?(nvcc|ninja|ptxas|cicc|gcc|g\+\+|cc|c\+\+|clang|clang\+\+)'"
     r"|(could not|cannot|failed to|unable to) find (the )?(nvcc|cuda)|nvcc (was )?not found"
     r"|CUDA_HOME environment variable is not set"
     r"|failed to find C compiler|ninja is required to load|cannot find ptxas"),
)  # fmt: skip
_WORDS: Final = tuple((what, re.compile(f"short of {what}|{words}", re.IGNORECASE)) for what, words in _LACKS)
_NUMBERS: Final = {
    errno.ENOMEM: MEMORY, errno.ENOSPC: "disk", errno.EDQUOT: "disk", errno.EROFS: "disk", errno.EIO: "disk",
    errno.ESTALE: "disk", errno.EMFILE: "files and processes", errno.ENFILE: "files and processes",
    errno.EAGAIN: "files and processes",
}  # fmt: skip
_ENDED: Final = frozenset(code for s in (signal.SIGKILL, signal.SIGTERM) for code in (-s, 128 + s))
_COMPILERS: Final = frozenset(
    ("nvcc", "ninja", "ptxas", "cicc", "gcc", "g++", "cc", "c++", "clang", "clang++", "cmake", "make", "ld")
)
_DEEPEST: Final = 20  # errors behind one another


def lack_of(err: BaseException) -> str:
    """What was missing when this was raised, in a word or two; "" where that is not known."""
    return next(filter(None, map(_lack_of_one, _behind(err))), "")


def lack_in(text: str) -> str:
    """What was missing, as far as a message says it; "" where it does not."""
    return next((what for what, words in _WORDS if words.search(text)), "")


def with_lack(line: str, err: BaseException) -> str:
    """A line about an error, with what was missing where it does not say so itself; `lack_in` finds it there."""
    lack = lack_of(err)
    return f"{line} (short of {lack})" if lack and not lack_in(line) else line


def _behind(err: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = err
    for _ in range(_DEEPEST):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _lack_of_one(err: BaseException) -> str:
    if isinstance(err, MemoryError):
        return MEMORY
    if isinstance(err, FileNotFoundError):
        return "a compiler" if Path(str(err.filename or "")).name in _COMPILERS else lack_in(_text(err))
    if isinstance(err, OSError) and err.errno in _NUMBERS:
        return _NUMBERS[err.errno]
    if isinstance(err, CalledProcessError) and err.returncode in _ENDED:
        return "time to end"
    return lack_in(f"{type(err).__name__}: {_text(err)}")


def _text(err: BaseException) -> str:
    try:
        return str(err)
    except Exception:  # other people's errors
        return ""
