"""The service's care for the database file: looked over for damage, built anew, noticed when it is another.

The look at every page takes tens of seconds for a year's database, so it runs in a thread that a signal ends, while
the daemon works.  Building it anew is done by the daemon's own thread, which goes on answering signals: the `beat` of
Store.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import StoreError

if TYPE_CHECKING:
    from gemmtuned.db.store import Store
    from gemmtuned.db.upkeep import Examination

logger = logging.getLogger("gemmtuned.daemon")
CUT_SHORT: Final = "a salvage of it was cut short"
EXAMINE_S: Final = 86_400.0


class Caretaker:
    """Looks after the database of one daemon. Every method returns soon, but for `look` when it must mend."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._file: tuple[int, int] | None = None  # which file it was, when it was last looked at
        self._examination: Examination | None = None
        self._looked_at: tuple[int, int] | None = None  # which file the examination began with
        self._damage = ""
        self._begun = False
        self._size, self._examined_s = 0, float("-inf")
        self._written: tuple[int, int] | None = None  # its size and time at the last look at its newest publication
        self._generation = 0  # which that was
        self._is_behind = False  # what is open holds pages of two files

    def begin(self, now_s: float) -> None:
        """Say what lies there of earlier salvages, and begin to look at every page."""
        from gemmtuned.db import mend

        if self._begun:
            return
        self._begun = True
        for one in mend.leftovers(self._store.path):
            if one.kind != mend.SET_ASIDE:
                logger.warning("unfinished salvage kind=%r path=%s bytes=%d", one.kind, one.path, one.size_bytes)
        if self._store.was_cut_short():
            self._damage = CUT_SHORT
        elif self._store.path.exists():
            self._examine(now_s)

    def look(self, now_s: float) -> bool:
        """Mend what was found damaged; True when the file is another than at the last look, or was mended.

        Raises StoreError when it cannot be mended now, and while it is a newer version's: the next look tries again.
        """
        if self._is_put_down():
            return True
        self._take_result()
        self._mind_size(now_s)
        if self._damage:
            self._store.mend(self._damage, self._looked_at)
            self._damage = ""
        self._store.refuse_newer()
        found = self._store.lies_at() or (0, 0)
        before, self._file = self._file, found
        if what := self._written_over(same=before == found):
            logger.warning("%s path=%s", what, self._store.path)
            self._is_behind = True
        if before in (None, found):
            return self._is_put_down()
        if before is not None and before != (0, 0):
            self._tell_of_another(before, found)
        return True

    def _tell_of_another(self, before: tuple[int, int], found: tuple[int, int]) -> None:
        """Say what became of the file. When this process built it anew, that was said."""
        from gemmtuned.db import mend

        path = self._store.path
        aside = mend.kept_as(path, before)
        if aside is None:
            what = "deleted or replaced, another file lies there" if found != (0, 0) else "deleted"
            logger.warning("the database was %s path=%s", what, path)
        elif aside != self._store.set_aside():
            logger.warning(
                "the database was damaged, and another process built it anew path=%s set_aside=%s", path, aside
            )

    def _is_put_down(self) -> bool:
        """Whether what is open held pages of two files: none of them may be written, and its locks keep others out."""
        if not self._is_behind:
            return False
        self._store.put_down()
        self._is_behind, self._examined_s = False, float("-inf")
        return True

    def _written_over(self, *, same: bool) -> str:
        """What became of the same file, or "": `cp` writes over it, and its name and number stay.

        Asked where the file was written since, on a connection of its own: one that was open knows its old pages, and
        would not meet what cannot be read of the new ones.
        """
        from gemmtuned.db import faults, queries

        try:
            facts = self._store.path.stat()
            written = facts.st_size, facts.st_mtime_ns
            if same and written == self._written:
                return ""
            before, self._generation = self._generation, queries.generation(self._store.path)
        except OSError:
            return ""
        except StoreError as err:
            if not same or not faults.is_damage(err):
                raise
            return "the database was written over, and cannot be read as it lies"
        self._written = written
        return "an older copy was written over the database" if same and self._generation < before else ""

    def _mind_size(self, now_s: float) -> None:
        """Look at every page once a day, and at once when the file became shorter: it never does by itself."""
        try:
            size = self._store.path.stat().st_size
        except OSError:
            size = 0
        due = size < self._size or not now_s - EXAMINE_S <= self._examined_s <= now_s
        self._size = size
        if self._begun and due and size and self._examination is None and not self._damage:
            self._examine(now_s)

    def _examine(self, now_s: float) -> None:
        from gemmtuned.db.upkeep import Examination

        self._examined_s, self._looked_at = now_s, self._store.lies_at()
        self._examination = Examination(self._store.path)

    def stop(self) -> None:
        """End the look."""
        if self._examination is not None:
            self._examination.stop()
            self._examination = None

    def _take_result(self) -> None:
        if self._examination is None:
            return
        try:
            found = self._examination.result()
        except StoreError as err:
            logger.warning("database not looked over reason=%r", str(err))
            found = []
        if found is not None:
            self._examination = None
            self._damage = found[0] if found else ""
            if self._looked_at != self._store.lies_at():  # a call met the damage meanwhile, or an operator was at it
                self._damage, self._examined_s = "", float("-inf")  # the file that lies there now is looked at next
