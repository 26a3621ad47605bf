"""Mixtures that quantise X and H, without a GPU: right in Triton's interpreter, compiled, and offered where allowed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from hooked import ForkServer, Home, run_interpreted
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.configs.tunable import can_tune, why_not
from gemmtuned.daemon.child import last_check
from gemmtuned.daemon.child.checks import Watch, Wrong, roughly_apart
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.verify import verify
from gemmtuned.daemon.protocol.options import DEFAULTS
from gemmtuned.kernels import spot_check
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.base import AheadBackend
from gemmtuned.kernels.backends.moe_tiles_ import MoeTiles
from gemmtuned.kernels.compile_candidate import compile_candidate
from gemmtuned.kernels.families.error import Error, Spread, limits
from gemmtuned.kernels.families.moe import MOE, MixtureKernel
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.triton import moe_fp8_tiling, moe_tiling
from gemmtuned.kernels.triton.moe_fp8_tiling import NAME, compiled, layer_of, likely, tile_of, tiles_of

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
NOW = ("narrow.randn", "narrow.outliers", "narrow.nobody", "narrow.unvisited", "wide.integers", "wide.apart")
LATER = ("narrow.integers", "narrow.apart", "narrow.twice", "wide.randn", "wide.tail", "wide.skewed", "wide.unvisited")
BACKEND = MoeTiles(NAME, device=H200)


def moe(m: int = 256, **more: Any) -> Problem:
    given = {"n": 2048, "k": 2048, "inter": 768, "experts": 128, "topk": 8, "scale": "1x128", "act": "silu_gated"}
    return Problem(
        family="moe", m=m, dtype="bf16", wdtype="fp8_e4m3", wscale="128x128", math_mode="reduced", **{**given, **more}
    )


@pytest.fixture(scope="module")
def interpreted(
    tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: ForkServer
) -> Callable[[tuple[str, ...]], dict[str, dict[str, Any]]]:
    """What moe_fp8_tiles_interpreted.py says of these cases, which are run together, once."""

    @cache
    def run(cases: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        home = Home(tmp_path_factory.mktemp("interpreted") / "home", native_cache, fork_server)
        said = run_interpreted(home, "moe_fp8_tiles_interpreted.py", *cases)
        return dict(zip(cases, said, strict=True))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "beside"), [*((c, NOW) for c in NOW), *(pytest.param(c, LATER, marks=pytest.mark.long) for c in LATER)]
)
def test_it_passes_the_gate_on_each_kind_of_inputs(
    interpreted: Callable[[tuple[str, ...]], dict[str, dict[str, Any]]], case: str, beside: tuple[str, ...]
) -> None:
    """Within the limits, the exact result to the bit where there is one; two cases have the same bits in a second call.

    Memory that no launch has written is NaN, and so are experts that nobody visits; X that is infinite gives NaN.
    """
    seen = interpreted(beside)[case]
    assert seen["r"] <= seen["allowed_r"] and seen["m"] <= seen["allowed_m"], seen
    assert seen["same"] is (True if case in ("narrow.randn", "wide.integers") else None)
    assert seen["exact"] in (None, True) and seen["infinite"] in (None, True), seen
    assert (seen["exact"] is True) == case.endswith("integers")
    assert seen["exact"] or seen["r"] > 0.01, "nothing was quantised"


def test_it_is_offered_where_the_caller_allows_it() -> None:
    found = list(BACKEND.candidates(moe()))
    assert len(set(found)) == len(found) == moe_fp8_tiling.RACED**2
    assert all(one.backend == NAME and len(tiles_of(one)) == 2 for one in found)
    strict = moe(scale="none")
    for other in (strict, moe(8), moe(threads=2), moe(inter=96), moe(bias=True), moe(n=2112, k=2112)):
        assert not list(BACKEND.candidates(other)), other
    assert list(MoeTiles(device=H200).candidates(strict)), "tiles that quantise nothing serve everybody"
    assert list(MoeTiles(device=H200).candidates(moe())) and isinstance(BACKEND, AheadBackend)
    assert not list(MoeTiles(NAME, device=replace(H200, arch="sm_80")).candidates(moe()))
    assert BACKENDS[NAME].stamps(H200) and not BACKENDS[NAME].stamps(replace(H200, arch="sm_80"))


def test_what_may_be_quantised_is_a_problem_of_its_own() -> None:
    problem, cpu = moe(), moe(threads=2)
    MOE.check(problem)
    assert can_tune(problem) and Problem.parse(str(problem)) == problem != moe(scale="none")
    assert problem.operands in set(MOE.tunable("cuda")) and problem.operands not in set(MOE.tunable("cpu"))
    for other in (cpu, moe(scale="row"), replace(problem, wscale="row"), moe(scale_dtype="e8m0")):
        assert "may be quantised" in why_not(other), other
        with pytest.raises(CandidateFailed):
            MOE.check(other)


def test_the_gate_allows_roundings_of_e4m3_to_whom_it_is_allowed() -> None:
    """0.048 is what quantising costs; a tenth is too much, and without leave it is as if nothing could be rounded."""
    spread = Spread(1 << 20, 4.5)
    stock = Error(0.003, 0.02)
    may, must_not = limits(moe(), stock, spread), limits(moe(scale="none"), stock, spread)
    assert Error(0.048, 0.6).within(may) and not Error(0.1, 0.6).within(may)
    assert not Error(0.01, 0.02).within(must_not) and Error(0.003, 0.02).within(must_not)


def test_a_first_call_may_be_as_far_off_as_quantising_makes_it() -> None:
    """Of 262,144 results one was off by a third of their RMS, on an H200: no fault, where X and H may be quantised."""
    torch.manual_seed(0)
    stock = torch.randn(256, 1024)
    y = stock.clone()
    y[3, 5] += 0.35 * stock.square().mean().sqrt()
    Watch(stock, roughly_apart(moe(), stock)).look(y, "its first call")
    for problem, wrong in ((moe(scale="none"), y), (moe(), -stock)):
        with pytest.raises(Wrong):
            Watch(stock, roughly_apart(problem, stock)).look(wrong, "its first call")


@pytest.mark.parametrize("where", ["verify", "last_check", "spot_check"])
def test_a_kernel_that_quantises_nothing_is_held_to_what_exact_ones_keep(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One result off by a third of their RMS is a rounding of e4m3 to a kernel that quantises, and a fault else."""
    small = moe(4, n=128, k=128, inter=128, experts=2, topk=1)
    default = MOE.default(small)

    def off(o: Operands) -> Tensor:
        y = default.call(o)
        rms = y.float().square().nan_to_num(0.0, 0.0, 0.0).mean().sqrt()
        y[3, 5] += (0.35 * rms).to(y.dtype)
        return y

    for quantises in (False, True):
        kernel = MixtureKernel(off, quantises=quantises)
        assert _refused_by(where, small, kernel, default, monkeypatch) is not quantises


