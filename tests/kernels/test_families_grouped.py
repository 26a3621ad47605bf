"""Grouped products: each row by the weight of its group, and what the gate finds in kernels that take another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.measure import copies_needed
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.kernel import StatelessKernel
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
PROBLEMS = [
    Problem(family="grouped", batch=5, m=23, n=24, k=40, dtype="bf16", threads=1),
    Problem(family="grouped", batch=2, m=3, n=16, k=64, dtype="fp32", threads=1, layout="nn"),
    Problem(family="grouped", batch=1, m=8, n=16, k=64, dtype="bf16", threads=1),
]


def by_groups(
    which: Callable[[int, int], int], ends: Callable[[list[int]], list[int]] = lambda e: e
) -> StatelessKernel:
    def call(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], w.shape[-1])
        first = 0
        for g, end in enumerate(ends(offs.tolist())):
            if end > first:
                y[first:end] = x[first:end] @ w[which(g, len(offs))]
            first = max(end, first)
        return y

    return StatelessKernel(call)


def judge(p: Problem, kernel: StatelessKernel) -> str:
    with as_called(p):
        found = verify(p, {Candidate("x"): kernel}, family_of(p).default(p), device=CPU)[Candidate("x")]
    return f"{found.outcome}: {found.note}"


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_a_loop_over_the_groups_is_right(p: Problem) -> None:
    assert judge(p, by_groups(lambda g, count: g)) == "ok: "


@pytest.mark.parametrize("p", PROBLEMS[:2], ids=str)
@pytest.mark.parametrize(
    "wrong",
    [
        by_groups(lambda g, count: (g + 1) % count),
        by_groups(lambda g, count: 0),
        by_groups(lambda g, count: g, lambda ends: [*(max(0, e - 1) for e in ends[:-1]), ends[-1]]),
        by_groups(lambda g, count: g, lambda ends: ends[:-1]),
    ],
    ids=["next weight", "first weight", "ends one early", "last group left out"],
)
def test_rows_of_another_groups_weight_are_found(p: Problem, wrong: StatelessKernel) -> None:
    assert judge(p, wrong).startswith("wrong")


def test_groups_that_were_dealt_out_before_are_not_kept() -> None:
    class KeepsEnds:
        def bind(self, w: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
            kept: list[Tensor] = []
            right = by_groups(lambda g, count: g).bind(w)
            return lambda x, offs: right(x, (kept.append(offs.clone()) or kept)[0] if not kept else kept[0])

    assert judge(PROBLEMS[0], KeepsEnds()).startswith("wrong")  # type: ignore[arg-type]


def test_inputs_have_an_empty_group_and_all_rows_are_dealt_out() -> None:
    p = PROBLEMS[0]
    for seed in range(5):
        offs = family_of(p).make(p, kind="randn", seed=seed, device=CPU)["offs"]
        assert offs.dtype == torch.int32 and offs[-1] == p.m and bool((offs[1:] >= offs[:-1]).all())
        assert bool((offs[1:] == offs[:-1]).any())
    assert copies_needed(p, 1 << 20, 1 << 40) == 2 * (1 << 20) // (5 * 24 * 40 * 2) + 1
    assert copies_needed(p.with_m(2), 1 << 20, 1 << 40) == 256, "two of five groups are read"


@pytest.mark.long
@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_copies_of_a_mixtures_weights_lie_over_each_other_and_give_one_result(layout: str) -> None:
    p = Problem(family="grouped", batch=64, m=4, n=1536, k=2048, dtype="bf16", threads=1, layout=layout)
    family = family_of(p)
    copies = [w for (w,) in family.weight_copies(p, count=5, device=CPU)]
    x, offs = family.make(p, kind="randn", seed=0, device=CPU, weights=(copies[0],)).activations

    assert {w.shape for w in copies} == {(64, 2048, 1536)} and len({w.data_ptr() for w in copies}) == 5
    assert copies[0].stride()[1:] == ((1, 2048) if layout == "nt" else (1536, 1))
    assert copies[-1].data_ptr() - copies[0].data_ptr() == 4 * 1536 * 2048 * 2
    results = [torch._grouped_mm(x, w, offs=offs) for w in copies]
    assert all(torch.equal(y, results[0]) for y in results)
    small = family.weight_copies(replace(p, n=16), count=3, device=CPU)
    assert len({w.untyped_storage().data_ptr() for (w,) in small}) == 3 and not torch.equal(
        small[0][0][0], small[0][0][1]
    )


def test_what_torch_has_not_is_refused() -> None:
    with pytest.raises(CandidateFailed, match="family grouped has"):
        family_of(Problem(family="grouped", batch=2, m=3, n=16, k=64, dtype="fp64"))
