"""The launches of moe_tiles.py as a function of tensors: made once for a layer, for any number of tokens.

The memory between the launches comes from torch's allocator at every call, so each stream and CUDA graph has its own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels.cuda import moe_run
from gemmtuned.kernels.cuda.moe_decode import Experts
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.kernels.own_kernel import POINTER_ALIGN
from gemmtuned.kernels.triton.moe_tiling import AT_ONCE, MOST_PAIRS, Tile, compiled, padded, turns

_PLAIN: Final = (torch.bfloat16, torch.float16)


class OnItsDevice:
    """A call of launches on the device of its operands; CandidateFailed for what Triton's own launcher raises."""

    layer: Experts

    def __call__(self, o: Operands) -> Tensor:
        """Y [T, D] of operands of the layer."""
        if not o.x.is_cuda:
            return self._run(o)
        try:
            with torch.cuda.device(o.x.device):
                return self._run(o)
        except (RuntimeError, MemoryError, CandidateFailed):
            raise
        except Exception as err:  # Triton's own launcher raises anything
            raise CandidateFailed(f"{self.layer}: {type(err).__name__}: {err}") from err

    def _run(self, o: Operands) -> Tensor:
        raise NotImplementedError


class Launches(OnItsDevice):
    """A layer cut into two tiles; the operands of a call are on the device that this was loaded on.

    Raises CandidateFailed where a launch does not compile, keeps values of a thread in memory or does not load.
    """

    def __init__(self, layer: Experts, up: Tile, down: Tile, arch: str) -> None:
        self.layer, self._tiles, self._padded = layer, (up, down), padded(layer)
        self._kernels = compiled(layer, up, down, arch)
        for kernel in self._kernels.values():
            kernel.load()

    def _run(self, o: Operands) -> Tensor:
        layer, tokens, kernels = self.layer, len(o.x), self._kernels
        x, ids, gates = o.x.contiguous(), o.ids.contiguous(), o.weights.contiguous()
        pairs = tokens * layer.topk
        up_places, down_places = (layer.experts + pairs // tile.tokens for tile in self._tiles)
        whole = torch.empty(pairs + 3 * (up_places + down_places), dtype=torch.int32, device=x.device)
        order, up_tiles, down_tiles = torch.split(whole, [pairs, 3 * up_places, 3 * down_places])
        h, parts = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (layer.inter, layer.width))
        y = torch.empty_like(x)
        given = {"ids": ids, "gates": gates, "order": order, "pairs": pairs, "parts": parts, "y": y}
        given_x, of_x = self._room(x, self._padded[0])
        given_h, of_h = self._room(h, self._padded[1])
        made_ready = tokens if "ready" in kernels else 0
        kernels["begin"]((layer.experts + made_ready, 1, 1), {
            **given, **of_x, "x": x, "up_tiles": up_tiles, "down_tiles": down_tiles, "up_places": up_places,
            "down_places": down_places,
        })  # fmt: skip
        kernels["up"]((-(-2 * layer.inter // self._tiles[0].rows), up_places, 1), {
            **given, **of_x, "x": given_x, "h": h, "w": _codes(o.w1), "scale": o.scale1, "bias": o.bias1,
            "tiles": up_tiles, "places": up_places,
        })  # fmt: skip
        if made_ready:
            kernels["ready"]((pairs, 1, 1), {**of_h, "x": h})
        columns = self._tiles[1].rows * turns(layer, self._tiles[1])
        kernels["down"]((-(-layer.width // columns), down_places, 1), {
            **given, **of_h, "h": given_h, "w": _codes(o.w2), "scale": o.scale2, "bias": o.bias2, "tiles": down_tiles,
            "places": down_places,
        })  # fmt: skip
        kernels["add"]((tokens, -(-layer.width // AT_ONCE), 1), given)
        return y

    def _room(self, rows: Tensor, columns: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What a product multiplies, and the room for it: the rows themselves where weights are plain."""
        if "ready" not in self._kernels:
            return rows, {"to": rows, "factor": rows}
        dtype = torch.float16 if self.layer.weight == "fp8_e4m3" else rows.dtype
        to = torch.empty(len(rows), columns, dtype=dtype, device=rows.device)
        return to, {"to": to, "factor": torch.empty(len(rows), dtype=torch.float32, device=rows.device)}


def layer_of(o: Operands, how: How, device: int) -> Experts | None:
    """What the kernels are to be compiled for; None for operands that they do not take, or not on this device."""
    if o.x.get_device() != device or not 0 < o.ids.numel() <= MOST_PAIRS or not o.x.is_contiguous():
        return None
    read = (o.x, o.w1, o.w2, o.scale1, o.scale2, o.bias1, o.bias2, o.weights)
    if any(t is not None and t.data_ptr() % POINTER_ALIGN for t in read):
        return None
    return moe_run.layer_of(o, how)


def _codes(w: Tensor) -> Tensor:
    return w if w.dtype in _PLAIN else w.view(torch.uint8)
