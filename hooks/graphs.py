"""CUDA graphs: what is captured is tuned, and replays are counted: a launch inside a graph runs with each of them.

Two methods of torch.cuda.CUDAGraph are wrapped: `capture_begin` waits for a table that is about to be active, and then
the graph learns the id of its capture; `replay` adds one to that id, under which the native hook knows what was
recorded.  Graphs captured before the hook was on are not known and not counted.  Servers that replay from C++ say so
with `gemmtuned.graph_replayed`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

from gemmtuned.hooks.native import Native

log = logging.getLogger("gemmtuned.hooks")

_WRAPPED: Final = ("capture_begin", "replay")
_ID: Final = "_gemmtuned_capture"  # attribute of a graph


class _Captured:
    """What a graph knows of its capture; tells the native hook when the graph is gone."""

    def __init__(self, graph: Any, native: Native, capture: int) -> None:
        self.capture = capture
        self._end = weakref.finalize(graph, native.graph_gone, capture)
        self._end.atexit = False

    def detach(self) -> None:
        """The graph's end is of no matter to this capture any more."""
        self._end.detach()


class GraphCounts:
    """The wrappers around one graph class; `current_device` gives the index of the device that captures.

    before: called before a capture begins.  replays: whether they are counted; else only captures are looked at.
    """

    def __init__(
        self,
        native: Native,
        graph_class: type[Any],
        current_device: Callable[[], int],
        *,
        before: Callable[[], None] = lambda: None,
        replays: bool = True,
    ) -> None:
        self._native, self._class, self._current_device, self._before = native, graph_class, current_device, before
        self._wrapped = _WRAPPED if replays else _WRAPPED[:1]
        self._stock: dict[str, Any] = {}
        self._told_of_strange = False

    def install(self) -> None:
        """Wrap; a second time does nothing."""
        if self._stock:
            return
        native, current_device, before_it = self._native, self._current_device, self._before
        self._stock = {name: getattr(self._class, name) for name in self._wrapped}
        begin, replay = (getattr(self._class, name) for name in _WRAPPED)

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):
                before_it()
            result = begin(graph, *args, **kwargs)
            with contextlib.suppress(Exception):  # a capture is open: nothing may go wrong here
                before = graph.__dict__.pop(_ID, None)
                if before:  # captured anew
                    before.detach()
                    native.graph_gone(before.capture)
                capture = native.capture_begun(current_device())
                if capture:
                    graph.__dict__[_ID] = _Captured(graph, native, capture)
            return result

        @functools.wraps(replay)
        def counted_replay(graph: Any) -> Any:
            result = replay(graph)
            captured = graph.__dict__.get(_ID)
            if captured:
                native.graph_replayed(captured.capture, 1)
            return result

        for name, ours in zip(self._wrapped, (capture_begin, counted_replay), strict=False):
            setattr(self._class, name, ours)

    def remove(self) -> None:
        """Put torch's own methods back, unless somebody has wrapped ours meanwhile."""
        for name, stock in self._stock.items():
            if getattr(getattr(self._class, name), "__wrapped__", None) is stock:
                setattr(self._class, name, stock)
        self._stock = {}

    def replayed(self, graph: Any, times: int) -> None:
        """A graph was replayed by other means than its `replay`; said once when nothing is known of it."""
        captured = getattr(graph, _ID, None)
        if not captured and not self._told_of_strange:
            self._told_of_strange = True
            log.warning("replays not counted reason='%r was not captured while the hook was on'", graph)
        if captured and times > 0:
            self._native.graph_replayed(captured.capture, times)
