"""The benchmark of a mixture's decode step: a dry run on this CPU gives every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
def test_a_dry_run_measures_every_arm_and_tunes_what_it_saw(tmp_path: Path, native_cache: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-P", str(ROOT / "benchmarks/moe_step.py"), "--out", str(tmp_path)]
    command += ["--models", "tiny,tiny-oss", "--batches", "1,4", "--layers", "2", "--steps", "2", "--rounds", "5"]
    env = {
        **os.environ, "GEMMTUNED_CACHE": str(native_cache), "GEMMTUNED_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run([*command, "--tune-s", "30"], env=env, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("moe_step-cpu-*.json")
    tiny, oss = json.loads(path.read_text())["models"]
    assert tiny["problems"][0].startswith("moe:fp32:1x64x64") and tiny["problems"][1].startswith("moe:fp32:4x64x64")
    assert not any(problem.startswith("moe:") for problem in oss["problems"]), "its weights lie as [E, K, N]"
    for model, arms in ((tiny, {"again", "hooked", "patched"}), (oss, {"again", "hooked"})):
        for case in model["cases"]:
            assert {len(times) for times in case["raw"].values()} == {5}
            assert set(case["arms"]) == arms | ({"grouped_mm", "batched_mm"} - {case["baseline"]})
            assert all(apart < 1e-4 for apart in case["apart"].values())
            assert all(case["kernels"].values())
    assert all(row["calls"] == 2 for case in tiny["cases"] for row in case["experts"].values())
    assert len(tiny["cases"][0]["experts"]) == 1
