"""A package of somebody else (support/outside), installed beside ours, adds a backend: captured, tuned, served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hooked import ForkServer, Home

from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.launch import OperatorLaunch, read_launch
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import cpu_device
from gemmtuned.db import queries
from gemmtuned.hooks import dispatch
from gemmtuned.kernels import families
from gemmtuned.kernels.families.base import Family

PROGRAM = """
import sys, time, torch, outside_gemm, gemmtuned
import torch.nn.functional as F
torch.manual_seed(0)
torch.set_num_threads(1)
x, w, bias = torch.randn(64, 256).half(), torch.randn(256, 256).half(), torch.randn(256).half()
gemmtuned.ready(20)
with torch.inference_mode():
    y = [F.linear(x, w, bias) for _ in range(20)][-1]
want = (x.double()[:, None, :] * w.double()).sum(-1) + bias.double()  # no GEMM: only those above are counted
print(float((y.double() - want).abs().max() / want.abs().max()), gemmtuned.status()["path"])
"""
SCORES = """
import torch, gemmtuned
torch.manual_seed(0)
import outside_family
q, k = torch.randn(512, 16), torch.randn(512, 16)
assert gemmtuned.ready(20)
with torch.inference_mode():
    y = [torch.ops.outside_family.scores(q, k) for _ in range(20)][-1]
