"""What other packages add to ours, by entry points: their backends and their families.

They are imported by workers, which measure, and never by programs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import TypeVar

logger = logging.getLogger("gemmtuned.kernels")
_T = TypeVar("_T")


def found(group: str, kind: str, objection: Callable[[_T], str]) -> Iterator[_T]:
    """What the entry points of this group name; those that do not load, or have an objection, are left out with a word.

    kind: what it is, for the word.  objection: why it cannot be taken; "" where it can.
    """
    for point in entry_points(group=group):
        try:
            one: _T = point.load()
            why = objection(one)
            if why:
                raise ValueError(why)
        except Exception as err:  # noqa: PERF203  other people's code may raise anything
            reason = f"{type(err).__name__}: {err}"
            logger.warning("%s left out entry_point=%r reason=%r", kind, point.value, reason)
        else:
            yield one
