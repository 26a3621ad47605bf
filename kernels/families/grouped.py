"""grouped: _grouped_mm, whose rows of X are dealt out to several weights, as the tokens of a mixture's experts are.

Group g has the rows from offs[g-1] up to offs[g], in order; offs lies on the device, int32.  `batch` of the problem is
the number of groups, m that of all rows together.  Here one group is empty and the others are of any size: in draws of
an even seed all sizes are as likely, in the others groups are as popular as Zipf's law says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.families.base import Family
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample

TYPES: Final = ("bf16", "fp32", "fp16")
# Up to here all weights are copied whole
WHOLE_BYTES: Final = 1 << 30


class Grouped(Family):
    """What is different where rows belong to groups."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if problem.bias or problem.weight_state != "plain" or problem.dtype not in TYPES:
            raise CandidateFailed(
                f"{problem}: family {self.name} has plain operands of {', '.join(TYPES)}, and no bias"
            )
        Family.check(self, problem)

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for dtype in TYPES:
            yield Problem(family=self.name, m=1, n=1, k=1, dtype=dtype).operands

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = Family.draw(self, problem, kind, seed, device, weights=weights)
        found["offs"] = ends_of_groups(problem, seed).to(device)
        return found

    def weight_bytes(self, problem: Problem) -> int:
        """Bytes of W of the groups that can have rows: no others are read."""
        return Family.weight_bytes(self, problem) * problem.weights_read // problem.batch

    def weight_copies(self, problem: Problem, *, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        """As Family.weight_copies; large ones lie over each other, one group further each, and all groups are alike.

        Where few groups have rows, those of the next copy are others in memory: as cold as whole copies, which a
        mixture's weights leave no room for.  Which group is whose is proven on other inputs.
        """
        if count * Family.weight_bytes(self, problem) <= WHOLE_BYTES:
            return Family.weight_copies(self, problem, count=count, device=device)
        one = self.draw(replace(problem, batch=1, m=1), "randn", 0, device, weights=True)
        alike = [(o, one[o.name]) for o in self.operands if o.weight]
        many = problem.batch + count - 1
        wholes = [self.lay(problem, o, t.expand(many, *t.shape[1:]))[0] for o, t in alike]
        return [tuple(whole[i : i + problem.batch] for whole in wholes) for i in range(count)]

    def rows(self, problem: Problem, inputs: Inputs, index: Tensor) -> tuple[Tensor | None, ...]:
        """As Family.rows; the groups end with them."""
        offs = inputs["offs"].clamp(max=problem.m)
        offs[-1] = problem.m
        return Family.rows(self, problem, inputs.having(offs=offs), index)

    def reference(self, problem: Problem, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Tensor:
        """As Family.reference, each row by its group's weight."""
        w64 = self.widen(problem, inputs, sample) if w64 is None else w64
        x = self.x_rows(problem, inputs, sample)
        group = torch.searchsorted(inputs["offs"].long(), sample.rows, right=True)
        y = x.new_empty(x.shape[0], w64.shape[-1])
        for g in sorted(set(group.tolist())):
            y[group == g] = x[group == g] @ w64[g]
        return y


def ends_of_groups(problem: Problem, seed: int) -> Tensor:
    """Where each group's rows end: all rows are dealt out, and one group has none where there are several."""
    random = torch.Generator().manual_seed(2 * seed + 0x0FF5)
    if seed % 2:
        popular = 1 / (1.0 + torch.randperm(problem.batch, generator=random))
        rows = torch.multinomial(popular, problem.m, replacement=True, generator=random)
        ends = torch.bincount(rows, minlength=problem.batch).cumsum(0)
    else:
        ends = torch.randint(0, problem.m + 1, (problem.batch,), generator=random).sort().values
    if problem.batch > 1:
        empty = int(torch.randint(1, problem.batch, (), generator=random))
        ends[empty] = ends[empty - 1]
    ends[-1] = problem.m
    return ends.to(torch.int32)


def _call(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=offs)


GROUPED: Final = Grouped(
    "grouped",
    operands=(
        Operand("x", "mk", layout=0),
        Operand("w", "bkn", dtype="wdtype", layout=1, weight=True),
        Operand("offs", "b", dtype="i32"),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=lambda problem: _call,
    routed=True,
    pad=16,  # torch asks for multiples of 16 bytes
)
FAMILIES: Final = (GROUPED,)
