"""A program may stop its clocks, or set them back: flushes, tables and its end go by the system's."""

from __future__ import annotations

import sqlite3
import time

import pytest
from hooked import LINEAR, Home, publish, published

SPANS = ("sampled_us", "waited_us")  # columns that are no times; a program waits for CPUs where others use them
# As freezegun does it: every name that leads to a clock leads to another
BY_NAME = """
import datetime
stopped = [946684800.0]  # the first of January 2000
names = ("time", "monotonic", "perf_counter")
fakes = {getattr(time, name): lambda: stopped[0] for name in names}
fakes |= {getattr(time, f"{name}_ns"): lambda: int(stopped[0] * 1e9) for name in names}
fakes |= {time.clock_gettime: lambda which: stopped[0], time.clock_gettime_ns: lambda which: int(stopped[0] * 1e9)}
fakes |= {time.localtime: lambda s=0: time.struct_time((2000, 1, 1, 0, 0, 0, 5, 1, 0))}


class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2000, 1, 1, tzinfo=tz)


def stop_clocks():
    fakes[datetime.datetime] = Datetime
    for module in [*sys.modules.values()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            try:
                if value in fakes and module is not sys.modules["__main__"]:
                    setattr(module, name, fakes[value])
            except Exception:
                pass
"""
# As time-machine does it: what C runs for the functions is another's, by whatever name they are called
IN_C = """
import ctypes
stopped = [946684800.0]
kept = []


def stop_clocks():
    class Definition(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("run", ctypes.c_void_p), ("flags", ctypes.c_int)]

    class Function(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ssize_t), ("type", ctypes.c_void_p), ("definition", ctypes.POINTER(Definition))]

    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p)
    for name in ("time", "monotonic", "perf_counter", "clock_gettime", "time_ns", "monotonic_ns", "clock_gettime_ns"):
        whole = name.endswith("_ns")
        run = kind(lambda module, argument, whole=whole: int(stopped[0] * 1e9) if whole else stopped[0])
        kept.append(run)
        function = Function.from_address(id(getattr(time, name)))
        function.definition.contents.run = ctypes.cast(run, ctypes.c_void_p).value
"""
FREEZEGUN = """
import datetime
import freezegun


class Stopped(list):
    def __setitem__(self, at, then):
        frozen.move_to(datetime.datetime.fromtimestamp(then, datetime.timezone.utc))


stopped = Stopped()


def stop_clocks():
    global frozen
    frozen = freezegun.freeze_time("2000-01-01").start()
"""
PROGRAM = """
import json, os, sys, threading, time, torch
import gemmtuned
from gemmtuned.hooks import activate
from hooked import LINEAR, publish, published
torch.set_num_threads(2)
{stop}
sleep, calls = time.sleep, [0]
threading.excepthook = lambda args: os._exit(70)


def until(what):
    for _ in range(6000):
        if what():
            return
        sleep(0.01)
    print("never", flush=True)
    os._exit(71)


def counted():
    flusher = activate.current().flusher
    torch.nn.functional.linear(torch.randn(4, 16), torch.randn(8, 16))
    calls[0] += 1
    until(lambda: flusher.calls == calls[0] and not flusher._pending)


counted()
stop_clocks()
counted()
assert time.monotonic() == time.time() == 946684800.0
for generation, then in ((1, 946684800.0), (2, 900000000.0), (3, 4000000000.0)):  # still, back, far ahead
    stopped[0] = then
    publish(activate.current().settings.config_dir, [published(LINEAR, "torch_swap")], generation)
    until(lambda: gemmtuned.generation() == generation)
    counted()
pid = os.fork()
if pid == 0:
    calls[0] = 0
    counted()
    activate.deactivate()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
torch.nn.functional.linear(torch.randn(4, 16), torch.randn(8, 16))
activate.deactivate()
print(json.dumps(calls[0]))
"""


@pytest.mark.parametrize("stop", [BY_NAME, IN_C, FREEZEGUN], ids=["by name", "in C", "freezegun"])
def test_clocks_that_the_program_has_stopped_or_set_back_stop_nothing_of_ours(home: Home, stop: str) -> None:
    if stop == FREEZEGUN:
        pytest.importorskip("freezegun")
    home.path.mkdir(exist_ok=True)
    publish(home.path / "configs", [published(LINEAR, "onednn")], 0)
    before_us = time.time_ns() // 1000
    done = home.run(PROGRAM.replace("{stop}", stop))
    after_us = time.time_ns() // 1000

    assert done.said == 5 and not done.ours
    assert home.calls() == 7  # with the child's and the last one
    conn = sqlite3.connect(home.path / "tune.db")
    try:
        times = {
            (table, column): {value for (value,) in conn.execute(f"SELECT {column} FROM {table}") if value}
            for table in ("sighting", "session", "problem", "run", "environment")
            for _, column, *_ in conn.execute(f"PRAGMA table_info({table})")
            if (column.endswith("_us") and column not in SPANS) or column in ("first_seen", "last_seen")
        }
    finally:
        conn.close()
    assert {("session", "started_us"), ("session", "beat_us")} <= times.keys(), times.keys()
    assert all(before_us - 60e6 <= value <= after_us for values in times.values() for value in values), times
