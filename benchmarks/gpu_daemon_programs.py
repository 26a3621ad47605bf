"""What the parts of gpu_daemon.py start and watch, other programs and tuning daemons, and how they report."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROLES = Path(__file__).resolve().with_name("gpu_daemon_roles.py")
STARTED = time.monotonic()
LINES: list[dict[str, Any]] = []  # of the part that runs


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
