"""A small language model server, as anyone might write it. Of gemmtuned it knows the one line of --freeze.

It builds a causal language model from transformers (layer sizes of Qwen3-0.6B, random weights, bytes as tokens),
reads requests as JSON lines from standard input and answers each with one JSON line.

    {"dtype": "fp32", "prompts": [...], "new_tokens": 16}  ->  {"tokens": 120, "decode_s": 1.9, "prefill_s": 0.4}
    {"dtype": "bf16", "prompts": [...], "logits": "file.pt"}  ->  {"logits": "file.pt"}, last-position logits saved
    {"dtype": "bf16", "prompts": [...], "logits": "f", "exact": 1} ->  the same, computed in float64
"""

import argparse
import copy
import json
import sys
import time

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(layers: int) -> dict[str, Qwen3ForCausalLM]:
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    return {name: copy.deepcopy(model).to(dtype) for name, dtype in DTYPES.items()}


def tokens_of(prompts: list[str]) -> torch.Tensor:
    return torch.tensor([list(p.encode()) for p in prompts])


def generate(model: Qwen3ForCausalLM, prompts: list[str], new_tokens: int) -> dict:
    """Greedy decoding of equally long prompts; prefill and decode are timed apart."""
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    logits = model(tokens_of(prompts), past_key_values=cache, logits_to_keep=1).logits
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    end = time.perf_counter()
    return {"tokens": len(prompts) * (new_tokens - 1), "decode_s": end - first, "prefill_s": first - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--freeze", action="store_true", help="let gemmtuned keep packed weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = build(args.layers)
    if args.freeze:
        import gemmtuned

        for model in models.values():
            gemmtuned.freeze(model)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model = models[request["dtype"]]
        with torch.inference_mode():
            if "logits" not in request:
                answer = generate(model, request["prompts"], request["new_tokens"])
            else:
                if request.get("exact"):
                    model = copy.deepcopy(model).double()
                logits = model(tokens_of(request["prompts"]), logits_to_keep=1).logits
                torch.save(logits.double(), request["logits"])
                answer = {"logits": request["logits"]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
