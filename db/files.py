"""Opening the file: the ways in which SQLite opens it, which file lies at a path, and where none may lie."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.open_files import make_folders
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.db import faults
from gemmtuned.db.lockfile import file_mode

__builtins__ = builtins

SALVAGE: Final = ".salvage-"
_PLAIN: Final = frozenset("/._-~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
JOURNAL_LIMIT_BYTES: Final = 64 << 20
# As /proc/mounts names them, without "fuse."; "nfs" is nfs4, too. Of several hosts, or of an object store.
NETWORK_FILESYSTEMS: Final = (
    "nfs", "cifs", "smb", "ncpfs", "9p", "afs", "auristorfs", "coda", "ceph", "glusterfs", "lustre", "gpfs", "mmfs",
    "beegfs", "fhgfs", "weka", "panfs", "ocfs2", "gfs2", "pvfs2", "orangefs", "quobyte", "moosefs", "mfs", "lizardfs",
    "saunafs", "seaweedfs", "juicefs", "cubefs", "cfs", "curvefs", "alluxio", "xtreemfs", "hdfs", "dfs", "dfuse",
    "sshfs", "davfs", "rclone", "s3fs", "goofys", "geesefs", "mountpoint-s3", "mount-s3", "gcsfuse", "blobfuse",
    "ossfs", "cosfs", "objectivefs", "vboxsf", "vmhgfs", "prl_fs", "fuse_dfs", "eos", "gvfs", "kio-fuse", "acfs",
    "cvfs", "azfiles", "tigrisfs", "yas3fs", "s3ql", "s3backer", "xrootd", "cvmfs", "daos", "kafs", "ibrix", "scoutfs",
)  # fmt: skip


def connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A bare read-write connection with our pragmas. Statements commit by themselves unless a BEGIN was sent.

    Raises StoreError for a file of one byte, which SQLite would take for an empty database.
    """
    faults.refuse_short(path)
    conn = sqlite3.Connection(  # as `connect` makes it, which programs replace: what another gives is no database
        f"{_uri(path)}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    pragmas = (
        "synchronous = NORMAL",  # counts survive a kill; installs ask for FULL
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {JOURNAL_LIMIT_BYTES}",
        "foreign_keys = ON",
        "secure_delete = OFF",  # where it is on, as in Debian, each page that becomes free is written, too
        "trusted_schema = OFF",
        "temp_store = MEMORY",
    )
    try:
        for pragma in pragmas:
            conn.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:  # the traceback would keep it open, and with it the log and the memory that it shares
        leave_log(conn)  # which may be what it cannot be read with
        conn.close()
        raise
    return conn


def _uri(path: Path) -> str:
    """As Path.as_uri, which a program may have replaced: SQLite would make a file of whatever that gives."""
    return "file:" + "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in os.fsencode(path))


def leave_log(conn: sqlite3.Connection) -> None:
    """Leave the write-ahead log to the daemon when this connection closes as the last one, from Python 3.12 on.

    In a program that is not ours each flush would otherwise copy it into the file, wait for the disk, and delete it.
    """
    setconfig = getattr(conn, "setconfig", None)
    if setconfig is not None:
        setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, True)  # type: ignore[attr-defined,unused-ignore]


def connect_read_only(path: Path, timeout_s: float = 5.0) -> sqlite3.Connection:
    """A connection that cannot write. Raises StoreError when there is no database or it cannot be read.

    Where the folder cannot be written, or its disk is full, SQLite needs a live writer to share memory with; without
    one, and without a log that would be missed, the file is read as it lies.
    """
    if not path.exists():
        raise StoreError(f"{path}: no such database. Run a program with GEMMTUNED=1 first, or set GEMMTUNED_DB")
    path = path.resolve()
    faults.refuse_short(path)
    faults.refuse_without_locks(path)
    uri = path.as_uri()
    try:
        try:
            return _probed(f"{uri}?mode=ro", timeout_s)
        except sqlite3.OperationalError as err:
            wal = path.with_name(path.name + "-wal")
            closed = faults.kind(err) in ("readonly", "cantopen", "full") or faults.no_room(path)
            if not closed or (wal.exists() and wal.stat().st_size):
                raise
            return _probed(f"{uri}?mode=ro&immutable=1", timeout_s, AsItLies)
    except (sqlite3.Error, UnicodeDecodeError, OSError) as err:
        raise faults.store_error(err, path, waited_s=timeout_s) from err


class AsItLies(sqlite3.Connection):
    """What others write meanwhile is not seen by it."""


def _probed(uri: str, timeout_s: float, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    conn = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, factory=factory)
    try:
        conn.execute("PRAGMA trusted_schema = OFF")
        conn.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except BaseException:
        conn.close()
        raise
    return conn


def journal_mode(conn: sqlite3.Connection) -> str:
    """The mode that SQLite is in for this file: `wal`, where the file system allows it."""
    return str(conn.execute("PRAGMA journal_mode").fetchone()[0])


def identity(path: Path | str) -> tuple[int, int] | None:
    """Which file lies at path. stat alone: to open and close the file here would drop SQLite's locks on it."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def folder_of_salvage(path: Path) -> Path:
    """Where mend.py builds a damaged database anew."""
    return path.with_name(f"{SALVAGE}{path.name}")


def salvage_is_finished(path: Path) -> bool:
    """Whether a salvage was killed at its last step: what it built waits to be renamed. Asked at every opening."""
    try:
        os.stat(f"{path.parent}/{SALVAGE}{path.name}/new.db")
    except OSError:
        return False
    return True


def make(path: Path) -> None:
    """An empty file that SQLite makes a database of; nothing where there is one."""
    failpoints.point("store.make")
    make_folders(path.parent)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.fchmod(fd, file_mode(path.parent))  # SQLite gives -wal and -shm the same mode
    finally:
        os.close(fd)


def is_network(kind: str) -> bool:
    """Whether this kind of file system, as /proc/mounts names it, is shared by hosts that share no memory."""
    return kind.removeprefix("fuse.").removeprefix("fuseblk.").startswith(NETWORK_FILESYSTEMS)


def refuse_network(path: Path) -> None:
    """WAL needs memory shared by all who open the file, which no network file system has."""
    mounts = Path("/proc/thread-self/mountinfo")  # also right where the program's first thread has ended
    if not mounts.exists():
        return
    real = str(path.parent.resolve())
    best, kind = "", ""
    for line in mounts.read_text("utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, right.split(" ")[0]
    if is_network(kind):
        raise StoreError(
            f"{path}: on {kind}, where SQLite cannot share memory. Set GEMMTUNED_HOME to a folder on a local disk"
        )
