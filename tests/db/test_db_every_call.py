"""SQLite's own method: of all reads, writes, fsyncs, renames and opens of store and publisher, each fails once."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("library") / "failing_calls.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(HERE / "failing_calls.c"), "-ldl"], check=True
    )
    return built


def every_call(folder: Path, library: Path, number: int, step: int) -> str:
    command = [sys.executable, str(HERE / "every_call_fails.py"), str(folder), str(library), str(number), str(step)]
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=3000)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_a_few_of_all_calls_fail_once_and_nothing_is_lost(tmp_path: Path, library: Path, error: str) -> None:
    said = every_call(tmp_path, library, getattr(errno, error), 13)
    total = re.fullmatch(r"(\d+) calls, tried to \d+, (\d+) of them refused a step\n", said)
    assert total is not None, said
    assert int(total[1]) > 60 and int(total[2]) >= 3, "the shim strikes SQLite's calls and Python's"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_each_of_all_calls_fails_once_and_nothing_is_lost(tmp_path: Path, library: Path, error: str) -> None:
    said = every_call(tmp_path, library, getattr(errno, error), 1)
    assert re.fullmatch(r"(\d+) calls, tried to \1, \d+ of them refused a step\n", said), said


READS = """
import ctypes, errno, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from store_cases import NEW, look_over, open_store, problem, saw
from gemmtuned.configs.errors import StoreError

home, shim = Path(sys.argv[1]), ctypes.CDLL(sys.argv[2])
store = open_store(home)
store.sightings.add("r", NEW, [saw(problem(n=64 + i)) for i in range(300)], now_s=1_800_000_000.0)
store.close()
refused = 0
for n in range(1, 160, int(sys.argv[4])):
    shim.fail_reads(str(home).encode(), n, errno.EIO)
    store = None
    try:
        store = open_store(home)
        store.sightings.add("r", NEW, [saw(problem())], now_s=1_800_000_000.0 + n)
        look_over(store)
    except StoreError:
        refused += 1
    finally:
        if store is not None:
            store.close()
    shim.fail_reads(b"", 0, 0)
assert not list(home.glob("*corrupt*")), sorted(p.name for p in home.iterdir())
print(refused)
"""


@pytest.mark.long
def test_a_read_that_the_disk_refuses_once_sets_no_sound_database_aside(tmp_path: Path, library: Path) -> None:
    command = [sys.executable, "-c", READS, str(tmp_path / "home"), str(library), str(HERE), "9"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": str(library)})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3, "the shim strikes SQLite's reads"
