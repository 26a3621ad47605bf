"""Failpoints: places with a name at which a test makes the code fail once, or kills the process.

    faults.point("publish.rename")          # in the code, before a write, fsync, rename or open

Off, this is one look at a module variable.  It is on in a process that was started with GEMMTUNED_FAILPOINTS, which
only tests set, or inside `armed(...)`.  The idea and the spelling follow etcd's gofail:

    GEMMTUNED_FAILPOINTS="publish.rename=ENOSPC; store.commit=3:kill; salvage.*=2+:EIO"

A rule is NAME=[N:]ACTION.  NAME may hold the wildcards of fnmatch; N counts the passings of all names that match.
`N:` acts at the Nth passing alone (the first when it is left out), `N+:` from the Nth on.  ACTION is the name of an
error (EIO, ENOSPC, EACCES ...: OSError is raised), `kill` (SIGKILL to this process), or `sleep SECONDS`.
With GEMMTUNED_FAILPOINTS_LOG=FILE the name of every passing is appended to this file, one a line, before it acts:
a loop over "the Nth passing of all fails" ends where N is beyond the lines of a run without a fault.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

VARIABLE: Final = "GEMMTUNED_FAILPOINTS"
LOG_VARIABLE: Final = "GEMMTUNED_FAILPOINTS_LOG"
_RULE: Final = (  # as text: compiled where a test has set some
    r"(?P<name>[a-z0-9_.*?]+)=(?:(?P<at>[1-9][0-9]*)(?P<on>\+?):)?(?P<action>[A-Za-z]+)(?: (?P<s>[0-9.]+))?"
)


@dataclass(slots=True)
class _Rule:
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
class _Armed:
    rules: list[_Rule]
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


_armed: _Armed | None = None


def point(name: str) -> None:
    """Fail here if a test asked for it. Raises OSError then, as the call that follows would."""
    if _armed is not None:
        _armed.reach(name)


@contextlib.contextmanager
def armed(rules: str = "") -> Iterator[list[str]]:
    """Within this block and process the rules hold; gives the list of names passed so far. For tests.

    Raises ValueError for a rule that cannot be read.
    """
    global _armed
    before, _armed = _armed, _Armed(_read(rules), "", [])
    try:
        yield _armed.passed
    finally:
        _armed = before


def _read(text: str) -> list[_Rule]:
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        match = re.fullmatch(_RULE, part)
        if match is None or not (match["action"] in ("kill", "sleep") or hasattr(errno, match["action"])):
            raise ValueError(f"{VARIABLE}: {part!r} is no rule; write NAME=[N:]EIO, kill or sleep SECONDS")
        at, seconds = int(match["at"] or 1), float(match["s"] or 0)
        found.append(_Rule(match["name"], at, bool(match["on"]), match["action"], seconds))
    return found


def _from_env() -> _Armed | None:
    rules, log = os.environ.get(VARIABLE), os.environ.get(LOG_VARIABLE, "")
    return None if rules is None and not log else _Armed(_read(rules or ""), log, [])


_armed = _from_env()
