"""Tests of torchao or torch on a GPU, with the hook off, counting, and after a tuning pass: the outcomes are the same.

    python -m benchmarks gpu_foreign                       (some ten minutes; fetches as foreign_suites does)
    python -m benchmarks gpu_foreign --tests 200 --tune-s 60 --workers 4
    python -m benchmarks gpu_foreign --torch               (torch's own tests of cuBLAS and of scaled products)

torchao's eager tests of fp8, int8 and 4-bit weights and of grouped products run three times, in the same parts side by
side: with the hook off; counting; and with what `gemmtuned tune` found in --tune-s seconds for the problems counted.
What differs runs again as foreign_suites says, and is listed as unsteady or as a difference.

Exit status: 0 no difference, 1 a difference, 77 nothing could be fetched.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import foreign_suites
import record
import torch
from foreign_fetch import SUITES, NotFetched, fetch
from foreign_suites import NOTHING_FETCHED, Runner, fresh

from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.native.build import build

TORCHAO: Final = replace(
    SUITES["torchao"],
    paths=(
        "test/float8/test_base.py", "test/quantization", "test/core",
        "test/prototype/moe_training/test_fp8_grouped_mm.py",
        "test/prototype/moe_training/test_tensor.py", "test/prototype/test_quantized_training.py",
        "test/prototype/blockwise_fp8_training",
    ),
    left_out=("inductor_fusion",),
)  # fmt: skip
TORCH: Final = replace(
    SUITES["torch"],
    paths=("test/test_matmul_cuda.py", "test/test_scaled_matmul_cuda.py", "test/test_linalg.py"),
    left_out=("tunableop", "broken_solution", "10000"),  # the last are minutes of tuning each
)
PRODUCTS: Final = ("mm", "matmul", "einsum", "tensordot", "addmv", "addbmm", "linear_layer", "float8", "cublas")
LEFT_OUT: Final = ("compile", "chunk", "pt2e", "expected_gpu_kernel_fbgemm", "ddp", "fsdp")  # minutes, or GiB, in each


def is_run(name: str, of_torch: bool) -> bool:
    """Whether this test is one of those that run: of torch's, those of products on a GPU."""
    if of_torch:
        return "cuda" in name and any(word in name.rpartition("::")[2] for word in PRODUCTS)
    return not any(word in name for word in LEFT_OUT)


def in_parts(runners: list[Runner], how: str, names: list[str]) -> dict[str, str]:
    """Outcome of each test; every runner has its part, and all run at once."""
    with ThreadPoolExecutor(len(runners)) as pool:
        parts = pool.map(
            lambda part: (
                part[1].outcomes(how, names[part[0] :: len(runners)]) if names[part[0] :: len(runners)] else {}
            ),
            enumerate(runners),
        )
        return {name: outcome for part in parts for name, outcome in part.items()}


def tune(runner: Runner, seconds: float) -> str:
    """Tune what was counted, for so long; its last line."""
    command = [sys.executable, "-P", "-m", "gemmtuned", "tune"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=runner.environment("routed"), **pipes) as process:  # type: ignore[call-overload]
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate()
    return str((said.strip().splitlines() or [""])[-1])


def main() -> int:
    parser = record.arguments(__doc__)
    parser.add_argument("--torch", action="store_true", help="the tests of torch's own matrix products instead")
    parser.add_argument("--tests", type=int, default=800, help="about how many")
    parser.add_argument("--tune-s", type=float, default=180, help="seconds of tuning between the passes")
    parser.add_argument("--workers", type=int, default=6, help="tests that run at once")
    parser.add_argument("--folder", type=Path, default=foreign_suites.FOLDER, help="for what is fetched")
    parser.add_argument("--sources", type=Path, help="has what to fetch")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was run")
        return NOTHING_FETCHED
    suite = TORCH if args.torch else TORCHAO
    folder, cache = args.folder.resolve(), Settings.from_env().cache
    build(cache)
    home = fresh(folder / "home" / "gpu")
    try:
        fetched = fetch(suite, folder, args.sources and args.sources.resolve())
    except NotFetched as err:
        print(f"{suite.sdist}: skipped, {err}")
        return NOTHING_FETCHED
    runners = [Runner(fetched, home, cache, fresh(folder / "parts" / str(i))) for i in range(args.workers)]
    every = [name for name in runners[0].names(suite) if is_run(name.lower(), args.torch)]
    names = every[:: max(1, len(every) // max(1, args.tests))]
    print(f"{len(names)} of {len(every)} tests", flush=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "sdist": suite.sdist, "tests": len(names)}
    name_of_file = f"gpu_foreign{'_torch' * args.torch}-{record.facts()['date'][:10]}"
    outcomes: dict[str, dict[str, str]] = {}
    for how in ("off", "counting", "routed"):
        if how == "routed":
            found["tuned"] = tune(runners[0], args.tune_s)
            print(found["tuned"], flush=True)
            before = foreign_suites._calls(home)
        outcomes[how] = in_parts(runners, how, names)
        found[how] = foreign_suites.kinds(outcomes[how].values())
        print(how, found[how], flush=True)
        record.save(name_of_file, found, args.out)  # as far as it is known, should this be cut off
    after = foreign_suites._calls(home)
    found["calls_routed"] = {outcome: calls - before.get(outcome, 0) for outcome, calls in after.items()}
    seen = set().union(*outcomes.values())
    differ = sorted(n for n in seen if len({outcomes[how].get(n) for how in outcomes}) > 1)
    found["differences"], found["unsteady"] = foreign_suites.again(runners[0], names, differ, outcomes)
    failed = [outcome for outcome in outcomes["off"].values() if outcome.startswith("failed")]
    found["why_they_fail"] = {why: failed.count(why) for why in sorted(set(failed))}
    print(f"calls {found['calls_routed']}, differences {found['differences']}, unsteady {found['unsteady']}")
    record.save(name_of_file, found, args.out)
    return 1 if found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
