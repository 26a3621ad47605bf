"""scaled: _scaled_mm of 8-bit floats, with one scale a tensor, a row, or a block of 128 of K; int8 by `_int_mm`.

Y = (X * scale_x) @ (W * scale_w).T + bias, rounded once; scales are fp32 and multiply.  Where the problem does not
allow the tensor core's shorter sums (math_mode is not `reduced`; use_fast_accum=False), `one_sign` shows them:
each of their roundings is towards zero, so on numbers of one sign they add up to some per cent, on others they do not.
int8 has one scale a tensor or a row (with zero points: zero_points.py); torch multiplies it exactly and the scales
follow.  Sizes that torch refuses with blocks of 128, one row of X among them, it multiplies as copies that it takes.

Kinds of inputs beside those of base.py, which are quantised as programs do it, by the largest number of a block:
    one_sign   neither X nor W has a negative number; only where shorter sums are not allowed
    apart      every scale is another power of two, 2^-4 to 2^4: a neighbour's scale cannot pass for the right one
    huge_row   one row of X has scales 2^10 times as large
    integers   small whole numbers and scales 2^-2 to 2^2: no sum is rounded in any order, so Y has one right value
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import INT8, SCALES, has_scales
from gemmtuned.configs.tunable import SCALED_OUTPUTS as OUTPUTS
from gemmtuned.configs.tunable import SCALED_TYPES as TYPES
from gemmtuned.kernels.dtypes import torch_dtype, wide
from gemmtuned.kernels.families.base import Family, normal, shape_activations
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample, spread_out
from gemmtuned.kernels.integers import scaled_int_product_into
from gemmtuned.kernels.scaled_by_torch import block_product, needs_copies

ON_CPUS: Final = SCALES[:2]  # what torch has there
_OWN_WEIGHTS: Final = ("one_sign", "apart", "integers")


class Scaled(Family):
    """What is different where operands have scales."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        p = problem
        types, scales = (p.dtype, p.wdtype), (p.scale, p.wscale)
        if types not in (*TYPES, INT8) or p.out_dtype not in OUTPUTS or p.weight_state != "plain":
            raise CandidateFailed(
                f"{p}: family {self.name} has plain operands of fp8 and int8 into {', '.join(OUTPUTS)}"
            )
        if not has_scales(types, scales) or {p.scale_dtype, p.wscale_dtype} != {"fp32"}:
            known = ", ".join(f"{x} by {w}" for x, w in SCALES if has_scales(types, (x, w)))
            raise CandidateFailed(f"{p}: family {self.name} has fp32 scales, {known}")
        if {p.scale_layout, p.wscale_layout} & {"swizzled", "other"} or p.batch != 1:
            raise CandidateFailed(f"{p}: family {self.name} has scales in rows or columns, and no batches")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        scales = ON_CPUS if device_kind == "cpu" else SCALES
        for (dtype, wdtype), out, (scale, wscale) in product((*TYPES, INT8), OUTPUTS, scales):
            if not has_scales((dtype, wdtype), (scale, wscale)):
                continue
            yield Problem(
                family=self.name, m=1, n=1, k=1, dtype=dtype, wdtype=wdtype, out_dtype=out, scale=scale, wscale=wscale
            ).operands

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        slow = ("one_sign",) if problem.math_mode != "reduced" else ()
        by_row = ("huge_row",) if problem.scale in ("row", "1x128", "row+zero") else ()
        return ("randn", "tail", "outliers", *by_row, "apart", *slow, "integers")  # those of equal weights together

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return kind == "integers"

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return kind if kind in _OWN_WEIGHTS else "randn"

    def lay(self, problem: Problem, operand: Operand, values: Tensor, *, pad: int = 0) -> tuple[Tensor, Tensor]:
        """As Family.lay. Scales lie without gaps, as torch wants them, but for what their layout says."""
        if not operand.scale_of:
            return Family.lay(self, problem, operand, values, pad=pad)
        lies = problem.wscale_layout if operand.weight else problem.scale_layout
        turned = values.dim() == 2 and lies.startswith("row") == operand.weight and min(values.shape) > 1
        rows = values.mT if turned else values
        across = rows.shape[-1] if rows.dim() else 1
        step = -(-across // 4) * 4 if lies.endswith("padded") else across
        count = rows.numel() // across
        buffer = values.new_full((count * step + 2 * pad,), float("nan"))
        view = buffer[pad : pad + count * step].view(count, step)[:, :across]
        view = view.view(rows.shape) if step == across else view
        view.copy_(rows)
        return (view.mT if turned else view), buffer

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = {}
        x, scale_x, w, scale_w, bias = (self.named(n) for n in ("x", "scale_x", "w", "scale_w", "bias"))
        random = torch.Generator(device=device).manual_seed(2 * seed)
        values = normal(x.shape(problem), torch.float32, random)
        shape_activations(values, kind, random)
        found["x"], found["scale_x"] = with_scales(problem, x, scale_x, values, kind, random)
        if kind == "huge_row":
            found["scale_x"][problem.m // 2] *= 2.0**10
        if weights:
            random.manual_seed(2 * seed + 1)
            rows = normal((problem.n, problem.k), torch.float32, random, scale=problem.k**-0.5)
            found["w"], found["scale_w"] = with_scales(problem, w, scale_w, rows.mT, kind, random)
        if problem.bias:
            random.manual_seed(2 * seed + 0x5EED)
            drawn = normal(bias.shape(problem), torch.float32, random)
            found["bias"] = (drawn.round_() if kind == "integers" else drawn).to(bias.torch_dtype(problem))
        return found

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen, dequantised."""
        scale = spread_out(inputs["scale_w"], self.named("scale_w"), problem, inputs["w"].shape)
        some = scale.index_select(-1, sample.cols) if scale.dim() and scale.shape[-1] > 1 else scale
        return Family.widen(self, problem, inputs, sample) * wide(some)

    def x_rows(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.x_rows, dequantised."""
        scale = spread_out(inputs["scale_x"], self.named("scale_x"), problem, inputs["x"].shape)
        some = scale.index_select(0, sample.rows) if scale.dim() and scale.shape[0] > 1 else scale
        return Family.x_rows(self, problem, inputs, sample) * wide(some)


def with_scales(
    problem: Problem, operand: Operand, scale_of: Operand, values: Tensor, kind: str, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(8-bit values, their scales) that stand for these values, or for others of the kind; scale_of: their scale's."""
    dtype = operand.torch_dtype(problem)
    shape = scale_of.shape(problem)
    if kind in ("apart", "integers"):
        most = 4 if kind == "apart" else 2
        powers = torch.randint(-most, most + 1, shape, generator=random, device=random.device)
        scale = torch.exp2(powers.float())
        if kind == "apart":  # 32: far from the smallest and the largest number of 8 bits
            size = problem.k**-0.5 if operand.weight else 1.0
            return _rounded(values / size * 32, dtype), scale * (size / 32)
        most = 1 if problem.math_mode == "reduced" else 2  # shorter sums hold 2^13
        whole = torch.randint(-most, most + 1, values.shape, generator=random, device=random.device)
        return whole.float().to(dtype), scale
    if kind == "one_sign":
        values = values.abs()
    largest = _by_block(values.abs(), scale_of.steps(problem)).reshape(shape)
    scale = largest.clamp_(min=2.0**-60).div_((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)
    return _rounded(values / spread_out(scale, scale_of, problem, values.shape), dtype), scale


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in this type, rounded to the nearest."""
    return values.to(dtype) if dtype.is_floating_point else values.round().clamp(-127, 127).to(dtype)


def _by_block(sizes: Tensor, steps: tuple[int | None, ...]) -> Tensor:
    """The largest number of each block."""
    for axis, step in enumerate(steps):
        if step is None:
            sizes = sizes.amax(axis, keepdim=True)
        elif step > 1:
            many = -(-sizes.shape[axis] // step)
            missing = many * step - sizes.shape[axis]
            room = (0, 0) * (sizes.dim() - 1 - axis) + (0, missing)
            blocks = torch.nn.functional.pad(sizes, room).reshape(
                *sizes.shape[:axis], many, step, *sizes.shape[axis + 1 :]
            )
            sizes = blocks.amax(axis + 1)
    return sizes


def _stock(problem: Problem) -> Callable[..., Tensor]:
    out, fast = torch_dtype(problem.out_dtype), problem.math_mode == "reduced"
    if problem.dtype == "i8":

        def exact(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Tensor:
            y = x.new_empty(x.shape[0], w.shape[1], dtype=out)
            return scaled_int_product_into(y, x, w.t(), scale_x, scale_w, bias)

        return exact

    def call(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(x, w, scale_x, scale_w, bias=bias, out_dtype=out, use_fast_accum=fast)

    if (problem.scale, problem.wscale) != ("1x128", "128x128") or problem.bias or problem.threads:
        return call
    refused: set[int] = set()  # rows of X

    def copied(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        if m not in refused:  # torch may take what is unlikely as it lies
            try:
                return call(x, w, scale_x, scale_w, bias)
            except (RuntimeError, ValueError):
                if not needs_copies(scale_x, x.shape[1]):
                    raise
                refused.add(m)
        return block_product(x, w.mT, scale_x, scale_w.mT, out, fast=fast)

    return copied


SCALED: Final = Scaled(
    "scaled",
    operands=(
        Operand("x", "mk", layout=0),
        Operand("w", "kn", dtype="wdtype", layout=1, weight=True),
        Operand("scale_x", "mk", dtype="scale_dtype", scale_of="x"),
        Operand("scale_w", "kn", dtype="wscale_dtype", scale_of="w", weight=True),
        Operand("bias", "n", dtype="out_dtype", optional=True, added=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    pad=16,  # torch asks for multiples of 16 bytes
)
FAMILIES: Final = (SCALED,)
