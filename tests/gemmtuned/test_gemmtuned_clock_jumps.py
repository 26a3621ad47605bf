"""The wall clock jumps for all processes of a home at once, while daemons are killed and stopped: no call is lost."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hooked import HERE, Home

from gemmtuned.db.store import check

pytestmark = pytest.mark.soak

HOUR_S, DAY_S = 3600, 86_400
JUMPS_S = (0, 0, 7, -7, HOUR_S, -HOUR_S, 3 * DAY_S, -3 * DAY_S, 40 * DAY_S, -400 * DAY_S)
STORM_S = 60.0
COUNTING = """
    import os, sys, time, torch
    calls, forks, end = 0, int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        torch.mm(torch.ones(1 + calls % 5, 24), torch.ones(24, 16))
        calls += 1
        time.sleep(0.002)
        if forks and calls % 100 == 0:
            forks -= 1
            if os.fork() == 0:
                calls = forks = 0
    os.write(1, f"{calls}\\n".encode())
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    """
COMMANDS = (
    ("coverage", "--json"), ("status", "--json"), ("untuned", "--json"), ("gains", "--json"), ("db", "vacuum"),
    ("db", "check"), ("db", "publish"), ("db", "backup", "copy.db"),
)  # fmt: skip


class Storm:
    """One home, of which all processes have the clock of a file."""

    def __init__(self, home: Home, library: Path, seed: int) -> None:
        self.home, self.dice = home, random.Random(seed)
        self.clock = home.path.parent / "clock"
        self.clock.write_bytes(bytes(8))
        self.env = {
            "LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self.clock), "GEMMTUNED_IDLE_S": "0.2",
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",  # OpenMP's threads do not live in a forked child
        }  # fmt: skip
        self.programs: dict[str, subprocess.Popen[str]] = {}
        self.daemon = self.command("daemon")
        self.failed: list[str] = []

    def command(self, *words: str) -> subprocess.Popen[str]:
        """A command in a group of its own; what it says goes to a file, since it may be much."""
        env = self.home.environment(**self.env, AITER_TUNE_GEMM="0")
        with (self.home.path.parent / "said").open("a") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "gemmtuned", *words],
                cwd=self.home.path.parent, env=env, stdout=said, stderr=said, text=True, start_new_session=True,
            )  # fmt: skip

    def jump(self) -> None:
        with self.clock.open("r+b") as file:
            file.write(self.dice.choice(JUMPS_S).to_bytes(8, sys.byteorder, signed=True))

    def turn(self) -> None:
        """One thing of what may happen."""
        while sum(program.poll() is None for program in self.programs.values()) < 2:
            run = f"job-{len(self.programs)}"
            forks, for_s = self.dice.choice((0, 0, 2)), self.dice.uniform(0.5, 5)
            self.programs[run] = self.home.start(  # type: ignore[assignment]
                COUNTING, str(forks), str(for_s), fresh=True, GEMMTUNED_RUN=run, **self.env
            )
        if self.daemon.poll() is not None:
            self.daemon = self.command("daemon")
        what = self.dice.random()
        if what < 0.3:
            self.jump()
        elif what < 0.4:
            self.daemon.send_signal(signal.SIGKILL)
            self.daemon.wait(20)
        elif what < 0.6:
            self.pause(self.daemon)
        elif what < 0.8:
            words = self.dice.choice(COMMANDS)
            with self.command(*words) as process:
                if self.dice.random() < 0.5:
                    self.pause(process)
                if process.wait(60):
                    self.failed.append(" ".join(words))
        else:
            time.sleep(0.3)

    def pause(self, process: subprocess.Popen[str]) -> None:
        """Stop it for a while, wherever it is: it may hold the lock."""
        time.sleep(self.dice.uniform(0, 0.3))
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
            time.sleep(self.dice.uniform(0, 3))
            process.send_signal(signal.SIGCONT)


def test_no_call_is_lost_while_the_clock_jumps_and_daemons_are_killed(tmp_path: Path, native_cache: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a compiler of C")
    library = tmp_path / "jumping_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "jumping_clock.c"], check=True)
    storm = Storm(Home(tmp_path / "home", native_cache), library, seed=31)
    end = time.monotonic() + STORM_S
    while time.monotonic() < end:
        storm.turn()
    told = {}
    for run, program in storm.programs.items():
        out, err = program.communicate(timeout=60)
        assert program.returncode == 0 and "gemmtuned: counts were lost" not in err, (run, err)
        told[run] = sum(map(int, out.split()))
    storm.daemon.terminate()
    assert storm.daemon.wait(30) in (0, 143)

    said = (tmp_path / "said").read_text()
    assert not storm.failed and "Traceback" not in said, (storm.failed, said[-2000:])
    db = storm.home.path / "tune.db"
    with closing(sqlite3.connect(db)) as conn:
        sql = "SELECT r.name, sum(calls) FROM every_sighting s JOIN run r ON r.id = s.run_id GROUP BY 1"
        counted = dict(conn.execute(sql).fetchall())
        days = conn.execute("SELECT count(DISTINCT hour / 24) FROM every_sighting").fetchone()[0]
        (demanded,) = conn.execute("SELECT total(calls) FROM demand").fetchone()
    assert counted == told and demanded == sum(told.values()) and len(told) > 5, json.dumps([counted, told])
    assert days > 2, "the clock has jumped for them"
    assert check(db) == []
