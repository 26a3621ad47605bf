"""A fork while a thread of ours becomes one of Python's: until 3.11 the child waits for ever for a lock it holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import HERE, Home

PROGRAM = """
import ctypes, json, os, signal, sys, threading, time, torch, gemmtuned
from gemmtuned.hooks import activate
joins = ctypes.CDLL(sys.argv[1]).slow_joins

def ends(child, within_s=5.0):
    "Whether it ends by itself, and well."
    end = time.monotonic() + within_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.002)

def fork(body=lambda: None):
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    return child

def counts_and_forks(wait_s):
    "As a worker that begins with a product, and then starts helpers of its own."
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    time.sleep(wait_s)
    if not ends(fork()):
        os._exit(1)

torch.mm(torch.ones(4, 16), torch.ones(16, 8))
seen, good = joins(), []
for turn in range(8):
    good.append(ends(fork(lambda: counts_and_forks(turn * 0.005)), 8.0))
stop = threading.Event()

def switches():
    while not stop.is_set():
        gemmtuned.disable()
        gemmtuned.enable()

thread = threading.Thread(target=switches)
thread.start()
for turn in range(12):
    good.append(ends(fork()))
    time.sleep(0.005)
stop.set()
thread.join()
print(json.dumps([good, joins() - seen]))
"""


@pytest.mark.long
def test_a_child_that_is_forked_while_our_thread_begins_ends_as_any_other(home: Home, tmp_path: Path) -> None:
    """One forked by a worker that has just counted for the first time; one forked while the hook is switched on."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path / "slow_joins.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(HERE / "slow_joins.c"), "-ldl"], check=True
    )
    good, joins = home.run(PROGRAM, str(built), fresh=True, LD_PRELOAD=str(built), timeout_s=150).said
    assert len(good) == 20 and all(good), good
    assert joins > 8 or sys.version_info[:2] != (3, 11)
