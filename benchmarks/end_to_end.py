"""Decode of whole models with and without gemmtuned: tokens/s of each arm in turn, and where the difference comes from.

    python -m benchmarks end_to_end --out FOLDER --home HOME --sizes 0.6B 1.7B --no-reload --seconds 570
    python -m benchmarks end_to_end --out FOLDER --home HOME --sizes 8B --seconds 540
    python -m benchmarks end_to_end --out FOLDER --sizes tiny --seconds 60      (no GPU: a dry run of everything)

Models of docs/examples/decode.py (random weights, static cache), each in modes eager, graph and compiled+graph at each
batch, with four arms in one process (end_to_end_model.py):

    stock, again   without the hook, twice: what they differ by is noise
    untuned        GEMMTUNED=1, nothing tuned
    tuned          the same after one idle pass of the daemon

and at the end 100 publishes while threads decode (end_to_end_reload.py).  Each model is measured by a process of its
own, which keeps what it has in FOLDER/end_to_end-SIZE.json: a second call measures what is not there, and tunes on
in HOME.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

HERE = Path(__file__).resolve().parent
MODES = ("eager", "graph", "compiled")
LEAST_S = 10.0  # for each part, whatever was asked for
RELOAD_S = 60.0  # what the publishes under load may take, kept free at the end


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, and to go on from")
    parser.add_argument(
        "--home", type=Path, help="GEMMTUNED_HOME of the run, to go on tuning in; default: home in --out"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["0.6B", "1.7B", "8B"], help="of docs/examples/decode.py, or tiny"
    )
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--weights", choices=("plain", "fp8"), default="plain", help="fp8: with one scale a row")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=11, help="of all arms; fewer when the time is up, but 5")
    parser.add_argument("--steps", type=int, default=64, help="of a block in a graph; an eager block has an eighth")
    parser.add_argument("--tune-s", type=float, default=120, help="longest a model may be tuned")
    parser.add_argument("--seconds", type=float, default=540, help="for the whole run")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--no-reload", action="store_true", help="leave the publishes under load out")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    until = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    args.home = (args.home or args.out / "home").absolute()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AITER_", "GEMMTUNED_"))}
    env |= {"GEMMTUNED_HOME": str(args.home), "PYTHONUNBUFFERED": "1"}
    env |= {"GEMMTUNED_CACHE": os.environ["GEMMTUNED_CACHE"]} if "GEMMTUNED_CACHE" in os.environ else {}
    subprocess.run([sys.executable, "-P", "-m", "gemmtuned.hooks.native.build"], env=env, check=False)
    failed = []
    for i, size in enumerate(args.sizes):
        part = args.out / f"end_to_end-{size}.json"
        if part.exists() and json.loads(part.read_text()).get("done") and not args.fresh:
            print(f"{size}: measured already, {part}", flush=True)
            continue
        left_s = until - time.monotonic() - (0 if args.no_reload else RELOAD_S)
        share_s = max(left_s / (len(args.sizes) - i), LEAST_S)
        if not run("end_to_end_model.py", size, part, args, env, share_s):
            failed.append(size)
    if not args.no_reload:
        part = args.out / "end_to_end-reload.json"
        if not (part.exists() and not args.fresh) and not run(
            "end_to_end_reload.py",
            "tiny" if "tiny" in args.sizes else "0.6B",
            part,
            args,
            env,
            max(min(RELOAD_S, until - time.monotonic()), LEAST_S),
        ):
            failed.append("reload")
    sizes = {
        part.stem.removeprefix("end_to_end-"): json.loads(part.read_text())
        for part in sorted(args.out.glob("end_to_end-*.json"))
    }
    reload = sizes.pop("reload", None)
    print(table(sizes))
    if reload:
        print(f"reload under load: {json.dumps(reload['summary'])}")
    result = {"benchmark": "end_to_end", "sizes": sizes, "reload": reload, "failed": failed}
    print("saved", record.save("end_to_end", result, args.out))
    return 1 if failed else 0


def run(script: str, size: str, part: Path, args: argparse.Namespace, env: dict[str, str], seconds: float) -> bool:
    """One measuring process to its end; False when it failed or took a minute longer than it was given."""
    command = [
        sys.executable,
        "-P",
        str(HERE / script),
        "--size",
        size,
        "--part",
        str(part),
        "--seconds",
        f"{seconds:.0f}",
    ]
    for name in ("layers", "rounds", "steps", "tune_s"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if script == "end_to_end_model.py":
        command += ["--weights", args.weights]
    command += ["--modes", *args.modes, "--batches", *map(str, args.batches)]
    print(f"{script} {size}: {seconds:.0f} s", flush=True)
    child = subprocess.Popen(command, env={**env, "GEMMTUNED_RUN": size}, start_new_session=True)
    try:
        return child.wait(seconds + 60) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):  # a daemon that it started, compilers of that
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def table(sizes: dict[str, Any]) -> str:
    """A line a case: gains over the stock arm with their intervals, and what the kernels had promised."""
    head = ("layer sizes of", "mode", "batch", "stock tokens/s", "stock again", "untuned", "tuned", "GEMM share")
    head += ("GEMM gain: races, in the model", "promised", "seen over promised")
    lines, notes = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)], [""]
    for size, part in sizes.items():
        for case in part["cases"]:
            if "arms" not in case:
                notes.append(f"{size} {case['mode']} batch {case['batch']}: {case['left_out']}")
                continue
            g, tuned = case["gemm"], case["arms"]["tuned"]
            cells = [size, case["mode"], str(case["batch"]), f"{case['stock_tokens_per_s']:.1f}"]
            cells += [interval(case["arms"][arm]) for arm in ("again", "untuned")] + [f"**{interval(tuned)}**"]
            cells += [f"{g['share']:.2f}", f"{g['gain_races']:.2f}, {g['gain_in_model']:.2f}", f"{g['promised']:.3f}"]
            lines.append("| " + " | ".join([*cells, f"{tuned['ratio'] / g['promised'] - 1:+.1%}"]) + " |")
        timed = [row for row in part.get("coverage", []) if row["time_us"]]
        covered = ", ".join(
            f"{row['family']} {row['covered_time_us'] / row['time_us']:.1%} on {row['device']}" for row in timed
        )
        notes.append(f"{size}: GEMM time covered: {covered or 'unknown'}")
    return "\n".join([*lines, *notes])


def interval(arm: dict[str, float]) -> str:
    return f"{arm['ratio']:.3f}x [{arm['low']:.3f}, {arm['high']:.3f}]"


if __name__ == "__main__":
    raise SystemExit(main())
