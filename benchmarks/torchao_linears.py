"""A model that torchao has quantised, unchanged: off, counted, and after one pass of the daemon.

    python -m benchmarks torchao_linears --out FOLDER [--kinds fp8_row,fp8_tensor,int8_dynamic --rows 1,8,64]

Four pairs of linears of Llama-1B's MLP sizes, in a CUDA graph (eager without a GPU).  Each arm is a process of its own,
and `off` has a second one at the end, so that one sees how far two processes of one arm are apart.  What is compared
with `off` bit for bit is the result of the counted arm; of the tuned arm, how far it is from the same model in fp64 of
its quantised weights is not asked: the daemon has compared each product with fp64.  Kinds that this torchao, torch or
device does not have are named.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

HIDDEN, INTER, PAIRS = 2048, 8192, 4
KINDS = ("fp8_row", "fp8_tensor", "int8_dynamic", "int8_weight_only")
ARMS = ("off", "counted", "tuned", "off again")


def config_of(kind: str) -> Any:
    from torchao import quantization
    from torchao.quantization import PerRow, PerTensor

    makers: dict[str, Callable[[], Any]] = {
        "fp8_row": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        "fp8_tensor": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
        "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "int8_weight_only": quantization.Int8WeightOnlyConfig,
    }
    return makers[kind]()


def model(kind: str, device: str) -> Any:
    import torch
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(PAIRS):
        up, down = torch.nn.Linear(HIDDEN, INTER, bias=False), torch.nn.Linear(INTER, HIDDEN, bias=False)
        layers += [torch.nn.RMSNorm(HIDDEN), up, torch.nn.SiLU(), down]
    made = torch.nn.Sequential(*layers).to(device, torch.bfloat16).eval()
    quantize_(made, config_of(kind))
    return made


def one(kinds: list[str], rows: list[int]) -> dict[str, Any]:
    """What one process measures: kind -> rows of X -> microseconds a call, and a digest of Y."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            with torch.inference_mode():
                made = model(kind, device)
                found[kind] = {str(m): timed(made, m, device) for m in rows}
        except (RuntimeError, AssertionError, ImportError, ValueError, NotImplementedError) as err:  # noqa: PERF203
            found[kind] = f"{type(err).__name__}: {str(err).splitlines()[0][:200]}"
    return found


def timed(made: Any, m: int, device: str) -> dict[str, Any]:
    import torch

    torch.manual_seed(m)
    x = torch.randn(m, HIDDEN, device=device, dtype=torch.bfloat16)
    run, wait = (lambda: made(x)), (lambda: None)
    y = made(x)
    if device == "cuda":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(x)
        run, wait = graph.replay, torch.cuda.synchronize
    times = []
    for _ in range(15):
        wait()
        began_s = time.perf_counter()
        for _ in range(100 if device == "cuda" else 5):
            run()
        wait()
        times.append((time.perf_counter() - began_s) / (100 if device == "cuda" else 5) * 1e6)
    low, mid, high = statistics.quantiles(times[1:], n=4)
    digest = hashlib.sha256(y.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return {"us": round(mid, 1), "q1": round(low, 1), "q3": round(high, 1), "digest": digest}


def arm(name: str, home: Path, given: list[str]) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER"))}
    env |= {"GEMMTUNED": "0" if name.startswith("off") else "1", "GEMMTUNED_HOME": str(home), "GEMMTUNED_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *given], env=env, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,8,64", help="rows of X")
    parser.add_argument("--name", default="torchao_linears")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(one(args.kinds.split(","), [int(m) for m in args.rows.split(",")])))
        return
    given = ["--kinds", args.kinds, "--rows", args.rows]
    with tempfile.TemporaryDirectory(prefix="gemmtuned-torchao-") as folder:
        home, results = Path(folder), {}
        for name in ARMS:
            if name == "tuned":
                tune(home)
            results[name] = arm(name, home, given)
        calls = coverage(home)
    from torchao import __version__ as torchao_version

    told = {"benchmark": "torchao_linears", "torchao": torchao_version, "arms": results, "coverage": calls}
    show(results)
    print("saved", record.save(args.name, told, args.out))


def command(home: Path, *words: str) -> str:
    code = "import sys; from gemmtuned.cli import main; sys.argv[0] = 'gemmtuned'; main()"
    env = {**os.environ, "GEMMTUNED": "0", "GEMMTUNED_HOME": str(home), "GEMMTUNED_IDLE_S": "0"}
    done = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, check=False)
    return done.stdout


def tune(home: Path) -> None:
    command(home, "daemon", "--once", "--wait-s", "60")


def coverage(home: Path) -> Any:
    told = json.loads(command(home, "coverage", "--json"))
    return {name: told[name] for name in told if not isinstance(told[name], list)}


def show(results: dict[str, Any]) -> None:
    for kind, off in results["off"].items():
        if isinstance(off, str):
            print(f"{kind}: not here: {off}")
            continue
        for m in off:
            arms = [results[name][kind][m] for name in ARMS]
            same = "bits the same" if arms[0]["digest"] == arms[1]["digest"] else "BITS DIFFER"
            print(
                f"{kind} m={m}: off {arms[0]['us']} us, again {arms[3]['us']}, counted {arms[1]['us']} ({same}), "
                f"tuned {arms[2]['us']} ({arms[0]['us'] / arms[2]['us']:.2f}x)"
            )


if __name__ == "__main__":
    main()
