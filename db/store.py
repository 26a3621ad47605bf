"""The store as programs and the daemon use it: one object over one SQLite file.

Its parts are attributes, each named as its file: `store.leases.lease_next` is in leases.py.  The parts share one
connection (connect.py: how the file is opened, locked and mended) and the row ids that are known (row_ids.py).
What people read is asked in queries.py.
"""

from __future__ import annotations

from pathlib import Path

from gemmtuned.db import connect, upkeep
from gemmtuned.db.connect import Beat, Connection
from gemmtuned.db.curation import Curation
from gemmtuned.db.files import folder_of_salvage
from gemmtuned.db.fleet import Fleet
from gemmtuned.db.fleet_sync import FleetSync
from gemmtuned.db.hints import Hints
from gemmtuned.db.ingest import Ingest
from gemmtuned.db.leases import Leases, Remaining, Work
from gemmtuned.db.recheck import Recheck
from gemmtuned.db.restore import Restore
from gemmtuned.db.resume import Resume, State
from gemmtuned.db.rollup import RollUp
from gemmtuned.db.row_ids import MAX_REMEMBERED, Rows
from gemmtuned.db.sightings import Sightings
from gemmtuned.db.solutions import Solutions
from gemmtuned.db.trials import Trials
from gemmtuned.db.upkeep import check
from gemmtuned.db.wanted import Wanted

__all__ = ["Remaining", "State", "Store", "Work", "check"]


class Store:
    """Read and write one database. Threads may share it; a forked child goes on with a connection of its own.

    locks: the folder of the lock file, the same for all who use this database.  timeout_s: how long any call waits for
    others (programs 0.25, commands and daemon 30).  create=False: a missing file is an error, a damaged one stays.
    upgrade=False: the schema of an older version is an error.
    beat: called every few milliseconds while a damaged file is built anew; a StoreError that it raises ends that.
    remembered: problems whose numbers are kept in memory.

    Every method of a part raises StoreBusy when others held the file too long and StoreError when it cannot be used;
    then nothing of that call was kept, and the next call tries afresh.  When a call meets damage the file is set
    aside, what can be read is salvaged, one warning is logged, and the call goes on with the new file.
    """

    def __init__(
        self,
        path: Path,
        *,
        locks: Path,
        timeout_s: float = 30.0,
        create: bool = True,
        upgrade: bool = True,
        beat: Beat | None = None,
        remembered: int = MAX_REMEMBERED,
    ) -> None:
        self.path = path
        self._db = Connection(path, locks=locks, timeout_s=timeout_s, create=create, upgrade=upgrade, beat=beat)
        shared = Rows(self._db, remembered=remembered)
        # What programs count, ours and those of other users
        self.sightings, self.ingest, self.rollup = Sightings(shared), Ingest(shared), RollUp(shared)
        # Who tunes what: between daemons, after an interruption, once more, and between hosts
        self.leases, self.resume = Leases(shared), Resume(shared)
        self.recheck, self.wanted = Recheck(shared), Wanted(shared)
        self.fleet, self.fleet_sync = Fleet(shared), FleetSync(shared)
        # What is known: imported rows, single runs, verdicts, what operators make of them, how they come back
        self.hints, self.trials, self.solutions = Hints(shared), Trials(shared), Solutions(shared)
        self.curation, self.restore = Curation(shared), Restore(shared)

    def lies_at(self) -> tuple[int, int] | None:
        """(st_dev, st_ino) of the file that lies at the path now; None when there is none."""
        return self._db.lies_at()

    def set_aside(self) -> Path | None:
        """The damaged file in whose place this process put a new one last; None when it has not."""
        return connect.set_aside(self._db)

    def refuse_newer(self) -> None:
        """Raise StoreError when a newer version has brought the file up to its own schema, which we must not write."""
        self._db.refuse_newer()

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        self._db.close()

    def put_down(self) -> None:
        """As close, which leaves it open where the lock cannot be had; this raises StoreBusy then."""
        self._db.put_down()

    def checkpoint(self) -> None:
        """Bring the log into the database; for a daemon with nothing else to do."""
        self._db.checkpoint()

    def vacuum(self) -> None:
        """Write the file anew without what is free in it; holds the lock all the while, about 1 s for 100 MB."""
        self._db.vacuum()

    def check(self) -> list[str]:
        """Everything found wrong with the file, one line each; [] when it is whole. Mends nothing."""
        return check(self.path)

    def mend(self, reason: str, of: tuple[int, int] | None = None) -> None:
        """Build the file anew from what can be read of it. Raises StoreError; then it lies as it was.

        of: which file was found damaged, as `lies_at` named it; another one is left as it is.
        """
        self._db.mend(reason, of)

    def was_cut_short(self) -> bool:
        """Whether a salvage was begun and not ended: killed, or the machine went down."""
        from gemmtuned.db.mend import tidy  # rarely needed, and programs import this module

        tidy(self._db.path)
        return folder_of_salvage(self._db.path).is_dir()

    def backup(self, to: Path) -> Path:
        """Write a consistent copy, while others go on writing. `to`: a file, or a folder to name one in. Returns it."""
        return upkeep.backup(self.path, to, timeout_s=self._db.timeout_s)
