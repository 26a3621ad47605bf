"""`make soak` runs the long tests in pieces, tells what each gave, and goes on where it was cut off."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import soak

TESTS = """
import pathlib, pytest
pytestmark = pytest.mark.soak
@pytest.mark.parametrize("n", range(3))
def test_holds(n): print("figure", n)
def test_breaks(): assert pathlib.Path("mended").exists()
"""
SKIPS = """
import pytest
@pytest.mark.soak
def test_skips(): pytest.skip("peft: skipped, pip: no network")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak\n    gpu\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n.soak\n.pytest_cache\nmended\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_long.py").write_text(TESTS)
    (tmp_path / "tests/test_short.py").write_text("def test_short(): assert False, 'this is no long one'\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run(["git", *author, *command], cwd=tmp_path, check=True)
    return tmp_path


def go(project: Path, *words: str, again: bool = False, only_list: bool = False) -> int:
    return soak.main(words, again=again, only_list=only_list, root=project, folder=project / ".soak")


@pytest.mark.long
def test_each_is_told_with_its_time_and_what_passed_is_not_run_again(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(project) == 1
    told = capsys.readouterr().out
    assert "1/2 test_long.py::test_holds passed in" in told and "2/2 test_long.py::test_breaks FAILED in" in told
    assert "1 passed, 1 FAILED" in told and ".soak/test_long-test_breaks.log" in told
    assert "figure 2" in (project / ".soak/test_long-test_holds.log").read_text()

    (project / "mended").touch()
    assert go(project) == 0
    told = capsys.readouterr().out
    assert "test_holds" not in told and "test_breaks passed" in told and "2 passed" in told
    kept = json.loads((project / ".soak/results.json").read_text())
    assert kept["tests/test_long.py::test_holds"]["counts"] == {"passed": 3}


@pytest.mark.long
def test_a_changed_tree_resumes_nothing_and_a_spoilt_file_of_results_is_none(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "mended").touch()
    (project / "tests/new.txt").touch()
    assert go(project, only_list=True) == 0 and "not run" in capsys.readouterr().out
    for _ in range(2):
        (project / ".soak").mkdir(exist_ok=True)
        (project / ".soak/results.json").write_text("{")
        assert go(project, "breaks") == 0
        assert "1/1 test_long.py::test_breaks passed" in capsys.readouterr().out


@pytest.mark.long
def test_what_was_skipped_is_named_with_the_reason(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tests/test_skips.py").write_text(SKIPS)
    for _ in range(2):
        assert go(project, "skips") == 0
        told = capsys.readouterr().out
        assert "1 skipped" in told and "SKIPPED test_skips.py::test_skips  peft: skipped, pip: no network\n" in told
