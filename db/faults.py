"""What a SQLite error means to a user: which kind it is, and the sentence that names the way out."""

from __future__ import annotations

import errno
import sqlite3
import stat
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import StoreBusy, StoreError
from gemmtuned.configs.open_files import free_bytes, in_the_way, limit_reached, size_limit
from gemmtuned.configs.read_file import read_regular
from gemmtuned.configs.unpatched import os
from gemmtuned.db import refusals
from gemmtuned.db.lockfile import way_out, what_lies_there

# Primary result codes (sqlite3.h). Python 3.10 tells only the text, which SQLite keeps fixed (sqlite3ErrStr).
_CODES: Final = {
    3: "perm",
    5: "busy",
    6: "busy",
    8: "readonly",
    10: "io",
    11: "corrupt",
    13: "full",
    14: "cantopen",
    15: "nolock",  # SQLITE_PROTOCOL: the log's locks could not be had however often they were tried
    26: "corrupt",
}
# Extended codes of SQLITE_IOERR: LOCK, UNLOCK, RDLOCK, CHECKRESERVEDLOCK, SHMLOCK
_LOCK_CODES: Final = tuple(10 | number << 8 for number in (15, 8, 9, 14, 20))
_MUCH_BYTES: Final = 64 << 20
_SHARED_BYTES: Final = 64 << 10  # a file with -shm behind its name: 32 KiB, and a block or two
OUR_NAMES: Final = ("tune.db", "ingest.db")
_OUR_WORDS: Final = (b"environment_stamp", b"compiled_gemm", b"gemmtuned")  # in our tables, and in a migration's record
_GONE: Final = ("no such table", "no such column")  # SQLite's words for a view, too
_LONGEST: Final = 512 - len("-journal")  # bytes in a path: SQLite has room for 512 with what it adds to one
_TEXTS: Final = {
    "locking protocol": "nolock",
    "is locked": "busy",
    "readonly": "readonly",
    "disk I/O error": "io",
    "malformed": "corrupt",
    "not a database": "corrupt",
    "Could not decode": "corrupt",
    "is full": "full",
    "unable to open": "cantopen",
    "access permission": "perm",
}


def kind(err: sqlite3.Error | UnicodeDecodeError) -> str:
    """`busy`, `readonly`, `perm`, `cantopen`, `full`, `io`, `corrupt`, `nolock`, or `other`."""
    if isinstance(err, UnicodeDecodeError):
        return "corrupt"  # SQLite's message quotes a schema that is no text any more
    code = getattr(err, "sqlite_errorcode", None)
    if code in _LOCK_CODES:
        return "nolock"
    if isinstance(code, int):
        return _CODES.get(code & 0xFF, "other")
    text = str(err)
    return next((name for part, name in _TEXTS.items() if part in text), "other")


def other_error(err: OSError | OverflowError | UnicodeEncodeError | MemoryError, path: Path) -> StoreError:
    """The error to raise instead of what is not SQLite's own word, for the database at path."""
    if isinstance(err, OSError):
        return store_error(err, path)
    if isinstance(err, MemoryError):
        return StoreError(f"{path}: {refusals.no_memory()}")
    return StoreError(f"{path}: a value that SQLite cannot hold ({err})")


