"""A transformer of diffusers on a CPU, denoising with the hook on and off: every product of its layers is recorded.

    python benchmarks/engine_diffusers.py [--out FOLDER]     # where diffusers and gemmtuned are

A DiT of three layers with random weights takes five DDIM steps.  Each `must` in the result is a yes or a no:

    exact calls        by problem, as hooks on the model's own layers count them, and no other dense problem
    same bits          of the image, with the hook on and nothing tuned
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from engine_server import Server

PROGRAM = """
import collections, json, torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
torch.manual_seed(0)
model = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, sample_size=16,
    patch_size=2, num_embeds_ada_norm=10,
).eval()
calls = collections.Counter()
def count(layer, given, made):
    rows = given[0].numel() // layer.in_features
    bias = "+bias" if layer.bias is not None else ""
    calls[f"fp32:{rows}x{layer.out_features}x{layer.in_features}{bias},threads={torch.get_num_threads()}"] += 1
for layer in model.modules():
    if isinstance(layer, torch.nn.Linear):
        layer.register_forward_hook(count)
steps = DDIMScheduler()
steps.set_timesteps(5)
x, labels = torch.randn(2, 4, 16, 16), torch.tensor([1, 2])
with torch.inference_mode():
    for t in steps.timesteps:
        y = model(x, timestep=t.expand(2), class_labels=labels).sample
        x = steps.step(y[:, :4], t, x).prev_sample
print(json.dumps([dict(calls), x.flatten().tolist()]))
"""


def denoise(home: Path, *, hooked: bool) -> tuple[dict[str, int], list[float]]:
    """(calls that the model's layers had, the image)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
    env |= {"GEMMTUNED": str(int(hooked)), "GEMMTUNED_HOME": str(home), "GEMMTUNED_RUN": "diffusers"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    calls, image = json.loads(done.stdout.splitlines()[-1])
    return calls, image


def main() -> None:
    """Check, print, write the result file."""
    given = record.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        _, right = denoise(home, hooked=False)
        asked, image = denoise(home, hooked=True)
        recorded = Server([], home, home).calls()
    dense = {problem: calls for problem, calls in recorded.items() if not problem.startswith("batched")}
    must = {"exact calls": dense == asked, "same bits": image == right}
    print(json.dumps(must))
    result: dict[str, Any] = {"benchmark": "engine_diffusers", "engine": f"diffusers {version('diffusers')}"}
    result |= {"calls": recorded, "must": must}
    print(record.save(f"engine-diffusers-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not all(must.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
