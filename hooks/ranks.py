"""Programs of several ranks: tables change on all of them at one point of the program, or on none.

Two kernels for one problem may round differently.  Where ranks compute the same thing each for itself (a router, a
sampler) a near tie then falls one way here and the other way there, and the ranks part for good.  So a rank takes a
table up when it starts and after that only in `gemmtuned.reload(group)`.  A launcher says by WORLD_SIZE that there are
several; a program may also make ranks of processes that know nothing of it (multiprocessing, Ray), which shows once
torch.distributed is initialised.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gemmtuned.hooks.hook import Hook


def several() -> bool:
    """True when this process is one of several ranks, by torch.distributed; imports nothing."""
    return _size() > 1


def rank() -> int | None:
    """This process's rank by torch.distributed; None before that is initialised."""
    return int(_distributed().get_rank()) if _size() else None


def reload_group(hook: Hook | None, group: torch.distributed.ProcessGroup) -> None:
    """All ranks of the group take up the table that its first rank reads now. Collective, hook or no hook."""
    import torch.distributed as dist

    box: list[Any] = [None]
    if dist.get_rank(group) == 0 and hook is not None:
        loaded = hook.tables.loader.load(newer_than=0)
        if loaded is not None and not hook.tables.refuses(loaded[0]):
            box = [(loaded[0], [s.to_row() for s in loaded[1]])]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[0] is not None and hook is not None:
        hook.tables.take_rows(*box[0])


def _distributed() -> Any:
    return sys.modules.get("torch.distributed")


def _size() -> int:
    dist = _distributed()
    try:
        return int(dist.get_world_size()) if dist is not None and dist.is_available() and dist.is_initialized() else 0
    except (AttributeError, RuntimeError, ValueError):  # half imported, or being taken down
        return 0
