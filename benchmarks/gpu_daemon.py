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
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from gpu_daemon_roles import p, used_bytes

HERE = Path(__file__).resolve()
ROLES = HERE.with_name("gpu_daemon_roles.py")
STARTED = time.monotonic()
LINES: list[dict[str, Any]] = []


def say(ok: bool | None, text: str) -> None:
    """ok: None for a fact that is neither right nor wrong."""
    mark = {True: "ok    ", False: "WRONG ", None: "      "}[ok]
    print(f"[{time.monotonic() - STARTED:5.0f} s] {mark} {text}", flush=True)
    LINES.append({"ok": ok, "text": text})


class Other:
    """Another program: gpu_daemon_roles.py, told what to do line by line, answering with JSON lines."""

    def __init__(self, role: str, device: str, *args: str, gpu: int | None = None) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AITER_", "GEMMTUNED_"))}
        if gpu is not None:
            env |= {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROLES), role, "--device", device, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        self.hear()

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()


class Tuning:
    """A daemon with a home full of problems, and what it says about itself."""

    def __init__(
        self,
        device: str,
        *options: str,
        count: int = 400,
        offset: int = 0,
        planted: bool = False,
        home: Path | None = None,
    ) -> None:
        self.home = home or Path(tempfile.mkdtemp(prefix="gemmtuned-"))
        self.env = {**os.environ, "GEMMTUNED_HOME": str(self.home), "GEMMTUNED_DEVICE_LOCKS": str(self.home)}
        if home is None:
            subprocess.run(
                [
                    sys.executable, str(ROLES), "seed", "--device", device, "--count", str(count),
                    "--offset", str(offset), *(["--planted"] if planted else []),
                ],
                env=self.env, check=True,
            )  # fmt: skip
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Tuning:
        log = (self.home / "daemon.log").open("ab")
        command = [sys.executable, "-P", "-m", "gemmtuned", "daemon", *self.options]
        self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(10)

    def notice(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            notice = json.loads((self.home / "daemon.json").read_text())
            if self.process is not None and notice["pid"] == self.process.pid:
                return dict(notice)
        return {"seats": [], "state": "", "reason": "", "solved": 0}

    def until(self, seconds: float, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """The first notice of which this holds; None when there was none in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            notice = self.notice()
            if what(notice):
                return notice
            time.sleep(0.01)
        return None

    def until_tuning(self, seconds: float = 30.0) -> int | None:
        """The worker's number once it is at a problem."""
        notice = self.until(seconds, lambda n: any(s["state"] == "tuning" for s in n["seats"]))
        return next((s["worker_pid"] for s in notice["seats"] if s["state"] == "tuning"), None) if notice else None

    def log(self) -> list[str]:
        return (self.home / "daemon.log").read_text().splitlines()


def names(device: str, gpu: int = 0) -> str:
    return "cpu" if device == "cpu" else f"cuda:{gpu}"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# --- the parts


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


def sessions(device: str, *options: str, seconds: float, most: int, gpu: int = 0) -> Iterator[int]:
    """Workers that are at a problem, at no particular moment of their search; the caller makes the daemon give way."""
    end = time.monotonic() + seconds
    home: Path | None = None
    given = 0
    while given < most and time.monotonic() < end:
        with Tuning(device, *options, "--devices", names(device, gpu), home=home) as tuning:
            home = tuning.home
            for _ in range(3):  # after more yields in a row without a result it waits longer and longer, as it should
                worker = tuning.until_tuning(min(20.0, max(end - time.monotonic(), 0.1)))
                if worker is None or given == most:
                    break
                time.sleep(0.1 + 0.037 * (given % 20))
                if not is_gone(worker):
                    given += 1
                    yield worker


def preempt(device: str, out: Path, seconds: float = 90.0, gpus: int = 1) -> dict[str, Any]:
    """A program that has torch loaded starts to use the GPU; its own start is the time its first kernel has run."""
    more = out / "gpu_daemon-preempt.json"
    starts = json.loads(more.read_text())["starts"] if more.exists() else []
    wanted = -(-(50 - len(starts)) // gpus)
    with contextlib.ExitStack() as stack:  # each GPU with a daemon and a program of its own
        turns = [stack.enter_context(_Starts(gpu, device, seconds, wanted)) for gpu in range(gpus)]
        for turn in turns:
            starts += turn.wait()
    result = {"starts": starts, "gpus": gpus}
    free = [s["free_ms"] for s in starts if s["free_ms"] is not None]
    memory = [s["memory_s"] for s in starts if s["memory_s"] is not None]
    if not free:
        say(False, f"{len(starts)} starts, and the daemon never gave way")
        return result
    init_ms = statistics.median(s["init_ms"] for s in starts)
    say(
        len(free) == len(starts) and p(free, 0.99) < 500,
        f"{len(starts)} starts: free of our work median {statistics.median(free):.0f} ms, p99 {p(free, 0.99):.0f} ms "
        f"after their first kernel (median {init_ms:.0f} ms after they began to use CUDA)",
    )
    if memory:
        say(p(memory, 0.99) < 2.0 and len(memory) == len(starts), f"memory back after p99 {p(memory, 0.99):.2f} s")
    if len(starts) < 50:
        say(None, f"{50 - len(starts)} more starts: run --parts preempt again with the same --out")
    return result


class _Starts:
    """The starts on one GPU, made by a process of their own, which ends its daemon when it is ended."""

    def __init__(self, gpu: int, device: str, seconds: float, most: int) -> None:
        code = "import json, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); import gpu_daemon; "
        code += f"print(json.dumps(gpu_daemon.starts_on({gpu}, {device!r}, {seconds}, {most})))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=HERE.parent, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> list[dict[str, Any]]:
        said, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the starts on a GPU ended with {self._process.returncode}")
        return list(json.loads(said.splitlines()[-1]))

    def __enter__(self) -> _Starts:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(20)


def starts_on(gpu: int, device: str, seconds: float, most: int) -> list[dict[str, Any]]:
    """What a program's starts on a GPU that is being tuned looked like."""
    starts: list[dict[str, Any]] = []
    floor = used_bytes(gpu)
    with Other("guest", device, "--gpu", str(gpu), gpu=gpu) as guest:
        alone = guest.ask(hold=1.5)  # what it holds by itself
        time.sleep(1.0)
        for worker in sessions(device, "--idle-s", "0.5", seconds=seconds, most=most, gpu=gpu):
            guest.tell(hold=1.2)
            watch = _watch_worker(worker, gpu, alone["used_bytes"], floor, 3.0)
            told = guest.hear()
            free_ms = (watch["gone_s"] - told["first_s"]) * 1e3 if watch["gone_s"] else None
            memory_s = watch["memory_s"] - told["first_s"] if watch["memory_s"] else None
            init_ms = (told["first_s"] - told["begun_s"]) * 1e3
            starts.append({"gpu": gpu, "free_ms": free_ms, "memory_s": memory_s, "init_ms": init_ms})
    return starts


def _watch_worker(
    worker: int, gpu: int, guest: int | None, floor: int | None, seconds: float
) -> dict[str, float | None]:
    """When the worker was gone, and when the GPU's use was down to the guest's own, or to nobody's after its end."""
    end = time.time() + seconds
    gone_s = memory_s = None
    while time.time() < end and (gone_s is None or memory_s is None):
        if gone_s is None and is_gone(worker):
            gone_s = time.time()
        if gone_s is not None:
            used = used_bytes(gpu)
            if used is None or guest is None or floor is None:
                break
            if used <= guest + (64 << 20) or used <= floor + (64 << 20):
                memory_s = time.time()
        time.sleep(0.002)
    return {"gone_s": gone_s, "memory_s": memory_s}


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
