"""A folder that `gemmtuned export` writes to, and which of its files are ours to replace.

The folder may be another tool's own (aiter/configs), with files of the same names that somebody tuned for days.  What
we wrote is noted in it with its hash; a file that is not noted, or was changed since, is not ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import MANIFEST, MAX_BYTES, read_manifest
from gemmtuned.configs.read_file import read_regular
from gemmtuned.configs.temporary import put

NOTES: Final = ".gemmtuned-export.json"  # name -> SHA-256 as written; hidden, so that no tool's glob takes it up


class ExportFolder:
    """The folder, there or not yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._notes = _read_notes(path / NOTES)

    def taken(self, names: Iterable[str]) -> list[str]:
        """The names among these under which the folder has a file."""
        return [name for name in names if (self.path / name).exists()]

    def not_ours(self, names: Iterable[str]) -> list[str]:
        """The names among these whose file in the folder is not ours, or was changed since we wrote it."""
        return [name for name in self.taken(names) if not self._is_ours(name)]

    def _is_ours(self, name: str) -> bool:
        if name != MANIFEST:
            return self._notes.get(name) == _digest(self.path / name)
        try:  # a folder that we published or exported tells by itself
            return read_manifest(self.path) is not None
        except TableError:
            return False

    def make(self) -> None:
        """Make the folder where there is none. Raises TableError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise TableError(f"{self.path}: cannot be made ({err.strerror or err})") from err

    def note(self, name: str) -> None:
        """Remember that this file is as we wrote it. Raises TableError when the disk refuses."""
        self._notes[name] = _digest(self.path / name)
        path = self.path / NOTES
        try:
            put(path, (json.dumps(self._notes, indent=1, sort_keys=True) + "\n").encode())
        except OSError as err:
            raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err


def _read_notes(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):  # lost notes make files somebody else's, which is the safe side
        return {}
    return {str(name): str(digest) for name, digest in raw.items()} if isinstance(raw, dict) else {}


def _digest(path: Path) -> str:
    try:
        return sha256(read_regular(path, MAX_BYTES)).hexdigest()
    except OSError:  # a folder, or not to be read
        return ""
