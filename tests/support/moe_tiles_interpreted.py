"""Run with TRITON_INTERPRET=1: the tiles of a mixture on small layers; one JSON line for each case that is named.

X is fp16: Triton's interpreter has no constants of bf16.  What torch.empty gives is filled with NaN and the largest
integers, so that a read of what no launch has written shows.
"""

import json
import sys

import torch
from quick_interpreter import make_quick

from gemmtuned.kernels import mixture
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.kernels.triton import moe_tiling
from gemmtuned.kernels.triton.moe_launch import Launches

WEIGHTS = {
    "none": ("fp16", "none"), "tensor": ("fp8_e4m3", "tensor"), "row": ("fp8_e4m3", "row"),
    "128x128": ("fp8_e4m3", "128x128"), "int4": ("int4", "group"), "mxfp4": ("mxfp4", "group"),
}  # fmt: skip


def weights(quant, experts, rows, k, group):
    """[experts, rows, k] as they lie in memory, and their scales."""
    if quant == "none":
        return (torch.randn(experts, rows, k) * k**-0.5).half(), None
    if WEIGHTS[quant][0] == "fp8_e4m3":
        w = (torch.randint(0, 256, (experts, rows, k), dtype=torch.uint8) & 0xB7).view(torch.float8_e4m3fn)
        shape = {"tensor": (experts,), "row": (experts, rows)}.get(quant, (experts, -(-rows // 128), -(-k // 128)))
        return w, (torch.rand(shape) + 0.5) * k**-0.5 * 4
    w = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8)
    if quant == "int4":
        return w, ((torch.rand(experts, rows, k // group) + 0.5) * k**-0.5 / 4).half()
    return w, torch.randint(119, 123, (experts, rows, k // group), dtype=torch.uint8)


def case(quant, act, up, down, *, tokens=21, width=160, inter=96, group=32, bias=False, weighted=False, long=False,
         large=1.0, twice=False):  # fmt: skip
    """Errors of the tiles and of torch's form against fp64; with `twice`, whether a second call gives the same bits."""
    torch.manual_seed(5)
    experts, topk = 6, 3
    how = How(act=act, interleaved=act == "swiglu", weighted=weighted, quant=quant)
    weight, scales = WEIGHTS[quant]
    layer = Experts(
        width=width, inter=inter, experts=experts, topk=topk, dtype="fp16", weight=weight, scales=scales,
        group=group if scales == "group" else 0, act="swiglu_clamped" if act == "swiglu" else act, bias=bias,
        weight_first=weighted, long_ids=long,
    )  # fmt: skip
    layer.check()
    w1, scale1 = weights(quant, experts, 2 * inter, width, group)
    w2, scale2 = weights(quant, experts, width, inter, group)
    x = (torch.randn(tokens, width) * large).half()
    x[:, -3:] *= 8  # a lost tail must show
    x[9, 5] = float("nan")
    ids = torch.randint(-1, experts - 1, (tokens, topk)).to(torch.int64 if long else torch.int32)
    ids[0], ids[1], ids[2:8], ids[9] = -1, experts, 2, 1  # nobody's, and an expert with most of the pairs
    ids[ids == 3] = 4
    for t in (w1, scale1, w2, scale2):  # experts that nobody visits: the last one, and one whose neighbours are visited
        if t is not None and t.dtype != torch.uint8:
            t[[3, -1]] = float("nan")
    biases = (torch.randn(experts, 2 * inter).half(), torch.randn(experts, width).half()) if bias else (None, None)
    o = Operands(
        x=x, w1=w1, w2=w2, weights=torch.rand(tokens, topk), ids=ids, scale1=scale1, scale2=scale2, bias1=biases[0],
        bias2=biases[1],
    )  # fmt: skip
    launches = Launches(layer, moe_tiling.tile_of(up), moe_tiling.tile_of(down), "sm_90")
    y = in_filled_memory(launches, o)
    exact = mixture.by_expert(
        Operands(**{n: getattr(o, n) for n in Operands.__slots__} | {"x": x.double(), "weights": o.weights.double()}),
        how,
    )

    sound = exact.isfinite()
    assert torch.equal(y.isnan(), exact.isnan()) and exact[9].isnan().all()

    def error(found):
        return ((found.double() - exact)[sound].norm() / exact[sound].norm()).item()

    print(json.dumps({
        "case": f"{quant} {act}", "error": error(y), "default": error(mixture.by_expert(o, how)),
        "same": torch.equal(y[10:], launches(o)[10:]) if twice else None, "nobody": not y[:2].any().item(),
    }))  # fmt: skip


def in_filled_memory(launches, o):
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True)  # the function for users imports torch's compiler for this
    try:
        return launches(o)
    finally:
        torch._C._set_deterministic_algorithms(False)


CASES = [
    lambda: case("none", "silu", "64.16.64.4.2", "32.32.32.4.2", bias=True, twice=True),
    lambda: case("tensor", "gelu", "64.16.64.4.2", "128.16.128.4.1", weighted=True, long=True),
    lambda: case("row", "silu", "64.32.128.4.2", "64.16.256.4.1", large=2.0**-9),
    lambda: case("128x128", "silu", "128.16.128.4.2", "128.16.256.4.1", width=256, inter=160),
    lambda: case("128x128", "swiglu", "128.16.256.4.1", "64.16.256.4.1", width=384, inter=128),
    lambda: case("int4", "silu", "64.16.128.4.2", "128.16.256.4.1", bias=True),
    lambda: case("int4", "gelu", "64.16.256.4.2", "64.16.128.4.1", width=256, inter=128, group=128, weighted=True),
    lambda: case("mxfp4", "swiglu", "64.16.128.4.2", "64.16.128.4.2", bias=True, long=True, twice=True),
]
if __name__ == "__main__":
    make_quick()
    for number in sys.argv[1:]:
        CASES[int(number)]()
