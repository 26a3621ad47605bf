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

To choose, max-autotune calls each candidate for a tenth of a second or more, extern kernels by the operators that we
count: thousands of calls of a product that the program calls once.  So what it calls meanwhile belongs to a phase.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.hooks.phase import Phase

if TYPE_CHECKING:
    from gemmtuned.hooks.compiled_notes import Note

SCHEDULER: Final = "torch._inductor.scheduler"
AUTOTUNER: Final = "torch._inductor.select_algorithm"
PHASE: Final = "autotuning"
MAX_WAITING: Final = 4096  # distinct ones kept until the flush thread takes them


class Compiled:
    """A patch of Inductor's scheduler between install() and remove(); `take` returns what was noted since."""

    def __init__(self) -> None:
        self.counted = False  # calls of a C++ wrapper are counted, so that they need no note
        self._waiting: dict[Note, None] = {}
        self._finder = _OnImport({SCHEDULER: self._patch, AUTOTUNER: self._patch_autotuner})
        # What stands in for AlgorithmSelectorCache.benchmark_choices, and what stood there
        self._autotuners: tuple[Any, Any] | None = None
        self._ours: Any = None  # what stands in for Scheduler.codegen, and what stood there
        self._stock: Any = None

    def install(self) -> None:
        """Patch them now, or when the program imports Inductor: it takes a second, so we never import it."""
        self._finder.install()

    def remove(self) -> None:
        """Take the patch back; if somebody has wrapped it meanwhile, it stays and does nothing."""
        with suppress(ValueError):
            sys.meta_path.remove(self._finder)
        choice: Any = getattr(sys.modules.get(AUTOTUNER), "AlgorithmSelectorCache", None)
        autotuners, self._autotuners = self._autotuners, None
        if autotuners is not None and vars(choice).get("benchmark_choices") is autotuners[0]:
            choice.benchmark_choices = autotuners[1]
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

    def _patch_autotuner(self, module: types.ModuleType) -> None:
        stock = vars(module.AlgorithmSelectorCache)["benchmark_choices"]
        if not isinstance(stock, classmethod):  # another torch's, which takes other arguments
            return
        watch = self

        def benchmark_choices(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with Phase(PHASE) if watch._autotuners is not None else nullcontext():
                return stock.__func__(cls, *args, **kwargs)

        self._autotuners = classmethod(benchmark_choices), stock
        module.AlgorithmSelectorCache.benchmark_choices = self._autotuners[0]


class _OnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls back once modules of Inductor's have been imported. then: by their names."""

    def __init__(self, then: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._then = then
        self._loaders: dict[str, Any] = {}

    def install(self) -> None:
        """Call back for those that are there, and wait for the others."""
        for name in self._then:
            if name in sys.modules:
                self._patch(sys.modules[name])
        if not all(name in sys.modules for name in self._then) and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _patch(self, module: types.ModuleType) -> None:
        with suppress(AttributeError, KeyError):  # a torch whose module has not what we look for is left as it is
            self._then[module.__name__](module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of the modules as others find it, with ourselves as its loader."""
        if name not in self._then:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """As the real loader does."""
        module: types.ModuleType | None = self._loaders[spec.name].create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """As the real loader does; then restore the module's loader and call back."""
        loader = module.__loader__ = self._loaders[module.__name__]
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        loader.exec_module(module)
        self._patch(module)
        if all(name in sys.modules for name in self._then):
            with suppress(ValueError):
                sys.meta_path.remove(self)


def _notes(scheduler: Any, counted: bool) -> Iterable[Note]:
    with suppress(Exception):  # a compilation goes on whatever becomes of our notes
        from gemmtuned.hooks.compiled_notes import notes

        return notes(scheduler, counted=counted)
    return ()
