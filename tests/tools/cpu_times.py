"""CPU seconds for each test, with all that it starts: `pytest --cpu-times FILE ...` writes them as JSON lines.

Wall time says little on a machine that others use, CPU time says what a test costs.  A test that takes more than
LIMIT_S of it and has none of the markers MARKED fails, so that `make test` stays as short as it is: five seconds on a
machine of one's own, and twice as much where others share its caches.  What fixtures take is written down with the test
that they were made for, and fails none.

    python tests/tools/cpu_times.py FILE      # what a run wrote: by file, then the dearest tests
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

LIMIT_S: Final = 10.0
MARKED: Final = ("slow", "long", "soak", "gpu")
_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")
_getpid, _waitid = os.getpid, os.waitid  # a test may replace them
_ME = str(_getpid())
_elsewhere_s = 0.0


def used_s() -> float:
    """CPU seconds of this process, of all children that have ended, of all descendants that run, and those of `add`."""
    own_s = sum(os.times()[:4]) + _elsewhere_s
    try:
        _waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # to look for descendants takes ten times as long, thrice a test
        return own_s
    return own_s + sum(map(_used_s, _descendants(_ME)))


def add(seconds: float) -> None:
    """Count what a process that is no descendant of this one has used for it."""
    global _elsewhere_s
    _elsewhere_s += seconds


def _descendants(pid: str) -> Iterator[str]:
    """All processes below this one; a process that ends meanwhile is left out."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = file.read().split()
            for child in children:
                yield child
                yield from _descendants(child)


def _used_s(pid: str) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_A_S  # utime, stime, cutime, cstime


class CpuTimes:
    """Measures each phase of each test; in the process that the user started it also writes them down."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._before_s = used_s()
        os.register_at_fork(after_in_child=self._in_a_fork)

    def _in_a_fork(self) -> None:
        """Count from nothing, and leave it to the parent to write (side_by_side.py)."""
        global _ME, _elsewhere_s
        _ME, _elsewhere_s, self._before_s, self._file = str(_getpid()), 0.0, 0.0, None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        report: Any = outcome.get_result()
        now_s = used_s()
        report.cpu_s, self._before_s = now_s - self._before_s, now_s
        marked = any(item.get_closest_marker(name) for name in MARKED)
        if report.when == "call" and report.passed and report.cpu_s > LIMIT_S and not marked:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {report.cpu_s:.1f} s of CPU time, at most {LIMIT_S:g} s are allowed without a "
                "marker: make it shorter, or mark it `long` (for `make long`) or `slow` (it stays in `make test`)"
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is not None:
            row = {"test": report.nodeid, "phase": report.when, "cpu_s": round(getattr(report, "cpu_s", 0.0), 3)}
            row |= {"wall_s": round(report.duration, 3), "outcome": report.outcome}
            with self._file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def table(file: Path, most: int = 30) -> str:
    """By file: CPU seconds, seconds, tests. Then the dearest tests: CPU seconds of fixtures, and of themselves."""
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    tests: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in file.read_text().splitlines():
        row = json.loads(line)
        sums = files[row["test"].partition("::")[0]]
        sums[0] += row["cpu_s"]
        sums[1] += row["wall_s"]
        sums[2] += row["phase"] == "call"
        tests[row["test"]]["itself" if row["phase"] == "call" else "fixtures"] += row["cpu_s"]
    all_s = sum(sums[0] for sums in files.values())
    lines = [f"{all_s:9.1f} s of CPU time, {sum(sums[2] for sums in files.values()):g} tests"]
    for name, (cpu_s, wall_s, count) in sorted(files.items(), key=lambda item: -item[1][0]):
        lines.append(f"{cpu_s:9.1f} {wall_s:9.1f} {count:6g}  {name}")
    dearest = sorted(tests.items(), key=lambda item: -sum(item[1].values()))[:most]
    return "\n".join([*lines, *(f"{took['fixtures']:9.2f} {took['itself']:9.2f}  {name}" for name, took in dearest)])


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
