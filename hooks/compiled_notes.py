"""What Inductor's scheduler holds of GEMMs inside its own kernels, as compiled.py notes them.

Imported with the first compilation, in the program's thread: most programs compile nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from gemmtuned.configs.problem import Problem

CPP_WRAPPER: Final = "compiled C++"  # noted in place of a template's name
PACKED: Final = "packed linear"
_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_PACKED: Final = (
    "torch.ops.mkldnn._linear_pointwise",
    "torch.ops.mkl._mkl_linear",
    "torch.ops.onednn.qlinear_pointwise",
)

Note = tuple[Problem, str, str]  # problem, the kernel's name, place


def notes(scheduler: Any, *, counted: bool) -> Iterator[Note]:
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
