"""The exchange with other hosts beside a running daemon: a child every minute, sooner when there is nothing to tune.

A thread of the daemon's process starts the child and reads what it says; the process itself never touches the network.
It also keeps the mark until when the daemon leases only what it has claimed (times.py).
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
from typing import Any

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.more_threads import begin
from gemmtuned.configs.settings import Settings, unhooked_env
from gemmtuned.fleet.times import PACE, Mark, Pace

log = logging.getLogger("gemmtuned.daemon")


def leave(settings: Settings) -> None:
    """A daemon without a URL starts: what one with a URL left behind when it was killed holds nothing back."""
    from gemmtuned.db.store import Store

    store = Store(settings.db, locks=settings.locks)
    try:
        if url := store.fleet_sync.url():
            store.fleet_sync.begin(url, live_until_s=0.0)
    finally:
        store.close()


class Beside:
    """See the module. Begins at once."""

    def __init__(self, settings: Settings, url: str, pace: Pace = PACE) -> None:
        from gemmtuned.db.store import Store

        self._settings, self._url, self._pace = settings, url, pace
        self._mark = Mark(pace)
        self._done = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._trouble = ""
        self._fruitless = 0
        self._claims = True  # whether they hold at this URL
        self._store = Store(settings.db, locks=settings.locks)
        self._store.fleet_sync.begin(url, live_until_s=self._mark.begin(time.time()))
        self._thread = threading.Thread(target=self._run, name="gemmtuned-sync", daemon=True)
        self._runs = begin(self._thread, "nothing is shared with the fleet")

    def stop(self) -> None:
        """End it: the next daemon, with or without a fleet, finds nothing held back."""
        self._done.set()
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._runs:
            self._thread.join(5.0)
        with suppress(GemmtunedError):
            self._store.fleet_sync.begin(self._url, live_until_s=0.0)
        self._store.close()

    def _run(self) -> None:
        failed = 0
        while not self._done.is_set():
            began_s = time.monotonic()
            self._keep(self._mark.begin(time.time()))
            trouble = self._once()
            if self._done.is_set():
                return
            failed = failed + 1 if trouble else 0
            mark, now_s = self._mark, time.time()
            self._keep(mark.failed() if trouble else mark.reached(now_s, claims=self._claims))
            self._tell(trouble)
            waits_s = {
                asked: self._pace.wait_s(failed, asked=asked, fruitless=self._fruitless) for asked in (True, False)
            }
            while not self._done.wait(self._pace.look_s):
                if time.monotonic() - began_s >= waits_s[False]:
                    break
                if time.monotonic() - began_s >= waits_s[True] and self._asked():
                    break

    def _keep(self, until_s: float) -> None:
        """A store that cannot be written now keeps the mark that it has; the next exchange brings another."""
        try:
            self._store.fleet_sync.begin(self._url, live_until_s=until_s)
        except GemmtunedError as err:
            log.warning("not noted until when the others count as reached reason=%r", str(err))

    def _asked(self) -> bool:
        with suppress(GemmtunedError):
            return bool(self._store.fleet_sync.asked())
        return False

    def _once(self) -> str:
        """One exchange in a child; why it failed, or ""."""
        pace = self._pace
        command = [sys.executable, "-m", "gemmtuned.fleet.sync_main", self._url, str(pace.lease_s), str(pace.work_s)]
        home = {"GEMMTUNED_HOME": str(self._settings.home), "GEMMTUNED_DB": str(self._settings.db)}
        try:
            self._process = subprocess.Popen(
                command, env=unhooked_env(**home), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            return str(err)
        try:
            said, wrong = self._process.communicate(timeout=pace.most_s)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            return f"no end after {pace.most_s:g} s"
        if self._process.returncode:
            return (wrong.strip().splitlines() or ["it ended without a word"])[-1]
        try:
            self._log(json.loads(said))
        except (ValueError, KeyError, TypeError) as err:
            return f"its answer cannot be read ({type(err).__name__}: {str(err)[:200]})"
        return ""

    def _log(self, done: dict[str, Any]) -> None:
        self._fruitless += 1
        if done["claims"] != self._claims:
            self._claims = done["claims"]
            says = "claims hold again" if self._claims else "a repository of tables: every host tunes for itself"
            log.warning("%s url=%s", says, self._url)
        if done["sent"] or done["fetched"] or done["claimed"]:
            self._fruitless = 0
            log.info(
                "synced sent=%d fetched=%d claimed=%d left=%d",
                done["sent"], done["fetched"], done["claimed"], done["left"],
            )  # fmt: skip
        for reason in done["refused"][:8]:
            log.warning("refused a result reason=%r", reason)

    def _tell(self, trouble: str) -> None:
        """Each new trouble once, and that it is over."""
        if trouble and trouble != self._trouble:
            log.warning("not synced, tuning goes on alone url=%s reason=%r", self._url, trouble)
        elif self._trouble and not trouble:
            log.info("synced again url=%s", self._url)
        self._trouble = trouble
