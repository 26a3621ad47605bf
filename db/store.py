"""The store as programs and the daemon use it: one object over one SQLite file.

sightings.py holds what programs write, leases.py how daemons share work, solutions.py the verdicts; connect.py how the
file is opened, locked and mended.  Reading for people is queries.py.
"""

from __future__ import annotations

import os
import sqlite3
from datetime import datetime, timezone
from pathlib import Path

from gemmtuned.configs.errors import StoreError
from gemmtuned.db import faults, migrations
from gemmtuned.db.connect import Connection, connect_read_only
from gemmtuned.db.leases import Leases, Remaining, Work
from gemmtuned.db.resume import Resume, State
from gemmtuned.db.sightings import Sightings
from gemmtuned.db.solutions import Solutions

__all__ = ["Remaining", "State", "Store", "Work"]


class Store(Sightings, Leases, Resume, Solutions):
    """Read and write one database. Threads may share it; a forked child goes on with a connection of its own.

    locks: the folder of the lock file, the same for all who use this database.  timeout_s: how long any call waits for
    others (programs 0.25, commands and daemon 30).  create=False: a missing file is an error.

    Every method raises StoreBusy when others held the file too long and StoreError when it cannot be used; then
    nothing of that call was kept, and the next call tries afresh.  A damaged file is set aside, what can be read is
    salvaged, and the call goes on with the new one.
    """

    def __init__(self, path: Path, *, locks: Path, timeout_s: float = 30.0, create: bool = True) -> None:
        self.path = path
        super().__init__(Connection(path, locks=locks, timeout_s=timeout_s, create=create))

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        self._db.close()

    def checkpoint(self) -> None:
        """Bring the log into the database; for a daemon with nothing else to do."""
        self._db.checkpoint()

    def check(self) -> list[str]:
        """Everything found wrong with the file, one line each; [] when it is whole. Mends nothing."""
        return check(self.path)

    def backup(self, to: Path) -> Path:
        """Write a consistent copy, while others go on writing. `to`: a file, or a folder to name one in. Returns it."""
        if to.is_dir():
            to = to / f"{self.path.stem}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}{self.path.suffix}"
        temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            conn = connect_read_only(self.path, self._db.timeout_s)
            try:
                conn.execute("VACUUM INTO ?", (str(temporary),))
            finally:
                conn.close()
            _sync(temporary)
            temporary.replace(to)
            _sync(to.parent)
        except (sqlite3.Error, OSError) as err:
            raise faults.store_error(err, to, waited_s=self._db.timeout_s) from err
        finally:
            temporary.unlink(missing_ok=True)
        return to


def check(path: Path) -> list[str]:
    """As Store.check, for a file that nobody needs to have open."""
    try:
        conn = connect_read_only(path, 30.0)
    except StoreError as err:
        return [str(err)]
    try:
        application, version = migrations.identity(conn)
        if application != migrations.APPLICATION_ID:
            return [f"{path}: not a gemmtuned database (application id {application:#x})"]
        found = [str(row[0]) for row in conn.execute("PRAGMA integrity_check(20)").fetchall() if row[0] != "ok"]
        found += [
            f"row {row[1]} of {row[0]} names no row of {row[2]}"
            for row in conn.execute("PRAGMA foreign_key_check").fetchall()
        ]
        if version < migrations.SCHEMA:
            found.append(
                f"schema {version}, not yet {migrations.SCHEMA}: the next program to write brings it up to date"
            )
        wrong = conn.execute(
            "SELECT count(*) FROM demand d WHERE d.calls != (SELECT coalesce(sum(s.calls), 0) FROM sighting s "
            "WHERE s.problem_id = d.problem_id AND s.environment_id = d.environment_id)"
        ).fetchone()[0]
        if wrong:
            found.append(f"{wrong} problems whose calls differ from the sum of their sightings")
        return found
    except sqlite3.Error as err:
        return [str(faults.store_error(err, path))]
    finally:
        conn.close()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
