"""The interpreter's own sleep and locks, also in a program in which gevent or eventlet has replaced them.

The replacements belong to the program's event loop.  In our thread they would create a second loop, with descriptors of
its own, and a lock that both threads take would make one wait for the loop of the other.  So code that runs in a
program (hooks/, db/, configs/) uses these, and waits for nothing else while it holds one of these locks;
tests/project/test_layers.py checks it.
"""

from __future__ import annotations

import _thread
import importlib.util
import time
from importlib.machinery import BuiltinImporter
from types import ModuleType


def as_built(module: ModuleType) -> ModuleType:
    """A fresh copy of a built-in module; the module itself if it is not built in."""
    spec = BuiltinImporter.find_spec(module.__name__)
    if spec is None or spec.loader is None:
        return module
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


_threads = as_built(_thread)
sleep = as_built(time).sleep
allocate_lock = _threads.allocate_lock
