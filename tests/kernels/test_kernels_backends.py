"""Backends: as right as the default on every shape, with torch's form of result, and nothing kept of a weight."""

from __future__ import annotations

import re

import cases
import pytest
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, cpu_device
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS, candidates, environment, onednn
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
HERE = environment(cpu_device())
BEYOND = re.compile(r": (NaN and Inf in|padded) .* is nan, torch gives ")
BF16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 kernels")


def names(problem: Problem) -> list[str]:
    return [c.backend for c in candidates(problem, HERE)]


def check_all(problem: Problem) -> None:
    kernels = {c: BACKENDS[c.backend].prepare(c, problem) for c in candidates(problem, HERE)}
    with as_called(problem):
        verdicts = verify(problem, kernels, kernels[Candidate("torch")], device=CPU)
    wrong = {c: v.note for c, v in verdicts.items() if v.outcome != "ok"}
    if problem.dtype == "bf16" and problem.k % 32 and cases.reads_beyond_rows():
        # swapped, it does so where the default does not: with rows of the weight
        wrong = {c: note for c, note in wrong.items() if c.backend != "torch_swap" or BEYOND.search(note) is None}
    assert wrong == {}


@pytest.mark.part(8)
@pytest.mark.parametrize("problem", cases.dense("fp32"), ids=str)
def test_every_backend_is_as_right_as_the_default_in_fp32(problem):
    check_all(problem)


@BF16
@pytest.mark.part(12)
@pytest.mark.parametrize("problem", cases.dense("bf16"), ids=str)
def test_every_backend_is_as_right_as_the_default_in_bf16(problem):
    check_all(problem)


@pytest.mark.parametrize("problem", cases.dense("fp16")[:6], ids=str)
def test_every_backend_is_as_right_as_the_default_in_fp16(problem):
    check_all(problem)


@pytest.mark.parametrize("problem", [*cases.layouts("fp32"), *cases.layouts("bf16")], ids=str)
def test_every_backend_is_as_right_as_the_default_in_every_layout(problem):
    check_all(problem)


@pytest.mark.parametrize("problem", [*cases.batched("fp32"), *cases.batched("bf16")], ids=str)
def test_every_backend_is_as_right_as_the_default_in_batches(problem):
    check_all(problem)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=BF16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 5, 33])
def test_packed_weights_give_the_same_result(dtype, bias, m):
    problem = Problem(m=m, n=72, k=136, dtype=dtype, bias=bias, threads=2, weight_state="packed")
    assert "onednn_packed" in names(problem)
    check_all(problem)


@pytest.mark.parametrize("family", ["dense_add", "batched_add"])
@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("m", [1, 5])
def test_a_full_c_is_added_with_operands_swapped_too(family, layout, m):
    batch = 3 if family == "batched_add" else 1
    problem = Problem(family=family, batch=batch, m=m, n=6, k=7, dtype="fp32", layout=layout, threads=2)
    assert names(problem) == ["torch", "torch_swap"]
    check_all(problem)


@pytest.mark.parametrize("mode", ["tf32", "bf16"])
def test_candidates_are_judged_under_the_programs_math_mode(mode):
    problem = Problem(m=8, n=64, k=128, dtype="fp32", math_mode=mode, threads=2)
    before = torch.get_float32_matmul_precision()
    check_all(problem)
    assert torch.get_float32_matmul_precision() == before


def test_candidates_are_pruned_to_what_can_win():
    plain = Problem(m=8, n=64, k=128, dtype="fp32", threads=2)
    assert names(plain) == ["torch", "torch_swap", "onednn"]
    assert names(plain.with_m(1)) == ["torch", "torch_swap", "torch_mv", "onednn"]
    packed = Problem(m=8, n=64, k=128, dtype="fp32", threads=2, weight_state="packed")
    assert names(packed) == ["torch", "torch_swap", "onednn", "onednn_packed"]
    for layout in ("nn", "ns", "tt"):  # oneDNN's fast code is for linear layers
        assert names(Problem(m=8, n=64, k=128, dtype="fp32", threads=2, layout=layout)) == ["torch", "torch_swap"]
    assert names(Problem(m=8, n=64, k=128, dtype="fp32")) == ["torch"]  # not a CPU's problem
    assert names(Problem(m=8, n=64, k=128, dtype="fp64", threads=2)) == ["torch"]
    assert names(Problem(m=8, n=64, k=128, dtype="i64", threads=2)) == ["torch"]


