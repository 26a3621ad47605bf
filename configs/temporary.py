"""Names of files that are written whole before they are renamed into place."""

from __future__ import annotations

import os
from pathlib import Path


def beside(path: Path) -> Path:
    """A name next to `path` that no other writer has.

    The number of a process is not enough: containers and hosts that share a folder count theirs each for itself, and a
    process may have several threads that write.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
