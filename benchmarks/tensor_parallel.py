"""A two-rank tensor-parallel MLP over NCCL: captured, tuned on both GPUs, then off, captured only and on in turns.

    python -m benchmarks tensor_parallel --out FOLDER [--rounds 3 --tokens 16]

docs/examples/tensor_parallel.py as it is, under torchrun; the tokens/s are what it prints itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

EXAMPLE = Path(__file__).resolve().parents[1] / "docs/examples/tensor_parallel.py"


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--more", nargs="*", default=[], help="arguments of the example: hidden=256 inter=512")
    args = parser.parse_args()
    home = tempfile.mkdtemp(prefix="gemmtuned-")
    env = {**os.environ, "GEMMTUNED_HOME": home, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), str(EXAMPLE)]
    program += ["--tokens", str(args.tokens), "--steps", str(args.steps), "--repeat", str(args.repeat)]
    program += [word for pair in args.more for word in ("--" + pair.split("=")[0], pair.split("=")[1])]

    def gemmtuned(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "gemmtuned", *words], env=env, capture_output=True, text=True)
        if done.returncode != code:
            raise SystemExit(f"gemmtuned {words[0]} ended with {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}")
        return done.stdout

    subprocess.run(program, env={**env, "AITER_TUNE_GEMM": "1"}, check=True)
    began = time.monotonic()
    gemmtuned("daemon", "--once", "--wait-s", "60", "--idle-s", "1")
    tuned_s = time.monotonic() - began
    said = gemmtuned(
        "compare", "--json", "--rounds", str(args.rounds), "--no-warm-up", "--figure", "([0-9.]+) tokens/s", "--",
        *program,
    )  # fmt: skip
    result: dict[str, Any] = {
        "benchmark": "tensor_parallel", "ranks": args.ranks, "tokens": args.tokens, "tuned_s": round(tuned_s, 1),
        "compare": json.loads(said), "coverage": json.loads(gemmtuned("coverage", "--json"))["total"],
        "gains": json.loads(gemmtuned("gains", "--json")),
    }  # fmt: skip
    print(json.dumps({key: result[key] for key in ("tuned_s", "compare", "coverage")}, indent=1))
    print("saved", record.save("tensor_parallel", result, args.out))


if __name__ == "__main__":
    main()
