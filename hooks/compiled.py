"""Notes GEMMs that torch.compile puts inside its own kernels: they call no operator, so they cannot be counted.

Inductor calls most GEMMs as extern kernels, which are counted like any other call.  With max-autotune it may choose
a template of its own (Triton, CUTLASS, C++) and fuse the surrounding operations into it.  Its scheduler holds that
choice when it writes the code; we note it there once per compilation, as present, without a number of calls.  Code that
comes from Inductor's cache on disk is not seen, nor a GEMM that had taken another form before (a product of one row as
a multiplication and a sum, weights packed by freezing).  In doubt nothing is noted.

With a C++ wrapper (TORCHINDUCTOR_CPP_WRAPPER, AOTInductor) extern kernels bypass the dispatcher, too: generated code
calls `aoti_torch_cpu_addmm_out`, which calls at::cpu::addmm_out.  We replace the former (native/shims.h), so that such
calls are counted and routed, also in a package that another process compiled.  If torch's function is found first,
the calls are noted in the scheduler as CPP_WRAPPER; linears whose weight freezing has packed (oneDNN's, MKL's) always
are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gemmtuned.hooks.compiled_notes import Note

SCHEDULER: Final = "torch._inductor.scheduler"
MAX_WAITING: Final = 4096  # distinct ones kept until the flush thread takes them


class Compiled:
    """A patch of Inductor's scheduler between install() and remove(); `take` returns what was noted since."""

    def __init__(self) -> None:
        self.counted = False  # calls of a C++ wrapper are counted, so that they need no note
        self._waiting: dict[Note, None] = {}
        self._finder = _OnImport(self._patch)
        self._ours: Any = None  # what stands in for Scheduler.codegen, and what stood there
        self._stock: Any = None

    def install(self) -> None:
        """Patch the scheduler now, or when the program imports Inductor: it takes a second, so we never import it."""
        module = sys.modules.get(SCHEDULER)
        if module is not None:
            with suppress(AttributeError):  # a scheduler without that method: nothing is noted
                self._patch(module)
        elif self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        """Take the patch back; if somebody has wrapped it meanwhile, it stays and does nothing."""
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        module = sys.modules.get(SCHEDULER)
        ours, self._ours = self._ours, None
        if module is not None and ours is not None and module.Scheduler.codegen is ours:
            module.Scheduler.codegen = self._stock

    def take(self) -> list[Note]:
        """What was noted since the last time."""
        return [self._waiting.popitem()[0] for _ in range(len(self._waiting))]

    def _patch(self, module: types.ModuleType) -> None:
        stock = module.Scheduler.codegen
        watch = self

        def codegen(self: Any, *args: Any, **kwargs: Any) -> Any:
            for note in _notes(self, watch.counted) if watch._ours is not None else ():
                if len(watch._waiting) < MAX_WAITING:
                    watch._waiting[note] = None
            return stock(self, *args, **kwargs)

        self._ours, self._stock = codegen, stock
        module.Scheduler.codegen = codegen


class _OnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls back once Inductor's scheduler has been imported."""

    def __init__(self, then: Callable[[types.ModuleType], None]) -> None:
        self._then = then
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the one module as others find it, with ourselves as its loader."""
        if name != SCHEDULER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """As the real loader does."""
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """As the real loader does; then restore the module's loader and call back."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with suppress(AttributeError):  # a scheduler without that method: nothing is noted
            self._then(module)
        with suppress(ValueError):
            sys.meta_path.remove(self)


def _notes(scheduler: Any, counted: bool) -> Iterable[Note]:
    with suppress(Exception):  # a compilation goes on whatever becomes of our notes
        from gemmtuned.hooks.compiled_notes import notes

        return notes(scheduler, counted=counted)
    return ()
