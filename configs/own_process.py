"""Which process this is, among those that it was forked from: noticed though C code forked it and told nobody.

A child may have its parent's number, as the first process of another PID namespace has whose parent is the first of its
own.  So this goes by a page of memory that Linux empties in each forked child.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_WIPED_IN_CHILDREN: Final = 18  # MADV_WIPEONFORK, of Linux 4.14


def _page() -> memoryview | None:
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPED_IN_CHILDREN)
    except Exception:  # an older Linux or one that is imitated, an audit hook of the program
        return None
    return memoryview(page).cast("Q")


_its_page: Final = _page()
_newest = 0


def own_process() -> int:
    """A number that no process has had from which this one was forked. Its pid where Linux cannot tell more."""
    global _newest
    if _its_page is None:
        return os.getpid()
    before = _newest  # first: another thread may notice the same fork meanwhile
    number = _its_page[0]
    if not number:
        _its_page[0] = number = before + 1
    if number != before:
        _newest = number
    return number
