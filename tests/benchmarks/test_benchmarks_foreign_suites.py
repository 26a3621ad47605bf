"""benchmarks/foreign_suites.py: what it calls a difference, where it gets a suite, and what it says where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import foreign_fetch
import foreign_suites
from foreign_fetch import NotFetched, Suite

TESTS = """
import os, torch

def test_always(): assert torch.ones(2, 3) @ torch.ones(3, 2) is not None
def test_only_without_the_hook(): assert os.environ["GEMMTUNED"] == "0"
def test_never(): raise ValueError(os.environ["GEMMTUNED"])
def test_slow_one(): raise AssertionError("this one is left out")
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Suite, Path]:
    """A suite whose archive is a folder that somebody has, and that folder; nothing is installed."""
    given = tmp_path / "given"
    (given / "mine-1.0/test/deep").mkdir(parents=True)
    (given / "mine-1.0/test/deep/test_mine.py").write_text(TESTS)
    (given / "mine-1.0/mine").mkdir()
    asked: list[str] = []
    monkeypatch.setattr(foreign_fetch, "_pip", lambda given, *args: asked.extend(args))
    monkeypatch.setattr(foreign_suites, "AGAIN", 1)
    return Suite("mine==1.0", (), ("test",), 100, ("slow_one",), "https://nowhere.invalid/mine", "0" * 40), given


@pytest.mark.long
def test_what_the_hook_changes_is_a_difference_and_what_fails_alike_is_none(
    suite: tuple[Suite, Path], tmp_path: Path, native_cache: Path
) -> None:
    fetched = foreign_fetch.fetch(suite[0], tmp_path / "folder", suite[1])
    assert not (fetched.root / "mine").exists(), "the tests would import what lies beside them"
    runner = foreign_suites.Runner(fetched, foreign_suites.fresh(tmp_path / "home"), native_cache)

    found = foreign_suites.compare(runner, suite[0], 100)

    name = "test.deep.test_mine::test_only_without_the_hook"
    assert found["tests"] == 3 and found["unsteady"] == {}
    assert found["off"] == {"passed": 2, "failed": 1, "skipped": 0}
    assert found["counting"] == found["routed"] == {"passed": 1, "failed": 2, "skipped": 0}
    assert list(found["differences"]) == [name]
    assert set(found["differences"][name]["off"]) == {"passed"}
    assert found["calls"] > 0 and found["routes"] == 1


@pytest.mark.parametrize(
    ("off", "routed", "expected"),
    [
        (["passed"] * 5, ["failed"] * 5, True),
        (["passed"] * 5, ["passed", "passed", "passed", "failed", "passed"], True),
        (["passed"] * 5, ["failed", "failed", "passed", "passed", "passed"], True),  # only beside others of its file
        (["passed"] * 5, ["failed", "passed", "passed", "passed", "passed"], False),
        (["passed", "failed", "passed", "passed", "passed"], ["failed"] * 5, False),
        (["missing"] * 5, ["passed"] * 5, True),
    ],
)
def test_a_difference_is_what_comes_again_and_never_without_the_hook(
    off: list[str], routed: list[str], expected: bool
) -> None:
    assert foreign_suites.is_difference({"off": off, "counting": off, "routed": routed}) is expected


def test_a_repository_with_another_commit_is_not_run(
    suite: tuple[Suite, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    repository = suite[1] / "mine-1.0"
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1.0"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    there = {"repository": repository.as_uri(), "sdist": "mine==1.0", "needs": (), "paths": ("test",), "tests": 1}

    with pytest.raises(NotFetched, match=r"another commit at v1\.0 than 0000"):
        foreign_fetch.fetch(Suite(**there, commit="0" * 40), tmp_path / "folder", None)
    fetched = foreign_fetch.fetch(Suite(**there, commit=head.stdout.strip()), tmp_path / "folder", None)
    assert (fetched.root / "test/deep/test_mine.py").read_text() == TESTS


@pytest.mark.long
def test_a_machine_without_a_network_says_which_suites_it_skips(tmp_path: Path, native_cache: Path) -> None:
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    env = {**os.environ, **nothing, "GEMMTUNED_CACHE": str(native_cache)}
    command = [sys.executable, foreign_suites.__file__, "--suites", "peft", "torchao"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "folder"), "--out", str(tmp_path / "out")],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip

    assert done.returncode == foreign_suites.NOTHING_FETCHED, done.stdout + done.stderr
    assert "peft: skipped, " in done.stdout and "torchao: skipped, " in done.stdout
    assert "No matching distribution found for peft==0.21.2" in done.stdout
    assert not (tmp_path / "out").exists()
