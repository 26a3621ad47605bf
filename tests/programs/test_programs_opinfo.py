"""PyTorch's own operator samples: nobody can tell the hook from stock torch, untuned or with everything routed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import HERE, ForkServer, Home
from once import once

# At least so many calls must have gone through a route, or the test says nothing about it
ONEDNN = 250 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 125  # those in bf16 only where the CPU has kernels
HITS = {"cpu": {"torch_swap": 1500, "torch_mv": 50, "onednn": ONEDNN}, "cuda": {"cublaslt": 100, "triton": 0}}


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", 3), pytest.param(("cpu", 1), marks=pytest.mark.soak), pytest.param(("cuda", 1), marks=pytest.mark.gpu)
    ],
    ids=str,
)  # fmt: skip
def matrix(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    native_cache: Path,
    fork_server: ForkServer,
) -> Any:
    """What opinfo_matrix.py found, in one process, with one of so many samples of each operator."""
    device, every = request.param

    def make(folder: Path) -> None:
        home = Home(folder / "home", native_cache, fork_server)
        argv = ["", str(folder / "said.json"), "--device", device, "--every", str(every)]
        code = f"import runpy, sys; sys.argv = {argv}; "
        code += f"runpy.run_path({str(HERE / 'opinfo_matrix.py')!r}, run_name='__main__')"
        done = home.run(code, AITER_TUNE_GEMM="0", fresh=device == "cuda", timeout_s=250)
        assert done.code == 0, done.err

    folder = once(tmp_path_factory, f"opinfo-{device}-{every}", make)
    return {"device": device, "every": every, **json.loads((folder / "said.json").read_text())}


@pytest.mark.long
def test_results_errors_and_derivatives_are_torchs_own(matrix: Any) -> None:
    assert matrix["found"] == []
    assert matrix["failures"] == []
    assert matrix["cases"] > 60  # operators times dtypes
    if matrix["device"] == "cpu":
        assert matrix["derivatives"] > 200 // matrix["every"]


@pytest.mark.long
def test_counts_are_the_profilers(matrix: Any) -> None:
    assert matrix["miscounted"] == []
    assert matrix["calls"] > 5000 // matrix["every"]


@pytest.mark.long
def test_the_samples_went_through_routes(matrix: Any) -> None:
    expected = {name: hits // matrix["every"] for name, hits in HITS[matrix["device"]].items()}

    assert {name: hits for name, hits in matrix["hits"].items() if hits < expected[name]} == {}
    assert matrix["hits"].keys() == expected.keys()
