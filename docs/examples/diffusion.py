"""Blocks of a diffusion transformer (DiT): thousands of patches at once, so GEMMs of large M, bound by compute.

    python docs/examples/diffusion.py --patches 4096 --steps 20                  # prints steps/s

Each denoising step runs all blocks once on every patch of every image, guided and unguided side by side in the batch.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the time step (adaLN)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: Tensor, time_step: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(time_step))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(y)
        return x + gate2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale2) + shift2), approximate="tanh"))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1152)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--patches", type=int, default=4096)
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.ModuleList(Block(args.hidden, args.heads) for _ in range(args.layers)).bfloat16().eval()
        x = torch.randn(2 * args.images, args.patches, args.hidden, dtype=torch.bfloat16)  # guided and unguided
        times = torch.randn(args.steps, 1, args.hidden, dtype=torch.bfloat16)

    def denoise(x: Tensor, time_step: Tensor) -> Tensor:
        y = x
        for block in blocks:
            y = block(y, time_step.expand(len(x), -1))
        return x - 0.05 * y

    for _ in range(args.repeat):
        denoise(x, times[0])
        start = time.perf_counter()
        image = x
        for time_step in times:
            image = denoise(image, time_step)
        assert image.float().sum().isfinite()  # waits for the device
        print(f"{args.steps / (time.perf_counter() - start):.2f} steps/s", flush=True)


if __name__ == "__main__":
    main()
