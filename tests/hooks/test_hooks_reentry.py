"""A signal's handler, or a finalizer, comes in the middle of any line of ours, and calls the API itself."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hooked import Home

from gemmtuned.configs.change_queue import ChangeQueue

# How many events of our code a call has; at the one of that number `act` comes, as a signal's handler does.
EVENTS = """
def events_of(call, at=0, act=None):
    seen = 0
    def local(frame, event, arg):
        nonlocal seen
        seen += 1
        if seen == at:
            sys.settrace(None)
            act()
        return local
    def called(frame, event, arg):
        name = frame.f_globals.get("__name__", "")
        return local(frame, event, arg) if name.startswith("gemmtuned.") else None
    sys.settrace(called)
    try:
        call()
    finally:
        sys.settrace(None)
    return seen
"""
# Interrupts every STEP-th event of our code in one call by another call, as a handler would; says what is wrong then.
INTERRUPTED = """
import faulthandler, json, os, sys
from pathlib import Path
import torch
import gemmtuned
from gemmtuned.hooks import activate
from hooked import LINEAR, publish, published, wait_for

outer, inner, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
folder, rows = Path(os.environ["GEMMTUNED_HOME"]) / "configs", [published(LINEAR, "torch_swap")]
newest, wrong = 0, []
layer, x = torch.nn.Linear(16, 8), torch.ones(4, 16)

def published_anew():
    global newest
    newest = max(newest, gemmtuned.generation()) + 1
    publish(folder, rows, newest)

def cycle():
    gemmtuned.disable()
    gemmtuned.enable()

def newer():
    published_anew()
    gemmtuned.reload()

calls = {"reload": gemmtuned.reload, "newer": newer, "status": gemmtuned.status, "disable": gemmtuned.disable,
         "cycle": cycle}

def interrupted(at):
    if outer == "reload":
        published_anew()
    try:
        return events_of(calls[outer], at, calls[inner])
    except Exception as err:
        wrong.append([at, repr(err)])

interrupted(0)
if not gemmtuned.is_enabled():
    gemmtuned.enable()
events = interrupted(0)
for at in range(1, events + 1, step):
    faulthandler.dump_traceback_later(20, exit=True)
    interrupted(at)
    if not gemmtuned.is_enabled():
        gemmtuned.enable()
    sum(s.calls for s in activate.current().drain())
    layer(x)
    if sum(s.calls for s in activate.current().drain()) != 1:
        wrong.append([at, "not counted"])
    if inner == "newer":
        used = [gemmtuned.generation(), activate.current().native.generation]
        if used != [newest, newest]:
            wrong.append([at, f"{used} in use instead of {newest}"])
faulthandler.cancel_dump_traceback_later()
ours = [t for t in os.listdir("/proc/self/task") if t != str(os.getpid())]
if len(ours) > 1:
    wait_for(lambda: len(os.listdir("/proc/self/task")) <= 2)  # one of faulthandler's, or ours of before, ends
print(json.dumps([events, wrong[:9]]))
"""


def steps(*of: tuple[str | int, ...]) -> list[Any]:
    """Of each two steps, the last two, the longer one; the shorter one in `make long`."""
    return [
        pytest.param(*calls, step, marks=marks)
        for *calls, longer, shorter in of
        for step, marks in ((longer, ()), (shorter, pytest.mark.long))
    ]


@pytest.mark.parametrize(
    ("outer", "inner", "step"),
    steps(
        ("reload", "newer", 43, 11), ("status", "disable", 53, 13), ("cycle", "cycle", 113, 29),
        ("reload", "disable", 127, 31),
    ),
)  # fmt: skip
def test_a_call_that_interrupts_another_is_obeyed_and_leaves_the_newest_in_use(
    home: Home, outer: str, inner: str, step: int
) -> None:
    """It was undone by the one that it had interrupted, raised, waited for itself, or left a second thread."""
    events, wrong = home.run(
        EVENTS + INTERRUPTED, outer, inner, str(step), GEMMTUNED_FLUSH_S="3600", GEMMTUNED_RELOAD="manual"
    ).said

    assert events > 100
    assert wrong == []


# Ends every STEP-th event of our code in one call by an exception, as a handler may; then all must work, and soon.
CUT_OFF = """
import faulthandler, json, os, sqlite3, sys, time
from pathlib import Path
import torch
import gemmtuned
from gemmtuned.hooks import activate, phase
from hooked import LINEAR, publish, published, wait_for

outer, step = sys.argv[1], int(sys.argv[2])
home = Path(os.environ["GEMMTUNED_HOME"])
rows, newest, wrong, made = [published(LINEAR, "torch_swap")], 0, [], 0
layer, x = torch.nn.Linear(16, 8), torch.ones(4, 16)
sys.unraisablehook = lambda _: None  # Python tells of what comes in a hook of a fork

class Late(BaseException):
    pass

def publish_newer():
    global newest
    newest = max(newest, gemmtuned.generation()) + 1
    publish(home / "configs", rows, newest)

def call():
    global made
    layer(x)
    made += 1

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def in_a_phase():
    with gemmtuned.phase("warm-up"):
        pass

calls = {"disable": gemmtuned.disable, "enable": gemmtuned.enable, "reload": gemmtuned.reload, "fork": fork,
         "slow fork": fork, "exit": activate._last_flush, "phase": in_a_phase}

def raise_late():
    raise Late

def cut_off(at):
    try:
        return events_of(calls[outer], at, raise_late)
    except Late:
        pass

