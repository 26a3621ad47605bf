"""fused_moe in a program with the hook: counted under its key, tuned from that, served by the table."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from command_line import says
from hooked import Home, publish, published

from gemmtuned.configs import aiter_rows
from gemmtuned.configs.aiter_csv import read_lines
from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import can_tune
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.cuda import moe_compile, moe_run
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.families.moe import how_of
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.ops import fused_moe
from gemmtuned.ops import moe as op

LAYER = Problem.parse("moe:fp32:4x64x64,threads=2,experts=4,topk=2,inter=32,act=silu_gated")
PROGRAM = """
import json, sys, torch
from hooked import wait_for
import gemmtuned
from gemmtuned.ops import fused_moe
torch.set_num_threads(2)
torch.manual_seed(0)
wait_for(lambda: gemmtuned.generation() == int(sys.argv[1]))
w1, w2 = torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 8
x, weights, ids = torch.randn(4, 64), torch.rand(4, 2), torch.randint(0, 4, (4, 2))
with torch.no_grad():
    found = [fused_moe(x, w1, w2, weights, ids) for _ in range(5)]
print(json.dumps([float(found[0].double().sum()), all(torch.equal(found[0], y) for y in found)]))
"""


def reported(home: Home) -> list[str]:
    """Why solutions failed, as the daemon is told."""
    with closing(sqlite3.connect(home.path / "tune.db")) as conn:
        return [reason for (reason,) in conn.execute("SELECT reason FROM quarantine")]


def test_calls_are_counted_under_their_key_and_served_by_the_table(home: Home) -> None:
    stock = home.run(PROGRAM, "0").said
    assert home.counts() == {(str(LAYER), "miss"): 5}, "products inside are not counted"
    publish(home.path / "configs", [published(LAYER, "moe_grouped")], 1)
    served = home.run(PROGRAM, "1").said
    assert home.counts() == {(str(LAYER), "miss"): 5, (str(LAYER), "exact"): 5}
    assert served[0] == pytest.approx(stock[0], rel=1e-4) and served[1]


def test_a_row_that_does_not_run_costs_itself_alone(home: Home) -> None:
    """A configuration for a GPU in a CPU's table: the call is served as if it were not there."""
    home.path.mkdir(exist_ok=True)
    publish(home.path / "configs", [published(LAYER, "moe_grouped", config='{"no":1}')], 1)
    done = home.run(PROGRAM, "1")
    assert done.said[1] and done.err.count("route failed") == 1
    assert home.counts()[str(LAYER), "miss"] == 5
    assert len(reported(home)) == 1 and "does not run" in reported(home)[0]


FAILING = (
    """
import torch
from gemmtuned.kernels import mixture
usual, calls = mixture.grouped, []
def grouped(o, how):
    calls.append(how)
    if len(calls) == 2:
        raise ERROR
    return usual(o, how)
mixture.grouped = grouped
"""
    + PROGRAM
)


@pytest.mark.parametrize(
    ("error", "outcomes", "reports"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory')", {"exact": 4, "miss": 1}, []),
        ("MemoryError()", {"exact": 4, "miss": 1}, []),
        ("RuntimeError('CUDA error: an illegal memory access was encountered')", {"exact": 4, "miss": 1}, []),
        ("RuntimeError('it is broken')", {"exact": 1, "miss": 4}, ["it is broken"]),
    ],
)  # fmt: skip
def test_a_failure_is_reported_once_and_a_shortage_is_nobodys_fault(
    home: Home, error: str, outcomes: dict[str, int], reports: list[str]
) -> None:
    publish(home.path / "configs", [published(LAYER, "moe_grouped")], 1)
    done = home.run(FAILING.replace("ERROR", error), "1")
    assert done.said[1]
    assert {outcome: n for (text, outcome), n in home.counts().items() if text == str(LAYER)} == outcomes
    assert reported(home) == reports and done.err.count("route failed") == len(reports)


