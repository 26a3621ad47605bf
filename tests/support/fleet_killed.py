"""Exchanges that are killed: a process that makes them ready and forks for each, since a start takes half a second.

Reads lines of JSON {folder, url, after}: a host's exchange with claims, ended by SIGKILL at its request of number
`after`, in the middle of it (nobody knows whether it arrived).  Answers with the signal that ended it, 0 for none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fleets import Host

from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.opening import open_objects


class Killed:
    """Objects whose host is killed at a request: before, within or after it."""

    def __init__(self, objects: Objects, after: int) -> None:
        self._objects, self._left = objects, after
        self.can_claim = objects.can_claim

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._objects, name)

        def counted(*args: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                threading.Timer(random.uniform(0, 0.003), os.kill, (os.getpid(), signal.SIGKILL)).start()
                call(*args, **named)
                time.sleep(1)
            return call(*args, **named)

        return counted


def exchange(folder: str, url: str, after: int) -> None:
    host = Host(Path(folder), url)
    host.turn(Killed(open_objects(url), after))


@contextmanager
def killer() -> Iterator[Callable[[Host, int], int]]:
    """For `with`: ends a host's exchange at its request of this number; the signal, 0 where it made fewer."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    stdin, stdout = process.stdin, process.stdout

    def kill(host: Host, after: int) -> int:
        stdin.write(json.dumps({"folder": str(host.folder), "url": host.url, "after": after}) + "\n")
        stdin.flush()
        return int(stdout.readline())

    try:
        yield kill
    finally:
        stdin.close()
        process.wait(30)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            exchange(**json.loads(line))
            os._exit(0)
        print(os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
