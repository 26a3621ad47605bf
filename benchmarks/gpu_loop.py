"""The whole loop on one GPU with an unchanged program: docs/examples/decode.py, hooked beside an un-hooked twin.

    python -m benchmarks gpu_loop --out FOLDER [--size 0.6B --batches 1 8 --tune-s 240]

Tokens/s before and after one idle tuning pass (`gemmtuned daemon --once --share-resident`), the two programs taking
turns; then coverage, gains, and how soon the running program had the last publish.

A program that takes the GPU over from another one runs its first graphs at another speed (stock faster) than
it has from then on.  So each turn is two requests; the second one
counts, and the first is in the result as `first_of_turn`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(tempfile.mkdtemp(prefix="gemmtuned-"))
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


class Program:
    """One decode.py --serve."""

    def __init__(self, name: str, size: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AITER_", "GEMMTUNED_"))}
        if name == "hooked":
            env |= {"AITER_TUNE_GEMM": "1", "GEMMTUNED_HOME": str(HOME)}
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "docs/examples/decode.py"), "--serve", "--size", size],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        if request:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def rounds(programs: list[Program], batches: list[int], count: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Tokens/s by program and batch; the first requests of the turns stand under "<name> first_of_turn"."""
    names = [p.name + suffix for suffix in ("", " first_of_turn") for p in programs]
    out: dict[str, dict[str, list[float]]] = {name: {str(b): [] for b in batches} for name in names}
    for number in range(count):
        for batch in batches:
            for program in programs if number % 2 else reversed(programs):
                for suffix in (" first_of_turn", ""):
                    seen = program.ask(batch=batch, steps=steps)
                    out[program.name + suffix][str(batch)].append(seen["tokens"] / seen["seconds"])
    return out


def show(title: str, seen: dict[str, dict[str, list[float]]]) -> None:
    for batch, values in seen["hooked"].items():
        ratios = sorted(h / s for h, s in zip(values, seen["stock"][batch], strict=True))
        stock = statistics.median(seen["stock"][batch])
        say(
            f"{title}, batch {batch}: stock {stock:.1f} tokens/s, hooked {statistics.median(values):.1f}: "
            f"{statistics.median(ratios):.3f}x [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        )


def gemmtuned(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GEMMTUNED_HOME": str(HOME), "COLUMNS": "160"}
    command = [sys.executable, "-P", "-m", "gemmtuned", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=timeout)


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--tune-s", type=float, default=240, help="at most this long for tuning")
    args = parser.parse_args()
    subprocess.run([sys.executable, "-P", "-m", "gemmtuned.hooks.native.build"], check=False)
    programs = [Program("stock", args.size), Program("hooked", args.size)]
    for program in programs:
        program.ask()
    say("both programs are loaded")
    rounds(programs, args.batches, 1, 16)
    before = rounds(programs, args.batches, args.rounds, args.steps)
    show("before", before)
    time.sleep(1.5)
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "daemon.log"
    with log.open("w") as sink:
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "gemmtuned", "daemon", "--once", "--share-resident", "--idle-s", "1"],
            env={**os.environ, "GEMMTUNED_HOME": str(HOME)}, stdout=sink, stderr=sink,
        )  # fmt: skip
        try:
            code = daemon.wait(args.tune_s)
        except subprocess.TimeoutExpired:
            print(gemmtuned("status").stdout)
            daemon.terminate()
            code = daemon.wait(10)
    tuned_s = time.monotonic() - began
    say(f"daemon ended with {code} after {tuned_s:.0f} s; its last lines:")
    print("".join(log.read_text().splitlines(keepends=True)[-6:]))
    time.sleep(1.5)
    after = rounds(programs, args.batches, args.rounds, args.steps)
    show("after", after)
    time.sleep(1.5)
    coverage = json.loads(gemmtuned("coverage", "--json").stdout)["rows"]
    sessions = json.loads(gemmtuned("status", "--json").stdout)["sessions"]
    manifest_file = HOME / "configs/manifest.json"
    delay = None
    if manifest_file.exists():
        manifest = json.loads(manifest_file.read_text())
        created = datetime.fromisoformat(manifest["created"]).timestamp()
        delay = [s["active_us"] / 1e6 - created for s in sessions if s["generation"] == manifest["generation"]]
    for row in coverage:
        if row["time_us"]:
            say(f"{row['family']} {row['device']}: {row['covered_time_us'] / row['time_us']:.1%} of GEMM time covered")
    say(f"active after publish: {delay} s")
    print(gemmtuned("gains").stdout)
    result = {
        "benchmark": "gpu_loop", "size": args.size, "tokens_per_s": {"before": before, "after": after},
        "tuned_s": tuned_s, "daemon_code": code, "coverage": coverage, "active_after_s": delay,
        "solutions": json.loads(gemmtuned("gains", "--json").stdout).get("rows", []),
    }  # fmt: skip
    print("saved", record.save("gpu_loop", result, args.out))
    for program in programs:
        program.process.kill()


if __name__ == "__main__":
    main()
