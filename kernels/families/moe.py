"""moe: a fused mixture of experts, as gemmtuned.ops.fused_moe calls it (kernels/mixture.py has the formula).

The exact result is made in fp64 of the experts that are visited, H rounded as X is: every kernel does it.  Half of the
routings are uniform, half are skewed as routers' are: which experts are visited decides the time.

Kinds of inputs beside randn, tail and outliers of base.py (the last columns of X are made large for tail, and all of X
small for it, so that H stays in range):
    skewed      a few experts have most of the tokens
    together    all tokens visit the same experts
    twice       an expert may stand twice in a token's top-k
    nobody      a third of the pairs have expert -1, among them all of the first token's
    unvisited   no token visits the upper half of the experts, whose weights, and scales of weights, are NaN
Weights of 8 and 4 bits are drawn as codes with scales, and have two kinds more:
    apart       every scale is another power of two, 2^-4 to 2^4: a neighbour's scale cannot pass for the right one
    integers    Y has one right value, since no sum is rounded in any order: small whole numbers, one expert of each
                token that counts, and a gate that is a power of two, so large that silu and gelu leave it as it is
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
from gemmtuned.configs.tunable import MOE_ACTS, MOE_QUANTISED, MOE_TYPES, PACKED, WEIGHT_ONLY, WIDENED, can_tune
from gemmtuned.kernels import mixture
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.dtypes import wide
from gemmtuned.kernels.families import quantised
from gemmtuned.kernels.families.base import Family, normal, shape_activations
from gemmtuned.kernels.families.grouped import WHOLE_BYTES
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.families.quantised import APART, INTEGERS, quant_of
from gemmtuned.kernels.kernel import Run, StatelessKernel
from gemmtuned.kernels.mixture import How, Operands

ROUTINGS: Final = ("skewed", "together", "twice", "nobody", "unvisited")
_NAN: Final = {"fp8_e4m3": 0x7F, "e8m0": 0xFF}  # codes
# Of kind `integers`: the codes of 0 and 4, the column of X that gates are made of, and how large it is there
_CODES: Final = {"i4": (8, 12), "fp4_e2m1": (0, 6), "fp8_e4m3": (0, 0x48), "i8": (0, 4)}
_COLUMN: Final = -3
_GATE, _SUM_OF_GATE = 32.0, 256.0  # where other sums stand beside it, and where they are added to it
_OTHERS: Final = 8  # numbers of a row of X that are not 0
_FEW: Final = 2  # the same where H may be quantised: e4m3 holds what they make of H


@dataclass(frozen=True, slots=True)
class MixtureKernel(StatelessKernel):
    """A kernel that is nothing but a function of the operands; call: (operands) -> y.

    takes: the same for fused_moe, whose operands are of more kinds than a problem says; None for those that it leaves.
    quantises: whether it rounds X and H to e4m3 where the problem allows it, so that its errors may be as large.
    """

    takes: Callable[[Operands], Tensor | None] | None = None
    quantises: bool = False

    @property
    def served(self) -> Callable[[Operands], Tensor | None]:
        """How fused_moe runs it."""
        return self.takes or self.call

    def bind(self, *weights: Tensor) -> Run:
        """Weights: w1, w2, both biases and both scales where the problem has them. Activations: x, their weights, ids.

        Scales have three axes, biases two.
        """
        call = self.call
        w1, w2, *others = weights
        bias1, bias2 = [t for t in others if t.dim() == 2] or (None, None)
        scale1, scale2 = [t for t in others if t.dim() == 3] or (None, None)

        def run(x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
            return call(
                Operands(
                    x=x, w1=w1, w2=w2, weights=gates, ids=ids, scale1=scale1, scale2=scale2, bias1=bias1, bias2=bias2
                )
            )

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
        if (p.topk or 0) > (p.experts or 0):
            raise CandidateFailed(f"{p}: a token visits {p.topk} of {p.experts} experts")
        if not can_tune(p):
            raise CandidateFailed(
                f"{p}: family {self.name} has weights of X's type, one of {', '.join(MOE_TYPES)}, or of 8 or 4 bits "
                "with their whole scales and X of 16 bits; X and H may be quantised where W is e4m3 by 128x128"
            )

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for dtype in MOE_TYPES:
            yield f"{self.name} {dtype}/{dtype}>{dtype} none/none plain"
        for (dtype, wdtype), scales in WEIGHT_ONLY.items():
            for wscale in dict.fromkeys(kind for kind, _ in scales):
                yield f"{self.name} {dtype}/{wdtype}>{dtype} none/{wscale} plain"
        wdtype, scale, wscale = MOE_QUANTISED
        for dtype in WIDENED if device_kind != "cpu" else ():
            yield f"{self.name} {dtype}/{wdtype}>{dtype} {scale}/{wscale} plain"

    def default(self, problem: Problem) -> MixtureKernel:
        """What fused_moe runs where nothing is known to be better."""
        how = how_of(problem)
        return MixtureKernel(lambda o: mixture.run(o, how))

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        kinds = ("randn", "tail", "outliers", *ROUTINGS)
        if problem.wscale == "none":
            return kinds
        return (*kinds, APART, INTEGERS) if how_of(problem).act != "swiglu" else (*kinds, APART)

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return kind == INTEGERS

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return kind if kind in ("unvisited", APART, INTEGERS) else "randn"

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = {}
        random = torch.Generator(device=device).manual_seed(2 * seed)
        x = self.named("x")
        values = normal(x.shape(problem), x.torch_dtype(problem), random)
        shape_activations(values, kind, random)
        if kind == INTEGERS:
            _make_whole(problem, values, random)
        found["x"] = (values / 64 if kind == "tail" else values).to(x.torch_dtype(problem))
        found["ids"], found["gates"] = (t.to(device) for t in _routing(problem, kind, seed))
        for number, o in enumerate(o for o in self.operands if o.weight and o.is_in(problem)):
            if not weights:
                break
            random.manual_seed(16 * seed + 2 * number + 1)  # odd: never the stream that X is drawn from
            found[o.name] = w = self._weight(problem, o, kind, random)
            if kind == "unvisited":
                name = getattr(problem, o.dtype, o.dtype)
                if w.is_floating_point() and w.element_size() > 1:
                    w[_visited(problem) :] = math.nan
                elif name in _NAN:
                    w.view(torch.uint8)[_visited(problem) :] = _NAN[name]
        return found

    def _weight(self, problem: Problem, o: Operand, kind: str, random: torch.Generator) -> Tensor:
        shape, dtype = o.shape(problem), o.torch_dtype(problem)
        if problem.wscale == "none" or len(shape) == 2:
            scale = shape[-1] ** -0.5 if len(shape) == 3 else 0.0 if kind == INTEGERS else 1.0
            return normal(shape, dtype, random, scale=scale).to(dtype)
        first = o.name in ("w1", "scale1")
        if o.scale_of:  # the second weight's keep Y within fp16
            usual = (1.0 if first else 2.0**-6) if kind == INTEGERS else self._reduced(problem, first) ** -0.5
            return quantised.scales(problem, shape, dtype, kind, usual, random, wide=1)
        w = quantised.drawn(problem, shape, dtype, kind, random)
        if first and kind == INTEGERS:
            _put_gates(problem, w.view(torch.uint8))
        return w

    @staticmethod
    def _reduced(problem: Problem, first: bool) -> int:
        return problem.k if first else problem.inter or 1

    def weight_bytes(self, problem: Problem) -> int:
        """Bytes of the weights of the experts that can be visited: no others are read."""
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
        """An empty tensor: W is not widened as a whole, since `reference` widens the visited experts one by one."""
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
            sums = x[rows] @ _exact(problem, inputs, "1", e).t()
            h = mixture.hidden(how, sums, factors, None if bias1 is None else wide(bias1[e]))
            part = wide(h.to(inputs["x"].dtype)) @ _exact(problem, inputs, "2", e).index_select(0, sample.cols).t()
            if bias2 is not None:
                part = part + wide(bias2[e].index_select(0, sample.cols))
            y.index_add_(0, rows, part if how.weighted else part * factors[:, None])
        return y


def how_of(problem: Problem) -> How:
    """What the problem's `act` says."""
    act, *flags = (problem.act or "").split("_")
    return How(
        act=act, gated="gated" in flags, interleaved="interleaved" in flags, weighted="weighted" in flags,
        quant=quant_of(problem),
    )  # fmt: skip


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
    if kind == INTEGERS:
        return ids.int(), (gates == gates.amax(1, keepdim=True)).float()
    return ids.int(), gates / gates.sum(1, keepdim=True)


