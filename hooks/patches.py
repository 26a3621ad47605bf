"""What the hook puts into torch: the native operators, once their library is there, and which of their switches are on.

    native    our operators stand in front of aten's GEMMs (hooks/native)
    off       nothing is patched: switched off, or the native library is not there yet

The library is never built here, because a build takes child processes and CPU time of the program.  Until somebody has
built it, the process counts nothing, says so, and looks for it now and then.  Operators that are registered late cause
no recompilation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs import clock
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.settings import BATCH_INVARIANT, Settings, batch_invariance
from gemmtuned.configs.stderr_lines import Once, tell
from gemmtuned.hooks import native
from gemmtuned.hooks.breaker import Breaker
from gemmtuned.hooks.compiled import Compiled
from gemmtuned.hooks.foreign import ForeignOperators
from gemmtuned.hooks.imports import import_ahead, importing
from gemmtuned.hooks.native import build as native_build
from gemmtuned.hooks.tables import Library, Tables

if TYPE_CHECKING:
    from gemmtuned.hooks.graphs import GraphCounts

log = logging.getLogger("gemmtuned.hooks")
LOOK_S: Final = 5.0  # between two looks for a library that was not there at the start
ANEW_S: Final = 30.0  # between two looks at torch's dispatcher for kernels on top of ours: each takes 1 to 2 ms


class Patches:
    """counts: whether calls are counted at all.  before_capture: called before a CUDA graph is captured."""

    def __init__(
        self, settings: Settings, library: Library, tables: Tables, *, counts: bool, before_capture: Callable[[], None]
    ) -> None:
        self._settings, self._library, self._tables = settings, library, tables
        self._counts, self._before_capture = counts, before_capture
        self.path = "off"
        self.note = ""  # why
        self.graphs: GraphCounts | None = None
        self.compiled = Compiled()
        self.breaker = Breaker()
        self.look_at_s: float | None = None  # when to look again for the library; of clock.monotonic()
        self.switches = native.OFF  # as it is set
        self._invariant = ""  # who asks for kernels that are the same for every M
        self._setting = FrameLock()  # around putting something into torch, and taking it back
        self._removed = False
        self._logged_others = Once()
        self._look_anew_s = 0.0  # a time of clock.monotonic()
        self.foreign = ForeignOperators()

    def install(self) -> None:
        """Patch torch, or say why not."""
        if self._settings.capture:
            self.compiled.install()
        if self._settings.native:
            self._take_library()
            if self.note:
                tell(log, logging.WARNING, "%s", self.note)
            import_ahead(self._settings)  # without the library, too: our thread looks for it, and tells of this process
        else:
            self.note = "GEMMTUNED_NATIVE=0: nothing is counted or routed"

    def remove(self) -> None:
        """Take every patch back for good, even if our thread is in the middle of a turn."""
        with self._setting:
            self._removed = True
            self.compiled.remove()
            if self.graphs is not None:
                self.graphs.remove()
            if self._library.native is not None:
                self._library.native.set_switches(native.OFF)  # and never deregistered, see hooks/native/install.h
            self.path = "off"

    def after_fork(self) -> None:
        """In a forked child: replace the lock, which the parent may have held."""
        self._setting = FrameLock()
        self.foreign.after_fork()

    def look_again(self, now_s: float) -> bool:
        """Look now and then for a library that was not there; True when it serves this process from now on."""
        if self.look_at_s is None or now_s < self.look_at_s:
            return False
        self._take_library()
        return self.path == "native"

    def _take_library(self) -> None:
        """Use the native library if it is there; else note why not, and when to look again."""
        self.look_at_s = clock.monotonic() + LOOK_S
        try:
            found = native_build.find_built(self._settings.cache)
            if found is None:
                self.note = native_build.missing(self._settings.cache)
                return
            self.look_at_s = None
            # the table must not change between giving it to the library and using that
            self._tables.changes.make(lambda: self._put_in(found))
        except (GemmtunedError, OSError) as err:
            self.note = f"nothing is counted or routed: {err}"

    def _put_in(self, found: Path) -> None:
        with self._setting:
            if self._removed:
                return
            self._install(native.Native(found))
            self.note = ""
            self._stay_removed()

    def _stay_removed(self) -> None:
        """A finalizer, in the middle of putting something in, may have had it all taken back."""
        if self._removed:
            self.remove()

    def _install(self, library: native.Native) -> None:
        self._tables.give_to(library)
        library.set_switches(native.OFF)
        library.install()
        self.compiled.counted = library.has_shims
        library.live_check(self._settings.live_check)
        if self._settings.capture or self._settings.dispatch:
            self.graphs = watch_graphs(library, self._settings, self.before_graph)
        self.switches = self._wanted()
        library.set_switches(self.switches)
        self._library.native, self.path = library, "native"

    # ---- what they may do

    @property
    def dispatches(self) -> bool:
        """Whether calls are routed now: False once the switch, or the breaker, has taken effect."""
        return bool(self.switches & native.DISPATCH)

    @property
    def counts(self) -> bool:
        """Whether calls are counted now."""
        return bool(self.switches & native.CAPTURE)

    def follow_switches(self) -> None:
        """Set the switches as the settings and the breaker ask for now, and report a batch-invariant mode."""
        before, switches = self._invariant, self._wanted()
        with self._setting:
            if switches != self.switches and self._library.native is not None and not self._removed:
                self._library.native.set_switches(switches)
                self.switches = switches
                self._stay_removed()
        if self._invariant != before and self.invariant_note():
            tell(log, logging.WARNING, "%s", self.invariant_note())

    def _wanted(self) -> int:
        if self.switched_off():
            return native.OFF
        self._invariant = batch_invariance()
        asked = not self._invariant or self._invariant == BATCH_INVARIANT  # an engine's mode: it keeps its own kernels
        dispatch = native.DISPATCH if self._settings.dispatch and not self.breaker.open and asked else 0
        return (native.CAPTURE if self._counts else 0) | dispatch | (native.INVARIANT if self._invariant else 0)

    def switched_off(self) -> str:
        """What the user has switched it off by; "" when it is on."""
        if self._settings.disabled:
            return "switched off by GEMMTUNED_DISABLE or AITER_BYPASS_TUNE_CONFIG"
        if self._settings.switched_off:
            return f"switched off: {self._settings.kill_switch} exists"
        return ""

    def invariant_note(self) -> str:
        """One line on what a batch-invariant mode leaves of dispatch; "" without such a mode."""
        if not self._invariant or not self._settings.dispatch:
            return ""
        if self._invariant == BATCH_INVARIANT:
            return f"{BATCH_INVARIANT}: dense products by kernels proven batch-invariant alone, all else by torch"
        return (
            f"dispatch is off, capture is on: {self._invariant} asks for one kernel whatever the batch "
            f"({BATCH_INVARIANT}=1 has those served that are proven so)"
        )

    # ---- kernels of others

    def look_for_new_foreign(self) -> None:
        """As `look_for_foreign`, each second: mostly nothing can have come."""
        if self._library.native is not None and self.switches != native.OFF:
            self.foreign.look_if_new(self._library.native)

    def look_for_foreign(self) -> None:
        """Count operators of engines and other packages that were registered since the last look."""
        if self._library.native is not None and self.switches != native.OFF:
            self.foreign.look(self._library.native)

    def overridden(self, *, anew: bool = False) -> dict[str, str]:
        """Operators whose calls do not reach us: name -> where the kernel that serves them was registered."""
        return self._library.native.overridden(anew=anew) if self._library.native is not None else {}

    def others_note(self) -> str:
        """One line on operators that somebody else serves; "" without any."""
        return _of_others(self.overridden())

    def before_graph(self) -> None:
        """Look for other packages' operators once more, so that the graph's calls of new ones are counted."""
        with suppress(Exception):  # the program's thread
            self.look_for_foreign()
        self._before_capture()

    def tell_of_others(self, now_s: float) -> None:
        """Report each overridden operator once. Registrations from C++ are looked up every ANEW_S seconds only."""
        anew = now_s >= self._look_anew_s
        if anew:
            self._look_anew_s = now_s + ANEW_S
            if self._library.native is not None:
                self._library.native.take_freed()
        overridden = self.overridden(anew=anew)
        new = {name: source for name, source in overridden.items() if self._logged_others.is_new(name)}
        if new:
            tell(log, logging.WARNING, "%s", _of_others(new))


def watch_graphs(library: native.Native, settings: Settings, before: Callable[[], None]) -> GraphCounts | None:
    """Count what is captured in CUDA graphs, and call `before` each capture; None without CUDA."""
    if not library.has_cuda:
        return None
    import torch

    with importing():
        from gemmtuned.hooks.graphs import GraphCounts

    graphs = GraphCounts(
        library, torch.cuda.CUDAGraph, torch.cuda.current_device, before=before, replays=settings.capture
    )
    graphs.install()
    return graphs


def _of_others(overridden: dict[str, str]) -> str:
    if not overridden:
        return ""
    served = ", ".join(f"{operator} ({source})" for operator, source in list(overridden.items())[:3])
    more = f" and {len(overridden) - 3} more" if len(overridden) > 3 else ""
    return f"kernels of others are left alone and their calls not counted: {served}{more}"
