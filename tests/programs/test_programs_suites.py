"""Other projects' own tests, thousands of them: benchmarks/foreign_suites.py finds none that the hook makes fail.

    SOAK=test_programs_suites make soak            # all five, or one: SOAK=torchaos_own make soak

What a machine without a network does not have is skipped with the name of the suite and what pip or git said.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "foreign_suites.py"
NOTHING_FETCHED = 77
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3500)]


def no_difference(name: str, folder: Path, at_least: int) -> dict[str, Any]:
    """Run one suite; what was found. Fails where a test comes out otherwise than with the hook off."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--suites", name, "--out", str(folder)],
        capture_output=True, text=True, timeout=3400,
    )  # fmt: skip
    if done.returncode == NOTHING_FETCHED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("foreign_suites-*.json")
    found = json.loads(file.read_text())["suites"][name]
    print(json.dumps({key: value for key, value in found.items() if key != "why_they_fail"}, indent=1))

    assert found["tests"] >= at_least and found["differences"] == {}
    assert found["off"]["passed"] > found["tests"] / 2
    return found


def test_pefts_own_tests_come_out_as_without_the_hook(tmp_path: Path) -> None:
    found = no_difference("peft", tmp_path, 600)
    assert found["calls_served_by_routes"] > found["tests"]


def test_linear_operators_own_tests_come_out_as_without_the_hook(tmp_path: Path) -> None:
    found = no_difference("linear_operator", tmp_path, 600)
    assert found["calls_served_by_routes"] > found["tests"]


def test_gpytorchs_own_tests_come_out_as_without_the_hook(tmp_path: Path) -> None:
    found = no_difference("gpytorch", tmp_path, 350)
    assert found["calls_served_by_routes"] > found["tests"]


def test_torchaos_own_tests_come_out_as_without_the_hook(tmp_path: Path) -> None:
    found = no_difference("torchao", tmp_path, 700)
    assert found["calls_served_by_routes"] > 200


def test_torchs_own_tests_come_out_as_without_the_hook(tmp_path: Path) -> None:
    found = no_difference("torch", tmp_path, 400)
    assert found["calls_served_by_routes"] > found["tests"]