def _refused_by(
    where: str, problem: Problem, kernel: MixtureKernel, default: MixtureKernel, monkeypatch: pytest.MonkeyPatch
) -> bool:
    candidate, cpu = Candidate("planted"), torch.device("cpu")
    if where == "verify":
        return "randn seed=1: error" in verify(problem, {candidate: kernel}, default, device=cpu)[candidate].note
    if where == "spot_check":
        monkeypatch.setattr(spot_check, "BACKENDS", {"planted": Planted(kernel)})
        solution = Solution(
            problem=problem, device="cpu-x-1", mode="eager", covers="exact", backend="planted", config="{}", stamp="1",
            us=1.0, baseline_us=2.0, gain_low=1.5, err=1e-3, baseline_err=1e-3, state="published",
        )  # fmt: skip
        return "error" in spot_check.spot_check(solution, device=cpu)
    inputs = MOE.make(problem, kind="randn", seed=0, device=cpu)
    weights = [inputs.weights]
    arm = Arm("planted", [lambda: kernel.bind(*inputs.weights)(*inputs.activations)])
    monkeypatch.setattr(last_check, "SMALL_US", math.inf)
    winner = last_check.Winner(
        problem, problem, "exact", candidate, Planted(kernel), kernel, default, arm, inputs, weights
    )
    try:
        last_check.last_check(winner, device=cpu, call_us=1.0, options=DEFAULTS)
    except Wrong:
        return True
    return False


