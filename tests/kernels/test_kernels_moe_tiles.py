"""The tiles of a mixture without a GPU: right in Triton's interpreter, compiled, and offered where they run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from hooked import ForkServer, Home, run_interpreted

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import AheadBackend
from gemmtuned.kernels.backends.moe_tiles_ import MoeTiles
from gemmtuned.kernels.compile_candidate import compile_candidate
from gemmtuned.kernels.triton import moe_tiling
from gemmtuned.kernels.triton.moe_tiling import compiled, layer_of, likely, tile_of, tiles_of

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
NOW = (0, 1, 2, 4, 6, 7)  # of moe_tiles_interpreted.py: each kind of scales and codes, each activation
LATER = (3, 5)
BACKEND = MoeTiles(device=H200)
FP8 = {"wdtype": "fp8_e4m3", "wscale": "128x128"}
MXFP4 = {"wdtype": "fp4_e2m1", "wscale": "1x32", "wscale_dtype": "e8m0"}
INT4 = {"wdtype": "i4", "wscale": "1x32", "wscale_dtype": "bf16"}


def moe(m: int = 256, **more: Any) -> Problem:
    sizes = {"n": 2048, "k": 2048, "inter": 768, "experts": 128, "topk": 8}
    return Problem(family="moe", m=m, dtype="bf16", act="silu_gated", math_mode="reduced", **{**sizes, **more})


@pytest.fixture(scope="module")
def interpreted(
    tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer
) -> Callable[[tuple[int, ...]], dict[int, dict[str, Any]]]:
    """What moe_tiles_interpreted.py says of these cases, which are run together, once."""

    @cache
    def run(numbers: tuple[int, ...]) -> dict[int, dict[str, Any]]:
        home = Home(tmp_path_factory.mktemp("interpreted") / "home", native_cache, fork_server)
        said = run_interpreted(home, "moe_tiles_interpreted.py", *map(str, numbers))
        return dict(zip(numbers, said, strict=True))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "beside"),
    [*((n, NOW) for n in NOW), *(pytest.param(n, LATER, marks=pytest.mark.long) for n in LATER)],
)
def test_it_is_as_exact_as_torch_and_touches_no_expert_in_vain(
    interpreted: Callable[[tuple[int, ...]], dict[int, dict[str, Any]]], number: int, beside: tuple[int, ...]
) -> None:
    """Odd sizes, pairs of nobody, an expert with most pairs, and one that nobody visits, whose weights are NaN.

    Memory that no launch has written is NaN, too.  Two cases, plain and coded weights, run twice for the same bits.
    """
    seen = interpreted(beside)[number]
    assert seen["same"] is (True if number in (0, 7) else None)
    assert seen["error"] <= 1.25 * seen["default"] and seen["nobody"], seen


@pytest.mark.parametrize("weights", [{}, FP8, MXFP4, INT4], ids=["bf16", "fp8", "mxfp4", "int4"])
def test_it_is_offered_for_many_tokens_on_gpus_alone(weights: dict[str, Any]) -> None:
    found = list(BACKEND.candidates(moe(**weights)))
    assert len(found) == moe_tiling.RACED**2 and len(set(found)) == len(found)
    assert all(len(tiles_of(one)) == 2 for one in found)
    for other in (moe(8, **weights), moe(threads=2, **weights), Problem(m=256, n=64, k=64, dtype="bf16")):
        assert not list(BACKEND.candidates(other)), other
    assert isinstance(BACKEND, AheadBackend)


def test_more_pairs_each_are_given_wider_tiles() -> None:
    layer = layer_of(moe(**FP8))
    assert layer is not None
    widths = [next(likely(layer, tokens, "sm_90", 1)).tokens for tokens in (16, 256, 1024, 8192)]
    assert widths == sorted(widths) and widths[0] == 16 and widths[-1] >= 64


def test_architectures_without_e4m3_have_no_such_layer() -> None:
    old = MoeTiles(device=replace(H200, arch="sm_80"))
    assert not list(old.candidates(moe(**FP8))) and list(old.candidates(moe(**INT4))) and list(old.candidates(moe()))
    assert not list(MoeTiles(device=replace(H200, arch="gfx942")).candidates(moe()))
    assert BACKEND.stamps(H200) and not BACKEND.stamps(replace(H200, arch="gfx942", kind="rocm"))
    assert not BACKEND.stamps(Device("cpu-x", "cpu", "x", "x86_64", 2))


def test_its_stamp_covers_all_files_that_its_kernels_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "triton"
    shutil.copytree(Path(moe_tiling.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(moe_tiling, "__file__", str(folder / "moe_tiling.py"))
    first = moe_tiling.source_hash.__wrapped__()

    for file in (
        "moe_tiles.py",
        "moe_plain_tiles.py",
        "coded_weights.py",
        "inline_ptx.py",
        "moe_tiling.py",
        "moe_launch.py",
    ):
        before = (folder / file).read_text()
        (folder / file).write_text(before + "\nTHIS_IS = 'new'\n")
        assert moe_tiling.source_hash.__wrapped__() != first, file
        (folder / file).write_text(before.replace('"""', '"""Now in other words. ', 1) + "\n# a comment\n")
        assert moe_tiling.source_hash.__wrapped__() == first, f"{file}: what is said of it is no part of it"
        (folder / file).write_text(before)
    (folder / "gemv.py").unlink()
    assert moe_tiling.source_hash.__wrapped__() == first


@pytest.mark.parametrize("config", ["{}", '{"up": "64.16.128.4.4"}', '{"up": "64.16.128.4", "down": "1"}', "[]", "x"])
def test_a_config_without_two_tiles_is_refused(config: str) -> None:
    with pytest.raises(CandidateFailed, match="no tiles of two products"):
        tiles_of(Candidate("moe_tiles", config))
    with pytest.raises(CandidateFailed, match="does not run"):
        BACKEND.prepare(Candidate("moe_tiles", config), moe(8))


@pytest.mark.parametrize("text", ["0.16.128.4.4", "48.16.128.4.4", "64.16.512.4.4", "64.16.128.4.9", "64.8.128.4.4"])
def test_what_is_no_tile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no tile"):
        tile_of(text)


def test_tiles_that_cut_a_block_of_scales_are_refused() -> None:
    layer = layer_of(moe(**FP8))
    assert layer is not None
    whole, cut = tile_of("64.16.128.4.4"), tile_of("64.16.64.4.4")
    with pytest.raises(CandidateFailed, match="does not cut"):
        compiled(layer, whole, cut, "sm_90")


def refused(candidate: Candidate, problem: Problem, device: Device) -> str:
    """Why it does not compile, or nothing."""
    try:
        compile_candidate(candidate, problem, device)
    except CandidateFailed as err:
        return str(err)
    return ""


@pytest.mark.long
@pytest.mark.part(2)
@pytest.mark.usefixtures("kept_compiler_cache")
@pytest.mark.parametrize("weights", [FP8, MXFP4, INT4, {}], ids=["fp8", "mxfp4", "int4", "bf16"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_80"])
def test_the_first_candidates_compile_without_spills(arch: str, weights: dict[str, Any]) -> None:
    """What the daemon compiles before a device is used, with both kinds of ids: both on sm_90, one elsewhere."""
    device = replace(H200, arch=arch)
    for problem in (moe(256, **weights), moe(2048, **weights)):
        chosen = list(MoeTiles(device=device).candidates(problem))[:2]
        said = [refused(candidate, problem, device) for candidate in chosen]
        assert not chosen or "" in said
        assert arch != "sm_90" or said == ["", ""]
