"""GPUs as devices to tune on: what others do there, by NVML.

What is not known counts as busy, with the reason.  Three things are looked at: utilisation, memory held by others (a
loaded server that is quiet right now is still somebody's), and the modes in which we must stay away (MIG, exclusive).
While our own worker runs, utilisation says nothing by itself; then the use of each process is asked for, and a process
that is not ours counts.  In a container the driver's process numbers are not ours: the one process that
appeared with our worker is taken for it; when that is not clear, use is not known.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from gemmtuned.configs.settings import child_env
from gemmtuned.configs.solution import Device, slug
from gemmtuned.daemon.idle import Limits, Reading

ANSWER_S: Final = 5.0
BASELINE_BYTES: Final = 700 << 20  # what driver and firmware hold on a card nobody uses
NEEDED_BYTES: Final = 3 << 29  # 1.5 GiB: a context, cold copies of the operands, workspaces
SHARE_S: Final = 0.09  # one answer serves all GPUs of a turn
STALE_S: Final = 0.5  # an older answer is none

Facts = dict[str, Any]


class Nvml:
    """Asks daemon/nvml_child.py; a child that does not answer in time is replaced, and use is not known meanwhile."""

    def __init__(self, command: list[str] | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._command = command or [sys.executable, "-m", "gemmtuned.daemon.nvml_child"]
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._answer: dict[str, Facts] = {}
        self._asked_s: float | None = None  # since when an answer is due
        self._answered_s = float("-inf")
        self.error = ""

    def facts(self) -> dict[str, Facts]:
        """Every GPU by UUID as last answered; empty when NVML has not answered in time. Never waits."""
        now_s = self._clock()
        if self._asked_s is None and now_s - self._answered_s >= SHARE_S:
            self._ask(now_s)
        if self._asked_s is not None:
            self._listen(now_s)
        return self._answer

    def wait(self) -> dict[str, Facts]:
        """As facts(), but waits for the first answer; for the start of the daemon."""
        until_s = self._clock() + ANSWER_S
        while not self.facts() and not self.error and self._clock() < until_s:
            time.sleep(0.02)
        return self._answer

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _ask(self, now_s: float) -> None:
        try:
            if self._child is None or self._child.poll() is not None:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=child_env(AITER_TUNE_GEMM=None, GEMMTUNED_DISPATCH=None),
                )
            assert self._child.stdin is not None
            self._asked_s = now_s
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it said why before it ended
        except OSError as err:
            self._fail(f"cannot be started ({err})")

    def _listen(self, now_s: float) -> None:
        assert self._asked_s is not None
        if self._child is None or self._child.stdout is None:
            return
        if not select.select([self._child.stdout], [], [], 0)[0]:
            if now_s - self._asked_s > ANSWER_S:
                self._fail(f"no answer from the driver for {ANSWER_S:g} s")
            elif now_s - self._answered_s > STALE_S:
                self._answer = {}  # not known is busy; the answer may still come
            return
        try:
            raw = json.loads(self._child.stdout.readline())
        except ValueError:
            self._fail("NVML ended without an answer. Install it with: pip install nvidia-ml-py")
            return
        self._asked_s, self._answered_s = None, now_s
        self.error = str(raw.get("error", ""))
        self._answer = {gpu["uuid"]: gpu for gpu in raw.get("gpus", [])}

    def _fail(self, why: str) -> None:
        self.close()
        self._asked_s, self._answered_s, self._answer = None, self._clock(), {}
        self.error = f"GPU monitor: {why}"


class GpuMonitor:
    """One GPU; see daemon/devices.py: Monitor. share_resident: tune beside a loaded program that is quiet."""

    def __init__(self, nvml: Nvml, facts: Facts, *, share_resident: bool = False) -> None:
        self._nvml = nvml
        self._share_resident = share_resident
        self._ours: set[str] = set()
        self._before: set[str] | None = None  # processes on the card when our worker started
        self._last_s: float | None = None
        self.id = str(facts["uuid"])
        units = sm_count(facts)
        self._device = Device(
            key=f"cuda-{slug(facts['name'], 40)}-{units}",
            kind="cuda",
            name=facts["name"],
            arch=facts["arch"] or "unknown",
            units=units,
        )

    @property
    def device(self) -> Device:
        return self._device

    @property
    def limits(self) -> Limits:
        return Limits(clear=0.0, busy=0.01, free_bytes=NEEDED_BYTES)

    def adopt(self, pid: int) -> None:
        facts = self._nvml.facts().get(self.id)
        self._ours = {str(pid)}
        self._before = _pids(facts) if facts else None

    def read(self, now_s: float) -> Reading:
        facts = self._nvml.facts().get(self.id)
        since_s, self._last_s = self._last_s if self._last_s is not None else now_s, now_s
        if facts is None:
            self._last_s = None
            return Reading(now_s, now_s, None, None, self._nvml.error or f"{self.id} is gone")
        others, note = self._others(facts)
        if not 0 < now_s - since_s <= 60:
            since_s = now_s - 1e-6
        return Reading(since_s, now_s, others, facts["free_bytes"], note)

    def _others(self, facts: Facts) -> tuple[float | None, str]:
        if facts["mig"]:
            return None, "MIG is on: slices share clocks and bandwidth, we stay away"
        if facts["exclusive"]:
            return None, "the GPU is in exclusive mode"
        if facts["util"] is None or facts["used_bytes"] is None:
            return None, "the driver does not say how much the GPU is used"
        ours = self._ours_on(facts)
        if not ours:  # no worker of ours holds a context here
            if facts["used_bytes"] > BASELINE_BYTES and not self._share_resident:
                held = facts["used_bytes"] >> 20
                return None, f"others hold {held} MiB of its memory (--share-resident tunes beside a quiet program)"
            return facts["util"], f"utilisation {facts['util']:.0%}" if facts["util"] else ""
        if facts["by_pid"] is None:
            return None, "the driver does not say who uses the GPU while we do"
        foreign = max((used for pid, used in facts["by_pid"].items() if pid not in ours), default=0)
        return foreign / 100, "another process computes" if foreign else ""

    def _ours_on(self, facts: Facts) -> set[str]:
        here = _pids(facts)
        if self._ours & here:
            return self._ours
        if self._before is None:
            return set()
        new = here - self._before
        if len(new) == 1:  # the container's view: our worker under the host's number
            self._ours |= new
            return self._ours
        return set()


def sm_count(facts: Facts) -> int:
    """Streaming multiprocessors: NVML counts cores, 128 on each SM from sm_86 on and on sm_90, 64 on sm_80."""
    cores = facts.get("units")
    if not cores:
        return 0
    return int(cores) // (64 if facts.get("arch") in ("sm_70", "sm_75", "sm_80") else 128)


def find_gpus(*, share_resident: bool = False) -> list[GpuMonitor]:
    """A monitor for each NVIDIA GPU of this machine; none without NVML."""
    nvml = Nvml()
    found = [GpuMonitor(nvml, facts, share_resident=share_resident) for facts in nvml.wait().values()]
    if not found:
        nvml.close()
    return found


def _pids(facts: Facts) -> set[str]:
    return {str(pid) for pid in facts["pids"] or ()} | set(facts["by_pid"] or ())
