"""A kernel is one file: this test adds one to a copy of the package, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from gemmtuned.kernels.cuda import nvrtc

ROOT = Path(__file__).resolve().parent.parent
ASK = """
import json
from gemmtuned.commands.tune_options import space
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.cuda_ import Cuda
from gemmtuned.kernels.backends.triton_ import Triton
here = backends.environment(h200 := Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132))
backends.BACKENDS.update(triton=Triton(device=h200), cuda=Cuda(device=h200))
found = {m: [str(c) for c in backends.candidates(Problem(m=m, n=4096, k=4096), here)] for m in (1, 64)}
try:
    parameters = {name: list(values) for name, values in space(["twist=2"])[0].items()}
except Exception as err:
    parameters = str(err)
print(json.dumps({"stamps": here.stamps, "found": found, "parameters": parameters}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package."""
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", *(f for f in ("configs", "daemon", "db", "hooks", "kernels")))
    shutil.copytree(ROOT / "gemmtuned", folder / "gemmtuned", ignore=ignore)
    for name in ("configs", "daemon", "db", "hooks", "kernels"):
        shutil.copytree(ROOT / name, folder / "gemmtuned" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def asked(copy: Path) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(copy), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, cwd=copy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def only_in(after: list[str], before: list[str]) -> list[str]:
    new = [c for c in after if c not in before]
    kept = [c for c in before if c in after]
    assert [c for c in after if c in before] == kept and len(before) - len(kept) <= len(new), "the last give way to it"
    return new


def test_a_kernel_in_triton_joins_with_one_file_and_leaves_all_others_as_they_were(copy: Path) -> None:
    before = asked(copy)
    assert "twist" in before["parameters"], "no kernel has it yet"

    file = copy / "gemmtuned" / "kernels" / "triton" / "added.py"
    text = (
        (file.parent / "gemv.py")
        .read_text()
        .replace("def gemv(", "def added(")
        .replace("function=gemv", "function=added")
    )
    text = text.replace('name="gemv"', 'name="added"').replace(
        '        Parameter("hold", 0, 2, default=0),\n',
        '        Parameter("hold", 0, 2, default=0),\n        Parameter("twist", 0, 2, default=0),\n',
    )
    file.write_text(text)
    after = asked(copy)

    stamps = after["stamps"]
    assert {name: stamps[name] for name in stamps if name != "triton.added"} == before["stamps"]
    assert stamps["triton.added"].startswith("added/")
    new = only_in(after["found"]["1"], before["found"]["1"])
    assert 0 < len(new) <= 6 and all('"kernel":"added"' in one for one in new)
    assert after["found"]["64"] == before["found"]["64"], "it runs M = 1 alone"
    assert after["parameters"] == {"twist": [2]}

    file.write_text(text.replace("total = tl.sum(acc, 1)", "total = tl.sum(acc, 1) * 2"))
    edited = asked(copy)["stamps"]
    assert {name for name in stamps if edited[name] != stamps[name]} == {"triton.added"}
    file.unlink()
    assert asked(copy) == before


@pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
def test_a_kernel_in_cuda_joins_with_one_file_and_leaves_all_others_as_they_were(copy: Path) -> None:
    before = asked(copy)

    file = copy / "gemmtuned" / "kernels" / "cuda" / "added.py"
    file.write_text((file.parent / "one_shot.py").read_text().replace('name="one_shot"', 'name="added"'))
    after = asked(copy)

    stamps = after["stamps"]
    assert {name: stamps[name] for name in stamps if name != "cuda.added"} == before["stamps"]
    new = only_in(after["found"]["64"], before["found"]["64"])
    assert 0 < len(new) <= 6 and all(one.startswith("cuda") and '"kernel":"added"' in one for one in new)
    file.unlink()
    assert asked(copy) == before
