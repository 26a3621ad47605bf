"""The benchmark of whole models: a dry run on this CPU gives every figure, and a second one measures nothing again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
def test_a_dry_run_measures_every_arm_once(tmp_path: Path, native_cache: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-P", str(ROOT / "benchmarks/end_to_end.py"), "--out", str(tmp_path), "--sizes", "tiny"]
    command += ["--modes", "eager", "--batches", "2", "--steps", "2", "--rounds", "5", "--seconds", "15"]
    env = {**os.environ, "GEMMTUNED_CACHE": str(native_cache), "OMP_NUM_THREADS": "1"}
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, timeout=100) for _ in range(2))

    assert first.returncode == second.returncode == 0, first.stdout + first.stderr + second.stderr
    assert "tiny: measured already" in second.stdout
    said = json.loads((tmp_path / "end_to_end.json").read_text())
    ((case,), coverage) = said["sizes"]["tiny"]["cases"], said["sizes"]["tiny"]["coverage"]
    assert {arm: len(values) for arm, values in case["tokens_per_s"].items()} == dict.fromkeys(
        ("stock", "again", "untuned", "tuned"), 5
    )
    assert sum(case["problems"].values()) == 15  # 7 a layer and the head
    assert 0 < case["gemm"]["share"] < 1
    assert case["gemm"]["races"]["without_verdict"] == 0
    assert case["gemm"]["promised"] >= 1
    assert [row["covered_time_us"] for row in coverage if row["family"] == "dense"] == [
        pytest.approx(row["time_us"]) for row in coverage if row["family"] == "dense"
    ]
    reload = said["reload"]["summary"]
    assert reload["generations_seen"][-1] == reload["publishes"] == 100
    assert reload["wrong"] == reload["failures"] == 0
    assert min(reload[f"{name}_ms"]["steps"] for name in ("quiet", "again", "publishing")) > 8
