"""Linear layers of fp8 weights with one scale a row, as serving engines have them, for models of end_to_end.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, scales [rows, 1]) of rows, by the largest number of each."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x / scale).to(E4M3), scale


class Fp8Linear(nn.Module):
    """As the layer given: rows of X are quantised at each call, then torch's own scaled product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantised(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantised(x.reshape(-1, x.shape[-1]))
        y = torch._scaled_mm(rows, self.weight.t(), scale, self.scale, bias=self.bias, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


def quantise(model: nn.Module) -> int:
    """Put one in place of each linear layer but the head; how many."""
    count = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Fp8Linear(module))
            count += 1
    return count
