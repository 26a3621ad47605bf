"""Scaled products of weights in AITER's order: exact result, what the gate takes and sees, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.tunable import can_tune
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import families
from gemmtuned.kernels.backends.base import StatelessKernel
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.shuffled_order import in_order, plain
from gemmtuned.ops import shuffle_weight

CPU = torch.device("cpu")
ANY = Candidate("torch_swap")
INT8 = Problem.parse("scaled:i8>bf16:4x48x96,scale=row,weight=shuffled,threads=1")
PROBLEMS = [
    INT8,
    Problem.parse("scaled:i8>fp16:1x16x64+bias,scale=tensor,weight=shuffled,threads=1"),
    Problem.parse("scaled:fp8_e4m3>bf16:5x32x128+bias,scale=row,weight=shuffled,threads=1"),
    Problem.parse("scaled:fp8_e4m3>bf16:3x16x32,scale=tensor,weight=shuffled,threads=1"),
]


def judge(problem: Problem, weight: Callable[[Tensor], Tensor]) -> str:
    """What the gate says of a product of `weight`, made of W [K, N] as it lies in memory."""

    def call(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None) -> Tensor:
        y = x.double() @ weight(w).double() * of_w * of_x
        return (y if bias is None else y + bias.double()).to(getattr(torch, OUT[problem.out_dtype]))

    stock = family_of(problem).default(problem)
    return verify(problem, {ANY: StatelessKernel(call)}, stock, device=CPU)[ANY].outcome


OUT = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_product_of_the_plain_weight_is_right_and_others_are_not(problem: Problem) -> None:
    assert judge(problem, lambda w: plain(w.mT).mT) == "ok"
    assert judge(problem, lambda w: w) == "wrong", "as if it were plain"
    assert judge(problem, lambda w: in_order(w.mT).view(w.mT.shape).mT) == "wrong", "shuffled once more"
    assert judge(problem, lambda w: plain(w.mT, 16, 32, 8).mT) == "wrong", "runs of eight"


def test_a_weight_that_is_kept_is_seen() -> None:
    kept: list[Tensor] = []

    def first(w: Tensor) -> Tensor:
        kept[1:] = []
        return (kept or kept.append(plain(w.mT).mT) or kept)[0]

    assert judge(INT8, first) == "wrong"


def test_the_order_is_that_of_shuffle_weight() -> None:
    w = torch.randint(-128, 128, (32, 96), dtype=torch.int8)
    assert torch.equal(in_order(w).view(w.shape), shuffle_weight(w))
    # the third run of 16 bytes in memory is of the third row, the 17th of the first row again
    assert torch.equal(in_order(w).view(-1, 16)[2], w[2, :16])
    assert torch.equal(in_order(w).view(-1, 16)[16], w[0, 16:32])


@pytest.mark.parametrize("change", ["4x40x96", "4x48x80"])
def test_sizes_that_are_of_no_whole_tiles_are_refused(change: str) -> None:
    odd = Problem.parse(str(INT8).replace("4x48x96", change))
    assert not can_tune(odd)
    with pytest.raises(CandidateFailed, match="N a multiple of 16 and K of 32"):
        family_of(odd)


def test_what_can_be_tuned_of_it_is_said_by_kind() -> None:
    for problem in PROBLEMS:
        assert can_tune(problem) and problem.operands in families.tunable("cpu")
    packed = Problem.parse(str(INT8).replace("weight=shuffled", "weight=packed"))
    zero = Problem.parse(str(INT8).replace("scale=row", "scale=row+zero,wscale=row"))
    assert not can_tune(packed) and not can_tune(zero)
    assert not {packed.operands, zero.operands} & {*families.tunable("cuda")}
