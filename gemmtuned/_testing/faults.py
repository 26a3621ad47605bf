"""Failpoints: points of the code with a name, at which a test makes the code fail once, or kills the process.

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
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # every program imports this file, and only those that a test has armed have rules
    from gemmtuned._testing.fault_rules import Armed

VARIABLE: Final = "GEMMTUNED_FAILPOINTS"
LOG_VARIABLE: Final = "GEMMTUNED_FAILPOINTS_LOG"

_armed: Armed | None = None


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
    before, _armed = _armed, _with(rules, "")
    try:
        yield _armed.passed
    finally:
        _armed = before


def _from_env() -> Armed | None:
    rules, log = os.environ.get(VARIABLE), os.environ.get(LOG_VARIABLE, "")
    return None if rules is None and not log else _with(rules or "", log)


def _with(rules: str, log: str) -> Armed:
    from gemmtuned._testing.fault_rules import Armed, read

    return Armed(read(rules), log, [])


_armed = _from_env()