def store_error(err: sqlite3.Error | UnicodeDecodeError | OSError, path: Path, *, waited_s: float = 0.0) -> StoreError:
    """The error to raise instead of err, for the database at path."""
    what = kind(err) if not isinstance(err, OSError) else _os_kind(err)
    if what == "io" and no_room(path):
        what = "full"
    if what == "busy":
        return busy(path, waited_s)
    if what == "nolock":
        return no_locks_error(path, err)
    if what in ("full", "cantopen") and no_inodes(path):
        return StoreError(
            f"{path}: disk full (no room for another file: all inodes are taken). Remove some files, or set "
            "GEMMTUNED_HOME to a folder on another disk"
        )
    if what == "full":
        return StoreError(
            f"{path}: disk full ({_free(path, err)}). Free space, or set GEMMTUNED_HOME to a folder on another disk"
        )
    if isinstance(err, NotADirectoryError | FileExistsError) and (below_a_file := no_folder_error(path)) is not None:
        return below_a_file
    if isinstance(err, OSError) and (of_lock := _of_lock(err, path)):
        return StoreError(f"{path}: {of_lock}")
    if what in ("cantopen", "io") and (full := _no_more_files(err, path)):
        return StoreError(f"{path}: cannot be opened: {full}")
    if what in ("readonly", "perm", "cantopen") and _is_read_only(path):
        return StoreError(f"{path}: {refusals.READ_ONLY}")
    if what in ("readonly", "perm", "cantopen", "io"):
        cause = err if isinstance(err, OSError) else refusals.tried(path.parent)
        meant = refusals.meaning(cause, path)
        if meant:
            return StoreError(f"{path}: {meant}")
        if cause is not None and cause is not err and _os_kind(cause) in ("full", "io"):  # SQLite says neither
            return store_error(cause, path)
    if what == "cantopen" and (size := len(os.fsencode(path))) > _LONGEST:
        return StoreError(
            f"{path}: a path of {size} bytes, and SQLite opens none of more than {_LONGEST}. Set GEMMTUNED_HOME to a "
            "folder with a shorter one"
        )
    if what in ("readonly", "perm", "cantopen"):
        return StoreError(
            f"{path}: cannot be opened for writing by uid {os.geteuid()} ({err}). "
            "Give it write access to the file and its folder, or set GEMMTUNED_HOME to a folder of its own"
        )
    if what == "corrupt":
        strange = _strange(path)
        if strange:
            return _no_database(path, strange)
        return StoreError(
            f"{path}: damaged ({err}). Start gemmtuned daemon, or restart the one that runs: it builds the database "
            "anew from what can be read, and published solutions come back by themselves. gemmtuned db check says more"
        )
    if what == "io":
        limit = size_limit()
        more = f", or {limit}" if limit else ". Look at the system log, or set GEMMTUNED_HOME to another disk"
        return StoreError(f"{path}: the disk refused ({err}){more}")
    return _plain_error(err, path)


def _plain_error(err: Exception, path: Path) -> StoreError:
    if is_gone(err):
        return StoreError(
            f"{path}: its tables or views are not as gemmtuned made them ({err}). Start gemmtuned daemon, or restart "
            "the one that runs: it builds the database anew from what can be read"
        )
    return StoreError(f"{path}: {err}")


def _of_lock(err: OSError, path: Path) -> str:
    """Why the database's lock cannot be opened, and what helps; "" for an error of another file or another kind."""
    if isinstance(err, NotADirectoryError) and err.filename is None:
        return f"its lock cannot be made ({err.strerror}){way_out(err)}"
    named = os.fsdecode(err.filename) if isinstance(err.filename, str | bytes | Path) else ""
    if not isinstance(err, PermissionError) or not (named.endswith(".lock") or named.endswith("/locks")):
        return ""
    return "" if refusals.meaning(err, path) else f"its lock {named} cannot be opened ({err.strerror}){way_out(err)}"


def is_gone(err: Exception) -> bool:
    """Whether it says that a table, view or column which was asked for is not there."""
    return str(err).startswith(_GONE)


def is_damage(err: StoreError) -> bool:
    """Whether it says that the file cannot be read as it lies, and not that it could not be asked."""
    cause = err.__cause__
    return isinstance(cause, sqlite3.Error | UnicodeDecodeError) and kind(cause) == "corrupt"


def _no_more_files(err: Exception, path: Path) -> str:
    """As limit_reached; SQLite does not say why it cannot open a file, so one that is closed to us is that."""
    there = path if os.path.exists(path) else path.parent  # Path.exists raises where the folder is closed
    return limit_reached(err) if isinstance(err, OSError) or os.access(there, os.R_OK | os.W_OK) else ""


def no_folder_error(path: Path) -> StoreError | None:
    """The error to raise when there can be no database at path, for it lies below a file."""
    what = in_the_way(path.parent)
    return StoreError(f"{path}: {what}. Move it away, or set GEMMTUNED_HOME or GEMMTUNED_DB") if what else None


def refuse_short(path: Path) -> None:
    """Raise StoreError for what is no file, and for one of one byte, which SQLite would take for an empty database.

    To open a FIFO, or some devices, would not return.

    By stat alone: to open and close a database here would drop all locks that SQLite has on it in this process
    (sqlite.org/howtocorrupt.html, 2.2), and the next program to close would take away the log that we write to.
    """
    try:
        facts = path.stat()
    except OSError:
        return  # who opens the database will say it
    if stat.S_ISDIR(facts.st_mode):
        raise StoreError(f"{path}: a folder, no database. Set GEMMTUNED_DB to a file, for example {path / 'tune.db'}")
    if not stat.S_ISREG(facts.st_mode):
        raise _no_database(path, what_lies_there(facts.st_mode))
    if facts.st_size == 1:
        raise _no_database(path, "1 byte")


