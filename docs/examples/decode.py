"""A decode loop as servers have it: transformers, a static cache and, on a GPU, one CUDA graph for a step.

It knows nothing of gemmtuned; run it with GEMMTUNED=1 and start `gemmtuned daemon --share-resident` beside it.

    python docs/examples/decode.py --batch 8 --steps 128 --repeat 3       # prints tokens/s
    python docs/examples/decode.py --serve                                 # requests as JSON lines on standard input:
        {"batch": 8, "steps": 128}  ->  {"tokens": 1024, "seconds": 0.7, "logits_sum": ...}

Every request captures its own graph, so one that comes after a reload runs the new kernels.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

SIZES = {  # hidden, intermediate, layers, heads, key-value heads
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),  # some of its layers: benchmarks/end_to_end.py --layers 8
}


def build(size: str, layers: int, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    hidden, inter, depth, heads, kv_heads = SIZES[size]
    config = Qwen3Config(
        vocab_size=151_936 if device == "cuda" else 256,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype).eval()


class Decoder:
    """Greedy decoding with a static cache; one step is one graph replay where there is a GPU."""

    def __init__(
        self, model: Qwen3ForCausalLM, batch: int, length: int, graph: bool, forward: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        self.forward = model if forward is None else forward  # its compiled form, say
        device = model.device
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=model.dtype, device=device)
        self.graph = None
        if graph:
            self.graph = self.capture()
            self.reset()

    def capture(self) -> torch.cuda.CUDAGraph:
        """One step as a graph, with the kernels that are in use now."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def reset(self) -> None:
        """Back to the first token: the cache counts its steps itself and must not run over its length."""
        self.cache.reset()
        self.position.zero_()

    def _step(self) -> None:
        out = self.forward(
            self.token, past_key_values=self.cache, cache_position=self.position, position_ids=self.position[None]
        )
        self.logits.copy_(out.logits[:, -1])
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()


@torch.inference_mode()
def decode(model: Qwen3ForCausalLM, batch: int, steps: int, graph: bool) -> dict:
    decoder = Decoder(model, batch, steps + 8, graph)
    for _ in range(3):
        decoder.step()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    total = decoder.logits.float().abs().sum().item()  # waits for the device
    seconds = time.perf_counter() - start
    return {"batch": batch, "tokens": batch * steps, "seconds": seconds, "logits_sum": total}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What this program and its compiled form take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-graph", action="store_true")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.size, args.layers, device, torch.bfloat16)
    graph = device == "cuda" and not args.no_graph
    if args.serve:
        print(json.dumps({"ready": True, "device": device}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(decode(model, request["batch"], request["steps"], graph)), flush=True)
        return
    for _ in range(args.repeat):
        seen = decode(model, args.batch, args.steps, graph)
        print(f"batch {seen['batch']}: {seen['tokens'] / seen['seconds']:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
