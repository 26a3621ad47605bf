"""Whether the package was upgraded or removed while this daemon runs: then its workers cannot start as it expects.

The parent keeps in memory what it imported, each worker imports what lies on the disk now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

WORKER: Final = Path(__file__).resolve().parent.parent / "child" / "worker_main.py"

Print = tuple[int, int, int]


def fingerprint(path: Path) -> Print | None:
    """(inode, size, time of the last change in ns) of a file; None where there is none to be seen."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


_AT_FIRST: Final = fingerprint(WORKER)


def what_changed() -> str:
    """What has become of the package since this process imported it; "" where it lies as it did."""
    now = fingerprint(WORKER)
    if now == _AT_FIRST:
        return ""
    return f"gemmtuned was {'removed' if now is None else 'replaced'} under this daemon ({WORKER.parents[1]})"
