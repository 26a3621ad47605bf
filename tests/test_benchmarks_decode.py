"""The benchmark of decode sizes: its supervisor ends in time and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

# Starts a process that would live on and hold our output, says its pid, then does what the argument says
CHILD = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(grandchild.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "decode.py"
    spec = importlib.util.spec_from_file_location("decode", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gone(pid: int) -> bool:
    """Within two seconds, no such process but for a corpse that waits for its parent."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_processes_that_compile_end_with_the_one_that_measures(decode: ModuleType, tmp_path: Path) -> None:
    trials, pid = tmp_path / "trials.jsonl", tmp_path / "pid"
    trials.touch()

    code = decode.supervise([sys.executable, "-S", "-c", CHILD, str(pid), "0"], dict(os.environ), trials, left_s=60)

    assert code == 0
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize(("left_s", "quiet_s"), [(1.0, 60.0), (60.0, 1.0)])
def test_a_hanging_measurement_is_killed_with_all_it_started(
    decode: ModuleType, tmp_path: Path, left_s: float, quiet_s: float
) -> None:
    trials, pid = tmp_path / "trials.jsonl", tmp_path / "pid"
    trials.touch()
    began = time.monotonic()
    command = [sys.executable, "-S", "-c", CHILD, str(pid), "600"]

    code = decode.supervise(command, dict(os.environ), trials, left_s=left_s, quiet_s=quiet_s)

    assert code == 124
    assert time.monotonic() - began < 5
    assert gone(int(pid.read_text()))
