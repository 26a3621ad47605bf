"""Is a warp faster with two or four chains of products?  The same configurations of warp_split_k, raced.

python benchmarks/chains.py --out FOLDER [--m 4,8,16 --shapes eight --best 8]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record

from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.options import SearchOptions
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.shortlist import shortlist


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="8,4,16")
    parser.add_argument("--shapes", default="eight")
    parser.add_argument("--best", type=int, default=10, help="configurations of a shape, by the estimate")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    here = environment(cuda_device(0))
    shapes = {"eight": dense.EIGHT, "all": dense.EIGHT + dense.TWELVE}.get(args.shapes) or record.sizes(args.shapes)
    problems = dense.left_to_do([], args.m, shapes, "bf16")
    tables: dict[Any, list[Candidate]] = {}
    for p in problems:
        found = shortlist(p.m, p.n, p.k, here.device.units, arch=here.device.arch)
        configs = [config for kernel, config in found if kernel == "warp_split_k"][: args.best]
        tables[p] = [
            Candidate.of("triton", kernel="warp_split_k", **{**config, "chains": chains})
            for config in configs
            for chains in (1, 2, 4)
            if config["block_k"] >= 32 * chains
        ]
    ahead = dense.Ahead(problems, here, tables.__getitem__)

    def measure(problem: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
        row["compile_s"] = round(ahead.wait(problem), 2)
        found = dense.tune(problem, here, SearchOptions(only=tuple(tables[problem])))
        best: dict[int, tuple[float, str]] = {}
        for trial in found["trials"]:
            if trial.phase == "screen" and trial.us and trial.candidate.backend == "triton":
                chains = json.loads(trial.candidate.config)["chains"]
                best[chains] = min(best.get(chains, (1e9, "")), (round(trial.us, 3), trial.candidate.config))
        row |= {f"chains_{chains}": best[chains] for chains in sorted(best)}
        row["screened"] = [(str(t.candidate), round(t.us, 3)) for t in found["trials"] if t.phase == "screen" and t.us]
        return row

    rows: list[dict[str, Any]] = []
    import time

    dense.work_through(problems, rows, measure, path=args.out / "chains.jsonl", until_s=time.monotonic() + args.seconds)
    print("saved", record.save("chains", {"benchmark": "chains", "stamps": here.stamps, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
