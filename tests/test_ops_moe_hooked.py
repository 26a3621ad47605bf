"""fused_moe in a program with the hook: counted under its key, tuned from that, served by the table."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hooked import HERE, Home, publish, published

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.mixture import How, Operands
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


def test_calls_are_counted_under_their_key_and_served_by_the_table(home: Home) -> None:
    stock = home.run(PROGRAM, "0").said
    assert home.counts()[str(LAYER), "miss"] == 5
    publish(home.path / "configs", [published(LAYER, "moe_grouped")], 1)
    served = home.run(PROGRAM, "1").said
    assert home.counts()[str(LAYER), "exact"] == 5
    assert served[0] == pytest.approx(stock[0], rel=1e-4) and served[1]


def test_a_row_that_does_not_run_costs_itself_alone(home: Home) -> None:
    """A configuration for a GPU in a CPU's table: the call is served as if it were not there."""
    home.path.mkdir(exist_ok=True)
    publish(home.path / "configs", [published(LAYER, "moe_grouped", config='{"no":1}')], 1)
    done = home.run(PROGRAM, "1")
    assert done.said[1] and done.err.count("route failed") == 1
    assert home.counts()[str(LAYER), "miss"] == 5


def test_the_whole_loop_from_a_count_to_a_verdict(home: Home) -> None:
    home.run(PROGRAM, "0")
    tuned = subprocess.run(
        [sys.executable, "-m", "gemmtuned", "tune", str(LAYER), "--json"], env=home.environment(), cwd=HERE,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert str(LAYER) in tuned.stdout, tuned.stderr
    assert "cannot be tuned" not in tuned.stdout + tuned.stderr


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
    codes = replace(o, w1=torch.zeros(4, 64, 16, dtype=torch.uint8), w2=torch.zeros(4, 32, 16, dtype=torch.uint8))
    assert op.problem_of(codes, How(quant="mxfp4")) == replace(
        usual, wdtype="fp4_e2m1", wscale="1x32", wscale_dtype="e8m0"
    )
    assert op.problem_of(replace(o, bias1=torch.zeros(4, 64)), How()) is None
