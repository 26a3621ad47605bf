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
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from gemmtuned.configs.problem import Problem

SCHEDULER: Final = "torch._inductor.scheduler"
CPP_WRAPPER: Final = "compiled C++"  # noted in place of a template's name
PACKED: Final = "packed linear"
_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_PACKED: Final = (
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkl._mkl_linear",
    "torch.ops.onednn.qlinear_pointwise",
)
MAX_WAITING: Final = 4096  # distinct ones kept until the flush thread takes them

Note = tuple[Problem, str, str]  # problem, the kernel's name, place


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
            for note in _notes(self, counted=watch.counted) if watch._ours is not None else ():
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


def _notes(scheduler: Any, *, counted: bool) -> Iterator[Note]:
    """The GEMMs of templates among the scheduler's nodes, and those a C++ wrapper calls, unless `counted`.

    Never raises, because Inductor is in the middle of its work.
    """
    with suppress(Exception):
        from torch._inductor.ir import MultiTemplateBuffer, TemplateBuffer
        from torch._inductor.virtualized import V

        wrapped = bool(getattr(V.graph, "cpp_wrapper", False))
        for node in scheduler.nodes:
            for part in node.get_nodes():
                template = getattr(part, "node", None)
                # several choices in one: an extern kernel may be the one that runs
                if isinstance(template, TemplateBuffer) and not isinstance(template, MultiTemplateBuffer):
                    with suppress(Exception):
                        yield _note(template, type(template).__name__.removesuffix("Buffer"))
                elif wrapped and not counted and _operator(template) in _PRODUCTS:
                    with suppress(Exception):
                        yield _note(template, CPP_WRAPPER)
                elif str(getattr(template, "python_kernel_name", None) or "").startswith(_PACKED):
                    with suppress(Exception):
                        yield _packed_note(template, CPP_WRAPPER if wrapped else PACKED)


def _operator(node: Any) -> str:
    """`addmm` of a node that calls extern_kernels.addmm, "" of others."""
    name = str(getattr(node, "python_kernel_name", None) or "")
    return name.removeprefix("extern_kernels.") if name.startswith("extern_kernels.") else ""


def _note(template: Any, kernel: str) -> Note:
    """The product that one kernel computes, of its last two inputs, which must fit each other and the output.

    Raises any exception when they do not.
    """
    import torch

    from gemmtuned.kernels.dtypes import SHORT

    a, b = template.inputs[-2:]
    one, other, out = ([_size(d) for d in t.get_size()] for t in (a, b, template))
    if one[:-2] != other[:-2] or one[-1] != other[-2] or out != [*one[:-1], other[-1]] or len(one) > 3:
        raise ValueError("no plain product")
    device = a.get_device()
    # what is added is a bias, which is a row, or a matrix as large as the result
    added = [_size(d) for d in template.inputs[0].get_size()] if len(template.inputs) == 3 else []
    full = kernel == CPP_WRAPPER and len(added) > 1 and added[-2] > 1
    problem = Problem(
        family=("batched" if len(one) == 3 else "dense") + ("_add" if full else ""),
        batch=one[0] if len(one) == 3 else 1,
        m=one[-2],
        n=other[-1],
        k=one[-1],
        bias=bool(added) and len(one) == 2 and not full,
        layout=_side(a, prefer_t=False) + _side(b, prefer_t=True),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        dtype=SHORT[a.get_dtype()],
        wdtype=SHORT[b.get_dtype()],
        out_dtype=SHORT[template.get_dtype()],
    )
    place = "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    return problem, kernel, place


def _packed_note(node: Any, kernel: str) -> Note:
    """The product of a linear with a packed weight, by its first input and its output. Raises any exception."""
    import torch

    from gemmtuned.kernels.dtypes import SHORT

    x = node.inputs[0]
    one, out = ([_size(d) for d in t.get_size()] for t in (x, node))
    problem = Problem(
        m=math.prod(out[:-1]), n=out[-1], k=one[-1], dtype=SHORT[x.get_dtype()], out_dtype=SHORT[node.get_dtype()],
        weight_state="packed", threads=torch.get_num_threads(),
    )  # fmt: skip
    return problem, kernel, "cpu"


def _size(dimension: Any) -> int:
    """A size; for a symbolic one the value at this compilation."""
    try:
        return int(dimension)
    except TypeError:
        from torch._inductor.virtualized import V

        sizes: Any = V.graph.sizevars
        hint = getattr(sizes, "guarding_hint_or_throw", None) or sizes.size_hint  # its name until torch 2.12
        return int(hint(dimension))


def _side(matrix: Any, *, prefer_t: bool) -> str:
    """As `side` of native/call.h."""
    rows, columns = (int(s) for s in matrix.get_stride()[-2:])
    if prefer_t and rows == 1:
        return "t"
    return "n" if columns == 1 else "t" if rows == 1 else "s"
