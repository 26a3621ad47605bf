"""The exchange with other hosts beside a running daemon: a child every minute, sooner when there is nothing to tune.

A thread of the daemon's process starts the child and reads what it says; the process itself never touches the network.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings, unhooked_env
from gemmtuned.fleet.claims import LEASE_S
from gemmtuned.fleet.sync import LIVE_S

log = logging.getLogger("gemmtuned.daemon")
MOST_S: Final = 240.0  # for one exchange; names older than SLACK_S of fleet/sync.py count as complete
FIRST_S: Final = 30.0  # so long the daemon leases nothing unclaimed at its start: the first exchange may take that


@dataclass(frozen=True, slots=True)
class Pace:
    """every_s: between two exchanges. soonest_s: when the daemon has nothing left that it claimed. Then as Exchange."""

    every_s: float = 60.0
    soonest_s: float = 5.0
    look_s: float = 1.0
    lease_s: float = LEASE_S
    live_s: float = LIVE_S


class Beside:
    """See the module. Begins at once."""

    def __init__(self, settings: Settings, url: str, pace: Pace = Pace()) -> None:
        from gemmtuned.db.store import Store

        self._settings, self._url, self._pace = settings, url, pace
        self._done = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._trouble = ""
        self._store = Store(settings.db, locks=settings.locks)
        self._store.fleet_begin(url, live_until_s=time.time() + FIRST_S)
        self._thread = threading.Thread(target=self._run, name="gemmtuned-sync", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it: the next daemon, with or without a fleet, finds nothing held back."""
        self._done.set()
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        self._thread.join(5.0)
        with suppress(GemmtunedError):
            self._store.fleet_begin(self._url, live_until_s=0.0)
        self._store.close()

    def _run(self) -> None:
        while not self._done.is_set():
            began_s = time.monotonic()
            self._once()
            while not self._done.wait(self._pace.look_s):
                passed_s = time.monotonic() - began_s
                if passed_s >= self._pace.every_s or (passed_s >= self._pace.soonest_s and self._asked()):
                    break

    def _asked(self) -> bool:
        with suppress(GemmtunedError):
            return bool(self._store.fleet_asked())
        return False

    def _once(self) -> None:
        command = [sys.executable, "-m", "gemmtuned.fleet.sync_main", self._url]
        command += [str(self._pace.lease_s), str(self._pace.live_s)]
        home = {"GEMMTUNED_HOME": str(self._settings.home), "GEMMTUNED_DB": str(self._settings.db)}
        try:
            self._process = subprocess.Popen(
                command, env=unhooked_env(**home), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            said, wrong = self._process.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            assert self._process is not None
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            said, wrong = "", f"no end after {MOST_S:g} s"
        except OSError as err:
            self._tell(str(err))
            return
        if self._done.is_set():
            return
        if self._process.returncode:
            self._tell((wrong.strip().splitlines() or ["it ended without a word"])[-1])
            return
        self._tell("")
        with suppress(ValueError):
            done = json.loads(said)
            if done["sent"] or done["fetched"] or done["claimed"]:
                log.info("synced sent=%d fetched=%d claimed=%d", done["sent"], done["fetched"], done["claimed"])
            for reason in done["refused"][:8]:
                log.warning("refused a result reason=%r", reason)

    def _tell(self, trouble: str) -> None:
        """Each new trouble once, and that it is over."""
        if trouble and trouble != self._trouble:
            log.warning("not synced, tuning goes on alone url=%s reason=%r", self._url, trouble)
        elif self._trouble and not trouble:
            log.info("synced again url=%s", self._url)
        self._trouble = trouble