def _make_whole(problem: Problem, x: Tensor, random: torch.Generator) -> None:
    """X of kind `integers`: a few numbers of 1 and -1 in each row, and what gates are made of."""
    others = _OTHERS if problem.scale == "none" else _FEW
    at = torch.randint(x.shape[1], (len(x), others), generator=random, device=x.device)
    signs = torch.where(x.gather(1, at) > 0, 1.0, -1.0)
    x.zero_().scatter_(1, at, signs)
    x[:, _COLUMN] = _GATE if how_of(problem).gated else _SUM_OF_GATE


def _put_gates(problem: Problem, codes: Tensor) -> None:
    """The first weight of kind `integers`, whose rows of gate have a number for _COLUMN alone, and other rows none."""
    how, (zero, four) = how_of(problem), _CODES[problem.wdtype]
    packed = problem.wdtype in PACKED
    gate = slice(0, None, 2) if how.interleaved else slice(0, codes.shape[1] // 2)
    of_rows = torch.full_like(codes[0, :, 0], zero if how.gated else four)
    if how.gated:
        codes[:, gate] = zero << 4 | zero if packed else zero
        of_rows[gate] = four
    if not packed:
        codes[:, :, _COLUMN] = of_rows
        return
    byte, upper = divmod(problem.k + _COLUMN, 2)
    codes[:, :, byte] = codes[:, :, byte] & (0x0F if upper else 0xF0) | (of_rows << 4 * upper)


def _exact(problem: Problem, inputs: Inputs, number: str, e: int) -> Tensor:
    """The weight of one expert in fp64."""
    w = inputs[f"w{number}"][e]
    if problem.wscale == "none":
        return wide(w)
    return dequantised(w, inputs[f"scale{number}"][e], quant_of(problem), torch.float64)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    return MOE.default(problem).call


MOE: Final = Moe(
    "moe",
    operands=(
        Operand("x", "mk", layout=0, bent=True),
        Operand("w1", "ehk", dtype="wdtype", weight=True, raw=True),
        Operand("w2", "eni", dtype="wdtype", weight=True, raw=True, of_sums=True),
        Operand("gates", "mt", dtype="fp32", bent=True, of_sums=True),
        Operand("ids", "mt", dtype="i32", index=True),
        Operand("bias1", "eh", optional=True, weight=True),
        Operand("bias2", "en", optional=True, weight=True, added=True),
        Operand("scale1", "ehk", dtype="wscale_dtype", scale_of="w1", weight=True, raw=True, bent=True, of_sums=True),
        Operand("scale2", "eni", dtype="wscale_dtype", scale_of="w2", weight=True, raw=True, bent=True, of_sums=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    routed=True,
    pad=16,
)
FAMILIES: Final = (MOE,)