def stored():
    conn = sqlite3.connect(home / "tune.db")
    try:
        asked = "SELECT (SELECT coalesce(sum(calls), 0) FROM every_sighting)"
        return conn.execute(asked + " + (SELECT coalesce(sum(calls), 0) FROM phase_call)").fetchone()[0]
    finally:
        conn.close()

def on():
    if outer == "exit" or not gemmtuned.is_enabled():
        gemmtuned.enable()

if outer == "slow fork":  # one at which all of it is paused
    sys.modules["multiprocess.util"] = type(sys)("multiprocess.util")
on()
publish_newer()
gemmtuned.reload()
if outer == "enable":
    gemmtuned.disable()
events = cut_off(0)
for at in range(1, events + 1, step):
    faulthandler.dump_traceback_later(20, exit=True)
    on()
    call()
    activate.current().flusher.flush()  # the database has been opened once
    call()
    if outer == "reload":
        publish_newer()
    if outer == "enable":
        gemmtuned.disable()
    began = time.monotonic()
    cut_off(at)
    on()
    call()
    fork()
    if outer == "reload":
        gemmtuned.reload()
        used = [gemmtuned.generation(), activate.current().native.generation]
        if used != [newest, newest]:
            wrong.append([at, f"{used} in use instead of {newest}"])
    wait_for(lambda: activate.current().background.alive)
    gemmtuned.disable()
    if time.monotonic() - began > 2:
        wrong.append([at, f"{time.monotonic() - began:.1f} s"])
    if phase.current():
        wrong.append([at, phase.current()])
    got = stored()
    if got != made:
        wrong.append([at, f"{got} calls stored of {made}"])
        made = got
faulthandler.cancel_dump_traceback_later()
wait_for(lambda: len(os.listdir("/proc/self/task")) <= 2)  # one may be faulthandler's
print(json.dumps([events, wrong[:9]]))
"""


@pytest.mark.parametrize(
    ("outer", "step"),
    steps(
        ("disable", 43, 11), ("enable", 401, 101), ("exit", 43, 11), ("fork", 7, 1), ("slow fork", 21, 5),
        ("reload", 43, 11), ("phase", 53, 13),
    ),
)  # fmt: skip
def test_what_an_exception_cuts_off_holds_up_nothing_and_loses_nothing(home: Home, outer: str, step: int) -> None:
    """A lock stayed locked: the thread waited for ever, each later change 2 s, and counts were lost."""
    events, wrong = home.run(EVENTS + CUT_OFF, outer, str(step), GEMMTUNED_RELOAD="manual").said

    assert events > (20 if outer == "fork" else 50)
    assert wrong == []


@pytest.mark.parametrize("at", ["Hook.stop", "Hook.remove", "Background.end", "Hook.start", "Background.start"])
def test_what_a_handlers_exception_leaves_half_done_is_undone_by_the_next_change(home: Home, at: str) -> None:
    """As of a program's own time limit.  The hook stayed behind with its thread, and two wrote to one database."""
    threads, counted = home.run(
        """
        import json, os, sys
        from pathlib import Path
        import torch, gemmtuned
        from gemmtuned.hooks import activate
        from gemmtuned.hooks.background import Background
        from gemmtuned.hooks.hook import Hook
        from hooked import wait_for

        class Late(Exception):
            pass

        kind, name = sys.argv[1].split(".")
        kind, times = {"Hook": Hook, "Background": Background}[kind], 0
        plain = getattr(kind, name)

        def late(*given, **named):
            global times
            if name == "start":
                plain(*given, **named)
            times += 1
            if times == 1:
                raise Late
            if name != "start":
                return plain(*given, **named)

        for _ in range(3):
            setattr(kind, name, late)
            times = 0
            try:
                gemmtuned.disable()
                gemmtuned.enable()
            except Late:
                pass
            setattr(kind, name, plain)
        gemmtuned.enable()
        activate.current().drain()
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        counted = sum(s.calls for s in activate.current().drain())
        wait_for(lambda: len(os.listdir("/proc/self/task")) <= 2)
        print(json.dumps([len(os.listdir("/proc/self/task")), counted]))
        """,
        at, GEMMTUNED_FLUSH_S="3600",
    ).said  # fmt: skip

    assert threads == 2
    assert counted == 1


def test_a_change_asked_for_in_the_middle_of_one_comes_after_it() -> None:
    changes, done = ChangeQueue(), list[str]()

    def outer() -> str:
        assert changes.make(lambda: done.append("inner")) is None
        done.append("outer")
        return "made"

    assert changes.make(outer) == "made"
    assert done == ["outer", "inner"]


def test_a_change_that_fails_leaves_the_next_its_turn(capfd: pytest.CaptureFixture[str]) -> None:
    changes, done = ChangeQueue(), list[str]()

    def outer() -> None:
        changes.make(lambda: 1 / 0)
        changes.make(lambda: done.append("inner"))
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        changes.make(outer)
    assert done == ["inner"]
    assert changes.make(lambda: "next") == "next"


def test_changes_of_two_threads_come_one_after_another() -> None:
    changes, inside, most = ChangeQueue(), 0, 0

    def change() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1

    threads = [threading.Thread(target=lambda: [changes.make(change) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_thread_that_outlives_its_hook_returns_into_memory_that_is_there(home: Home) -> None:
    """What C called in it was freed with the hook, where nobody had waited for the thread to begin."""
    done = home.run(
        """
    import gc, gemmtuned
    from gemmtuned.hooks import background

    class Part:
        def due_s(self): return float("inf")
        def turn(self): pass

    for _ in range(40):
        background.Background([Part()], background.Sleeper()).start()
    gc.collect()
    print(1)
    """,
        GEMMTUNED="0",
        AITER_TUNE_GEMM="0",
    )
    assert done.said == 1
