"""The last flush of forked children that end by os._exit and so skip `atexit`: those of multiprocessing and its copies.

`multiprocess`, which knows dill and has the workers of Hugging Face's datasets, is a copy of multiprocessing with lists
of its own of what to call at a child's start and end.  Celery's billiard uses those of multiprocessing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

_COPIES: Final = (("multiprocess", "multiprocess.util", "multiprocess.process"),)
_OF_A_COPY: Final = ("Finalize", "register_after_fork", "_run_after_forkers", "_finalizer_registry")
_COPIED: Final = tuple(util for _, util, _ in _COPIES)
_FIRST: Final = 100  # before other finalizers
_registered: set[str] = set()  # a child has them from its parent
_flush: list[Callable[[], object]] = []


def finish_in_children(flush: Callable[[], object]) -> None:
    """Flush at the end of multiprocessing's children, and of this process if it is one."""
    from multiprocessing import process, util

    _flush[:] = [flush]
    _finish_in(util, process)
    after_fork()


def has_copies(modules: Mapping[str, object]) -> bool:
    """Whether a forked child must call `after_fork` at once."""
    return any(name in modules for name in _COPIED)


def after_fork() -> None:
    """In a forked child, before a copy of multiprocessing clears its list and asks who wants to be in it."""
    for name, of_util, of_process in _COPIES if _flush else ():
        util, process = sys.modules.get(of_util), sys.modules.get(of_process)
        if util is None:
            continue
        with suppress(Exception):  # other people's code, or other code of this name, which may be imported when asked
            if name not in _registered and all(hasattr(util, one) for one in _OF_A_COPY):
                _registered.add(name)
                _finish_in(util, process)


def _finish_in(util: Any, process: Any) -> None:
    def register(_: object = None) -> None:
        util.Finalize(None, _flush[0], exitpriority=_FIRST)

    util.register_after_fork(sys.modules[__name__], register)
    if process.parent_process() is not None:
        register()
