"""The page in which this process says that it runs products: made once it uses a GPU, gone when it ends.

The daemon tunes beside a loaded program only while that is quiet.  By this page it sees that an engine which polls the
CPU without a request is quiet, and at once when it no longer is.  Without a page it goes by CPU time.

Killed processes leave theirs, and who has a page next takes them away.  Of those in another PID namespace, such as a
container with the same /dev/shm, nobody here can say whether they live: their pages go when they were not touched for
LEFT_S.
"""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.heartbeat_page import folder_of, page_of
from gemmtuned.configs.numbers import whole
from gemmtuned.configs.processes import life_of, namespace_of, pid_namespace
from gemmtuned.configs.unpatched import os

if TYPE_CHECKING:
    from gemmtuned.hooks.native import Native

TOUCH_S: Final = 600.0  # between two signs of life
LEFT_S: Final = 3600.0  # without one


class Beats:
    """This process's page."""

    def __init__(self) -> None:
        self._page: Path | None = None
        self._tried = False
        self._touch_s = 0.0  # when to touch it next, of clock.monotonic()

    def follow(self, native: Native | None, places: tuple[str, ...]) -> None:
        """Have a page from when a GPU is in use, and say that we live. Tried once."""
        if self._page is not None and clock.monotonic() >= self._touch_s:
            self._touch_s = clock.monotonic() + TOUCH_S
            with suppress(OSError):
                os.utime(self._page)
        if native is not None and not self._tried and any(place != "cpu" for place in places):
            self.show(native)

    def show(self, native: Native) -> bool:
        """Have a page now; False where none can be made."""
        self._tried = True
        uid = os.geteuid()
        try:
            namespace = namespace_of("self")
            folder, page = folder_of(uid), page_of(os.getpid(), uid, namespace)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                folder.chmod(0o700)  # the umask may have closed it to us
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != uid or facts.st_mode & 0o022:
                return False
            _sweep(folder, namespace)
            page.unlink(missing_ok=True)  # the page of a process that had our number before
            if native.show_beats(page):
                self._page = page
        except OSError:
            pass
        return self._page is not None

    def hide(self) -> None:
        """Take the page away; calls may still count in it."""
        if self._page is not None:
            with suppress(OSError):
                self._page.unlink()
        self._page = None

    def after_fork(self) -> None:
        """In a forked child: the page is the parent's."""
        self._page, self._tried = None, False


def _sweep(folder: Path, namespace: int) -> None:
    """Take pages away that killed processes have left.

    Where /proc is another namespace's, a number in it is another process: then only time tells, as for containers.
    """
    sees = pid_namespace() is not None
    for page in folder.glob("beats-*-*"):
        where, pid = map(whole, page.name.split("-")[1:3])
        if where is None or pid is None:
            continue
        with suppress(OSError, IndexError):
            try:
                here = sees and where == namespace
                over = life_of(pid)[0] if here else clock.now_s() - page.stat().st_mtime > LEFT_S
            except FileNotFoundError:
                over = True
            if over:
                page.unlink()
