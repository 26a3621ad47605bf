"""Verification: every planted fault is found and named, and a right kernel passes."""

from __future__ import annotations

import re

import planted_kernels as planted
import pytest
import torch
from hooked import Home
from planted_stateful import KeepsBias, KeepsX

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child import checks
from gemmtuned.daemon.child import verify as verify_module
from gemmtuned.daemon.child.verify import SEEDS, Checked, default_error, verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.base import StatelessKernel
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
PROBLEM = Problem(m=9, n=24, k=200, dtype="fp32", bias=True, threads=2)
CANDIDATE = Candidate("planted")


def verdict(kernel, problem: Problem = PROBLEM) -> Checked:
    kernel = kernel if hasattr(kernel, "bind") else StatelessKernel(kernel)
    default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
    with as_called(problem):
        return verify(problem, {CANDIDATE: kernel}, default, device=CPU)[CANDIDATE]


def test_a_right_kernel_passes_with_its_error_told():
    found = verdict(planted.right)
    assert found.outcome == "ok"
    assert 0 < found.err < 1e-6
    assert 0 < found.baseline_err < 1e-6


class AlikeFromThenOn:
    """Once it has seen rows of X that begin alike it takes them for equal in that closure, whatever they are later."""

    def bind(self, w):
        seen = []

        def run(x, bias):
            y = planted.right(x, w, bias)
            half = x[:, : x.shape[1] // 2]
            if seen:
                y[:] = y[0].clone()
            elif torch.equal(half, half[:1].expand_as(half)) and not torch.equal(x, x[:1].expand_as(x)):
                seen.append(True)
            return y

        return run


@pytest.mark.parametrize(
    "kernel,reason",
    [
        (planted.dropped_tail, "randn seed=1: error r="),
        (planted.double_counted, "error r="),
        (planted.nan_result, "error r=nan"),
        (planted.one_wrong, "error r="),
        (planted.low_precision, "error r="),
        (planted.wrong_dtype, "dtype is torch.float64, torch gives torch.float32"),
        (planted.wrong_shape, r"shape is torch.Size\(\[8, 24\]\)"),
        (planted.wrong_strides, r"strides are \(1, 9\), torch gives \(24, 1\)"),
        (planted.no_tensor, "gives NoneType, expected a Tensor"),
        (planted.unwritten_row, "poisoned with NaN"),
        (planted.eats_nan, "NaN and Inf in .*: .* elements off, .* torch gives (nan|-?inf)"),
        (planted.eats_inf, "(NaN and Inf in|rows of X zero, large).*: .* torch gives"),
        (planted.reads_beside, "padded seed=1: .* is nan"),
        (planted.writes_operand, "randn seed=1: it writes into its operands"),
        (planted.writes_beside, "padded seed=1: it writes into its operands or beside them"),
        (planted.static(), "shares memory"),
        (planted.windows(), "shares memory"),
        (planted.KeepsWeight(), "weight edited in place"),
        (planted.KeepsByAddress(), "error r=|weight edited in place"),
        (KeepsX(), "other X and bias, elsewhere"),
        (KeepsBias(copy=False), "other X and bias, elsewhere"),
        (AlikeFromThenOn(), "after all edits"),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_a_planted_fault_is_found_and_named(kernel, reason):
    found = verdict(kernel)
    assert found.outcome == "wrong"
    assert found.err is None
    assert found.note.startswith(f"{PROBLEM} planted: ")
    assert re.search(reason, found.note), found.note


def test_how_large_results_are_is_measured_once_for_each_case_and_not_for_each_check(monkeypatch):
    measured: list[int] = []
    usual = checks.root_mean_square
    monkeypatch.setattr(checks, "root_mean_square", lambda y: measured.append(id(y)) or usual(y))
    assert verdict(planted.right, PROBLEM).outcome == "ok"
    assert len(measured) <= len(SEEDS) + 2  # and for other inputs


@pytest.mark.parametrize("of", [{}, {"bias": True}, {"family": "batched", "batch": 3}, {"family": "dense_add"}])
@pytest.mark.parametrize("limit", [30000.0, 50000.0, 1e9])
def test_fp16_results_up_to_the_largest_number_are_asked_for(of, limit):
    def cut(x, w, *added):
        y = BACKENDS["torch"].prepare(Candidate("torch"), problem).bind(w)(x, *added)
        return torch.where(y.abs() > limit, y.sign() * torch.inf, y)

    problem = Problem(**{"m": 9, "n": 24, "k": 200, "dtype": "fp16", "threads": 2, **of})
    found = verdict(cut, problem)
    assert found.outcome == ("ok" if limit > 65504 else "wrong"), found.note


def leaking(x, w, bias):
    """As torch 2.13 in bf16 on CPUs with AMX: a row is NaN where the next one has NaN or Inf."""
    y = planted.right(x, w, bias)
    y[:-1][~x[1:].isfinite().all(-1)] = torch.nan
    return y


def leaking_on(x, w, bias):
    """Into the row after it."""
    y = planted.right(x, w, bias)
    y[1:][~x[:-1].isfinite().all(-1)] = torch.nan
    return y


@pytest.mark.parametrize(
    ("kernel", "outcome"),
    [
        (planted.right, "ok"), (leaking, "ok"), (leaking_on, "wrong"), (planted.eats_nan, "wrong"),
        (planted.eats_inf, "wrong"),
    ],
)  # fmt: skip
def test_what_the_default_lets_into_other_rows_is_asked_of_nobody(kernel, outcome):
    default = StatelessKernel(leaking)
    with as_called(PROBLEM):
        found = verify(PROBLEM, {CANDIDATE: StatelessKernel(kernel)}, default, device=CPU)[CANDIDATE]
    assert found.outcome == outcome, found.note


def test_a_kernel_that_raises_is_refused_in_one_line():
    found = verdict(planted.raises)
    assert found.outcome == "refused"
    assert found.note == f"{PROBLEM} planted: RuntimeError: no kernel image is available"


def test_one_wrong_element_outside_the_sampled_rows_is_found():
    def wrong_at_200(a, b, bias):
        y = planted.right(a, b, bias)
        if len(y) == 500:
            y[200, 7] += 0.01
        return y

    problem = Problem(m=500, n=24, k=64, dtype="fp32", threads=2)
    default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
    rows = [r for case in verify_module._cases(problem, default, CPU) for r in case.sample.rows.tolist()]
    found = verdict(wrong_at_200, problem)
    assert found.outcome == "wrong"
    assert "(200, 7)" in found.note or 200 in rows


def test_a_dropped_tail_is_found_in_bf16_too():
    problem = Problem(m=9, n=24, k=1000, dtype="bf16", threads=2)
    assert verdict(planted.dropped_tail, problem).outcome == "wrong"


def test_jitter_between_calls_matters_only_where_the_program_asked_for_determinism():
    exacting = Problem(m=9, n=24, k=200, dtype="fp32", bias=True, threads=2, deterministic=True)
    found = verdict(planted.jitter(), exacting)
    assert found.outcome == "wrong"
    assert "20 equal calls do not agree bitwise" in found.note
    assert verdict(planted.jitter()).outcome == "ok"


def test_a_packed_weight_may_be_a_copy():
    packed = Problem(m=9, n=24, k=200, dtype="fp32", threads=2, weight_state="packed")
    assert verdict(planted.KeepsWeight(), packed).outcome == "ok"


def test_one_bad_candidate_does_not_spoil_the_others():
    default = BACKENDS["torch"].prepare(Candidate("torch"), PROBLEM)
    kernels = {
        Candidate("writes"): StatelessKernel(planted.writes_operand),
        Candidate("right"): StatelessKernel(planted.right),
        Candidate("raises"): StatelessKernel(planted.raises),
    }
    announced = []
    with as_called(PROBLEM):
        found = verify(PROBLEM, kernels, default, device=CPU, before=announced.append)
    assert [v.outcome for v in found.values()] == ["wrong", "ok", "refused"]
    assert announced[:3] == list(kernels)
    assert announced[-1] == Candidate("right")


def test_each_call_belongs_to_the_candidate_announced_last():
    default = BACKENDS["torch"].prepare(Candidate("torch"), PROBLEM)
    last = []

    def named(name):
        def call(a, b, bias):
            assert last[-1] == Candidate(name)
            return planted.right(a, b, bias)

        return StatelessKernel(call)

    with as_called(PROBLEM):
        found = verify(
            PROBLEM, {Candidate(n): named(n) for n in ("one", "two")}, default, device=CPU, before=last.append
        )
    assert all(v.outcome == "ok" for v in found.values())


def test_a_default_that_fails_is_said_to_be_torchs_own():
    with as_called(PROBLEM), pytest.raises(CandidateFailed, match="torch's own kernel fails"):
        verify(PROBLEM, {CANDIDATE: StatelessKernel(planted.right)}, StatelessKernel(planted.raises), device=CPU)


@pytest.mark.parametrize("limit", ["LARGE_FLOPS", "LARGE_WEIGHTS"])
def test_large_problems_have_one_kind_of_inputs_a_seed(monkeypatch, limit):
    monkeypatch.setattr(verify_module, limit, 1.0)
    default = BACKENDS["torch"].prepare(Candidate("torch"), PROBLEM)
    with as_called(PROBLEM):
        seen = [(c.inputs.kind, c.inputs.seed) for c in verify_module._cases(PROBLEM, default, CPU)]
    assert seen == [("randn", 1), ("tail", 2), ("outliers", 3)]


def test_the_defaults_error_is_known_without_rivals_and_for_any_dtype():
    with as_called(PROBLEM):
        assert 0 < default_error(PROBLEM, BACKENDS["torch"].prepare(Candidate("torch"), PROBLEM), device=CPU) < 1e-6
    whole = Problem(m=2, n=3, k=4, dtype="i64", threads=2)
    assert default_error(whole, BACKENDS["torch"].prepare(Candidate("torch"), whole), device=CPU) == 0.0


def test_the_switches_import_no_compiler(home: Home):
    """torch.use_deterministic_algorithms imports torch's: two seconds of every worker and every `gemmtuned tune`."""
    imports = """
        import sys, torch
        from gemmtuned.configs.problem import Problem
        from gemmtuned.kernels.torch_flags import as_called, deterministic
        usual, repeated = (Problem(m=4, n=8, k=16, threads=2, deterministic=on) for on in (False, True))
        """
    none = """
        with as_called(usual), deterministic(False, poison=True):
            assert torch.are_deterministic_algorithms_enabled() and torch.empty(4).isnan().all()
        assert not torch.are_deterministic_algorithms_enabled()
        assert not [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))]
        """
    told = """
        with as_called(repeated):  # what a backend compiles there is to know of it
            assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
        assert not torch.are_deterministic_algorithms_enabled() and not torch._inductor.config.deterministic
        """
    for program, code in ((home, none), (home.compiling(), told)):
        done = program.run(imports + code, AITER_TUNE_GEMM="0")
        assert done.code == 0, done.err
