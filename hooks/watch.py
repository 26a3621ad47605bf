"""Hot reload: a publish becomes active in the running process, without a restart and without touching the call path.

A watchdog observer only sets a flag.  The loader thread waits for it, lets the events settle, reads the manifest,
then the files that changed, validates every row, builds the new table and hands it over.  A slow poll finds what the
observer misses (network file systems, an exhausted inotify limit, a folder made anew).  A bad file keeps the old table.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import MANIFEST, TableFile, read_manifest, read_table
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks.imports import importing
from gemmtuned.hooks.pace import in_slices

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent

log = logging.getLogger("gemmtuned.hooks")
SETTLE_S: Final = 0.05  # a publish is several renames; wait until it is quiet for this long,
SETTLED_S: Final = 0.5  # but no longer than this
POLL_S: Final = 5.0
BLIND_POLL_S: Final = 0.5  # while there are no events: no folder yet, or no observer to be had
READS: Final = ("opened", "closed_no_write")  # our own look at a file must not make us look again
MIN_GAP_S: Final = 0.5  # reloads closer than this are taken together: parsing holds the interpreter lock

_subscribers: list[Callable[[int], None]] = []


def subscribe(callback: Callable[[int], None]) -> Callable[[], None]:
    """See gemmtuned.on_reload."""
    if not callable(callback):
        raise TypeError(f"on_reload takes a function of one argument, the generation; got {callback!r}")
    _subscribers.append(callback)

    def off() -> None:
        if callback in _subscribers:
            _subscribers.remove(callback)

    return off


def _tell(callback: Callable[[int], None], generation: int) -> None:
    try:
        callback(generation)
    except Exception:
        log.exception("a callback given to on_reload raised generation=%d", generation)


class Loader:
    """Reads published tables. Keeps parsed files by hash, so that a publish costs only the files that changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures = 0
        self.refused = ""  # why the newest table is not in use; empty when it is
        self.complaints: list[str] = []  # rows not taken, of the newest table
        self._files: dict[TableFile, tuple[list[Solution], list[str]]] = {}
        self._told: set[str] = set()

    def load(self, newer_than: int) -> tuple[int, list[Solution]] | None:
        """(generation, published solutions), or None when nothing newer is there or it cannot be used (said once)."""
        try:
            manifest = read_manifest(self.folder)
            if manifest is None or manifest.generation == newer_than:
                self.refused = ""
                return None
            if manifest.generation < newer_than:
                raise TableError(
                    f"{self.folder}: generation {manifest.generation} is older than {newer_than}, which is in use. "
                    "If the database was made anew, restart this program"
                )
            files = {f: self._files.get(f) or read_table(self.folder, f, pace=in_slices) for f in manifest.files}
        except TableError as err:
            self._refuse(str(err))
            return None
        except Exception as err:  # whatever a file can hold: the old table stays
            self._refuse(f"{self.folder}: {type(err).__name__}: {err}")
            return None
        self._files, self.refused = files, ""
        self.complaints = [c for _, complaints in files.values() for c in complaints]
        if self.complaints:
            self._tell(f"{len(self.complaints)} rows are not used, the first: {self.complaints[0]}")
        return manifest.generation, [s for solutions, _ in files.values() for s in solutions]

    def _refuse(self, why: str) -> None:
        self.failures += 1
        self.refused = f"a published table could not be taken up: {why}"
        self._tell(why)

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("table not taken reason=%s", what)


class Watcher:
    """Calls `reload` in its own thread whenever something newer may have been published, until `held` says True.

    files: tables of the user's own, watched too where their folder can be; the poll finds what that misses.
    """

    def __init__(
        self,
        folder: Path,
        reload: Callable[[], int | None],
        *,
        automatic: bool,
        held: Callable[[], bool] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        self._folder, self._reload, self._automatic, self._held = folder, reload, automatic, held
        self._files = frozenset(map(str, files))
        self._beside = sorted({file.parent for file in files} - {folder})
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._observer: Any = None
        self._watched: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._error = ""
        self.polling = False  # true when there are no file events and only the poll is left

    def start(self) -> None:
        """Start the loader thread; the observer starts in it."""
        self._thread = threading.Thread(target=self._run, name="gemmtuned-loader", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.2) -> None:
        """End both threads; returns after timeout_s at the latest."""
        self._stop.set()
        self._changed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self._once()
        while self._automatic and not self._stop.is_set():
            poll_s = POLL_S if self._watch() else BLIND_POLL_S
            self._changed.wait(poll_s * random.uniform(0.8, 1.2))  # noqa: S311  jitter
            settled_s = time.monotonic() + SETTLED_S
            while self._changed.is_set() and not self._stop.is_set() and time.monotonic() < settled_s:
                self._changed.clear()
                self._stop.wait(SETTLE_S)
            if self._stop.is_set():
                break
            if self._held is not None and self._held():
                log.info("tables change in gemmtuned.reload(group) alone reason='this is one of several ranks'")
                break
            if self._once():
                self._stop.wait(MIN_GAP_S)
        self._unwatch()

    def _once(self) -> bool:
        try:
            generation = self._reload()
        except Exception as err:
            if str(err) != self._error:
                self._error = str(err)
                log.exception("reload failed; what was in use stays")
            return False
        if generation is None:
            return False
        for callback in tuple(_subscribers):
            _tell(callback, generation)
        return True

    def _watch(self) -> bool:
        """Have an observer on the folder as it is now; False without one."""
        try:
            facts = self._folder.stat()
        except OSError:
            self._unwatch()
            return False
        here = (facts.st_dev, facts.st_ino)
        if self._observer is not None and self._watched == here and self._sees():
            return True
        self._unwatch()
        try:
            with importing():
                from watchdog.events import FileSystemEventHandler
                from watchdog.observers import Observer

            class SetFlag(FileSystemEventHandler):
                def on_any_event(self, event: FileSystemEvent) -> None:
                    # the manifest is renamed into place, or the folder itself goes
                    kind = event.event_type
                    if kind in ("moved", "deleted") or (kind not in READS and str(event.src_path).endswith(MANIFEST)):
                        changed.set()

            class SetFlagFor(FileSystemEventHandler):
                def on_any_event(self, event: FileSystemEvent) -> None:
                    here = (str(event.src_path), str(event.dest_path))
                    if event.event_type not in READS and not files.isdisjoint(here):
                        changed.set()

            changed, files = self._changed, self._files
            observer = Observer()
            observer.daemon = True
            observer.schedule(SetFlag(), str(self._folder), recursive=False)
            for beside in self._beside:
                if beside.is_dir():
                    observer.schedule(SetFlagFor(), str(beside), recursive=False)
            if any(Path(file).parent == self._folder for file in files):
                observer.schedule(SetFlagFor(), str(self._folder), recursive=False)
            observer.start()
        except Exception as err:  # inotify instances or watches used up, no permission: the poll is enough
            if not self.polling:
                log.info("watching by polling every=%gs reason=%s", BLIND_POLL_S, err)
            self.polling = True
            return False
        self._observer, self._watched, self.polling = observer, here, False
        self._changed.set()  # look once more: it may have been published before the watch began
        return True

    def _sees(self) -> bool:
        # a folder made anew may have the old one's inode; the emitter ends with the folder it watched
        return bool(self._observer.is_alive() and all(e.is_alive() for e in self._observer.emitters))

    def _unwatch(self) -> None:
        observer, self._observer, self._watched = self._observer, None, None
        if observer is not None:
            observer.stop()
