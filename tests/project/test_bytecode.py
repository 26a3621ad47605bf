"""tools/bytecode.py: what it compiles is what pytest and imports then use."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import bytecode

TEST = """def test_it() -> None:
    found = 1
    assert found == 2
"""


def compiled(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and number of each file of bytecode below this folder; one that is written anew has another number."""
    files = sorted(folder.rglob("__pycache__/*.py*"))
    return {file.name: (file.read_bytes(), file.stat().st_ino) for file in files}


def test_pytest_takes_what_it_would_have_made_itself(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    bytecode.rewritten(file)
    here = compiled(tmp_path)
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60).stdout

    assert "assert 1 == 2" in said
    assert len(here) == 1 and compiled(tmp_path) == here


def test_a_test_that_is_no_python_is_left_to_pytest(tmp_path: Path) -> None:
    for text in (b"NUMBER =\n", b"\0", b"\xff\n"):
        (tmp_path / "test_wrong.py").write_bytes(text)
        bytecode.rewritten(tmp_path / "test_wrong.py")

    assert not compiled(tmp_path)


def test_modules_are_compiled_but_those_that_are_left_out_and_those_that_are_compiled_already(tmp_path: Path) -> None:
    for name in ("sympy/core/one.py", "sympy/physics/two.py", "sympy/core/tests/three.py", "sympy/wrong.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("NUMBER = 1\n" if name != "sympy/wrong.py" else "NUMBER =\n")

    bytecode.installed(tmp_path / "sympy")
    bytecode.installed(tmp_path / "not there")

    made = compiled(tmp_path)
    assert list(made) == [Path(importlib.util.cache_from_source("one.py")).name]
    bytecode.installed(tmp_path / "sympy")
    assert compiled(tmp_path) == made


def test_the_folders_that_it_names_are_there() -> None:
    """One that goes by another name would not be compiled, and nobody would say so."""
    assert not [name for name in bytecode.OURS if not (bytecode.ROOT / name).is_dir()]
