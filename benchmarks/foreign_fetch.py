"""Which tests of other projects foreign_suites.py runs, and how it gets them: by pip and git, or from a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

HERE: Final = torch.__version__.partition("+")[0]
# Another release's tests of torch run, too: those that need what this one lacks fail with the hook off, as with it on
TORCH: Final = os.environ.get("FOREIGN_TORCH") or HERE


@dataclass(frozen=True)
class Suite:
    """A source archive and what its tests need beside torch, numpy, transformers and pytest.

    paths: files and folders of tests. left_out: words in names of files or tests that are not run.
    repository: where the tests are, at the tag `v` and the version, if no archive has them; commit: that tag's.
    is_here: the package itself is the one that runs this.  without: files of theirs that today's pytest cannot load.
    """

    sdist: str
    needs: tuple[str, ...]
    paths: tuple[str, ...]
    tests: int  # are run at most
    left_out: tuple[str, ...] = ()
    repository: str = ""
    commit: str = ""
    is_here: bool = False
    without: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        """Name and version as archives and folders have it: peft-0.21.2."""
        return self.sdist.replace("==", "-")


SUITES: Final = {
    "peft": Suite(
        "peft==0.21.2",
        (
            "accelerate", "diffusers", "datasets", "pyarrow", "dill", "xxhash", "multiprocess", "importlib_metadata",
            "zipp", "pillow", "requests", "urllib3", "certifi", "charset_normalizer", "parameterized", "scipy",
        ),
        (
            "tests/test_custom_models.py", "tests/test_tuners_utils.py", "tests/test_bufferdict.py",
            "tests/test_lorafa.py", "tests/test_loraplus.py", "tests/test_randlora.py", "tests/test_vera.py",
        ),
        700,
    ),
    "linear_operator": Suite(
        "linear_operator==0.6.1",
        ("jaxtyping", "wadler_lindig", "mpmath", "scipy"),
        ("test/operators", "test/functions", "test/utils"),
        700,
    ),
    "gpytorch": Suite(
        "gpytorch==1.15.2",
        ("linear_operator==0.6.1", "jaxtyping", "wadler_lindig", "scipy", "scikit-learn", "joblib", "threadpoolctl"),
        ("test/kernels", "test/distributions", "test/likelihoods", "test/means", "test/variational", "test/models"),
        450,
        ("keops",),
    ),
    "torchao": Suite(
        "torchao==0.18.0",
        ("expecttest", "parameterized"),
        (
            "test/quantization", "test/dtypes", "test/core", "test/sparsity", "test/test_utils.py",
            "test/float8/test_base.py", "test/float8/test_float8_utils.py", "test/float8/test_auto_filter.py",
            "test/prototype/test_int4_opaque_tensor.py", "test/prototype/test_quantized_training.py",
            "test/prototype/test_smoothquant.py", "test/prototype/test_parq.py", "test/prototype/test_awq.py",
            "test/prototype/test_codebook_quant.py", "test/prototype/pat", "test/prototype/test_sparsifier.py",
            "test/prototype/module_swap_quantization", "test/prototype/test_structured_sparsifier.py",
        ),
        800,
        (
            "x86inductor", "pt2e_qat", "train_eval", "eval_train", "move_exported",  # minutes of compiling in each
            # these want a GPU or another processor
            "arm_inductor", "sparse_2x4", "mi300", "test_float8_tensor", "int4_preshuffled", "int4_tensor",
            "int4_tile_packed", "test_int8_tensor.py", "test_int8_kernels", "int4_plain", "intx_opaque",
        ),
        "https://github.com/pytorch/ao",
        "5f2baf9d575cf732362594c998c399902942531f",
    ),
    "torch": Suite(
        f"torch=={TORCH}",
        ("expecttest", "parameterized", "hypothesis", "sortedcontainers"),
        ("test/test_linalg.py", "test/test_nn.py", "test/test_transformers.py", "test/test_mkldnn.py"),
        800,
        ("cuda", "cudnn", "tunableop", "svd", "lobpcg", "eigh", "norm"),
        "https://github.com/pytorch/pytorch",
        (torch.version.git_version or "") if TORCH == HERE else "",
        is_here=True,
        without=("test/conftest.py",),
    ),
}  # fmt: skip


class NotFetched(Exception):
    """pip or git could not bring what a suite needs."""


# ---- fetching


@dataclass(frozen=True)
class Fetched:
    """python: of the suite's own environment; root: the folder that pytest runs in."""

    python: Path
    root: Path


def fetch(suite: Suite, folder: Path, given: Path | None) -> Fetched:
    """Install the packages and unpack the tests, from the folder `given` first. Raises NotFetched."""
    python = folder / "venv" / suite.release / "bin" / "python"
    root = folder / "sources" / suite.release
    mark = root.parent / f"{suite.release}.fetched"
    if not mark.exists():
        for old in (python.parent.parent, root):
            shutil.rmtree(old, ignore_errors=True)
        _environment(python.parent.parent)
        packages = suite.needs if suite.is_here else (suite.sdist, *suite.needs)
        _pip(given, "--python", str(python), "install", "--no-deps", *packages)
        root.parent.mkdir(parents=True, exist_ok=True)
        _unpack(suite, root, given)
        mark.touch()
    shutil.rmtree(root / suite.sdist.partition("==")[0], ignore_errors=True)  # the installed package is what is tested
    for name in suite.without:
        (root / name).unlink(missing_ok=True)
    for tests in {path.split("/")[0] for path in suite.paths}:
        (root / tests / "__init__.py").touch()  # some tests import their neighbours as a package
    (root / "plain.ini").write_text("[pytest]\n")  # theirs ask for plug-ins
    return Fetched(python, root)


def _environment(folder: Path) -> None:
    """A virtual environment that has, after its own packages, those of the one that runs this."""
    venv.create(folder, with_pip=False)
    for kind in {"purelib", "platlib"}:
        beside = sysconfig.get_path(kind)
        (Path(sysconfig.get_path(kind, vars={"base": str(folder), "platbase": str(folder)})) / "beside.pth").write_text(
            f"import site; site.addsitedir({beside!r})\n"
        )


def _unpack(suite: Suite, root: Path, given: Path | None) -> None:
    if not suite.repository:
        _pip(given, "download", "--no-deps", "--no-binary", ":all:", "-d", str(root.parent), suite.sdist)
        with tarfile.open(root.parent / f"{suite.release}.tar.gz") as archive:
            archive.extractall(root.parent, filter="data")
    elif given is not None and (given / suite.release).is_dir():
        shutil.copytree(given / suite.release, root, symlinks=True)
    else:
        tag = "v" + suite.sdist.partition("==")[2]
        _fetched(
            "git",
            "-c",
            "core.askPass=true",
            "clone",
            "-q",
            "--depth",
            "1",
            "--branch",
            tag,
            suite.repository,
            str(root),
        )
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        if suite.commit and head.stdout.strip() != suite.commit:
            raise NotFetched(f"{suite.repository} has another commit at {tag} than {suite.commit}")


def _pip(given: Path | None, *args: str) -> None:
    first = ["--find-links", str(given)] if given is not None else []
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *args]
    _fetched(*command, *first)


def _fetched(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as err:
        raise NotFetched(f"{command[0]}: {err.strerror}") from err
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise NotFetched(f"{Path(command[0]).name} {' '.join(command[1:9])} ... failed: {said}")
