"""`python -m benchmarks NAME --help`, and of the laboratory, without a GPU and what single programs need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import contextlib, io, json, runpy, sys
from pathlib import Path
from benchmarks.__main__ import main, programs
sys.modules["matplotlib"] = sys.modules["scipy"] = None  # whoever imports these fails
said = {}
for folder in map(Path, ("benchmarks", "lab")):
    for name in programs(folder.resolve()):
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                main(folder.resolve(), [name, "--help"])
            said[f"{folder} {name}"] = "it goes on after --help"
        except SystemExit as end:
            said[f"{folder} {name}"] = "" if end.code == 0 and "usage: " in out.getvalue() else f"ends with {end.code}"
        except BaseException as err:
            said[f"{folder} {name}"] = repr(err)
print(json.dumps(said))
"""


@pytest.mark.long
def test_every_program_says_what_it_takes_and_does_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    said = json.loads(done.stdout.splitlines()[-1])

    assert len(said) > 40
    assert {name: why for name, why in said.items() if why} == {}
