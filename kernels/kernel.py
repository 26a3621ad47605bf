"""What a kernel is: operands in the order in which its family declares them (kernels/families), a result out.

The weights are bound first, then the activations are given at every call, each in the family's order: for dense
`bind(w) -> run(x, bias)`, for scaled `bind(w, scale_w) -> run(x, scale_x, bias)`.  An optional operand that is not
there is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Run = Callable[..., Tensor]


class Kernel(Protocol):
    """One way to run one problem.

    One with an attribute `quantises` that is true rounds X and H of a mixture to e4m3 where its caller allows it, and
    may be as far off as that makes it (kernels/families/error.py).
    """

    def bind(self, *weights: Tensor) -> Run:
        """For these weights: run(*activations) -> y.

        W is [K, N] or [B, K, N], as torch's calls take it: for a linear layer the view W.t().  A packed kernel packs
        here, outside what is timed.
        """


@dataclass(frozen=True, slots=True)
class StatelessKernel:
    """A kernel that is nothing but a function of all operands in the family's order: call(x, w, ...) -> y.

    Each weight stands right behind the activation that it belongs to: x, w, then scale_x, scale_w, then the others.
    """

    call: Callable[..., Tensor]

    def bind(self, *weights: Tensor) -> Run:
        """Keeps the weights themselves and no copy of them."""
        call = self.call
        if len(weights) == 1:
            w = weights[0]
            return lambda x, *others: call(x, w, *others)
        count = len(weights)

        def run(*activations: Tensor) -> Tensor:
            pairs = (t for pair in zip(activations, weights, strict=False) for t in pair)
            return call(*pairs, *activations[count:])

        return run
