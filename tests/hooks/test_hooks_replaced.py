"""A program or its tests put functions of their own in the place of the interpreter's: no count is lost or doubled."""

from __future__ import annotations

import time

import pytest
from hooked import Home

PROGRAM = """
import _thread, builtins, collections, fcntl, json, os, pathlib, select, signal, sqlite3, sys, threading, time
import gemmtuned, torch
from gemmtuned.hooks import activate

main, ident, sleep, monotonic = _thread.get_ident(), _thread.get_ident, time.sleep, time.monotonic
a, shapes = torch.ones(4, 16), [torch.ones(16, 8 * n) for n in range(1, 100)]
flusher, calls, blocked = activate.current().flusher, 0, True


def call():
    global calls
    torch.mm(a, shapes[0])
    torch.mm(a, shapes[calls // 2 % 99])
    calls += 2


def counted(limit_s=20.0):
    until_s = monotonic() + limit_s
    while flusher.calls < calls or flusher._pending._counts or flusher.in_store:
        if monotonic() > until_s:
            return False
        sleep(0.01)
    return flusher.calls == calls


def raises(*given, **options):
    raise RuntimeError("planted")


def waits(*given, **options):
    while blocked and ident() != main:
        sleep(0.01)


class Replaced:
    def __init__(self, name, how):
        where, _, self.name = name.rpartition(".")
        self.module = pathlib.Path if where == "Path" else sys.modules[where]
        self.old = getattr(self.module, self.name)
        same = self.old("/etc/passwd") if how == "one file" else None
        self.new = {"raises": raises, "waits": waits}.get(how, lambda *given, **options: same)

    def put(self):
        setattr(self.module, self.name, self.new)

    def take_back(self):
        setattr(self.module, self.name, self.old)


call()
assert counted()
"""
WHILE = """
from hooked import publish
for name, how in json.loads(sys.argv[1]):
    replaced = Replaced(name, how)
    replaced.put()
    call()
    sleep(0.15)
    call()
    replaced.take_back()
    assert counted(), (name, how, flusher.calls, calls)
assert activate.current().background.alive
gemmtuned.disable()
print(json.dumps(calls))
"""
UNTIL_THE_END = """
replaced = Replaced(*sys.argv[1:])
call()
print(json.dumps(calls), flush=True)
replaced.put()
"""
REPLACED = [
    *((f"builtins.{name}", "raises") for name in ("len", "int", "hash", "max", "getattr", "isinstance", "sum", "map")),
    *((f"builtins.{name}", "none") for name in ("len", "next", "zip", "sorted", "min", "round", "bool", "iter")),
    ("_thread.get_ident", "raises"), ("threading.get_ident", "raises"), ("threading.Lock", "raises"),
    ("sys._getframe", "raises"), ("sys._current_frames", "raises"), ("time.sleep", "raises"),
    ("os.stat", "one file"), ("os.stat", "raises"), ("os.fstat", "raises"), ("os.getpid", "none"),
    ("os.open", "raises"), ("os.read", "none"), ("os.write", "raises"), ("os.close", "raises"),
    ("fcntl.flock", "none"), ("fcntl.fcntl", "raises"), ("select.poll", "raises"), ("sqlite3.connect", "none"),
    ("Path.stat", "none"), ("Path.exists", "raises"), ("Path.resolve", "none"), ("json.loads", "none"),
]  # fmt: skip


def test_what_is_replaced_for_a_while_costs_no_count_and_counts_none_twice(home: Home) -> None:
    import json

    done = home.run(PROGRAM + WHILE, json.dumps(REPLACED))

    assert done.said == home.calls() and done.said > 2 * len(REPLACED)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("builtins.len", "none"), ("builtins.next", "raises"), ("builtins.getattr", "none"), ("os.fstat", "raises"),
        ("_thread.get_ident", "raises"), ("signal.pthread_sigmask", "raises"), ("builtins.isinstance", "none"),
    ],
)  # fmt: skip
def test_what_is_replaced_until_the_end_costs_no_count_without_a_line(home: Home, name: str, how: str) -> None:
    done = home.run(PROGRAM + UNTIL_THE_END, name, how, whole_end=True)

    assert done.said == 4
    assert home.calls() == 4 or any("counts" in line for line in done.ours), done.err


@pytest.mark.parametrize("name", ["os.lstat", "json.loads", "sqlite3.complete_statement", "Path.resolve"])
def test_a_function_that_never_returns_in_our_thread_holds_up_no_end(home: Home, name: str) -> None:
    began_s = time.monotonic()
    done = home.run(PROGRAM + UNTIL_THE_END, name, "waits", whole_end=True, timeout_s=30)

    assert done.code == 0 and time.monotonic() - began_s < 20
    assert home.calls() == 4 or any("counts" in line for line in done.ours), done.err


def test_a_tracer_that_raises_in_our_thread_does_not_end_it(home: Home) -> None:
    """From Python 3.12 on threading.settrace_all_threads sets one there."""
    trace = """
def tracer(frame, event, value):
    if frame.f_code.co_name == "_ended":
        traced.append(event)
        raise RuntimeError("planted")


def wait(timeout_s):
    if not traced:
        sys.settrace(tracer)
    return old(timeout_s)


traced, events = [], activate.current().watcher.events
old, events.wait = events.wait, wait
for _ in range(200):
    if traced:
        break
    call()
    sleep(0.02)
call()
assert traced == ["call"] and counted()
gemmtuned.disable()
print(json.dumps(calls))
"""
    done = home.run(PROGRAM + trace)

    assert done.said == home.calls()
    assert done.ours == ["gemmtuned: an error of ours, the program runs on: RuntimeError: planted"]
