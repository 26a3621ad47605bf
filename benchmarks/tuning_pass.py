"""How long a pass of the daemon takes, and what of it: compiling, screening, the races that decide.

    python -m benchmarks tuning_pass --out FOLDER [--m 1,8 --shapes 4096x4096,1024x4096 --seconds 300]

A program that runs linear layers of these sizes is counted, then `gemmtuned daemon --once` tunes into an empty home,
with the compiler's cache empty, too.  When what began is taken from the daemon's own trials: compiling is from the
verdict before to torch's own kernel, which is timed first.  In front of the first one that holds the second in which
the device is watched, and the start of the worker, too: it is apart in the summary, and in no median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

from gemmtuned.db.queries import ask

LAYERS = "2048x1024,1024x1024,1024x2048,3072x1024,1024x3072,4096x4096,1024x4096,12288x4096,4096x12288"  # of Qwen3
PARTS = ("compile", "screen", "decide")
PROGRAM = """
import json, sys, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
with torch.inference_mode():
    for m, n, k in json.loads(sys.argv[1]):
        x, w = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        for _ in range(100):
            torch.nn.functional.linear(x, w)
"""
TRIALS = """
SELECT p.text AS problem, t.phase, t.outcome, t.started_us / 1e6 AS at_s
FROM trial t JOIN problem p ON p.id = t.problem_id ORDER BY t.started_us
"""
VERDICTS = """
SELECT p.text AS problem, s.backend, s.state, s.published_us / 1e6 AS at_s
FROM solution s JOIN problem p ON p.id = s.problem_id WHERE s.mode = 'eager' ORDER BY s.published_us
"""


def main() -> None:
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-pass-"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AITER_", "GEMMTUNED_"))}
    env |= {"GEMMTUNED_HOME": str(folder / "home"), "TRITON_CACHE_DIR": str(folder / "triton")}
    problems = [(m, n, k) for m in map(int, args.m.split(",")) for n, k in record.sizes(args.shapes)]
    counted = {**env, "AITER_TUNE_GEMM": "1"}
    subprocess.run([sys.executable, "-P", "-m", "gemmtuned.hooks.native.build"], env=env, check=False)  # not beside it
    subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(problems)], env=counted, check=True)

    began_s = time.time()
    daemon = subprocess.Popen([sys.executable, "-m", "gemmtuned", "daemon", "--once", "--idle-s", "1"], env=env)
    try:
        code = daemon.wait(args.seconds)
    except subprocess.TimeoutExpired:
        daemon.send_signal(signal.SIGTERM)
        code = None
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
        daemon.kill()
    took_s = time.time() - began_s

    rows = timeline(folder / "home" / "tune.db", began_s)
    for row in rows:
        print(row)
    later = rows[1:]
    summary = {
        "problems": len(problems), "solved": len(rows), "seconds": round(took_s, 1), "in_time": code is not None,
        "first_compile_s": rows[0]["compile_s"] if rows else None,
        **{f"{part}_s": round(statistics.median(row[f"{part}_s"] for row in later), 2) for part in PARTS if later},
    }  # fmt: skip
    print(summary)
    print("saved", record.save("tuning_pass", {"benchmark": "tuning_pass", "summary": summary, "rows": rows}, args.out))


def timeline(database: Path, began_s: float) -> list[dict[str, Any]]:
    """Of each verdict, in order: seconds before the first candidate is timed, of screening, of what comes after it."""
    trials, rows = ask(database, TRIALS), []
    for verdict in ask(database, VERDICTS):
        own = [trial for trial in trials if trial["problem"] == verdict["problem"]]
        timed = [trial for trial in own if trial["outcome"] != "refused"]  # that is told with the compiler's begin
        screened = [trial["at_s"] for trial in timed if trial["phase"] == "screen"]
        later = [trial["at_s"] for trial in timed if trial["phase"] != "screen"]
        if not screened:
            continue
        first, decided = screened[0], later[0] if later else verdict["at_s"]
        rows.append({
            "problem": verdict["problem"], "backend": verdict["backend"], "state": verdict["state"],
            "timed": len(screened), "refused": len(own) - len(timed), "compile_s": round(first - began_s, 2),
            "screen_s": round(decided - first, 2), "decide_s": round(verdict["at_s"] - decided, 2),
        })  # fmt: skip
        began_s = verdict["at_s"]
    return rows


def arguments() -> argparse.Namespace:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="1,8", help="rows of X")
    parser.add_argument("--shapes", default=LAYERS, help="NxK,NxK,...")
    parser.add_argument("--seconds", type=float, default=300, help="longest the daemon may take")
    return parser.parse_args()


if __name__ == "__main__":
    main()
