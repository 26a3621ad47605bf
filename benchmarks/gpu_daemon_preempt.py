"""A part of gpu_daemon.py: when our work and its memory are gone from a GPU on which somebody starts."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_daemon_programs import Other, is_gone, say, sessions
from gpu_daemon_roles import p, used_bytes


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
        code = "import json, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        code += "from gpu_daemon_preempt import starts_on; "
        code += f"print(json.dumps(starts_on({gpu}, {device!r}, {seconds}, {most})))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
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