class Launches:
    """What stands in for two launches on a GPU, which cannot be here."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __call__(self, o: Operands) -> torch.Tensor:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "calls"),
    [(CandidateFailed("no"), 1), (Declined("no memory"), 2), (torch.OutOfMemoryError("out of memory"), 2)],
    ids=str,
)  # fmt: skip
def test_launches_that_fail_are_served_by_torch(monkeypatch: pytest.MonkeyPatch, error: Exception, calls: int) -> None:
    """Those that are to blame are not tried again; others are."""
    made = Launches(error)
    monkeypatch.setattr(moe_run, "runs_here", lambda device: True)
    monkeypatch.setattr(op, "_usual", lambda o, how: y if (y := op._launched(o, how)) is not None else op.run(o, how))
    monkeypatch.setattr(moe_run, "_made", lambda *key: made)
    monkeypatch.setattr(moe_run, "_loaded", {})
    x, w1, w2 = (torch.randn(size).bfloat16() for size in ((3, 64), (4, 64, 64), (4, 64, 32)))
    given = x, w1, w2, torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [3, -1]])
    with torch.no_grad():
        found = [fused_moe(*given) for _ in range(2)]
    monkeypatch.undo()
    assert made.calls == calls
    assert all(torch.equal(y, fused_moe(*given)) for y in found)


def test_a_program_with_the_hook_compiles_nothing_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has a good form meanwhile; what the daemon has compiled by then is looked for now and then."""
    asked: list[bool] = []

    def made(*key: object) -> None:
        asked.append(bool(key[-1]))
        raise Declined("not compiled yet")

    monkeypatch.setattr(moe_run, "runs_here", lambda device: True)
    monkeypatch.setattr(moe_run, "_made", made)
    monkeypatch.setattr(moe_run, "_loaded", {})
    monkeypatch.setattr(moe_run, "_look_at_s", {})
    monkeypatch.setattr(op.activate, "current", object)
    x, w1, w2 = (torch.randn(size).bfloat16() for size in ((3, 64), (4, 64, 64), (4, 64, 32)))
    o = Operands(x=x, w1=w1, w2=w2, weights=torch.rand(3, 2), ids=torch.tensor([[0, 1], [2, 3], [3, -1]]))
    monkeypatch.setattr(op, "grouped_runs", lambda o: True)
    assert op._launched(o, How()) is None and op._launched(o, How()) is None and asked == [True]
    monkeypatch.setattr(moe_run, "LOOK_S", 0.0)
    moe_run._look_at_s.clear()
    assert op._launched(o, How()) is None and op._launched(o, How()) is None and asked == [True] * 3
    monkeypatch.setattr(op, "grouped_runs", lambda o: False)  # there torch goes expert after expert
    assert op._launched(o, How()) is None and asked[-1] is False


def test_ids_of_64_bits_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution was raced with ids of 32 bits: the same configuration, compiled for the others, serves those."""
    problem = Problem.parse("moe:bf16:3x64x64,experts=4,topk=2,inter=32,act=silu_gated")
    candidate = next(BACKENDS["moe_decode"].candidates(problem))
    asked: list[Experts] = []

    def loaded(layer: Experts, *rest: object) -> Callable[[Operands], torch.Tensor]:
        asked.append(layer)
        return lambda o: o.x

    monkeypatch.setattr(moe_run, "loaded", loaded)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as a tensor on the CPU says it is
    kernel = BACKENDS["moe_decode"].prepare(candidate, problem)
    x, w1, w2 = (torch.randn(size).bfloat16() for size in ((3, 64), (4, 64, 64), (4, 64, 32)))
    o = Operands(x=x, w1=w1, w2=w2, weights=torch.rand(3, 2), ids=torch.tensor([[0, 1], [2, 3], [3, -1]]))
    for ids in (o.ids, o.ids.int()):
        y = kernel.served(replace(o, ids=ids))
        assert y is not None and torch.equal(y, x) and asked[-1].long_ids == (ids.dtype == torch.int64)
    assert kernel.served(replace(o, ids=o.ids[:, :1], weights=o.weights[:, :1])) is None  # another layer
    assert kernel.served(replace(o, w1=w1.mT.contiguous().mT)) is None


def test_weights_of_other_strides_are_left_by_the_grouped_form() -> None:
    """Torch's grouped product refuses them; an error would withdraw the solution for everybody."""
    problem = Problem.parse("moe:bf16:3x64x64,threads=1,experts=4,topk=2,inter=32,act=silu_gated")
    kernel = BACKENDS["moe_grouped"].prepare(next(BACKENDS["moe_grouped"].candidates(problem)), problem)
    x, w1, w2 = (torch.randn(size).bfloat16() for size in ((3, 64), (4, 64, 64), (4, 64, 32)))
    o = Operands(x=x, w1=w1, w2=w2, weights=torch.rand(3, 2), ids=torch.tensor([[0, 1], [2, 3], [3, -1]]))
    assert kernel.served(o) is not None
    wide = w1.repeat_interleave(2, 2)[..., ::2]
    assert torch.equal(wide, w1) and kernel.served(replace(o, w1=wide)) is None
    assert kernel.served(replace(o, w2=w2.repeat_interleave(2, 2)[..., ::2])) is None


