"""Tests run in forks: every outcome comes home, a fork that dies costs one test, and what is shared is made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import side_by_side

CONFTEST = """
import pytest
from side_by_side import SideBySide

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: first")
    config.addinivalue_line("markers", "timed: second")
    config.addinivalue_line("markers", "slow: early")
    config.pluginmanager.register(SideBySide(2), "side-by-side")

@pytest.fixture(scope="module")
def shared():
    with open("made", "a") as file:
        file.write("x")

@pytest.fixture
def breaks_at_its_end():
    yield
    raise ValueError("at the end")
"""
KINDS = """
import os, pathlib, signal, warnings
import pytest

@pytest.mark.parametrize("n", range(4))
def test_holds(n, tmp_path, shared):
    warnings.warn(f"number {n}")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_breaks():
    print("what it has printed")
    os.system("echo what its child has printed")
    assert False, "it breaks"

def test_breaks_off(breaks_at_its_end):
    pass

def test_is_left_out():
    pytest.skip("of its own will")
"""
ALONE = """
import os, time
import pytest
from side_by_side import folder_of_all

@pytest.mark.alone
def test_is_alone():
    assert not os.path.exists("began")
    time.sleep(0.1)
    assert not os.path.exists("began")

@pytest.mark.timed
@pytest.mark.parametrize("n", range(3))
def test_is_timed(n):
    assert not os.path.exists("began")
    with open("timed", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.1)
    assert not os.path.exists("began")

@pytest.mark.slow
@pytest.mark.parametrize("n", range(40))
def test_is_one_of_many(n, tmp_path_factory):
    open("began", "w").close()
    time.sleep(0.01)
    with open("who", "a") as file:
        file.write(f"{os.getpid()}\\n")
    with open("where", "a") as file:
        file.write(f"{folder_of_all(tmp_path_factory)}\\n")
    assert tmp_path_factory.getbasetemp().parent == folder_of_all(tmp_path_factory)
"""


def run(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    path = {"PYTHONPATH": str(Path(side_by_side.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    return done.returncode, done.stdout


def test_every_outcome_comes_home_and_a_fork_that_dies_fails_the_test_that_it_was_at(tmp_path: Path) -> None:
    (tmp_path / "test_kinds.py").write_text(KINDS)
    (tmp_path / "test_alone.py").write_text(ALONE)
    code, said = run(tmp_path)

    assert code == 1
    assert said.splitlines()[-1].startswith("2 failed, 49 passed, 1 skipped, 4 warnings, 1 error in"), said
    assert "ran test_kinds.py::test_dies ended with -9" in said
    assert "it breaks" in said and "what it has printed" in said and "what its child has printed" in said
    assert "ValueError: at the end" in said and "of its own will" in said
    assert all(said.count(f"UserWarning: number {n}") == 1 for n in range(4))
    assert len((tmp_path / "made").read_text()) == 1, "one fork has all that share it, as the other has enough to do"
    assert len({*(tmp_path / "who").read_text().split()}) == 2, "who has nothing more to do takes half"
    assert len({*(tmp_path / "timed").read_text().split()}) == 2, "what mostly waits is run in two forks"
    assert len({*(tmp_path / "where").read_text().split()}) == 1, "what is made once for all lies in one folder"


def test_a_run_that_is_to_end_at_the_first_failure_does(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(
        "import time, pytest\n\ndef test_breaks():\n    assert False\n\n"
        "@pytest.mark.parametrize('n', range(500))\ndef test_holds(n):\n    time.sleep(0.02)\n"
    )
    code, said = run(tmp_path, "-x")
    assert code == 1 and "stopping after 1 failures" in said
    assert "500 passed" not in said


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("import no_such_module\n")
    code, said = run(tmp_path)
    assert code == 2 and "No module named 'no_such_module'" in said


def test_a_file_that_starts_threads_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n\ndef test(): pass\n"
    )
    code, said = run(tmp_path)
    assert code == 4 and "1 threads were begun while test files were imported" in said, said