def test_the_stamp_says_what_the_solution_depends_on():
    assert HERE.stamps["torch"] == torch.__version__
    assert HERE.stamps["onednn"] == f"{torch.__version__}/{HERE.device.key}"
    gpu = environment(Device(key="cuda-x-1", kind="cuda", name="x", arch="sm_90", units=132))
    assert "onednn" not in gpu.stamps
    assert "torch" in gpu.stamps


@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_candidate_that_the_backend_does_not_offer_is_refused(name):
    problem = Problem(m=8, n=64, k=128, dtype="fp32", threads=2, layout="ns")
    with pytest.raises(CandidateFailed, match=f"(?i){name}"):
        BACKENDS[name].prepare(Candidate.of(name, tile=3), problem)
    if name not in ("torch", "torch_swap"):
        with pytest.raises(CandidateFailed, match=f"(?i){name}"):
            BACKENDS[name].prepare(Candidate(name), problem)


@pytest.mark.parametrize("name", ["torch", "torch_swap", "onednn"])
def test_no_stale_result_when_a_weight_is_edited_in_place(name):
    problem = Problem(m=4, n=256, k=512, dtype="fp32", threads=2)
    kernel = BACKENDS[name].prepare(Candidate(name), problem)
    x, w = torch.randn(4, 512), torch.randn(256, 512)
    run = kernel.bind(w.t())
    for _ in range(5):
        run(x, None)
        w.data.mul_(-2)  # bumps no version counter
        assert torch.allclose(run(x, None), torch.nn.functional.linear(x, w), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["torch", "torch_swap", "onednn"])
def test_no_stale_result_when_a_weight_is_freed_and_its_address_used_again(name):
    problem = Problem(m=4, n=256, k=512, dtype="fp32", threads=2)
    kernel = BACKENDS[name].prepare(Candidate(name), problem)
    x = torch.randn(4, 512)
    addresses = set()
    for _ in range(50):
        w = torch.randn(256, 512)
        addresses.add(w.data_ptr())
        assert torch.allclose(kernel.bind(w.t())(x, None), torch.nn.functional.linear(x, w), atol=1e-3, rtol=1e-4)
        del w
    assert len(addresses) < 50  # otherwise nothing was tested


def test_onednn_leaves_operands_that_are_slices_to_torch(monkeypatch):
    """There its reference code would run, a thousand times slower."""
    problem = Problem(m=4, n=64, k=128, dtype="fp32", bias=True, threads=2)
    kernel = BACKENDS["onednn"].prepare(Candidate("onednn"), problem)
    asked = []
    monkeypatch.setattr(onednn, "_pointwise", lambda: lambda *args: asked.append(args))
    x, w, bias = torch.randn(4, 128), torch.randn(64, 136)[:, :128], torch.randn(64)
    assert torch.equal(kernel.bind(w.t())(x, bias), torch.addmm(bias, x, w.t()))
    kernel.bind(w.contiguous().t())(torch.randn(4, 136)[:, :128], bias)
    kernel.bind(w.contiguous().t())(x, torch.randn(128)[::2])
    assert asked == []
    kernel.bind(w.contiguous().t())(x, bias)
    assert len(asked) == 1


def test_a_packed_weight_is_packed_once_and_is_not_the_plain_one():
    problem = Problem(m=4, n=64, k=128, dtype="fp32", threads=2, weight_state="packed")
    kernel = BACKENDS["onednn_packed"].prepare(Candidate("onednn_packed"), problem)
    x, w = torch.randn(4, 128), torch.randn(64, 128)
    run = kernel.bind(w.t())
    expected = torch.nn.functional.linear(x, w)
    w.zero_()
    assert torch.allclose(run(x, None), expected, atol=1e-4)


@pytest.mark.parametrize("n,m", [(1, 5), (5, 1), (1, 1), (6, 5)])
@pytest.mark.parametrize("name", ["torch_swap", "onednn", "torch_mv"])
def test_results_have_the_strides_that_stock_torch_gives(name, n, m):
    problem = Problem(m=m, n=n, k=8, dtype="fp32", bias=True, threads=2)
    if name not in names(problem):
        pytest.skip("not a candidate for this shape")
    inputs = family_of(problem).make(problem, kind="randn", seed=1, device=CPU)
    y = inputs.run(BACKENDS[name].prepare(Candidate(name), problem))
    stock = torch.addmm(inputs["bias"], inputs["x"], inputs["w"])
    assert (y.shape, y.stride(), y.dtype) == (stock.shape, stock.stride(), stock.dtype)


def test_switches_are_restored_after_an_error():
    state = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())
    with (
        pytest.raises(ValueError, match="inside"),
        as_called(Problem(m=1, n=1, k=1, dtype="fp32", threads=1, deterministic=True)),
    ):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        raise ValueError("inside")
    after = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())
    assert after == state
