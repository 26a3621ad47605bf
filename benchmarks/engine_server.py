"""A serving engine in a process of its own: started, asked over HTTP, looked at through our database, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_S = 300
FLUSH_S = 6.0  # more calls of a known problem are written after five seconds (hooks/pending.py)
SETTLED_S = 60
NAME = "tiny"
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def say(what: str) -> None:
    """One line of progress, apart from the figures."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


@dataclass
class Server:
    """command: what starts it, `{model}` and `{port}` filled in.  env: besides GEMMTUNED and its home."""

    command: list[str]
    model: Path
    home: Path
    hooked: bool = True
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = self.home / f"server-{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; seconds until it answers."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
        env |= {
            "GEMMTUNED": str(int(self.hooked)),
            "GEMMTUNED_HOME": str(self.home),
            "PYTHONPATH": str(HERE),
        } | self.env
        command = [part.format(model=self.model, port=self.port) for part in self.command]
        began_s = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd="/", start_new_session=True)
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > began_s + START_S:
                raise SystemExit(f"the engine did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)
        say(f"a server answers after {time.monotonic() - began_s:.0f} s: {self.home.name}, log {self.log}")
        return time.monotonic() - began_s

    def _answers(self) -> bool:
        try:
            with _NO_PROXY.open(f"http://127.0.0.1:{self.port}/v1/models", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, prompt: list[int], tokens: int) -> str:
        """The greedy text that follows."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return str(self.post("/v1/completions", body)["choices"][0]["text"])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What it answers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with _NO_PROXY.open(request, timeout=120) as answer:
            return dict(json.load(answer))

    def ours(self) -> list[str]:
        """Lines of ours in the engine's log."""
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace")).splitlines()
        return [line for line in lines if re.search(r"gemmtuned \d+\.\d+", line)]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """A question to the database of its home."""
        path = self.home / "tune.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchall()

    def calls(self) -> dict[str, int]:
        """Calls of the traffic, by problem."""
        return dict(self.rows("SELECT problem, SUM(calls) FROM coverage_by_problem GROUP BY 1"))

    def settled(self) -> dict[str, int]:
        """`calls`, once flushes bring nothing more: on a busy machine they come late."""
        calls: dict[str, int] | None = None
        end_s = time.monotonic() + SETTLED_S
        while (before := calls) is None or (calls != before and time.monotonic() < end_s):
            time.sleep(FLUSH_S)
            calls = self.calls()
        return calls

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it and what it has started."""
        if self.process is None:
            return
        for sign, wait_s in ((how, 30), (signal.SIGKILL, 10)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, sign)
                self.process.wait(wait_s)
        self.process = None

    def gemmtuned(self, *args: str, code: int | None = 0) -> str:
        """What a command of ours says of its home."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
        command = [sys.executable, "-m", "gemmtuned", *args]
        env |= {"GEMMTUNED_HOME": str(self.home)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600, cwd="/")
        if code is not None and done.returncode != code:
            raise SystemExit(f"{' '.join(args)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Started one after the other, and ended whatever happens."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.stop()


def until(look: Callable[[], Any], timeout_s: float = 30.0) -> bool:
    """Whether that comes true in time."""
    end_s = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.2)
    return True