def refuse_strange(path: Path) -> None:
    """Raise StoreError for what was never a database of ours: to build one in its place would take somebody's file.

    Only for a file that SQLite has found damaged, with no connection of ours to it: see `refuse_short`.
    """
    what = _strange(path)
    if what:
        raise _no_database(path, what)


def no_database(path: Path) -> StoreError:
    """The error to raise where no program has counted yet."""
    return StoreError(f"{path}: no such database. Run a program with GEMMTUNED=1 first, or set GEMMTUNED_DB")


def _no_database(path: Path, what: str) -> StoreError:
    what = what if "database" in what else f"{what}, no database"
    return StoreError(f"{path}: {what}; it is left as it is. Set GEMMTUNED_DB to another file")


def _strange(path: Path) -> str:
    """What the file is when it is no damaged database of ours, as far as its first megabyte says; "" when it may be.

    Every page of SQLite's has a zero byte, which text has not.  By the name that we give it, anything may be ours; by
    another name that somebody has set, only what still holds a word of our schema.
    """
    try:
        start = read_regular(path, 1 << 20)
    except OSError:
        return ""
    if start and b"\0" not in start[: 1 << 16]:
        return "a text file"
    if not start or path.name in OUR_NAMES or any(word in start for word in _OUR_WORDS):
        return ""
    return "a damaged database of another program" if start.startswith(b"SQLite format 3\0") else "a binary file"


def busy(path: Path, waited_s: float) -> StoreError:
    """Somebody held the database for as long as we waited; or nobody did, and locks cannot be had at all there."""
    err = refusals.no_locks(path.parent)
    if err is not None:  # SQLite calls that busy, too
        return no_locks_error(path, err)
    return StoreBusy(
        f"{path}: locked by another process for {waited_s:g} s. Try again; if it stays so, look for a stopped daemon "
        "or an open transaction in a sqlite3 shell"
    )


def no_locks(folder: Path) -> str:
    """Why no file in this folder can be locked; "" where they can be, as far as is known. Leaves nothing behind."""
    err = refusals.no_locks(folder)
    return "" if err is None else str(err.strerror)


def refuse_without_locks(path: Path) -> None:
    """Raise StoreError where the kernel gives no locks: SQLite would wait for locks that nobody holds."""
    err = refusals.no_locks(path.parent)
    if err is not None:
        raise no_locks_error(path, err)


def no_locks_error(path: Path, err: Exception) -> StoreError:
    """The error to raise where the kernel gives no locks: nobody holds them, and to wait does not help."""
    forbidden = isinstance(err, PermissionError) and refusals.meaning(err, path)
    if forbidden:
        return StoreError(f"{path}: {forbidden}")
    why = err.strerror or err if isinstance(err, OSError) else err
    return StoreError(
        f"{path}: the file system gives no locks ({why}), as one of a network without its lock service. "
        "Set GEMMTUNED_HOME to a folder on a local disk"
    )


def _os_kind(err: OSError) -> str:
    name = os.strerror(err.errno) if err.errno else ""
    if name in (os.strerror(28), os.strerror(122)):  # ENOSPC, EDQUOT
        return "full"
    if err.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS) and err.filename is None:  # a lock's has no name
        return "nolock"
    return "io" if err.errno == 5 else "cantopen"


def no_room(path: Path) -> bool:
    """Whether the disk has no room for the memory that users of this database share: to SQLite an I/O error."""
    free = _free_bytes(path)
    if free is not None and free < _SHARED_BYTES:
        return not _is_read_only(path)  # an image that only is read has no room, and nobody wants any
    return no_inodes(path)


def no_inodes(path: Path) -> bool:
    """Whether the disk has no room for another file, such as the log beside the database, whatever is free of it."""
    facts = _disk(path)
    return facts is not None and bool(facts.f_files and not facts.f_favail)  # some file systems count none


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _free(path: Path, err: Exception) -> str:
    """How full it is, in words that stay the same for a while: who says it once is to see that it was said."""
    if isinstance(err, OSError) and err.errno == errno.EDQUOT:
        return "the quota is used up"
    free = _free_bytes(path)
    if free is None:
        return "free space unknown"
    return f"{free >> 20} MiB free" if free < _MUCH_BYTES else "so the system says: a quota, or what is reserved there"


def _free_bytes(path: Path) -> int | None:
    try:
        return free_bytes(_folder(path))
    except OSError:
        return None


def _disk(path: Path) -> os.statvfs_result | None:
    """Facts of the disk that the file is on, or would be once its folders are made; None where nobody tells."""
    try:
        return os.statvfs(_folder(path))
    except OSError:
        return None


def _folder(path: Path) -> Path:
    return next((parent for parent in path.parents if os.path.lexists(parent)), path.parent)
