"""moe: a fused mixture of experts, as gemmtuned.ops.fused_moe calls it (kernels/mixture.py has the formula).

The exact result is made in fp64 of the experts that are visited, H rounded as X is: every kernel does it.  Half of the
routings are uniform, half are skewed as routers' are: which experts are visited decides the time.

Kinds of inputs beside randn, tail and outliers of base.py (the last columns of X are made large for tail, and all of X
small for it, so that H stays in range):
    skewed      a few experts have most of the tokens
    together    all tokens visit the same experts
    twice       an expert may stand twice in a token's top-k
    nobody      a third of the pairs have expert -1, among them all of the first token's
    unvisited   no token visits the upper half of the experts, whose weights are NaN
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import MOE_ACTS, MOE_TYPES
from gemmtuned.kernels import mixture
from gemmtuned.kernels.dtypes import wide
from gemmtuned.kernels.families.base import Family, normal, shape_activations
from gemmtuned.kernels.families.grouped import WHOLE_BYTES
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.kernel import Run, StatelessKernel
from gemmtuned.kernels.mixture import How, Operands

ROUTINGS: Final = ("skewed", "together", "twice", "nobody", "unvisited")


@dataclass(frozen=True, slots=True)
class MixtureKernel(StatelessKernel):
    """A kernel that is nothing but a function of the operands; call: (operands) -> y.

    takes: the same for fused_moe, whose operands are of more kinds than a problem says; None for those that it leaves.
    """

    takes: Callable[[Operands], Tensor | None] | None = None

    @property
    def served(self) -> Callable[[Operands], Tensor | None]:
        """How fused_moe runs it."""
        return self.takes or self.call

    def bind(self, *weights: Tensor) -> Run:
        """Weights: w1, w2, then both biases where the problem has them. Activations: x, routing weights, ids."""
        call = self.call
        w1, w2, bias1, bias2 = (*weights, None, None)[:4]
        assert w1 is not None and w2 is not None

        def run(x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
            return call(Operands(x=x, w1=w1, w2=w2, weights=gates, ids=ids, bias1=bias1, bias2=bias2))

        return run


class Moe(Family):
    """What is different where tokens visit experts."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        p = problem
        if p.n != p.k or p.batch != 1 or p.layout != "nt" or p.weight_state != "plain" or p.act not in MOE_ACTS:
            raise CandidateFailed(
                f"{p}: family {self.name} has n = k, no batch, plain weights and act of {', '.join(MOE_ACTS)}"
            )
        if {p.dtype, p.wdtype, p.out_dtype} != {p.dtype} or p.dtype not in MOE_TYPES or (p.scale, p.wscale) != (
            "none", "none",
        ):  # fmt: skip
            raise CandidateFailed(f"{p}: family {self.name} has weights of X's type, one of {', '.join(MOE_TYPES)}")
        if (p.topk or 0) > (p.experts or 0):
            raise CandidateFailed(f"{p}: a token visits {p.topk} of {p.experts} experts")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for dtype in MOE_TYPES:
            yield f"{self.name} {dtype}/{dtype}>{dtype} none/none plain"

    def default(self, problem: Problem) -> MixtureKernel:
        """What fused_moe runs where nothing is known to be better."""
        how = how_of(problem)
        return MixtureKernel(lambda o: mixture.run(o, how))

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        return ("randn", "tail", "outliers", *ROUTINGS)

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return kind if kind == "unvisited" else "randn"

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = {}
        random = torch.Generator(device=device).manual_seed(2 * seed)
        x = self.named("x")
        values = normal(x.shape(problem), x.torch_dtype(problem), random)
        shape_activations(values, kind, random)
        found["x"] = (values / 64 if kind == "tail" else values).to(x.torch_dtype(problem))
        found["ids"], found["gates"] = (t.to(device) for t in _routing(problem, kind, seed))
        for number, o in enumerate(o for o in self.operands if o.weight and o.is_in(problem)):
            if not weights:
                break
            random.manual_seed(4 * seed + number)
            shape = o.shape(problem)
            scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
            w = normal(shape, o.torch_dtype(problem), random, scale=scale).to(o.torch_dtype(problem))
            if kind == "unvisited":
                w[_visited(problem) :] = math.nan
            found[o.name] = w
        return found

    def weight_bytes(self, problem: Problem) -> int:
        """Of the experts that can be visited: no others are read."""
        experts = problem.experts or 1
        return Family.weight_bytes(self, problem) * min(problem.m * (problem.topk or 1), experts) // experts

    def weight_copies(self, problem: Problem, *, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        """As Family.weight_copies; large ones lie over each other, one expert further each, and all experts are alike.

        As for grouped products: the experts that a routing visits are others in memory in the next copy.
        """
        if count * Family.weight_bytes(self, problem) <= WHOLE_BYTES:
            return Family.weight_copies(self, problem, count=count, device=device)
        experts, few = problem.experts or 1, replace(problem, m=1, experts=problem.topk)
        drawn = self.draw(few, "randn", 0, device, weights=True)
        names = [o.name for o in self.operands if o.weight and o.is_in(problem)]
        whole = [drawn[name][:1].repeat(experts + count - 1, *[1] * (drawn[name].dim() - 1)) for name in names]
        return [tuple(w[i : i + experts] for w in whole) for i in range(count)]

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """Nothing: only experts that are visited are ever widened, one after the other."""
        return inputs["x"].new_empty(0)

    def reference(self, problem: Problem, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Tensor:
        """As Family.reference; H is rounded as the problem's type is."""
        how, x = how_of(problem), self.x_rows(problem, inputs, sample)
        ids, gates = (inputs[name].index_select(0, sample.rows) for name in ("ids", "gates"))
        y = x.new_zeros(len(x), len(sample.cols))
        bias1, bias2 = inputs.tensors.get("bias1"), inputs.tensors.get("bias2")
        for e in torch.unique(ids).tolist():
            if not 0 <= e < (problem.experts or 0):
                continue
            rows, slots = (ids == e).nonzero(as_tuple=True)
            factors = gates[rows, slots].double()
            sums = x[rows] @ wide(inputs["w1"][e]).t()
            h = mixture.hidden(how, sums, factors, None if bias1 is None else wide(bias1[e]))
            part = wide(h.to(inputs["x"].dtype)) @ wide(inputs["w2"][e].index_select(0, sample.cols)).t()
            if bias2 is not None:
                part = part + wide(bias2[e].index_select(0, sample.cols))
            y.index_add_(0, rows, part if how.weighted else part * factors[:, None])
        return y


def how_of(problem: Problem) -> How:
    """What the problem's `act` says."""
    act, *flags = (problem.act or "").split("_")
    return How(
        act=act, gated="gated" in flags, interleaved="interleaved" in flags, weighted="weighted" in flags
    )  # fmt: skip


def touched_bytes(problem: Problem, ids: Tensor) -> int:
    """Bytes of the weights of the experts that these ids really visit: the floor of a call's time is made of them."""
    visited = torch.unique(ids)
    count = int(((visited >= 0) & (visited < (problem.experts or 0))).sum())
    return count * (Family.weight_bytes(MOE, problem) // (problem.experts or 1))


def _visited(problem: Problem) -> int:
    """How many experts may be visited where some are not."""
    return max(problem.topk or 1, (problem.experts or 1) // 2)


def _routing(problem: Problem, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """(experts of each token, what they count), on the CPU, the same for every device."""
    random = torch.Generator().manual_seed(2 * seed + 0x0E)
    tokens, experts, topk = problem.m, problem.experts or 1, problem.topk or 1
    liking = torch.empty(tokens, experts).exponential_(generator=random).log_().neg_()  # its largest: a fair draw
    if kind == "skewed" or (kind not in ROUTINGS and seed % 2):
        liking += -1.5 * torch.log(1.0 + torch.randperm(experts, generator=random))  # popularity by Zipf's law
    if kind == "unvisited":
        liking[:, _visited(problem) :] = -math.inf
    ids = liking.topk(topk, 1).indices
    if kind == "together":
        ids = ids[:1].expand(tokens, topk).clone()
    if kind == "twice":
        ids = torch.randint(0, min(experts, 2 * topk), (tokens, topk), generator=random)
    if kind == "nobody":
        ids[torch.rand(tokens, topk, generator=random) < 1 / 3] = -1
        ids[0] = -1
        if tokens == 1 and topk > 1:  # not all of the result is zero
            ids[0, -1] = 0
    gates = torch.rand(tokens, topk, generator=random) + 0.1
    return ids.int(), gates / gates.sum(1, keepdim=True)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    return MOE.default(problem).call


MOE: Final = Moe(
    "moe",
    operands=(
        Operand("x", "mk", layout=0, bent=True),
        Operand("w1", "ehk", dtype="wdtype", weight=True),
        Operand("w2", "eni", dtype="wdtype", weight=True),
        Operand("gates", "mt", dtype="fp32", bent=True, of_sums=True),
        Operand("ids", "mt", dtype="i32", index=True),
        Operand("bias1", "eh", optional=True, weight=True),
        Operand("bias2", "en", optional=True, weight=True, added=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    routed=True,
    pad=16,
)
FAMILIES: Final = (MOE,)
