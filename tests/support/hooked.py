"""Run small programs under the hook, each in a process and a home of its own, and plant what a daemon would publish."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import HERE, Forked, ForkServer, kill_group

from gemmtuned.configs.manifest import write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Solution

STUB = [  # of ours, what a program imports with the hook off
    "gemmtuned", "gemmtuned._autoload", "gemmtuned.configs", "gemmtuned.configs.errors", "gemmtuned.configs.numbers",
    "gemmtuned.configs.settings", "gemmtuned.configs.value_class",
]  # fmt: skip
LINEAR = Problem(m=4, n=8, k=16, dtype="fp32", threads=2)


@dataclass
class Done:
    """A program that has ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> Any:
        """The JSON on its last line."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])

    @property
    def ours(self) -> list[str]:
        """What the hook wrote on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("gemmtuned:")]


@dataclass
class Home:
    """A GEMMTUNED_HOME, and programs that use it."""

    path: Path
    cache: Path
    server: ForkServer | None = None

    def environment(self, **env: str) -> dict[str, str]:
        """For a hooked program: two threads, its counts flushed every 0.1 s."""
        ours = {
            "AITER_TUNE_GEMM": "1",
            "GEMMTUNED_QUIET": "1",
            "GEMMTUNED_HOME": str(self.path),
            "GEMMTUNED_DEVICE_LOCKS": str(self.path.parent / "locks"),
            "GEMMTUNED_CACHE": str(self.cache),
            "GEMMTUNED_FLUSH_S": "0.1",
            "GEMMTUNED_RUN": "test",
            "OMP_NUM_THREADS": "2",
            "MKL_NUM_THREADS": "2",
        }
        rest = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED_", "AITER_"))}
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**rest, "PYTHONPATH": path, **ours, **env}

    def compiling(self) -> Home:
        """The same one, for programs that call torch's compiler: they have it imported."""
        return self if self.server is None else Home(self.path, self.cache, self.server.compiling)

    def bare(self) -> Home:
        """The same one, for programs that are to import our modules themselves, and have torch."""
        return self if self.server is None else Home(self.path, self.cache, self.server.bare)

    def start(
        self, code: str, *args: str, fresh: bool = False, whole_end: bool = False, **env: str
    ) -> Forked | subprocess.Popen[str]:
        """Start a program, in a group of processes of its own.

        fresh: in a process that imports torch itself.  whole_end: it also takes torch apart in the end, as those do.
        """
        if self.server is not None and not fresh:
            return self.server.start(code, args, self.environment(**env), whole_end=whole_end)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", textwrap.dedent(code), *args],
            env=self.environment(**env),
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, code: str, *args: str, timeout_s: float = 90, fresh: bool = False, whole_end: bool = False, **env: str
    ) -> Done:
        """Run a program to its end; see `start`.

        When the time is over it is killed with all that it has started, so that nothing of it slows the next test.
        """
        if self.server is not None and not fresh:
            return Done(*self.server.run(code, args, self.environment(**env), timeout_s, whole_end=whole_end))
        process = self.start(code, *args, fresh=True, **env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            kill_group(process.pid)
            raise
        assert process.returncode is not None
        return Done(process.returncode, out, err)

    def run_ranks(self, count: int, code: str, *args: str, timeout_s: float = 90, **env: str) -> list[Done]:
        """Run `count` ranks of a program side by side; RENDEZVOUS names the file they meet in."""
        meet = self.path.parent / "rendezvous"
        meet.unlink(missing_ok=True)
        env |= {"WORLD_SIZE": str(count), "RENDEZVOUS": str(meet)}
        processes = [self.start(code, *args, RANK=str(rank), **env) for rank in range(count)]
        try:
            said = [process.communicate(timeout=timeout_s) for process in processes]
        except BaseException:
            for process in processes:
                kill_group(process.pid)
            raise
        return [Done(process.wait(), *texts) for process, texts in zip(processes, said, strict=True)]

    def counts(self) -> dict[tuple[str, str], int]:
        """(problem, outcome) -> calls, as the database has it."""
        conn = sqlite3.connect(self.path / "tune.db")
        try:
            conn.row_factory = sqlite3.Row
            sums: dict[tuple[str, str], int] = {}
            for row in conn.execute("SELECT * FROM every_sighting s JOIN problem p ON p.id = s.problem_id").fetchall():
                key = (row["text"], row["outcome"])
                sums[key] = sums.get(key, 0) + row["calls"]
            return sums
        finally:
            conn.close()

    def calls(self) -> int:
        """All calls in the database."""
        return sum(self.counts().values())


def run_interpreted(home: Home, program: str, *args: str) -> list[dict[str, Any]]:
    """The JSON lines of a program of this folder with these arguments; its kernels run in Triton's interpreter."""
    code = f"import runpy; runpy.run_path({str(HERE / program)!r}, run_name='__main__')"
    done = home.run(code, *args, timeout_s=110, AITER_TUNE_GEMM="0", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.code == 0, done.err[-2000:]
    return [json.loads(line) for line in done.out.splitlines()]


def solution(problem: Problem, backend: str, device: str, stamp: str, **columns: Any) -> Solution:
    """What a daemon would have found."""
    values: dict[str, Any] = {
        "mode": "eager", "covers": "exact", "config": "{}", "us": 5.0, "baseline_us": 10.0, "gain_low": 1.5,
        "err": 1e-6, "baseline_err": 1e-6, "state": "published", **columns,
    }  # fmt: skip
    return Solution(problem=problem, device=device, backend=backend, stamp=stamp, **values)


def published(problem: Problem, backend: str, **columns: Any) -> Solution:
    """A solution for this machine and this torch."""
    from gemmtuned.configs.solution import cpu_device

    here = cpu_device()
    stamp = columns.pop("stamp") if "stamp" in columns else _stamps(backend, here).get(backend, "none")
    return solution(problem, backend, columns.pop("device", here.key), stamp, **columns)


def _stamps(backend: str, here: Device) -> dict[str, str]:
    """Those of one backend: all of them are 4 ms, which tests with thousands of solutions would wait for."""
    from gemmtuned.kernels.stamps import stamps

    found = stamps(backend, here)
    if not found:
        from gemmtuned.kernels.backends import environment

        found = environment(here).stamps
    return found


def publish(folder: Path, solutions: Iterable[Solution], generation: int) -> None:
    """As the daemon does it."""
    write_tables(folder, {"test": solutions}, generation=generation)


def wait_for(what: Callable[[], Any], *, limit_s: float = 10.0, every_s: float = 0.02) -> Any:
    """The first true answer. Fails when there is none in time, in which waiting for a CPU does not count."""
    began_s, waited_s = time.monotonic(), 0.0
    before = _cpu_waits()
    while True:
        found = what()
        if found:
            return found
        took_s = time.monotonic() - began_s
        if took_s > limit_s:
            waited_s = max((s - before.get(thread, 0.0) for thread, s in _cpu_waits().items()), default=0.0)
            if took_s > limit_s + min(waited_s, 9 * limit_s):
                break
        time.sleep(every_s)
    raise AssertionError(f"not within {limit_s} s, and {waited_s:.1f} s in which a thread waited for a CPU: {what}")


def opened() -> dict[int, str]:
    """What each descriptor of this process leads to; one that a thread closes meanwhile is left out."""
    targets = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return targets


def _cpu_waits() -> dict[str, float]:
    """Seconds for which each thread of this process was ready to run and others had the CPUs, where Linux tells it."""
    waits = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):
            waits[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waits
