"""Configurations of scaled_tiles that are small enough to run on the CPU, as PTX, with changes of its source."""

from __future__ import annotations

from typing import Any

import scaled_operands
import torch
from ptx_tensor_maps import TensorMaps

from gemmtuned.kernels.cuda import scaled_tiles as kernel
from gemmtuned.kernels.cuda.scaled_tiles import ScaledTiles

# m, n, k, rows, tokens, halves, share_w, share_x, parts, clusters; three steps are on their way
ONE_STEP = (16, 8, 128, 8, 64, 1, 1, 1, 1, 1)
TURNS = (70, 40, 400, 32, 64, 1, 1, 1, 1, 1)  # four tiles one after another, a ring, K that ends within a step
QUARTERS = (130, 36, 640, 32, 64, 1, 1, 1, 1, 2)  # pairs are stored, not fours of them
GROUPS = (130, 40, 400, 32, 128, 1, 1, 1, 1, 2)
HALVES = (70, 72, 272, 48, 64, 2, 1, 1, 1, 2)
SHARED_W = (130, 40, 528, 32, 64, 1, 2, 1, 1, 1)  # a thread block without tokens
SHARED_X = (70, 72, 528, 32, 64, 1, 1, 2, 1, 1)
SHARED = (70, 72, 400, 16, 64, 1, 2, 2, 1, 1)
PARTS = (33, 40, 400, 24, 64, 1, 1, 1, 2, 2)
THREE_PARTS = (70, 22, 384, 32, 128, 1, 1, 1, 3, 1)
ALL = (100, 64, 640, 32, 64, 1, 2, 1, 2, 2)
TOO_MANY = (40, 24, 256, 32, 64, 1, 2, 1, 1, 2)  # clusters: one has no tile
TOO_MANY_PARTS = (40, 24, 256, 32, 64, 2, 1, 1, 2, 2)
ACROSS = (20, 136, 256, 48, 64, 2, 1, 1, 1, 1)  # a tile that meets two scales of W, in its second half


def config(
    m: int, n: int, k: int, rows: int, tokens: int, halves: int, share_w: int, share_x: int, parts: int, clusters: int,
    *, kind: str, promoted: bool, bias: bool = True, out: str = "bf16", int8: bool = False, by_token: bool = False,
    zero: int = 0, depth: int = 3,
) -> ScaledTiles:  # fmt: skip
    """depth: steps on their way, 0 for as many as the kernel takes by itself."""
    form = type("OfDepth", (ScaledTiles,), {"depth": depth}) if depth else ScaledTiles
    return form(
        m, n, k, bias, out, kind, promoted, rows, tokens, halves, share_w, share_x, parts, clusters, int8, by_token,
        zero,
    )  # fmt: skip


def of_int8(shape: tuple[int, ...], kind: str = "ROW", *, bias: bool = True, zero: int = 0) -> ScaledTiles:
    return config(*shape, kind=kind, promoted=False, bias=bias, int8=True, zero=zero)


def run(one: ScaledTiles, *changes: tuple[str, str], **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(Y, what it should be); changes: of its source."""
    text = one.source()
    for what, instead in changes:
        assert what in text, what
        text = text.replace(what, instead)
    form = type("Changed", (type(one),), {"source": lambda _: text})
    fields = {name: getattr(one, name) for name in ScaledTiles.__dataclass_fields__}
    return scaled_operands.run(form(**fields), kernel.KERNEL, kind=TensorMaps, **how)
