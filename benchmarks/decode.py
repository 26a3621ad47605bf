"""Our kernels against F.linear at the sizes where decode spends its time, weights cold, inside CUDA graphs.

    python3 benchmarks/decode.py --out results --seconds 240
    python3 benchmarks/decode.py --out results --seconds 90 --replay-stress 100000
    python3 benchmarks/decode.py --out /tmp/dry --dry-run          (no GPU: interpreter, small shapes)
    python3 benchmarks/decode.py --out /tmp/dry --compile-only     (no GPU: every candidate, for sm_90)

Needs torch and triton only; gemmtuned need not be installed.  For every (N, K) and M all candidates are compiled in
other processes ahead of the device, checked against fp64, and timed briefly; the fastest are then timed in turns
with F.linear and the streaming floor.  Everything is kept: `trials.jsonl` (as it happens; a later run with
--resume goes on from it) and `decode.json`.

This process only watches: the one that measures may crash or hang on a bad candidate, is started again, and
leaves that candidate out.  It leads a process group of its own that is killed when it ends, because compiling processes
that outlive it would keep our output open, and GRACE_S after --seconds at the latest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(576, 7168), (2112, 7168), (1280, 8192), (256, 7168), (7168, 2048), (4096, 4096), (1536, 7168), (512, 16384)]
QUIET_S = 150.0  # a candidate that shows no progress for this long hangs
GRACE_S = 15.0  # after --seconds: for the shape at hand


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, default=240, help="start no new shape after this long")
    parser.add_argument("--m", default="8,1,16,4,32", help="rows of X, measured in this order")
    parser.add_argument("--shapes", default="", help="NxK,NxK,... instead of the eight of the issue")
    parser.add_argument("--limit", type=int, default=24, help="candidates a shape, all kernels together")
    parser.add_argument("--explore", type=int, default=0, help="more candidates a shape, drawn from what was left out")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of the final comparison")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compiling processes")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--resume", type=Path, help="trials.jsonl of an earlier run")
    parser.add_argument("--replay-stress", type=int, default=0, help="graph replays a stream of the reductions, first")
    parser.add_argument("--stress-only", action="store_true", help="nothing but the stress")
    parser.add_argument("--dry-run", action="store_true", help="interpreter on the CPU, small shapes")
    parser.add_argument("--compile-only", action="store_true", help="compile for sm_90 and report")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.m = [int(text) for text in options.m.split(",")]
    pairs = [tuple(int(size) for size in text.split("x")) for text in options.shapes.split(",") if text]
    options.shapes = pairs or ([(48, 256), (40, 136)] if options.dry_run else SHAPES)
    if options.dry_run:
        options.dtype = "fp16"  # the interpreter multiplies bf16 wrongly
    return options


def environment(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Where the measuring process finds gemmtuned without an installation, and Triton its cache."""
    (folder / "gemmtuned").symlink_to(ROOT / "gemmtuned")
    env = {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    if options.dry_run:
        env["TRITON_INTERPRET"] = "1"
    return env


def main() -> int:
    options = arguments()
    if options.child:
        from decode_device import measure_all  # beside this file

        return measure_all(options)
    options.out.mkdir(parents=True, exist_ok=True)
    trials = options.out / "trials.jsonl"
    if options.resume and options.resume.resolve() != trials.resolve():
        trials.write_bytes(options.resume.read_bytes())
    elif not options.resume:
        trials.write_bytes(b"")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `supervise` can clean up
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="decode-", ignore_cleanup_errors=True) as folder:
        env = environment(Path(folder), options)
        command = [sys.executable, "-s", __file__, *sys.argv[1:], "--child", "--started", str(started)]
        for attempt in range(6):
            left_s = started + options.seconds + GRACE_S - time.time()
            code = supervise(command, env, trials, left_s=left_s)
            if code == 0:
                return 0
            with trials.open("a") as file:
                file.write(json.dumps({"kind": "crash", "code": code, "attempt": attempt}) + "\n")
            print(f"measuring process ended with {code} on attempt {attempt}", flush=True)
            if time.time() - started > options.seconds:
                break
    return 1


def supervise(command: list[str], env: dict[str, str], trials: Path, *, left_s: float, quiet_s: float = QUIET_S) -> int:
    """Exit code of the measuring process; 124 when it was killed, for quiet_s without a new trial or after left_s.

    Nothing that it started is alive when this returns.
    """
    until = time.monotonic() + left_s
    child = subprocess.Popen(command, env=env, start_new_session=True)
    size, since = -1, time.monotonic()
    try:
        while (code := child.poll()) is None:
            time.sleep(0.1)
            now = trials.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() > min(until, since + quiet_s):
                return 124
        return code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
