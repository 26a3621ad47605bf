"""A program of version 0.1.0 that runs on while newer versions take over its home: it goes on, and says why."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from hooked import Done, Home, publish, published

from gemmtuned.configs.launch import OperatorLaunch
from gemmtuned.configs.problem import Problem

ROOT = Path(__file__).resolve().parents[2]
LAST_COMMIT = "71490d6"  # of version 0.1.0
PROGRAM = """
import json, os, sys, time, torch
import torch.nn.functional as F
torch.manual_seed(0)
w = [torch.randn(n, k) for n, k in ((256, 64), (512, 256), (64, 512))]
bias, q = torch.randn(256), torch.randn(8, 32, 64)
xs = [torch.randn(m, 64) for m in (1, 4, 9, 33)]
def step():
    found = []
    for x in xs:
        y = F.linear(F.linear(F.linear(x, w[0], bias), w[1]), w[2])
        found += [y, torch.addmm(y, y, torch.eye(64))]
    return [*found, torch.bmm(q, q.mT), torch.baddbmm(q[:, :, :32], q, q.mT)]
want, different, steps = step(), 0, 0
print("counting", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until and not os.path.exists(sys.argv[2]):
    different += sum(not torch.equal(a, b) for a, b in zip(step(), want))
    steps += 1
    time.sleep(0.005)
import gemmtuned
status = gemmtuned.status()
print(json.dumps([steps, different, status["generation"], status["rows"]]))
"""


@pytest.fixture(scope="module")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with version 0.1.0 installed, and else what we have."""
    folder = tmp_path_factory.mktemp("old")
    archive = subprocess.run(["git", "archive", LAST_COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip("this copy has no history: version 0.1.0 is not in it")
    (folder / "source").mkdir()
    subprocess.run(["tar", "x", "-C", str(folder / "source")], input=archive.stdout, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv/bin/python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*words, "--target", str(site), str(folder / "source")], check=True)
    return python


def run_old(old_python: Path, home: Home, seconds: float) -> subprocess.Popen[str]:
    """A program of version 0.1.0 that counts for so long, or until a file `stop` lies beside its home."""
    env = home.environment(GEMMTUNED_NATIVE="0", PYTHONPATH="")
    words = [str(old_python), "-P", "-c", PROGRAM, str(seconds), str(home.path.with_name("stop"))]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "counting\n"
    return process


def done(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=120)
    return Done(process.returncode, out, err)


@pytest.mark.soak
def test_a_newer_daemon_takes_its_database_over(old_python: Path, home: Home) -> None:
    process = run_old(old_python, home, 250)
    time.sleep(3)
    words = [sys.executable, "-P", "-m", "gemmtuned", "tune", "fp32:512x8x8,threads=1"]
    tuned = subprocess.run(
        words, env=home.environment(AITER_TUNE_GEMM="0"), capture_output=True, text=True, check=False
    )
    time.sleep(10)  # it flushes once a second, on a busy machine later
    home.path.with_name("stop").touch()
    old = done(process)

    assert tuned.returncode in (0, 75), tuned.stderr  # 75: others use the CPU
    steps, different, _, _ = old.said
    assert steps > 10 and different == 0
    while_it_ran, at_its_end = [line for line in old.ours if "counts" in line]
    assert "a newer gemmtuned has brought this database up to date: upgrade gemmtuned here" in while_it_ran
    assert "counts were lost" in at_its_end and "Upgrade gemmtuned here" in at_its_end
    assert home.calls() > 0, "what it had written before is there"


@pytest.mark.soak
def test_what_it_does_not_know_of_a_newer_table_runs_on_stock_torch(old_python: Path, home: Home) -> None:
    operator = OperatorLaunch(
        operator="aten::relu", schema="aten::relu(Tensor self) -> Tensor", arguments=("x",), package="torch",
        version=torch.__version__,
    ).text()  # fmt: skip
    rows = [
        published(Problem.parse(text), backend, **columns)
        for text, backend, columns in (
            ("fp32:9x256x64+bias,threads=2,invariant=1", "rows", {"config": '{"kernel":"stock","block":8,"grain":1}'}),
            ("batched_add:fp32:8x32x32x64,threads=2", "torch_swap", {}),
            ("dense_add:fp32:33x64x64,layout=nn,threads=2", "torch_swap", {}),
            ("scaled:fp8_e4m3>bf16:8x64x64,scale=1x128,wscale=1x128,threads=2", "cublaslt", {"stamp": "1"}),
            ("fp32:33x512x256,threads=2", "outside", {"stamp": "1", "launch": operator}),
            ("a.b:fp32:33x512x256,threads=2", "outside", {"stamp": "1", "launch": operator}),
            ("moe:bf16:8x256x256,experts=8,topk=2,inter=64,act=silu_gated,threads=2", "moe_grouped", {"stamp": "1"}),
        )
    ]
    process = run_old(old_python, home, 10)
    publish(home.path / "configs", rows, generation=41)
    time.sleep(3)
    publish(home.path / "configs", rows, generation=42)
    old = done(process)

    steps, different, generation, _ = old.said
    assert steps > 10 and different == 0 and generation == 42
    (told,) = old.ours
    assert "rows are not used, the first:" in told
