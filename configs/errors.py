"""Every error gemmtuned raises on purpose.

    GemmtunedError                 exit code 1
    +-- SettingError               2    a variable or option has a wrong value
    +-- ProblemError               2    a problem could not be parsed
    +-- TableError                 1    a published table or manifest cannot be trusted or read
    +-- StoreError                 1    the database cannot be used
    |   +-- StoreBusy              75   it is locked by others longer than we wait
    |   +-- StoreInterrupted       143  we were told to stop meanwhile
    +-- CandidateFailed            1    a backend refuses a problem, or its result is wrong
    |   +-- Declined               1    it cannot run now, for a reason that is not its own
    +-- WorkerFailed               1    the tuning process broke its protocol or cannot be started
    |   +-- WorkerDied             1    it ended by itself: crash, out of memory, killed by others
    |   |   +-- WorkerKilled       1    by SIGKILL
    |   +-- WorkerHung             1    it passed its deadline and was killed
    |   +-- PieceFailed            1    a piece of another package ended it, which is left out from now on
    +-- TryLater                   75   nothing is wrong: no idle device, or another daemon is at work

A message names the thing, where it is and the way out.  The command line prints it on one line and ends with
`exit_code`; a traceback therefore always means a bug.
"""

from __future__ import annotations


class GemmtunedError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class SettingError(GemmtunedError):
    """A variable or an option has a value we cannot use."""

    exit_code = 2


class ProblemError(GemmtunedError):
    """A problem's spelling or one of its columns is not valid."""

    exit_code = 2


class TableError(GemmtunedError):
    """A published table, its manifest or its folder cannot be read or trusted."""


class HeaderError(TableError):
    """The first line names columns of no table we know."""


class StoreError(GemmtunedError):
    """The database cannot be opened, read or written."""


class StoreBusy(StoreError):
    """The database stayed locked by others for as long as we were willing to wait."""

    exit_code = 75


class StoreInterrupted(StoreError):
    """Something that takes long was ended by a signal; the database lies as it was."""

    exit_code = 143


class CandidateFailed(GemmtunedError):
    """A candidate cannot run the problem, or ran and gave a wrong result."""


class Declined(CandidateFailed):
    """A candidate cannot run now, and is not to blame: no memory, or a device, stream or capture that is broken."""


class WorkerFailed(GemmtunedError):
    """The tuning process died, passed its deadline, answered nonsense or cannot be started."""


class WorkerDied(WorkerFailed):
    """The tuning process ended though nobody asked it to."""


class WorkerKilled(WorkerDied):
    """The worker was ended, or stopped, from outside: memory had run out, or somebody sent SIGKILL or SIGSTOP."""


class WorkerHung(WorkerFailed):
    """The tuning process said nothing until its deadline and was killed."""


class PieceFailed(WorkerFailed):
    """A piece of another package ended the worker: it is remembered, and the next worker does without it."""


class TryLater(GemmtunedError):
    """Nothing is wrong, but it cannot be done now."""

    exit_code = 75