want = (q.double()[:, None, :] * k.double()).sum(-1) / 4  # no GEMM: only those above are counted
print(float((y.double() - want).abs().max() / want.abs().max()), *gemmtuned.status()["engine_operators"])
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PROBLEM = "fp16:64x256x256+bias,threads=1"
CONTRACTS = """
import outside_family
import outside_gemm
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels import families
from gemmtuned.testing import BackendContract, FamilyContract

families.add_others()
SCORES = tuple(map(Problem.parse, ("outside.scores:fp32:9x40x72,threads=1", "outside.scores:fp32:64x33x16,threads=1")))


class TestOutside(BackendContract):
    backend = outside_gemm.BACKEND
    problems = (Problem.parse("fp16:9x40x72+bias,threads=1"), Problem.parse("fp16:1x16x64,threads=1"))
    others = (Problem.parse("bf16:9x40x72,threads=1"), *SCORES)


class TestScores(FamilyContract):
    family = families.FAMILIES["outside.scores"]
    problems = SCORES


class TestScoresBackend(BackendContract):
    backend = outside_family.BACKEND
    problems = SCORES
    others = TestOutside.problems
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed, as pip does it."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(Path(__file__).parents[1] / "support/outside", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(folder / "site"), str(folder / "source")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def home(
    tmp_path: Path, native_cache: Path, fork_server: ForkServer, site: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Home]:
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))
    yield Home(tmp_path / "home", native_cache, fork_server)


def command(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = home.environment(AITER_TUNE_GEMM="0", **ONE_THREAD)
    words = [sys.executable, "-P", "-m", "gemmtuned", *arguments]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()), reason="this CPU has instructions for fp16: oneDNN is faster"
)
@pytest.mark.slow
@pytest.mark.usefixtures("beside_others")
def test_it_is_captured_tuned_published_and_served_natively_under_its_name(home: Home) -> None:
    counted = home.run(PROGRAM.replace("gemmtuned.ready(20)", ""), **ONE_THREAD)
    assert counted.code == 0, counted.err
    assert home.counts() == {(PROBLEM, "miss"): 20}

    tuned = command(home, "tune")
    served = home.run(PROGRAM, **ONE_THREAD)

    assert tuned.returncode == 0, tuned.stderr + tuned.stdout
    assert served.code == 0, served.err
    error, path = served.out.split()
    assert float(error) < 2e-3 and path == "native"
    assert home.counts() == {(PROBLEM, "miss"): 20, (PROBLEM, "exact"): 20}
    (row,) = queries.solutions(home.path / "tune.db")
    assert (row["backend"], row["stamp"], row["hit_calls"], row["environment"]) == (
        "outside", "1.2.0", 20, f"{cpu_device().key} torch={torch.__version__}",
    )  # fmt: skip
    assert row["saved_us"] > 0 and "outside" in command(home, "gains").stdout

    # A program without that operator: torch serves it, and nothing is imported for it
    without = home.run(PROGRAM.replace("outside_gemm, ", ""), **ONE_THREAD)

    assert without.code == 0 and float(without.out.split()[0]) < 2e-3
    assert home.counts()[(PROBLEM, "miss")] == 40


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_family_of_another_package_is_captured_tuned_published_and_served(home: Home) -> None:
    problem = "outside.scores:fp32:512x512x16,threads=1"
    counted = home.run(SCORES, fresh=True, **ONE_THREAD)
    assert counted.code == 0, counted.err
    assert home.counts() == {(problem, "miss"): 20}, "what its own operator calls inside is not counted beside it"

    for _ in range(6):
        tuned = command(home, "tune")
        if tuned.returncode != 75:  # else others use the CPU: no times can be taken
            break
    else:
        pytest.skip(f"the machine is in use: {tuned.stdout}")

    assert tuned.returncode == 0, tuned.stderr + tuned.stdout
    (row,) = queries.solutions(home.path / "tune.db")
    assert (row["problem"], row["backend"], row["stamp"]) == (problem, "outside_scores", "1.2.0")
    assert "outside_scores" in command(home, "gains").stdout

    served = home.run(SCORES, fresh=True, **ONE_THREAD)
    assert served.code == 0, served.err
    error, *operators = served.out.split()
    assert float(error) < 1e-5 and operators == ["outside_family::scores"]
    assert home.counts() == {(problem, "miss"): 20, (problem, "exact"): 20}
    (row,) = queries.solutions(home.path / "tune.db")
    assert row["hit_calls"] == 20

    for unknown in ("outside.score:fp32:8x8x8,threads=1", "bool:8x8x8,threads=1"):
        told = command(home, "tune", unknown)
        assert told.returncode == 1 and "this version cannot tune it" in told.stdout, "and it ends"


@pytest.mark.long
def test_what_it_adds_keeps_the_contracts(home: Home, tmp_path: Path) -> None:
    (tmp_path / "test_outside.py").write_text(CONTRACTS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*words, "test_outside.py"], env=home.environment(AITER_TUNE_GEMM="0"), cwd=tmp_path, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def test_a_family_that_takes_a_name_in_use_is_left_out() -> None:
    assert families._objection(Family("dense", (), lambda problem: torch.mm)) == (
        "its name is 'dense', expected package.family in small letters, digits and _"
    )
    assert not families._objection(Family("a.b", (), lambda problem: torch.mm))
    with pytest.raises(ProblemError, match=r"family is 'dnese', expected one of dense"):
        Problem.parse("dnese:bf16:8x8x8")
    assert str(Problem.parse("a.b:bf16:8x8x8")) == "a.b:bf16:8x8x8"


def test_a_record_of_an_operator_is_checked_field_by_field() -> None:
    good = (
        '{"arguments":["x","w","bias",1.0],"contiguous":["x"],"max_m":8,"operator":"a::b","package":"p",'
        '"schema":"a::b(Tensor x) -> Tensor","version":"1"}'
    )
    read = read_launch(good)
    assert isinstance(read, OperatorLaunch)
    assert read.operator == "a::b" and read.conditions == (("x.size0", "<=", 8), ("x.contiguous", "==", 1))
    assert read_launch(read.text()) == read
    for old, new, what in (
        ('"a::b"', '"a.b"', "operator"),
        ('"bias"', '"gate"', "arguments"),
        ('["x"]', '["z"]', "contiguous"),
        ('"max_m":8', '"max_m":0', "max_m"),
        ('"version":"1"', '"version":1', "version"),
        ('"a::b(Tensor', '"c::d(Tensor', "schema"),
        ('"package":"p",', "", "launch has"),
    ):
        with pytest.raises(TableError, match=what):
            read_launch(good.replace(old, new))


def test_another_version_of_its_package_is_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.installed_version("pytest") == pytest.__version__
    assert dispatch.installed_version("no-such-package-of-anybody") is None


def test_the_page_shows_the_very_files_of_this_package() -> None:
    here = Path(__file__).parents[1] / "support"
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()

    assert (here / "outside/outside_gemm.py").read_text().rstrip() in page
    assert (here / "outside/outside_family.py").read_text().rstrip() in page and CONTRACTS.strip() in page
    assert (here / "outside/pyproject.toml").read_text().partition("[project]")[2].rstrip() in page
