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

ROOT = Path(__file__).resolve().parents[2]
ASK = """
import json, os
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
print(json.dumps({"stamps": here.stamps, "found": found, "parameters": parameters}), flush=True)
os._exit(0)  # taking torch apart takes half a second
"""

PLAIN = Path(__file__).parents[1].joinpath("support", "added") / "plain.py"
CONTRACT = """
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.kernels.triton.plain import KERNEL
from gemmtuned.testing import KernelContract


class TestPlain(KernelContract):
    kernel, backend = KERNEL, "triton"
    problems = (Problem(m=8, n=576, k=1024), Problem(m=33, n=100, k=72, bias=True, dtype="fp16"))
    device = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
    compiled = 2
"""
RUN = """
import torch
from gemmtuned.kernels.triton import plain
from gemmtuned.kernels.triton.python_launch import run
config = {"rows": 16, "tokens": 32, "block_k": 16, "warps": 4, "stages": 3}
x, w, bias = torch.randn(19, 72).half(), torch.randn(41, 72).half(), torch.randn(41).half()
error = (run(plain, x, w, bias, config).double() - (x.double() @ w.double().T + bias.double())).abs().max()
assert error < 0.02, error
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


def python(copy: Path, *arguments: str, **env: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(copy), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **env}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, cwd=copy, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def asked(copy: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(python(copy, "-c", ASK))
    return answer


def only_in(after: list[str], before: list[str]) -> list[str]:
    new = [c for c in after if c not in before]
    kept = [c for c in before if c in after]
    assert [c for c in after if c in before] == kept and len(before) - len(kept) <= len(new), "the last give way to it"
    return new


@pytest.mark.long
def test_a_kernel_in_triton_joins_with_one_file_and_leaves_all_others_as_they_were(copy: Path) -> None:
    before = asked(copy)
    assert "twist" in before["parameters"], "no kernel has it yet"

    file = copy / "gemmtuned" / "kernels" / "triton" / "plain.py"
    text = PLAIN.read_text().replace(
        'Parameter("stages", most=8),\n', 'Parameter("stages", most=8),\n        Parameter("twist", 0, 2, default=0),\n'
    )
    file.write_text(text)
    after = asked(copy)

    stamps = after["stamps"]
    assert {name: stamps[name] for name in stamps if name != "triton.plain"} == before["stamps"]
    assert stamps["triton.plain"].startswith("plain/")
    new = only_in(after["found"]["64"], before["found"]["64"])
    assert 0 < len(new) <= 6 and all('"kernel":"plain"' in one for one in new)
    assert after["parameters"] == {"twist": [2]}

    file.write_text(text.replace("acc = tl.dot(xt, wt, acc)", "acc = 2 * tl.dot(xt, wt, acc)"))
    edited = asked(copy)["stamps"]
    assert {name for name in stamps if edited[name] != stamps[name]} == {"triton.plain"}
    file.unlink()
    assert asked(copy) == before


@pytest.mark.long
def test_the_kernel_of_the_page_is_right_and_keeps_the_contract(copy: Path) -> None:
    file = copy / "gemmtuned" / "kernels" / "triton" / "plain.py"
    shutil.copy(PLAIN, file)
    (copy / "test_plain.py").write_text(CONTRACT)

    told = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(copy), "test_plain.py")
    python(copy, "-c", RUN, TRITON_INTERPRET="1")
    file.unlink()

    assert "passed" in told and "failed" not in told and "error" not in told
    page = (ROOT / "docs" / "extending.md").read_text()
    assert PLAIN.read_text().rstrip() in page and CONTRACT.strip() in page


@pytest.mark.soak
@pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
def test_a_kernel_in_cuda_joins_with_one_file_and_leaves_all_others_as_they_were(copy: Path) -> None:
    before = asked(copy)

    file = copy / "gemmtuned" / "kernels" / "cuda" / "added.py"
    file.write_text(
        (file.parent / "one_shot.py")
        .read_text()
        .replace('name="one_shot"', 'name="added"')
        .replace("fits(__file__,", 'fits(__file__.replace("added", "one_shot"),')
    )
    after = asked(copy)

    stamps = after["stamps"]
    assert {name: stamps[name] for name in stamps if name != "cuda.added"} == before["stamps"]
    new = only_in(after["found"]["64"], before["found"]["64"])
    assert 0 < len(new) <= 6 and all(one.startswith("cuda") and '"kernel":"added"' in one for one in new)
    file.unlink()
    assert asked(copy) == before
