"""A decoder as servers have them, in plain torch: it answers "decode N steps" with how fast it was.

It knows nothing of gemmtuned, and its layers have the sizes of Qwen3-0.6B.  Each line on standard input is a number of
steps; each answer is one JSON object: {"tokens": 200, "seconds": 0.71, "sum": 1234.5}, where `sum` is a figure over the
last output by which two runs can be compared.  On a GPU a step is one CUDA graph, captured anew for every line, so that
a line after a reload runs the new kernels.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INTER, HEADS, KV_HEADS, HEAD = 1024, 3072, 16, 8, 128
LAYERS, BATCH, LENGTH = 4, 8, 64


class Block(nn.Module):
    """One decoder layer with a key-value cache of LENGTH tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INTER, bias=False)
        self.down = nn.Linear(INTER, HIDDEN, bias=False)
        self.before_attention, self.before_mlp = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.register_buffer("keys", torch.zeros(BATCH, KV_HEADS, LENGTH, HEAD))
        self.register_buffer("values", torch.zeros(BATCH, KV_HEADS, LENGTH, HEAD))
        self.keys: Tensor
        self.values: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are [BATCH, HIDDEN]: one token of each sequence."""
        qkv = self.qkv(self.before_attention(x)).view(BATCH, HEADS + 2 * KV_HEADS, 1, HEAD)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.keys[:, :, :1].copy_(k)
        self.values[:, :, :1].copy_(v)
        mixed = functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        x = x + self.out(mixed.reshape(BATCH, HEADS * HEAD))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


def model(device: str) -> tuple[nn.Module, Tensor]:
    """The decoder with random weights, and its input [BATCH, HIDDEN]: fp32 on a CPU, bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device, dtype).eval()
    return blocks, torch.randn(BATCH, HIDDEN).to(device, dtype)


def step_of(blocks: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """One decode step; on a GPU the replay of a graph that is captured here."""
    if x.device.type != "cuda":
        return lambda: blocks(x)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        blocks(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y: Tensor = blocks(x)

    def replay() -> Tensor:
        graph.replay()
        return y

    return replay


@torch.inference_mode()
def decode(blocks: nn.Module, x: Tensor, steps: int) -> dict[str, float]:
    """Run that many steps and say how fast they were."""
    step = step_of(blocks, x)
    y = step()
    y.float().sum().item()  # waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        y = step()
    total = y.double().sum().item()
    return {"tokens": BATCH * steps, "seconds": time.perf_counter() - start, "sum": total}


def main() -> None:
    """Answer lines until standard input ends."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks, x = model(device)
    print(json.dumps({"ready": True, "device": device, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(blocks, x, int(line))), flush=True)


if __name__ == "__main__":
    main()
