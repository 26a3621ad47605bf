"""A home with a daemon that runs as a process, and what reads beside it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from fakes import ENVIRONMENT

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db.store import Store

HERE = Path(__file__).parents[1] / "support"


class Home:
    """A home folder and the daemon processes started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder), "GEMMTUNED_IDLE_S": "0"})
        self.store = Store(self.settings.db, locks=self.settings.locks)
        self.started: list[subprocess.Popen[str]] = []

    def see(self, *problems: Problem, environment: Environment = ENVIRONMENT) -> None:
        self.store.sightings.add("serve", environment, [Sighting(p, "miss", 10) for p in problems], now_s=time.time())

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "daemon_process.py"), str(self.folder), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def until(self, state: str, seconds: float = 20.0) -> None:
        """Wait until the running daemon says it is in this state."""
        end = time.monotonic() + seconds
        while True:
            notice = read_notice(self.folder)
            if notice is not None and notice["running"] and notice["state"] == state:
                return
            assert time.monotonic() < end, f"the daemon says {notice}"
            time.sleep(0.02)

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        conn = sqlite3.connect(self.settings.db)
        try:
            return conn.execute(sql).fetchall()
        finally:
            conn.close()
