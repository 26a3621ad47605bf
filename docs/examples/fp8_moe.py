"""Blocks of an FP8 model with a mixture of experts, as DeepSeek-like servers run them: all kinds of GEMM in one step.

    python docs/examples/fp8_moe.py --tokens 16 --steps 50                       # prints tokens/s

Linear layers keep their weights in e4m3 and call torch._scaled_mm; experts share one torch._grouped_mm over tokens
sorted by expert; router and head are plain bf16.  On a GPU gemmtuned counts all of them and routes the plain ones;
_scaled_mm and _grouped_mm are served by torch in this version.  On a CPU torch makes the two out of plain products.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def to_fp8(t: Tensor) -> tuple[Tensor, Tensor]:
    """(t in e4m3, the scale that takes it back), one scale for all of t."""
    scale = t.abs().amax().float().clamp(min=1e-8) / LARGEST
    return (t.float() / scale).to(FP8), scale


class Fp8Linear(nn.Module):
    """y = x @ w.T with both operands in e4m3 and the result in bf16."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        weight, scale = to_fp8(torch.randn(n, k) / k**0.5)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        x8, scale = to_fp8(x)
        return torch._scaled_mm(x8, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16)


class Experts(nn.Module):
    """Each token through its top experts: up and down projection, weighted and summed."""

    def __init__(self, hidden: int, inter: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inter) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inter, hidden) / inter**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top, dim=-1)
        expert, order = chosen.flatten().sort()
        ends = expert.bincount(minlength=len(self.up)).cumsum(0).int()
        token = order // self.top
        y = F.silu(torch._grouped_mm(x[token], self.up, offs=ends))
        y = torch._grouped_mm(y, self.down, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, token, y)


class Block(nn.Module):
    def __init__(self, hidden: int, inter: int, experts: int, top: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mix = nn.Sequential(Fp8Linear(hidden, 2 * hidden), nn.SiLU(), Fp8Linear(2 * hidden, hidden))
        self.experts = Experts(hidden, inter, experts, top)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.experts(self.norm2(x))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inter", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    blocks = [Block(args.hidden, args.inter, args.experts, args.top) for _ in range(args.layers)]
    model = nn.Sequential(*blocks, nn.RMSNorm(args.hidden), nn.Linear(args.hidden, args.vocabulary, bias=False))
    for module in model.modules():  # bf16, but for what is e4m3 or a scale
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.bfloat16()))
    model = model.to(device).eval()
    x = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16, device=device)
    for _ in range(args.repeat):
        for _ in range(2):
            model(x)
        start = time.perf_counter()
        for _ in range(args.steps):
            total = model(x).float().sum()
        assert total.isfinite()  # waits for the device
        seconds = time.perf_counter() - start
        print(f"{args.tokens * args.steps / seconds:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