QUANTISED = """
import json, sys, torch
from hooked import wait_for
import gemmtuned
from gemmtuned.ops import fused_moe
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
wait_for(lambda: gemmtuned.generation() >= int(sys.argv[1]))
x, weights, ids = torch.randn(4, 128).bfloat16(), torch.rand(4, 2), torch.randint(0, 8, (4, 2))
w1, w2 = torch.randn(8, 128, 128), torch.randn(8, 128, 64)
bytes1, bytes2 = (torch.randint(0, 256, (8, 128, k // 2), dtype=torch.uint8) for k in (128, 64))
given = {
    "per_Token": (*(w.to(torch.float8_e4m3fn) for w in (w1, w2)), *(torch.rand(8, 128, 1) / 8 for _ in range(2))),
    "per_Group": (bytes1, bytes2, *(torch.rand(8, 128, k // 32).bfloat16() / 32 for k in (128, 64))),
    "per_1x32": (bytes1, bytes2, *(torch.randint(120, 125, (8, 128, k // 32), dtype=torch.uint8) for k in (128, 64))),
}
with torch.no_grad():
    sums = {}
    for quant, (one, two, scale1, scale2) in [*given.items()][-int(sys.argv[3]):]:
        found = [
            fused_moe(x, one, two, weights, ids, quant_type=quant, w1_scale=scale1, w2_scale=scale2) for _ in range(5)
        ]
        assert all(torch.equal(found[0], y) for y in found)
        sums[quant] = float(found[0].double().abs().sum())
print(json.dumps(sums))
"""
WAITING = 2 + (os.cpu_count() or 1)  # so many threads wait for each other: what others take then counts as well
OF_QUANTISED = [
    Problem.parse(f"moe:bf16/{kind},threads={WAITING},experts=8,topk=2,inter=64,act=silu_gated")
    for kind in (
        "fp8_e4m3:4x128x128,wscale=row",
        "i4:4x128x128,wscale=1x32,wscaledtype=bf16",
        "fp4_e2m1:4x128x128,wscale=1x32",
    )
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("many", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_whole_loop_from_a_count_to_a_verdict(home: Home, many: int) -> None:
    """What is counted is tuned in the foreground, and the next program is served what was found.

    many: so many of the quantised kinds, the last one among them; with all of them the plain one is tuned, too.
    """
    texts = [*map(str, OF_QUANTISED[-many:])]
    home.run(PROGRAM, "0")
    before = home.run(QUANTISED, "0", str(WAITING), str(many)).said
    assert home.counts() == {(text, "miss"): 5 for text in (str(LAYER), *texts)}
    asked = [*([str(LAYER)] if many > 1 else []), *texts]
    tuned = says(home.path, "tune", "--json", *asked)
    assert "cannot be tuned" not in tuned.stdout + tuned.stderr
    verdicts = {row["problem"]: row.get("state", "") for row in json.loads(tuned.stdout)["rows"]}
    assert set(verdicts) == {*asked}, tuned.stderr  # that of two threads: put off where others use the CPU
    solved = {text: state for text, state in verdicts.items() if state in ("published", "default_best")}
    assert set(solved) >= set(texts), tuned.stdout
    # all experts together are a tenth faster, which a busy neighbour can hide: what is sure is that they were right
    with sqlite3.connect(home.path / "tune.db") as db:
        seen = db.execute("SELECT problem, outcome FROM trials WHERE backend = 'moe_grouped'").fetchall()
    assert {problem for problem, _ in seen} >= set(texts) and {outcome for _, outcome in seen} <= {"ok", "slower"}
    after = home.run(QUANTISED, "1", str(WAITING), str(many)).said
    assert after == pytest.approx(before, rel=1e-2)
    assert {text: home.counts()[text, "exact"] for text in texts} == dict.fromkeys(texts, 5)
    rows = json.loads(says(home.path, "coverage", "--by", "problem", "--json").stdout)["rows"]
    reached = {row["problem"]: (row["exact_calls"], row["missed_calls"]) for row in rows}
    assert reached == {str(LAYER): (0, 5), **dict.fromkeys(texts, (5, 5))}
    gains = json.loads(says(home.path, "gains", "--json").stdout)["rows"]
    assert {row["problem"] for row in gains} >= {text for text in texts if solved[text] == "published"}
    assert json.loads(says(home.path, "untuned", "--json").stdout)["states"]["untunable"] == 0


def test_keys_are_those_of_the_call() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    w = torch.zeros(4, 64, 32)
    o = Operands(x=torch.zeros(3, 32), w1=w, w2=torch.zeros(4, 32, 32), weights=torch.ones(3, 2), ids=ids)
    threads = torch.get_num_threads()
    usual = Problem.parse(f"moe:fp32:3x32x32,threads={threads},experts=4,topk=2,inter=32,act=silu_gated")
    assert op.problem_of(o, How()) == usual
    assert op.problem_of(o, How(act="swiglu", interleaved=True, weighted=True)) == replace(
        usual, act="swiglu_gated_interleaved_weighted"
    )
    assert op.problem_of(replace(o, bias1=torch.zeros(4, 64)), How()) is None


def quantised(wdtype: torch.dtype, *scales: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Operands:
    """256 wide; weights of 4 bits lie in bytes."""
    packed = 2 if wdtype == torch.uint8 else 1
    scale1, scale2 = (torch.zeros(4, *shape, dtype=dtype) for shape in scales)
    return Operands(
        x=torch.zeros(3, 256, dtype=torch.bfloat16), w1=torch.zeros(4, 256, 256 // packed).to(wdtype),
        w2=torch.zeros(4, 256, 128 // packed).to(wdtype), weights=torch.ones(3, 2), scale1=scale1, scale2=scale2,
        ids=torch.zeros(3, 2, dtype=torch.int32),
    )  # fmt: skip


FP8, BYTES, BF16 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16


@pytest.mark.parametrize(
    ("quant", "o", "key"),
    [
        ("tensor", quantised(FP8, (), ()), "fp8_e4m3,wscale=tensor"),
        ("row", quantised(FP8, (256,), (256,)), "fp8_e4m3,wscale=row"),
        ("128x128", quantised(FP8, (2, 2), (2, 1)), "fp8_e4m3,wscale=128x128"),
        ("mxfp4", quantised(BYTES, (256, 8), (256, 4), dtype=BYTES), "fp4_e2m1,wscale=1x32"),
        ("int4", quantised(BYTES, (256, 8), (256, 4), dtype=BF16), "i4,wscale=1x32,wscaledtype=bf16"),
        ("int4", quantised(BYTES, (256, 4), (256, 2), dtype=BF16), "i4,wscale=1x64,wscaledtype=bf16"),
        ("int4", quantised(BYTES, (256, 2), (256, 1)), "i4,wscale=1x128,wscaledtype=fp32"),
    ],
)
def test_the_key_of_a_quantised_call_tells_all_that_decides(quant: str, o: Operands, key: str) -> None:
    """What it says is what the kernels make of the operands: they are compiled for one and serve the other."""
    how = How(quant=quant)
    wdtype, scales = key.split(",", 1)
    act = f"threads={torch.get_num_threads()},experts=4,topk=2,inter=128,act=silu_gated"
    problem = op.problem_of(o, how)
    assert problem == Problem.parse(f"moe:bf16/{wdtype}:3x256x256,{scales},{act}")
    assert can_tune(problem) and how_of(problem) == how
    on_gpu = replace(problem, threads=0)
    readable = "fp32" not in key or wdtype != "i4"  # by our kernels
    assert moe_compile.described(on_gpu) == moe_run.layer_of(o, how)
    assert (moe_compile.layer_of(on_gpu) is not None) == readable
    many = on_gpu.with_m(5000)
    assert moe_compile.layer_of(many) is None and moe_compile.described(many) == moe_compile.described(on_gpu)


AITERS = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"


@pytest.mark.parametrize(
    ("quant", "o", "x", "w", "kinds"),
    [
        ("tensor", quantised(FP8, (), ()), "float8_e4m3fn", "float8_e4m3fn", ["per_Tensor"]),
        ("row", quantised(FP8, (256,), (256,)), "float8_e4m3fn", "float8_e4m3fn", ["per_Token"]),
        ("row", quantised(torch.int8, (256,), (256,)), "int8", "int8", ["per_Token"]),
        ("128x128", quantised(FP8, (2, 2), (2, 1)), "float8_e4m3fn", "float8_e4m3fn", ["per_1x128", "per_128x128"]),
        (
            "mxfp4",
            quantised(BYTES, (256, 8), (256, 4), dtype=BYTES),
            "float4_e2m1fn_x2",
            "float4_e2m1fn_x2",
            ["per_1x32"],
        ),
        ("int4", quantised(BYTES, (256, 8), (256, 4), dtype=BF16), "bfloat16", "int4", ["per_1x32"]),
        ("int4", quantised(BYTES, (256, 1), (256, 1)), "bfloat16", "int4", ["per_Token"]),
    ],
)
def test_a_row_of_aiters_table_and_the_same_call_are_one_problem(
    quant: str, o: Operands, x: str, w: str, kinds: list[str]
) -> None:
    """Whatever AITER makes of X in the call; what we write tells what AITER makes of it."""
    problem = op.problem_of(o, How(quant=quant))
    assert problem is not None
    row = "3,256,128,4,2,ActivationType.Silu,torch.bfloat16,torch.{},torch.{},QuantType.{},1,0"
    rows = [row.format(a, w, kind) for a in dict.fromkeys((x, "bfloat16", "float8_e4m3fn")) for kind in kinds]
    found = read_lines([AITERS, *rows], name="untuned_fmoe.csv").rows
    assert {aiter_rows.problem_of(one, threads=problem.threads) for one in found} == {problem}
    family = aiter_rows.family_of(problem)
    assert family is not None
    assert ",".join(aiter_rows.key_texts(problem, family).values()) == rows[0]


@pytest.mark.parametrize(
    ("quant", "o"),
    [
        ("int4", quantised(BYTES, (256, 4), (256, 2), dtype=BF16)), ("int4", quantised(BYTES, (256, 8), (256, 4))),
        ("row", quantised(FP8, (256,), (256,), dtype=BF16)),
    ],
)  # fmt: skip
def test_what_aiter_has_no_words_for_is_not_written_as_another_problem(quant: str, o: Operands) -> None:
    problem = op.problem_of(o, How(quant=quant))
    assert problem is not None and aiter_rows.family_of(problem) is None
    interleaved = op.problem_of(quantised(FP8, (), ()), How(quant="tensor", interleaved=True))
    assert interleaved is not None and aiter_rows.family_of(interleaved) is None


@pytest.mark.parametrize(
    ("quant", "o", "key"),
    [
        ("int4", quantised(BYTES, (256, 1), (256, 1)), "row"),  # of different lengths
        ("int4", quantised(BYTES, (256, 16), (256, 8)), "1x16"),
        ("int4", quantised(BYTES, (256, 8), (256, 2)), ""),
        ("int4", quantised(BYTES, (256, 32), (256, 16)), ""),  # groups that no key has a word for
        ("row", quantised(torch.float8_e5m2, (256,), (256,)), "row"),
        ("row", quantised(FP8, (256,), (256,), dtype=BF16), "row"),
        ("row", replace(quantised(FP8, (256,), (256,)), scale1=torch.zeros(4, 256, dtype=BF16)), ""),
    ],
)
def test_a_call_that_cannot_be_tuned_has_another_key_or_none(quant: str, o: Operands, key: str) -> None:
    problem = op.problem_of(o, How(quant=quant))
    assert (problem.wscale if problem else "") == key
    assert problem is None or not can_tune(problem)
