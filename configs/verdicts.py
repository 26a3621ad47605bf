"""Spot checks of rows that somebody else measured, as questions and answers between a program and who may try them.

A program does not try a kernel on its user's machine by itself: that takes seconds of CPU time and a child process.  It
leaves the row in `checked/` of the home; `gemmtuned run` before the program starts, or the daemon, answers; the program
looks again now and then.  One small file a row, named by its hash; an answer holds for the versions in the row's stamp.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from gemmtuned.configs import clock
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.open_files import make_folders, open_to_owner
from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.solution import Solution
from gemmtuned.configs.temporary import temporary_path

MAX_QUESTIONS: Final = 4096
MOST_BYTES: Final = 1 << 20  # per question
_SAME_MOMENT_NS: Final = 2_000_000_000  # another answer may come within what a file system tells apart


class Verdicts:
    """The questions and answers in one home. Nothing here raises: without a folder there is no answer."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "checked"
        self._known: dict[Solution, str] = {}
        self._seen_ns: int | None = None  # when the folder had changed last, at the last look

    def of(self, solution: Solution) -> str | None:
        """Why the solution must not be used here, "" when it may, None before somebody has tried it."""
        known = self._known.get(solution)
        if known is None:
            found = _read(self._path(solution))
            if found is not None and found[1] is not None:
                known = self._known[solution] = found[1]
        return known

    def may_be_new(self) -> bool:
        """Whether answers may have come since this was asked last; to look for each of thousands takes a second."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return False
        before, self._seen_ns = self._seen_ns, changed_ns
        return changed_ns != before or clock.now_ns() - changed_ns < _SAME_MOMENT_NS

    def ask(self, solutions: Iterable[Solution]) -> None:
        """Leave those to be tried that nobody has left yet."""
        with suppress(OSError):
            make_folders(self._folder)
            for solution in list(solutions)[:MAX_QUESTIONS]:
                if not self._path(solution).exists():
                    self._write(solution, None)

    def answer(self, solution: Solution, reason: str) -> None:
        """Say what the trial gave. Raises OSError where it cannot be kept."""
        make_folders(self._folder)
        self._write(solution, reason)

    def open(self) -> list[Solution]:
        """What waits to be tried."""
        try:
            found = [_read(path) for path in sorted(self._folder.glob("*.json"))[:MAX_QUESTIONS]]
        except OSError:
            return []
        return [question[0] for question in found if question is not None and question[1] is None]

    def _path(self, solution: Solution) -> Path:
        row = {name: value for name, value in solution.to_row().items() if name not in _MEASURED}
        return self._folder / f"{sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:24]}.json"

    def _write(self, solution: Solution, reason: str | None) -> None:
        path = self._path(solution)
        new = temporary_path(path)
        try:
            new.write_text(json.dumps({"row": solution.to_row(), "reason": reason}), encoding="utf-8")
            open_to_owner(new)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


_MEASURED: Final = ("us", "baseline_us", "gain_low", "err", "baseline_err", "state", "generation", "launch", "beside")


def _read(path: Path) -> tuple[Solution, str | None] | None:
    try:
        found = json.loads(read_small(path, MOST_BYTES))
        reason = found["reason"]
        return Solution.from_row(found["row"]), None if reason is None else str(reason)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, GemmtunedError):
        return None