class Planted:
    """A backend that has one kernel."""

    name, order = "planted", 1

    def __init__(self, kernel: MixtureKernel) -> None:
        self._kernel = kernel

    def stamps(self, device: Device) -> dict[str, str]:
        return {self.name: "1"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> MixtureKernel:
        return self._kernel


def test_numbers_of_kind_integers_stay_whole_where_h_is_quantised() -> None:
    """X and H are numbers that e4m3 holds beside the largest of their group: the result has one right value."""
    problem = moe(40, n=256, k=256, inter=192, experts=6, topk=2)
    given = MOE.make(problem, kind="integers", seed=1, device=torch.device("cpu"))
    x = given["x"].float()
    assert ((x != 0).sum(1) <= 3).all() and (x.abs().amax(1) == 32).all()


def test_more_pairs_each_are_given_wider_tiles() -> None:
    layer = layer_of(moe())
    assert layer is not None
    widths = [next(likely(layer, tokens, "sm_90", 1)).tokens for tokens in (16, 256, 1024, 8192)]
    assert widths == sorted(widths) and widths[0] == 16 and widths[-1] == 64


def test_its_stamp_covers_all_files_that_its_kernels_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "triton"
    shutil.copytree(Path(moe_tiling.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(moe_fp8_tiling, "__file__", str(folder / "moe_fp8_tiling.py"))
    first = moe_fp8_tiling.source_hash.__wrapped__()
    for file in (
        "moe_fp8_tiles.py",
        "moe_tiles.py",
        "moe_fp8_tiling.py",
        "moe_tiling.py",
        "moe_fp8_launch.py",
        "moe_launch.py",
    ):
        before = (folder / file).read_text()
        (folder / file).write_text(before + "\nTHIS_IS = 'new'\n")
        assert moe_fp8_tiling.source_hash.__wrapped__() != first, file
        (folder / file).write_text(before + "\n# a comment\n")
        assert moe_fp8_tiling.source_hash.__wrapped__() == first, file
        (folder / file).write_text(before)


@pytest.mark.parametrize("config", ["{}", '{"up": "64.16.1.4.4"}', '{"up": "64.16.1.4", "down": "1"}', "[]", "x"])
def test_a_config_without_two_tiles_is_refused(config: str) -> None:
    with pytest.raises(CandidateFailed, match="no tiles of two products"):
        tiles_of(Candidate(NAME, config))
    with pytest.raises(CandidateFailed, match="does not run"):
        BACKEND.prepare(Candidate(NAME, config), moe(8))


@pytest.mark.parametrize(
    "text", ["32.16.1.4.4", "256.16.1.4.4", "64.8.1.4.4", "64.48.1.4.4", "64.16.0.4.4", "64.16.1.4.9"]
)
def test_what_is_no_tile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no tile"):
        tile_of(text)


def test_tiles_that_do_not_cut_h_are_refused() -> None:
    layer = layer_of(moe(inter=192))
    assert layer is not None
    assert {tile.columns for tile in likely(layer, 256, "sm_90", 1)} == {64}
    with pytest.raises(CandidateFailed, match="does not cut"):
        compiled(layer, tile_of("128.16.1.8.3"), tile_of("128.16.1.4.4"), "sm_90")


def refused(candidate: Candidate, problem: Problem, device: Device) -> str:
    """Why it does not compile, or nothing."""
    try:
        compile_candidate(candidate, problem, device)
    except CandidateFailed as err:
        return str(err)
    return ""


@pytest.mark.long
@pytest.mark.usefixtures("kept_compiler_cache")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_89"])
def test_likely_tiles_compile_without_spills(arch: str) -> None:
    """What the daemon compiles before a device is used: all of them on sm_90, one at least elsewhere."""
    device = replace(H200, arch=arch)
    for problem in (moe(256), moe(2048)):
        layer = layer_of(problem)
        assert layer is not None
        ups, downs = (list(likely(layer, problem.m, arch, stage)) for stage in (1, 2))
        chosen = [Candidate.of(NAME, up=u.text(), down=d.text()) for u, d in zip(ups, downs, strict=False)]
        said = [refused(candidate, problem, device) for candidate in chosen]
        assert "" in said and (arch != "sm_90" or set(said) == {""}), said
