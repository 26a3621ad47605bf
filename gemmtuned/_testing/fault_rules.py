"""The rules of failpoints, read and obeyed: see gemmtuned/_testing/faults.py.

Only a process that a test has armed imports this file.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

_RULE: Final = (  # as text: compiled where a test has set some
    r"(?P<name>[a-z0-9_.*?]+)=(?:(?P<at>[1-9][0-9]*)(?P<on>\+?):)?(?P<action>[A-Za-z]+)(?: (?P<s>[0-9.]+))?"
)


@dataclass(slots=True)
class Rule:
    name: str
    at: int
    on: bool  # and at every passing after it
    action: str
    seconds: float
    passed: int = 0

    def reach(self, name: str) -> None:
        if not fnmatchcase(name, self.name):
            return
        self.passed += 1
        if self.passed == self.at or (self.on and self.passed > self.at):
            self.act(name)

    def act(self, name: str) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "sleep":
            time.sleep(self.seconds)
        else:
            number = getattr(errno, self.action)
            raise OSError(number, os.strerror(number), f"failpoint {name}")


@dataclass(slots=True)
class Armed:
    rules: list[Rule]
    log: str
    passed: list[str]

    def reach(self, name: str) -> None:
        if self.log:
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, f"{name}\n".encode())
            finally:
                os.close(fd)
        else:
            self.passed.append(name)
        for rule in self.rules:
            rule.reach(name)


def read(text: str) -> list[Rule]:
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        match = re.fullmatch(_RULE, part)
        if match is None or not (match["action"] in ("kill", "sleep") or hasattr(errno, match["action"])):
            raise ValueError(f"GEMMTUNED_FAILPOINTS: {part!r} is no rule; write NAME=[N:]EIO, kill or sleep SECONDS")
        at, seconds = int(match["at"] or 1), float(match["s"] or 0)
        found.append(Rule(match["name"], at, bool(match["on"]), match["action"], seconds))
    return found
