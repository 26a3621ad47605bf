"""Try rows of the user's tables for programs that wait to use them: before `gemmtuned run`, or beside the daemon."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.more_threads import begin
from gemmtuned.configs.passing import lack_in
from gemmtuned.configs.settings import Settings, unhooked_env
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.configs.verdicts import Verdicts

log = logging.getLogger("gemmtuned.daemon")
CHECK_S: Final = 300.0  # a spot check ends by then; most of it is importing torch
LOOK_S: Final = 5.0
LONGEST_S: Final = 600.0  # between two looks, where checks of what waits gave no answer


def spot_checks(solutions: Sequence[Solution]) -> list[str]:
    """Why each must not be used here, "" when it may; tried in a process of its own. Takes some seconds."""
    rows = json.dumps([solution.to_row() for solution in solutions])
    command = [sys.executable, "-m", "gemmtuned.kernels.spot_check"]
    try:
        done = subprocess.run(
            command, input=rows, capture_output=True, text=True, env=unhooked_env(), timeout=CHECK_S, check=True
        )
        reasons = [str(reason) for reason in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        last = (getattr(err, "stderr", "") or str(err)).strip().splitlines()[-1:]
        return [f"spot check did not run: {' '.join(last)}"] * len(solutions)
    return reasons if len(reasons) == len(solutions) else ["spot check gave no answer"] * len(solutions)


def check_tables(settings: Settings) -> None:
    """Try what is new in the tables that AITER_CONFIG_* name, before a program that uses them starts."""
    if not settings.tables:
        return
    from gemmtuned.hooks.user_tables import UserLoader

    tables = UserLoader(settings.tables)
    tables.load()
    verdicts, device = Verdicts(settings.home), cpu_device().key
    new = [s for s in tables.solutions if s.device == device and not s.launch and verdicts.of(s) is None]
    _answer(verdicts, new)


def check_waiting(settings: Settings) -> int:
    """Try what programs wait for; of how many rows it is known now."""
    verdicts = Verdicts(settings.home)
    return _answer(verdicts, verdicts.open())


class Beside:
    """A thread of the daemon's process that answers what programs ask."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._done = settings, threading.Event()
        thread = threading.Thread(target=self._run, name="gemmtuned-checks", daemon=True)
        begin(thread, "rows of other tools' tables are not checked")

    def stop(self) -> None:
        """End it; what it is at is tried again by the next daemon."""
        self._done.set()

    def _run(self) -> None:
        verdicts, pause_s = Verdicts(self._settings.home), LOOK_S
        while not self._done.wait(pause_s):
            try:
                waiting = verdicts.open()
                count = _answer(verdicts, waiting)
            except OSError as err:
                log.warning("rows of users' tables are not tried reason=%r", str(err))
                return
            if count:
                log.info("tried rows of users' tables rows=%d", count)
            pause_s = LOOK_S if count or not waiting else min(2 * pause_s, LONGEST_S)


def _answer(verdicts: Verdicts, solutions: Sequence[Solution]) -> int:
    """Keep what the checks say; of what they could not tell, for want of memory, say, the answer is still to come."""
    answered = 0
    for solution, reason in zip(solutions, spot_checks(solutions) if solutions else (), strict=True):
        if not reason.startswith(("spot check did not run", "spot check gave no answer")) and not lack_in(reason):
            verdicts.answer(solution, reason)
            answered += 1
    return answered
