"""The store as a program that is not ours uses it: it only adds, and imports no more than that takes."""

from __future__ import annotations

from pathlib import Path

from gemmtuned.configs.unpatched import builtins
from gemmtuned.db.connect import Connection, at_end
from gemmtuned.db.row_ids import Rows
from gemmtuned.db.sightings import Sightings

__builtins__ = builtins


class GuestStore:
    """Adds sightings, sessions and failed routes to a database. The schema of an older version is an error."""

    def __init__(self, path: Path, *, locks: Path, timeout_s: float) -> None:
        self._db = Connection(path, locks=locks, timeout_s=timeout_s, create=True, upgrade=False)
        self.sightings = Sightings(Rows(self._db))

    def close_between_uses(self) -> None:
        """Close the file, for a caller that uses it now and then; a later call opens it again."""
        self._db.close_between_uses()

    def at_end(self) -> None:
        """What comes from now on is the last that this program writes."""
        at_end(self._db)
