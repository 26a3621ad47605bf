"""Remove compiled kernels that nothing names any more: those of candidates that lost, and of tables long gone.

So is what a process that was killed left half written: tables, backups, what the daemon says.

Rows of solutions are never deleted, and `gemmtuned rollback` may publish any generation again, so whatever one row of
the store or of the published tables names is kept, wherever it lies.  What is young is kept, too: a worker leaves a
kernel before its verdict is in the store.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.manifest import BINARIES
from gemmtuned.configs.published import read_published
from gemmtuned.daemon.publishing.publish import publishing

if TYPE_CHECKING:
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")
YOUNG_S: Final = 7 * 86400.0
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HALF: Final = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp(-journal)?")  # see configs/temporary.py; SQLite's of a backup
_OURS: Final = re.compile(rf"[0-9a-f]{{64}}|{_HALF.pattern}")


def prune(store: Store, home: Path, folder: Path, locks: Path) -> int:
    """Remove from the `bin` of the home and of the published tables what nothing names; returns how many bytes.

    Nothing is removed while a published table cannot be read.  Raises StoreError, StoreBusy, TableError, TryLater.
    """
    before = time.time() - YOUNG_S  # files have the system's clock
    folders = dict.fromkeys((home, folder))
    half = sum(_prune(one, _HALF, set(), before) for one in (*folders, home / "checked"))
    if half:
        logger.info("removed what killed processes had half written bytes=%d", half)
    with publishing(locks):  # no publisher brings a kernel meanwhile
        published = read_published(folder)
        if published is not None and (published.trouble or published.unread or published.manifest is None):
            return half
        named = {digest for text in store.solutions.launches() for digest in _DIGEST.findall(text)}
        if published is not None:
            named.update(digest for line in published.lines for digest in _DIGEST.findall(line))
        freed = sum(_prune(one / BINARIES, _OURS, named, before) for one in folders)
    if freed:
        logger.info("kernels removed that nothing names bytes=%d", freed)
    return half + freed


def _prune(folder: Path, ours: re.Pattern[str], named: set[str], before_s: float) -> int:
    freed = 0
    with contextlib.suppress(OSError):  # there is none, or it is another user's, closed to us
        for path in folder.iterdir():
            if not ours.fullmatch(path.name) or path.name in named:
                continue
            with contextlib.suppress(OSError):
                facts = path.lstat()
                if facts.st_mtime < before_s:
                    path.unlink()
                    freed += facts.st_size if facts.st_nlink == 1 else 0
    return freed
