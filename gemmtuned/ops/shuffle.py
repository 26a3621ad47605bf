"""AITER's pre-shuffled weight layout: made, undone, and recognised beside a plain weight.

A shuffled weight [N, K] has the shape of the plain one with its elements in the order that AITER's assembly and
composable kernels read them: tiles of `layout[0]` rows by 2 x `layout[1]` columns, inside them runs of 16 bytes.  AITER
marks it with an attribute, which `.view`, `.data` and a new Parameter lose; so every function here also takes the
answer as an argument.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels import shuffled_order
from gemmtuned.ops.tensors import tensor

PRESHUFFLE_M_THRESHOLD: Final = 128  # AMD's guide: below it a shuffled weight is slower
_RUN_BYTES: Final = 16
_TN: Final = (16, 16)  # what the guide calls "tn"
_TN_MULTIPLE: Final = 256


class ShuffleError(GemmtunedError, ValueError):
    """A weight cannot be shuffled so, or is shuffled already."""


def shuffle_weight(x: Tensor, layout: tuple[int, int] | str = _TN) -> Tensor:
    """A copy of the weight [..., N, K] in AITER's order, marked `is_shuffled`.

    layout: (rows, half the columns) of a tile, or "tn", AMD's guide's name for (16, 16) with N and K multiples of 256.
    Raises ShuffleError when N or K is no multiple of the tile, or the weight is shuffled already as its mark says, or
    that of the weight it is a view of: doing it twice gives another order and wrong results.
    """
    if is_shuffled(x) or is_view_of_shuffled(x):
        raise ShuffleError("the weight is shuffled already; shuffle the plain one, once after it was loaded")
    rows, cols, run = _tile(x, layout)
    found = shuffled_order.in_order(x, rows, cols, run)
    _mark(found, layout)  # it is what views of the result tell by (`is_view_of_shuffled`)
    return _mark(found.view(x.shape), layout)


def unshuffle_weight(x: Tensor, layout: tuple[int, int] | str | None = None) -> Tensor:
    """The plain weight of a shuffled one, as a copy. layout: None is the one it was marked with, else (16, 16)."""
    marked: tuple[int, int] | str = getattr(x, "shuffle_layout", _TN)
    rows, cols, run = _tile(x, layout or marked)
    return shuffled_order.plain(x, rows, cols, run)


def is_shuffled(x: Tensor) -> bool:
    """Whether the weight carries AITER's mark; a mark can be lost, so False is no proof."""
    return getattr(x, "is_shuffled", False) is True


def is_view_of_shuffled(x: Tensor) -> bool:
    """Whether an unmarked weight is a view of a marked one: `.t()`, a slice. Such a view is in no order we can tell.

    torch's compiler shows the marks of what code is handed, and not of what it makes: it sees no view made inside.
    """
    base = getattr(x, "_base", None)
    return base is not None and is_shuffled(base) and not is_shuffled(x)


def tile_of(x: Tensor) -> tuple[int, int, int]:
    """(rows, columns, elements of 16 bytes) of the tiles of a shuffled weight. Raises ShuffleError if it has none."""
    layout: tuple[int, int] | str = getattr(x, "shuffle_layout", _TN)
    return _tile(x, layout)


def _mark(x: Tensor, layout: tuple[int, int] | str) -> Tensor:
    x.is_shuffled = True  # type: ignore[attr-defined]
    x.shuffle_layout = layout  # type: ignore[attr-defined]
    return x


def _tile(x: Tensor, layout: tuple[int, int] | str) -> tuple[int, int, int]:
    """(rows, columns, elements of 16 bytes) of a tile. Raises ShuffleError."""
    if tensor("the weight", x).dim() < 2:
        raise ShuffleError(f"a weight has at least two dimensions, this one has {x.dim()}")
    n, k = x.shape[-2:]
    if isinstance(layout, str):
        if layout != "tn":
            raise ShuffleError(f"layout {layout!r} is not known: 'tn', or a pair such as (16, 16)")
        if n % _TN_MULTIPLE or k % _TN_MULTIPLE:
            raise ShuffleError(f"layout 'tn' needs N and K to be multiples of {_TN_MULTIPLE}, the weight is {n}x{k}")
        layout = _TN
    if not isinstance(layout, tuple | list) or len(layout) != 2 or not all(isinstance(side, int) for side in layout):
        raise ShuffleError(f"layout is {layout!r}, expected 'tn', or a pair such as (16, 16)")
    if min(layout) < 1:
        raise ShuffleError(f"layout {layout!r} is not known: 'tn', or a pair such as (16, 16)")
    rows, cols = layout[0], 2 * layout[1]
    run = _RUN_BYTES // x.element_size()
    if n % rows or k % cols or cols % run:
        raise ShuffleError(f"layout {layout} needs N to be a multiple of {rows} and K of {cols}, the weight is {n}x{k}")
    return rows, cols, run
