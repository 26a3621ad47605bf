"""What we import in a program: mostly within its `import torch`, and what is left never during a fork.

A program without threads of its own may go through `sys.modules` as it is, and fails where another thread imports
meanwhile: "dictionary changed size during iteration".  So `import_ahead` brings what our thread will need.  What only
some rows of a table need (Triton's kernels), or the first table of a home, is imported by our thread all the same.

A thread that imports holds the module's lock.  A child that is forked meanwhile inherits the lock without the thread,
and whoever imports the module there waits for ever.  So our threads import inside `importing()`, and a fork waits.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.frame_lock import FrameLock, Running
from gemmtuned.configs.settings import MANIFEST, Settings
from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

WAIT_S: Final = 5.0  # imports end by themselves; but one may wait for the thread that forks, so not for ever

_lock = FrameLock()


def importing() -> FrameLock:
    """Around everything in our threads that may import a module."""
    return _lock


def require_standard(name: str) -> None:
    """Before a module of the standard library is imported that the program may have one of its own by the name of.

    Raises GemmtunedError where that is so: the program's own must not run in our thread, nor ours take its name.
    """
    found = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
    origin = found.origin if found is not None else None
    if origin is None or not origin.startswith(os.path.dirname(os.__file__) + os.sep):
        raise GemmtunedError(f"the standard library's {name} is not to be had: {origin or 'nothing'} is in its place")


def import_ahead(settings: Settings) -> None:
    """Import what our thread needs, in the program's. What fails here is tried again, and reported, by who needs it."""
    with suppress(Exception), importing():
        if settings.capture:
            require_standard("sqlite3")
            importlib.import_module("gemmtuned.db.guest")
            importlib.import_module("gemmtuned.kernels.device")
        if sys.modules["torch"].version.cuda:
            for name in ("beats", "graphs"):
                importlib.import_module(f"gemmtuned.hooks.{name}")
        if settings.dispatch and (settings.tables or (settings.config_dir / MANIFEST).is_file()):
            importlib.import_module("gemmtuned.hooks.routes")
            importlib.import_module("gemmtuned.hooks.probation")
            if settings.tables:
                for name in ("configs.aiter_rows", "configs.verdicts", "hooks.user_tables"):
                    importlib.import_module(f"gemmtuned.{name}")


def pause(fork: Running) -> None:
    """Wait until none of our threads imports, for WAIT_S at most, and let none begin until the fork is over."""
    _lock.hold(fork, WAIT_S)


def is_going_on() -> bool:
    """Whether one of them imports, or a fork waits for that."""
    return _lock.is_taken


def after_fork() -> None:
    """In a forked child: whoever held the lock is not here."""
    global _lock
    _lock = FrameLock()
