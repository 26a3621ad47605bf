"""Publishing beside the daemon's loop: with thousands of solutions the tables take a second to write.

A device that others want back is left within half a second, so nothing in the loop may take so long.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.more_threads import begin
from gemmtuned.daemon.publishing.publish import publish

if TYPE_CHECKING:
    from gemmtuned.configs.settings import Settings
    from gemmtuned.db.store import Store

LONG_S: Final = 0.25  # for the last one: a disk that takes so long holds up the loop as much as thousands of solutions
FEW: Final = 300  # solutions: their tables are written in some 30 ms, in the loop itself
OWN_WAIT_S: Final = 5.0  # that the thread waits for the database
SWITCH_S: Final = 0.0005  # the loop waits so long for the interpreter at each call of SQLite, and not for 5 ms
LEAVE_S: Final = 1.5  # a daemon that is told to stop is gone within 2 s


class Publishing:
    """Brings the published tables in line with the store, in the loop or in a thread, one at a time."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._thread: threading.Thread | None = None
        self._error: GemmtunedError | None = None
        self._done: int | None = None
        self._of_another = False  # what runs, or has ended, began with a file that is not the database any more
        self.took_s = 0.0  # the last one

    @property
    def runs(self) -> bool:
        """Whether a thread is at it."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, now_s: float, *, here: bool = False) -> None:
        """Publish; here: in this thread, however long it takes. Raises as `publish` does, where it is done here."""
        generation = self._store.solutions.generation()
        here = here or (self._store.solutions.count_live() <= FEW and self.took_s < LONG_S)
        thread = threading.Thread(
            target=self._in_thread, args=(generation, now_s), name="gemmtuned-publish", daemon=True
        )
        if not here and begin(thread, "tables are published in the loop"):
            self._thread = thread
        else:
            self._publish(self._store, generation, now_s)

    def result(self) -> int | None:
        """The store's generation that was published since this was last asked. Raises what the thread ended with."""
        if self.runs:
            return None
        self._thread, of_another, self._of_another = None, self._of_another, False
        error, self._error = self._error, None
        if error is not None:
            raise error
        done, self._done = self._done, None
        return None if of_another else done

    def forget(self) -> None:
        """The database is another file by now: what was published of the one before says nothing about it."""
        self._of_another = self._thread is not None or self._done is not None

    def wait(self) -> None:
        """Until a thread that is at it has ended, for a moment at most."""
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _in_thread(self, generation: int, now_s: float) -> None:
        from gemmtuned.db.store import Store

        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:  # a store of its own: the loop's is not held meanwhile
            store = Store(self._settings.db, locks=self._settings.locks, timeout_s=OWN_WAIT_S, create=False)
            try:
                self._publish(store, generation, now_s)
            finally:
                store.close()
                _give_back()
        except GemmtunedError as err:
            self._error = err
        except Exception as err:  # a thread that ends without a word would be begun again at once, without end
            self._error = TableError(f"{self._settings.config_dir}: not published ({type(err).__name__}: {err})")
        finally:
            sys.setswitchinterval(before_s)

    def _publish(self, store: Store, generation: int, now_s: float) -> None:
        began_s = time.monotonic()
        publish(store, self._settings.config_dir, self._settings.locks, now_s=now_s)
        self.took_s, self._done = time.monotonic() - began_s, generation


def _give_back() -> None:
    """Return to the system what the C library keeps of the memory that the tables took: it is free, and counts as ours.

    Without this a daemon of 7,000 solutions stays up to 9 MiB larger or smaller by chance of what lies at the ends.
    """
    import ctypes

    with contextlib.suppress(AttributeError, OSError):  # glibc has it, others give memory back by themselves
        ctypes.CDLL(None).malloc_trim(0)
