"""The launches of moe_fp8_tiles.py as a function of tensors: made once for a layer, for any number of tokens.

The memory between the launches comes from torch's allocator at every call, so each stream and CUDA graph has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.triton.moe_fp8_tiling import Tile, compiled
from gemmtuned.kernels.triton.moe_launch import OnItsDevice
from gemmtuned.kernels.triton.moe_tiling import AT_ONCE


class Launches(OnItsDevice):
    """A layer cut into two tiles; the operands of a call are on the device that this was loaded on.

    Raises CandidateFailed where a launch does not compile, keeps values of a thread in memory or does not load.
    """

    def __init__(self, layer: Experts, up: Tile, down: Tile, arch: str) -> None:
        self.layer, self._up, self._down = layer, up, down
        self._kernels = compiled(layer, up, down, arch)
        for kernel in self._kernels.values():
            kernel.load()

    def _run(self, o: Operands) -> Tensor:
        layer, tokens, kernels, device = self.layer, len(o.x), self._kernels, o.x.device
        x, ids, gates = o.x.contiguous(), o.ids.contiguous(), o.weights.contiguous()
        pairs, groups = tokens * layer.topk, layer.inter // self._up.columns
        up_places, down_places = (layer.experts + pairs // tile.tokens for tile in (self._up, self._down))
        whole = torch.empty(pairs + 3 * (up_places + down_places), dtype=torch.int32, device=device)
        order, up_tiles, down_tiles = torch.split(whole, [pairs, 3 * up_places, 3 * down_places])
        codes = torch.empty(tokens, layer.width, dtype=torch.float8_e4m3fn, device=device)
        h = torch.empty(pairs, layer.inter, dtype=torch.float8_e4m3fn, device=device)
        scales, h_scales = (
            torch.empty(n, dtype=torch.float32, device=device) for n in (tokens * (layer.width // 128), pairs * groups)
        )
        parts = torch.empty(pairs, layer.width, dtype=x.dtype, device=device)
        y = torch.empty_like(x)
        given = {
            "ids": ids, "gates": gates, "order": order, "pairs": pairs, "parts": parts, "y": y, "codes": codes,
            "scales": scales, "h": h, "h_scales": h_scales,
        }  # fmt: skip
        kernels["begin"]((layer.experts + tokens, 1, 1), {
            **given, "x": x, "up_tiles": up_tiles, "down_tiles": down_tiles, "up_places": up_places,
            "down_places": down_places,
        })  # fmt: skip
        kernels["up"]((groups, up_places, 1), {
            **given, "w": o.w1, "scale": o.scale1, "tiles": up_tiles, "places": up_places,
        })  # fmt: skip
        kernels["down"]((-(-layer.width // (self._down.columns * self._down.turns)), down_places, 1), {
            **given, "w": o.w2, "scale": o.scale2, "tiles": down_tiles, "places": down_places,
        })  # fmt: skip
        kernels["add"]((tokens, -(-layer.width // AT_ONCE), 1), given)
        return y
