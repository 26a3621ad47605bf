"""Whether what was published still lies there: a table that was removed or spoilt serves no program that starts now.

A look costs a few calls of stat, so it is made every few seconds; hashes are compared only where something changed.
"""

from __future__ import annotations

from pathlib import Path

from gemmtuned.configs.manifest import BINARIES, MANIFEST


class PublishedFolder:
    """What lies in the folder of published tables, as of the last `keep`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, tuple[int, ...]] | None = None

    def keep(self) -> None:
        """Remember the folder as it is now: this is how it should be."""
        self._kept = self._look()

    def changed(self) -> bool:
        """Whether the folder differs from what `keep` saw; False before the first `keep`."""
        return self._kept is not None and self._look() != self._kept

    def _look(self) -> dict[str, tuple[int, ...]]:
        """Facts of the folder, the manifest, the tables, and the folder of kernels: one that goes changes its time."""
        try:
            tables = sorted(self._folder.glob("*.jsonl"))
        except OSError:
            tables = []
        return {path.name: _facts(path) for path in (self._folder, self._folder / MANIFEST, *tables)} | {
            BINARIES: _facts(self._folder / BINARIES, whole=True)
        }


def _facts(path: Path, *, whole: bool = False) -> tuple[int, ...]:
    """Which file it is and what changes when it is written; of the folder itself only whose it is. () for none."""
    try:
        facts = path.lstat()
    except OSError:
        return ()
    which = (facts.st_dev, facts.st_ino, facts.st_mode, facts.st_uid)
    return (*which, facts.st_size, facts.st_mtime_ns) if whole or path.suffix in (".json", ".jsonl") else which
