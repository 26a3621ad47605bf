"""Sleeping and locking as the interpreter does it, also where gevent or eventlet have put functions of their own there.

Theirs belong to the program's event loop: in a thread of ours they would make a second one, with its descriptors, and a
lock that both take would have the one wait for the loop of the other.  So what runs in a host (hooks/, db/, configs/)
takes these, and nobody waits for anything else while they are held: tests/project/test_layers.py looks.
"""

from __future__ import annotations

import _thread
import importlib.util
import time
from importlib.machinery import BuiltinImporter
from types import ModuleType


def as_built(module: ModuleType) -> ModuleType:
    """A copy of a built-in module as it was made; the module itself where it is not built in."""
    spec = BuiltinImporter.find_spec(module.__name__)
    if spec is None or spec.loader is None:
        return module
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


_threads = as_built(_thread)
sleep = as_built(time).sleep
allocate_lock = _threads.allocate_lock
allocate_rlock = _threads.RLock
