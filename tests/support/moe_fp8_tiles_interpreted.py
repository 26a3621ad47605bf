"""Run with TRITON_INTERPRET=1: mixtures that quantise X and H, on small layers; one JSON line for each case.

Each case is one kind of inputs of the family's.  What torch.empty gives is filled with NaN and the largest integers, so
that a read of what no launch has written shows.
"""

import json
import sys

import torch
from interpreted_types import teach_fp8_and_bf16
from moe_tiles_interpreted import in_filled_memory
from quick_interpreter import make_quick

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.families.error import Spread, limits, measure_error
from gemmtuned.kernels.families.moe import MOE
from gemmtuned.kernels.families.operand import Sample
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.triton import moe_fp8_tiling
from gemmtuned.kernels.triton.moe_fp8_launch import Launches

FORMS = {  # act, inter, tiles
    "narrow": ("silu_gated", 192, "64.16.1.4.2", "128.16.1.4.2"),
    "wide": ("gelu_gated_weighted", 256, "128.32.1.8.2", "64.16.3.4.2"),
}
TWICE = ("narrow.randn", "wide.integers")


def case(form, kind, *, twice, m=33, width=256):
    """Our error and the largest that the gate allows; whether bits are the right ones; with `twice`, the same again."""
    act, inter, up, down = FORMS[form]
    problem = Problem(
        family="moe", m=m, n=width, k=width, inter=inter, experts=6, topk=4, act=act, dtype="fp16", wdtype="fp8_e4m3",
        scale="1x128", wscale="128x128",
    )  # fmt: skip
    layer = moe_fp8_tiling.layer_of(problem)
    launches = Launches(layer, moe_fp8_tiling.tile_of(up), moe_fp8_tiling.tile_of(down), "sm_90")
    inputs = MOE.make(problem, kind=kind, seed=3, device=torch.device("cpu"))
    names = {"x": "x", "w1": "w1", "w2": "w2", "weights": "gates", "ids": "ids", "scale1": "scale1", "scale2": "scale2"}
    o = Operands(**{name: inputs.tensors[given] for name, given in names.items()})
    y = in_filled_memory(launches, o)
    sample = Sample(torch.arange(m), torch.arange(width))
    exact = MOE.reference(problem, inputs, sample)
    stock = MOE.default(problem).call(o)
    allowed = limits(problem, measure_error(stock, exact), Spread.of(exact, MOE.x_rows(problem, inputs, sample)))
    error = measure_error(y, exact)
    infinite = Operands(**{n: getattr(o, n) for n in Operands.__slots__} | {"x": torch.full_like(o.x, torch.inf)})
    print(json.dumps({
        "kind": kind, "r": error.r, "m": error.m, "allowed_r": allowed.r, "allowed_m": allowed.m,
        "exact": torch.equal(y, stock) if MOE.is_exact(kind) else None,
        "same": torch.equal(y, launches(o)) if twice else None,
        "infinite": launches(infinite).isnan().all().item() if kind == "randn" else None,
    }))  # fmt: skip


make_quick()
teach_fp8_and_bf16()
for given in sys.argv[1:]:
    case(*given.split("."), twice=given in TWICE)
