"""Hot reload: a publish becomes active in the running process, without a restart and without touching the call path.

A file event only sets a flag.  The hook's thread lets the events settle, reads the manifest, then the files that
changed, validates every row, builds the new table and hands it over.  A slow poll finds what events miss (network
file systems, an exhausted inotify limit, a folder made anew).  A bad file keeps the old table.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.numbers import rows_are
from gemmtuned.configs.packed import Solutions
from gemmtuned.configs.settings import MANIFEST
from gemmtuned.configs.stderr_lines import Once, tell
from gemmtuned.configs.unpatched import allocate_lock, os
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.inotify import Events
from gemmtuned.hooks.pace import about, in_slices

if TYPE_CHECKING:
    from gemmtuned.configs.manifest import Manifest, TableFile
    from gemmtuned.hooks.native import Native

SETTLE_S: Final = 0.05  # a publish is several renames: we wait until no event has come for so long
SETTLED_S: Final = 0.5  # the longest such wait
POLL_S: Final = 5.0
BLIND_POLL_S: Final = 0.5  # the interval while there are no events: no folder yet, or no inotify
MIN_GAP_S: Final = 0.5  # the least time between two reloads, because parsing holds the interpreter lock

log = logging.getLogger("gemmtuned.hooks")


class _Subscriber:
    """A callback given to on_reload, and the generations that it has not heard of yet.

    Each is called in a thread of its own, one generation after another, since one may take hours: the recapture of
    CUDA graphs waits until its engine is idle, and no other callback is to wait for that.
    """

    def __init__(self, callback: Callable[[int], None]) -> None:
        self._callback = callback
        self.untold: list[int] = []
        self._telling = allocate_lock()  # held by the thread that calls it

    def after_fork(self) -> None:
        """In a forked child: whoever was telling is not here."""
        self._telling = allocate_lock()
        self.untold.clear()

    def go_on(self) -> None:
        """Start the thread that calls it, if something is untold; if none can start, the next turn retries."""
        if self.untold and not self._telling.locked():
            with suppress(RuntimeError):
                threading.Thread(target=self._tell_all, name="gemmtuned-reload", daemon=True).start()

    def _tell_all(self) -> None:
        while self.untold and self._telling.acquire(blocking=False):  # else the thread that holds it tells this, too
            try:
                while self.untold:
                    self._call(self.untold.pop(0))
            finally:
                self._telling.release()

    def _call(self, generation: int) -> None:
        if self not in _subscribers:  # taken off meanwhile
            return
        try:
            self._callback(generation)
        except Exception:
            log.exception("a callback given to on_reload raised generation=%d", generation)


_subscribers: list[_Subscriber] = []


def subscribe(callback: Callable[[int], None]) -> Callable[[], None]:
    """See gemmtuned.on_reload."""
    if not callable(callback):
        raise TypeError(f"on_reload takes a function of one argument, the generation; got {callback!r}")
    subscriber = _Subscriber(callback)
    _subscribers.append(subscriber)

    def off() -> None:
        with suppress(ValueError):  # a second time
            _subscribers.remove(subscriber)

    return off


def after_fork() -> None:
    """In a forked child: whoever was telling is not here."""
    for subscriber in _subscribers:
        subscriber.after_fork()


def _tell_subscribers(generation: int) -> None:
    for subscriber in tuple(_subscribers):
        subscriber.untold.append(generation)
    _go_on_telling()


def _go_on_telling() -> None:
    for subscriber in tuple(_subscribers):
        subscriber.go_on()


class Loader:
    """Reads published tables. Keeps parsed files by hash, so that a publish costs only the files that changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures = 0
        self.refused = ""  # why the newest table is not in use; empty when it is
        self.complaints: list[str] = []  # rows not taken, of the newest table
        self._files: dict[TableFile, tuple[Solutions, list[str]]] = {}
        self._taken: tuple[int, tuple[TableFile, ...]] | None = None  # the newest table: its generation and its files
        self._logged = Once()

    def load(self, newer_than: int) -> tuple[int, Solutions] | None:
        """(generation, published solutions), or None when nothing newer is there or it cannot be used (said once).

        A table with the same number but other files is newer: after a backup of the home was restored, its daemon uses
        numbers a second time.
        """
        if self._is_nowhere():
            self.refused = ""
            return None
        with importing():  # late, because most programs have no table
            from gemmtuned.configs.manifest import read_manifest

        try:
            manifest = read_manifest(self.folder)
            if manifest is None or (manifest.generation == newer_than and not self._is_another(manifest)):
                self.refused = ""
                return None
            if manifest.generation < newer_than:
                raise TableError(
                    f"{self.folder}: generation {manifest.generation} is older than {newer_than}, which is in use. "
                    "If the database was made anew, restart this program"
                )
            files = {f: self._files.get(f) or self._read(f) for f in manifest.files}
        except TableError as err:
            self._refuse(str(err))
            return None
        except Exception as err:  # whatever a file can hold: the old table stays
            self._refuse(f"{self.folder}: {type(err).__name__}: {err}")
            return None
        self._files, self.refused, self._taken = files, "", (manifest.generation, manifest.files)
        self.complaints = [c for _, complaints in files.values() for c in complaints]
        if self.complaints:
            self._tell(f"{rows_are(len(self.complaints))} not used, the first: {self.complaints[0]}")
        return manifest.generation, Solutions.joined(solutions for solutions, _ in files.values())

    def _is_nowhere(self) -> bool:
        """Whether nothing was ever published in the folder, as far as can be said of it."""
        try:
            os.stat(self.folder / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False

    def _is_another(self, manifest: Manifest) -> bool:
        """Whether this manifest has the number of the table taken last, but other files."""
        return self._taken is not None and self._taken[0] == manifest.generation and self._taken[1] != manifest.files

    def _read(self, file: TableFile) -> tuple[Solutions, list[str]]:
        with importing():
            from gemmtuned.configs import launch  # noqa: F401  what reading a row with a launch record imports
            from gemmtuned.configs.manifest import solutions_of

        complaints: list[str] = []
        return Solutions(solutions_of(self.folder, file, complaints, pace=in_slices)), complaints

    def _refuse(self, why: str) -> None:
        self.failures += 1
        self.refused = f"a published table could not be taken up: {why}"
        self._tell(why)

    def _tell(self, what: str) -> None:
        if self._logged.is_new(what):
            tell(log, logging.WARNING, "table not taken reason=%s", what)


class Watcher:
    """Calls `reload` when something newer may have been published, until `held` returns True. A part of our thread.

    files: the user's own tables.  They are watched too where their folder can be; the poll finds the rest.
    """

    def __init__(
        self,
        folder: Path,
        reload: Callable[[], int | None],
        *,
        automatic: bool,
        held: Callable[[], bool] | None = None,
        files: Sequence[Path] = (),
        native: Callable[[], Native | None] = lambda: None,
    ) -> None:
        self._folder, self._reload, self._automatic, self._held = folder, reload, automatic, held
        self._files = tuple(files)
        self.events = Events(native)  # where the thread sleeps
        self._begun = False
        self._watched: tuple[int, int] | None = None
        self._due_s = clock.monotonic()
        self._changed_s: float | None = None  # since when something has changed
        self._not_before_s = 0.0
        self._error = ""
        self.polling = False  # there are no file events, so that only the poll finds new tables

    @property
    def begun(self) -> bool:
        """Whether it has looked once."""
        return self._begun

    def due_s(self) -> float:
        """When to look next; at once after an event, unless others follow it."""
        now_s = clock.monotonic()
        if self.events.changed:
            self.events.changed = False
            self._changed_s = self._changed_s or now_s
            settled_s = min(now_s + SETTLE_S, self._changed_s + SETTLED_S)
            self._due_s = max(settled_s, self._not_before_s)
        return self._due_s

    def turn(self) -> None:
        """Look whether there is something newer, and go on watching."""
        self._changed_s = None
        self._due_s = clock.monotonic() + BLIND_POLL_S  # holds if the rest of this turn raises
        if self._begun and self._held is not None and self._held():
            self._automatic = False
            self.events.close()
        if self._begun and not self._automatic:
            self._due_s = math.inf
            return
        took = self._once()
        self._begun = True
        if not self._automatic:
            self._due_s = math.inf
            return
        now_s = clock.monotonic()
        poll_s = POLL_S if self._watch() else BLIND_POLL_S
        self._due_s = now_s + about(poll_s)
        self._not_before_s = now_s + (MIN_GAP_S if took else 0.0)

    def _once(self) -> bool:
        try:
            generation = self._reload()
        except Exception as err:
            if str(err) != self._error:
                self._error = str(err)
                what = f"{type(err).__name__}: {err}"
                tell(log, logging.ERROR, "reload failed; what was in use stays reason=%s", what)
            return False
        if generation is None:
            _go_on_telling()
            return False
        _tell_subscribers(generation)
        return True

    def _watch(self) -> bool:
        """Watch the folder as it is now (it may have been made anew); False when there are no events of it."""
        try:
            facts = self._folder.stat()
        except OSError:
            self.events.close()
            return False
        here = (facts.st_dev, facts.st_ino)
        if self.events.alive and self._watched == here:
            return True
        folders: dict[Path, set[str]] = {self._folder: {MANIFEST}}
        for file in self._files:
            with suppress(OSError):  # a folder that we may not read: the poll is enough
                if file.parent.is_dir():
                    folders.setdefault(file.parent, set()).add(file.name)
        try:
            self.events.watch(folders)
        except OSError:  # inotify instances or watches used up, no permission, no /proc: the poll is enough
            self.polling = True
            return False
        self._watched, self.polling = here, False
        self.events.changed = True  # look once more: a table may have been published before the watch began
        return True
