"""What a daemon that tunes does to others on the GPU: every part prints a line and keeps its own result file.

    python -m benchmarks gpu_daemon --out FOLDER                       # all parts, about 8 minutes on one GPU
    python -m benchmarks gpu_daemon --out FOLDER --parts preempt       # one part; preempt adds to what FOLDER has

    facts     what the driver tells about processes here: nobody, a loaded program, one that computes      15 s
    probe     1 kHz of small GEMMs, p99 alone and beside a daemon that watches, taking turns               70 s
    preempt   somebody starts on a GPU that is being tuned: when our work is gone, when its memory        110 s
    bursts    50 ms of work at 0.2, 1 and 5 Hz: does tuning ever start?                                    75 s
    resident  a loaded quiet server's first request, alone and while it is tuned beside it                 65 s
    faults    planted kernels: hang, out of bounds, seldom wrong, ...: none published, time lost          120 s
    slowed    races while the driver says (it is made to) that the device is hot: they do not count        30 s
    two       two GPUs: one busy and one idle, one idle, both idle                                        130 s

preempt makes 10 to 15 starts in its time on each of --gpus; --preempt-s 400, or 200 on two GPUs, makes the fifty that a
p99 needs.
A line that begins with WRONG is a failure.  --device cpu runs the logic of all but facts, faults, slowed and two.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record
from gpu_daemon_preempt import preempt
from gpu_daemon_programs import LINES, ROLES, Other, Tuning, is_gone, names, say, sessions

HERE = Path(__file__).resolve()


def facts(device: str, out: Path) -> dict[str, Any]:
    from gemmtuned.daemon.device.sampler import Sampler

    sampler = Sampler()
    seen: dict[str, Any] = {"error": "", "nobody": sampler.wait()}

    def look(name: str, seconds: float = 2.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answer = sampler.facts()
            time.sleep(0.1)
        seen[name] = answer
        keys = (
            "util", "peak", "used_bytes", "free_bytes", "pids", "by_pid", "held_by_pid", "compute_mode", "mig",
            "driver",
        )  # fmt: skip
        for gpu in answer.values():
            say(None, f"{name}: { ({k: gpu[k] for k in keys}) }")

    look("nobody")
    with Other("server", device) as server:
        say(None, f"the other program has pid {server.process.pid}")
        look("loaded")
        server.tell(busy=4.0)
        look("computing")
    look("gone")
    seen["error"] = sampler.error
    sampler.close()
    return seen


def probe(device: str, out: Path) -> dict[str, Any]:
    windows: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    with Other("probe", device) as other:
        other.ask(seconds=2.0)
        tuning = Tuning(device, "--idle-s", "10", "--devices", names(device))
        for turn in range(6):
            for arm in ("alone", "beside") if turn % 2 else ("beside", "alone"):
                with tuning if arm == "beside" else contextlib.nullcontext():
                    if arm == "beside":
                        tuning.until(10, lambda n: bool(n["state"]))
                    windows[arm].append(other.ask(seconds=4.0))
        tuned = any(" solved generation" in line for line in tuning.log())
    p99 = {arm: [w["p99_us"] for w in seen] for arm, seen in windows.items()}
    ratio = statistics.median(p99["beside"]) / statistics.median(p99["alone"])
    spread = max(p99["alone"]) / min(p99["alone"])
    say(
        ratio <= max(1.02, spread) and not tuned,
        f"probe p99 beside the daemon {ratio:.3f}x of alone; A/A {spread:.3f}x",
    )
    return {"windows": windows, "ratio": ratio, "aa_spread": spread, "tuned_meanwhile": tuned}


def bursts(device: str, out: Path) -> dict[str, Any]:
    seen = {}
    tuning = Tuning(device, "--idle-s", "10", "--share-resident", "--devices", names(device), count=8)
    with Other("server", device) as server:
        for hertz in (0.2, 1.0, 5.0):
            seconds = max(15.0, 6 / hertz)
            server.tell(bursts=hertz, seconds=seconds)
            with tuning:
                started = tuning.until(seconds - 1.5, lambda n: any(s["state"] == "tuning" for s in n["seats"]))
                reason = tuning.notice()["reason"]
            server.hear()
            seen[str(hertz)] = {"started": started is not None, "reason": reason}
            say(
                started is None, f"50 ms at {hertz:g} Hz: tuning {'started' if started else 'never started'} ({reason})"
            )
    return seen


def resident(device: str, out: Path) -> dict[str, Any]:
    alone, beside = [], []
    with Other("server", device) as server:
        for _ in range(6):
            time.sleep(1.5)
            alone.append(server.ask(request=1)["ms"])
        for worker in sessions(device, "--idle-s", "1", "--share-resident", seconds=40.0, most=12):
            began = time.monotonic()
            ms = server.ask(request=1)["ms"]
            while not is_gone(worker) and time.monotonic() < began + 3:
                server.ask(request=1)  # it goes on working: the daemon must see it
            beside.append({"ms": ms, "yielded_after_ms": (time.monotonic() - began) * 1e3})
    result = {"alone_ms": alone, "beside": beside}
    if not beside:
        say(False, "was never tuned beside the quiet server")
        return result
    first = statistics.median(alone)
    typical, worst = (f([b["ms"] for b in beside]) - first for f in (statistics.median, max))
    late = max(b["yielded_after_ms"] for b in beside)
    say(
        worst < 50,
        f"first request alone {first:.1f} ms; beside the worker {typical:+.1f} ms, at worst {worst:+.1f} ms; "
        f"the worker was gone after {late:.0f} ms at the latest ({len(beside)} times)",
    )
    return result


def faults(device: str, out: Path) -> dict[str, Any]:
    tuning = Tuning(device, count=5, planted=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROLES), "faults", "--device", device], env=tuning.env, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    took = time.monotonic() - began
    from gemmtuned.db import queries

    db = tuning.home / "tune.db"
    trials = [row for row in queries.trials(db) if row["backend"].startswith("planted")]
    published = [row["backend"] for row in queries.solutions(db)]
    worst: dict[str, dict[str, Any]] = {}
    for row in trials:
        bad = row["outcome"] not in ("ok", "slower")
        if bad or row["backend"] not in worst:
            worst[row["backend"]] = {"outcome": row["outcome"], "phase": row["phase"], "note": row["note"][:200]}
    for backend, row in sorted(worst.items()):
        caught = row["outcome"] not in ("ok", "slower")
        say(caught and backend not in published, f"{backend}: {row['outcome']} in {row['phase']}: {row['note'][:110]}")
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lost = [event for event in events if "lost_s" in event]
    for event in lost:
        say(event["lost_s"] < 30, f"a worker was lost to {event['candidate']}: {event['lost_s']:.1f} s")
    planted = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    missing = [name for name in planted if name not in worst]
    say(not missing, f"all {len(planted)} planted faults were tried" if not missing else f"never tried: {missing}")
    solved = {row["m"] for row in queries.solutions(db)}
    say(
        done.returncode == 0 and bool(solved),
        f"the others were solved, M = {sorted(solved)}, in {took:.0f} s, exit {done.returncode}",
    )
    if done.returncode:
        print(done.stderr[-3000:])
    return {"trials": worst, "published": published, "lost": lost, "took_s": took}


def slowed(device: str, out: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROLES), "slowed", "--device", device], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-3000:])
        say(False, f"exit {done.returncode}")
        return {}
    told = dict(json.loads(done.stdout.splitlines()[-1]))
    say(
        told["hot_readings"] > 0 and told["sometimes"]["backend"] == told["never"]["backend"],
        f"hot at every other look: {told['sometimes']['backend']} {told['sometimes']['us']:.1f} us, never hot: "
        f"{told['never']['backend']} {told['never']['us']:.1f} us, {told['hot_readings']} races run again",
    )
    say("slowed down" in told["always"], f"always hot: {told['always']}")
    return told


def two(device: str, out: Path) -> dict[str, Any]:
    from gemmtuned.daemon.device.sampler import Sampler

    sampler = Sampler()
    gpus = sorted(sampler.wait().values(), key=lambda gpu: gpu["index"])
    sampler.close()
    if len(gpus) < 2:
        say(None, "two GPUs are needed for this part")
        return {"gpus": len(gpus)}
    with Other("server", device, gpu=0) as server:
        server.tell(busy=40.0)
        with Tuning(device, "--idle-s", "1", "--devices", "cuda:0,cuda:1", count=1000) as tuning:
            tuning.until_tuning(30)
            end, used = time.monotonic() + 8, set()
            while time.monotonic() < end:
                used |= {s["name"] for s in tuning.notice()["seats"] if s["worker_pid"]}
                time.sleep(0.05)
            reason = tuning.notice()["reason"]
    say(used == {"cuda:1"}, f"one busy, one idle: used {sorted(used)} ({reason})")
    rate = {}
    for devices in ("cuda:0", "cuda:0,cuda:1"):
        count = devices.count(",") + 1  # other sizes in each, so that neither finds the other's kernels compiled
        with Tuning(device, "--idle-s", "1", "--devices", devices, count=2000, offset=8 * count) as tuning:
            tuning.until(40, lambda n, count=count: sum(s["state"] == "tuning" for s in n["seats"]) == count)
            time.sleep(2.0)
            began, solved = time.monotonic(), tuning.notice()["solved"]
            time.sleep(20.0)
            rate[devices] = 60 * (tuning.notice()["solved"] - solved) / (time.monotonic() - began)
    gain = rate["cuda:0,cuda:1"] / max(rate["cuda:0"], 1e-9)
    say(gain >= 1.8, f"problems a minute: one GPU {rate['cuda:0']:.0f}, two {rate['cuda:0,cuda:1']:.0f}: {gain:.2f}x")
    return {"used_one_busy": sorted(used), "problems_a_minute": rate, "gain": gain}


PARTS = {f.__name__: f for f in (facts, probe, preempt, bursts, resident, faults, slowed, two)}


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preempt-s", type=float, default=90.0, help="at most so long for preempt")
    parser.add_argument("--gpus", type=int, default=1, help="for preempt, side by side")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # daemons and other programs end with it
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        LINES.clear()
        began = time.monotonic()
        more = {"seconds": args.preempt_s, "gpus": args.gpus} if name == "preempt" else {}
        result = PARTS[name](args.device, args.out, **more)
        result |= {"benchmark": "gpu_daemon", "part": name, "took_s": time.monotonic() - began, "lines": list(LINES)}
        print("saved", _save(name, result, args.out, args.device), flush=True)


def _save(name: str, result: dict[str, Any], out: Path, device: str) -> Path:
    """As record.save, whose facts are asked in a process of their own: torch would take a context here."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(HERE.parent)!r}); import record; print(json.dumps(record.facts()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = out / f"gpu_daemon-{name}.json"
    command = {"command": " ".join([HERE.name, *(a for a in sys.argv[1:] if "/" not in a)])}
    path.write_text(json.dumps({**json.loads(told.stdout.splitlines()[-1]), **command, **result}, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
