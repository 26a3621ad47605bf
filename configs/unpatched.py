"""The interpreter's own functions, also in a program that has put others in their place.

gevent and eventlet replace sleep and locks; tests replace what they please, `os.getpid` or `open` or even `len`, for as
long as they run, and mean their own code.  Our thread would end, count twice, or take a made up file for another one.
So code on the way of the counts to the store uses what was there when the hook began: `os` and its like from here, and
by `__builtins__ = builtins`, where the functions of a module look for `len`, also those.  What the standard library's
own code calls is out of our hands: where that fails a flush fails, which is said, and made good by a later one.

The replacements of gevent belong to the program's event loop.  In our thread they would create a second loop, with
descriptors of its own, and a lock that both threads take would make one wait for the loop of the other.  So code that
runs in a program (hooks/, db/, configs/) uses these, and waits for nothing else while it holds one of these locks;
tests/project/test_layers.py checks it.
"""

from __future__ import annotations

import _thread
import builtins as _builtins
import fcntl as _fcntl
import importlib.util
import os as _os
import select as _select
import signal as _signal
import time
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from types import ModuleType
from typing import TYPE_CHECKING


def as_built(module: ModuleType) -> ModuleType:
    """A fresh copy of a module of the interpreter's that is written in C; the module itself where it is none."""
    spec = BuiltinImporter.find_spec(module.__name__) or module.__spec__
    if spec is None or spec.loader is None:
        return module
    if spec.origin != "built-in" and type(spec.loader) is not ExtensionFileLoader:
        return module
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


_threads = as_built(_thread)
_time = as_built(time)
sleep = _time.sleep
clock_gettime_ns = _time.clock_gettime_ns
allocate_lock = _threads.allocate_lock
get_ident = _threads.get_ident
thread_count = _threads._count
poll = as_built(_select).poll  # eventlet deletes that of the module


def as_of_now(module: ModuleType) -> ModuleType:
    """A copy: a name that is given another value in the module later keeps this one here."""
    copy = ModuleType(f"{module.__name__} of gemmtuned")  # by its own name, pyfakefs would find and replace it
    copy.__dict__.update({**vars(module), "__name__": copy.__name__})
    return copy


if TYPE_CHECKING:
    import builtins as builtins
    import fcntl as fcntl
    import os as os
    import signal as signal
else:
    builtins, fcntl, os, signal = map(as_of_now, (_builtins, _fcntl, _os, _signal))
