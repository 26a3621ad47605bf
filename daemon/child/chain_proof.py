"""CHILD side: proof that a kernel is batch-invariant: each row of Y has the same bits at every M and at every position.

A row's bits are those that it has alone, at M = 1.  They are compared at every M from 1 to CHAIN_M, in each at all
positions, by rows drawn anew: so every pair of M and position is looked at.  X lies where it was allocated, and as
a slice of more rows, by turns.  Sums in another order differ in some column of Y with near certainty: what is compared
is thousands of values of random data a row.

Beyond CHAIN_M the native hook takes CHAIN_M rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import CHAIN_M, Problem
from gemmtuned.daemon.child.checks import Wrong, same_bits
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.families import family_of

A_FEW: Final = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 100, 128, 255, 256)  # most kernels that vary with M do so here
_KINDS: Final = ("outliers", "randn")  # inputs (kernels/families/base.py); a few sizes are tried with the first


def prove(
    kernel: Kernel,
    problem: Problem,
    *,
    device: torch.device,
    sizes: Iterable[int] = (),
    before: Callable[[], object] = lambda: None,
) -> int:
    """How many rows were compared; before: called between sizes, for who waits for a word.

    sizes: numbers of rows; all from 1 to CHAIN_M unless said.  Runs under the caller's switches.  Raises Wrong with the
    first row that differs, or what the kernel raises.
    """
    sizes = tuple(sizes)
    compared = 0
    for seed, kind in enumerate(_KINDS[:1] if sizes else _KINDS):
        inputs = family_of(problem.at(CHAIN_M)).make(problem.at(CHAIN_M), kind=kind, seed=seed, device=device)
        run, x = kernel.bind(*inputs.weights), inputs["x"]
        alone = torch.cat([run(*inputs.having(x=x[i : i + 1].clone()).activations) for i in range(CHAIN_M)])
        random = torch.Generator().manual_seed(seed)
        for m in sizes or range(1, CHAIN_M + 1):
            before()
            order = torch.randperm(CHAIN_M, generator=random)[:m].to(device)
            _compare(run(*inputs.having(x=_placed(x[order], m)).activations), alone[order], m)
            compared += m
    return compared


def _placed(x: Tensor, m: int) -> Tensor:
    """X in memory of its own, or, for every other M, from the second row on of a tensor with one more."""
    return torch.cat([x[:1], x])[1:] if m % 2 else x


def _compare(y: Tensor, expected: Tensor, m: int) -> None:
    if same_bits(y, expected):
        return
    position = int((y != expected).any(1).nonzero()[0]) if bool((y != expected).any()) else 0
    raise Wrong(f"not batch-invariant: a row alone has other bits than at position {position} of {m}")
