"""Whether packages were upgraded or removed while this daemon runs.

The parent keeps in memory what it imported, each worker imports what lies on the disk now: of another gemmtuned it
cannot start as the parent expects, of another torch it has another environment.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
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


def packages() -> frozenset[str]:
    """Names with versions of the packages that a process of this Python finds now, as folders of metadata have them."""
    return frozenset[str]().union(*map(_metadata_in, sys.path))


_listed: dict[str, tuple[int, frozenset[str]]] = {}  # by folder: when it was changed last, in ns, and what was there


def _metadata_in(folder: str) -> frozenset[str]:
    with suppress(OSError):  # an archive, or not there
        changed_ns = os.stat(folder or ".").st_mtime_ns  # noqa: PTH116  each turn asks; a Path takes twice as long
        if folder not in _listed or _listed[folder][0] != changed_ns:
            with os.scandir(folder or ".") as entries:
                names = (entry.name for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
                _listed[folder] = changed_ns, frozenset(names)
        return _listed[folder][1]
    return frozenset()
