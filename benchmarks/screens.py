"""What people look at, of a store with 100,000 problems and a year of hours: `gemmtuned top` and `gemmtuned report`.

    python -m benchmarks screens [--home FOLDER] [--seconds 60]

top: its share of a core at two looks a second, on a terminal of 132 x 40, and the daemon's with and without it, in one
run; the daemon is paused, so that it tunes nothing meanwhile.  report: wall and CPU seconds of the command, start
included, the best of three, and the size of the page.  The store is written first (one to two minutes) unless FOLDER
has one, all else takes some four minutes; each step is told on stderr.
"""

from __future__ import annotations

import fcntl
import os
import pty
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any, Final

import psutil
import record
import wide_store

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.settings import child_env
from gemmtuned.daemon.watch.ask import ask

RUNS: Final = 3
WARM_S: Final = 15.0  # import, first look, first picture
LIMITS: Final = {"top_share_of_a_core": 0.05, "report_s": 10.0, "report_bytes": 5_000_000}
SIZE: Final = (40, 132)


def say(what: str) -> None:
    """One line of progress, apart from the figures."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def share(process: psutil.Process, seconds: float) -> float:
    """Of a core, that this process alone uses."""

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before, began_s = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began_s)


def top(env: dict[str, str], home: Path, seconds: float) -> dict[str, Any]:
    """Shares of a core: of the daemon alone, of the daemon while it is watched, and of `top`."""
    say("a daemon starts")
    daemon = subprocess.Popen([sys.executable, "-m", "gemmtuned", "daemon"], env=env, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            try:
                if ask(home)["notice"]:
                    break
            except TryLater:
                pass
            time.sleep(0.5)
        else:
            raise SystemExit("the daemon has answered nothing in two minutes")
        time.sleep(WARM_S)
        say(f"the daemon alone, {seconds:.0f} s")
        alone = share(psutil.Process(daemon.pid), seconds)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *SIZE, 0, 0))
        shown: list[int] = []
        watching = subprocess.Popen(
            [sys.executable, "-m", "gemmtuned", "top"], env={**env, "TERM": "xterm-256color"}, stdin=theirs,
            stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=_drain, args=(ours, shown), daemon=True).start()
        time.sleep(WARM_S)
        at = sum(shown)
        say(f"top beside it, {seconds:.0f} s")
        pair: dict[str, float] = {}
        other = threading.Thread(target=lambda: pair.update(daemon=share(psutil.Process(daemon.pid), seconds)))
        other.start()
        watched = share(psutil.Process(watching.pid), seconds)
        other.join()
        memory = psutil.Process(watching.pid).memory_info().rss
        watching.terminate()
        watching.wait(20)
    finally:
        daemon.terminate()
        daemon.wait(60)
    return {
        "top_share_of_a_core": round(watched, 4),
        "top_resident_bytes": memory,
        "top_bytes_drawn": sum(shown) - at,
        "daemon_share_of_a_core_alone": round(alone, 4),
        "daemon_share_of_a_core_watched": round(pair["daemon"], 4),
        "seconds": seconds,
    }


def _drain(terminal: int, shown: list[int]) -> None:
    try:
        while chunk := os.read(terminal, 65536):
            shown.append(len(chunk))
    except OSError:  # the other end is closed
        pass


def report(env: dict[str, str], folder: Path) -> dict[str, Any]:
    """[wall, CPU] seconds of the best of a few runs, and the bytes of the page, of all the year."""
    page = folder / "report.html"
    taken = []
    for _ in range(RUNS):
        began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "gemmtuned", "report", "--since", "365d", "--out", str(page)]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        taken.append((time.monotonic() - began_s, cpu_s))
        say(f"report {len(taken)} of {RUNS}: {taken[-1][0]:.1f} s")
    return {
        "report_s": [round(min(wall for wall, _ in taken), 2), round(min(cpu for _, cpu in taken), 2)],
        "report_bytes": page.stat().st_size,
    }


def main() -> None:
    """Measure, print, write the result file."""
    parser = record.arguments(__doc__)
    parser.add_argument("--home", type=Path, help="where the store is, or is written")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = given.home or Path(scratch)
        rows = {} if (home / "tune.db").exists() else wide_store.write(home)
        env = child_env(GEMMTUNED_HOME=str(home))
        (home / "paused").touch()
        result = {
            "rows": rows or wide_store.rows(home),
            "load_before": [round(load, 2) for load in os.getloadavg()],
            "limits": LIMITS,
            **report(env, Path(scratch)),
            **top(env, home, given.seconds),
        }
    print(result)
    print(record.save(f"screens-{time.strftime('%Y-%m-%d')}", result, given.out))


if __name__ == "__main__":
    main()
