"""Programs of several ranks: tables change on all of them at one point of the program, or on none.

Two kernels for one problem may round differently.  Where ranks compute the same thing each for itself (a router, a
sampler) a near tie then falls one way here and the other way there, and the ranks part for good.  So a rank takes a
table up when it starts and after that only in `gemmtuned.reload(group)`.  A launcher says by WORLD_SIZE that there are
several; a program may also make ranks of processes that know nothing of it (multiprocessing, Ray), which shows once
torch.distributed is initialised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from typing import TypeGuard

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


class Together:
    """All ranks of a group change tables at one step of the program, without a word of the program's.

    Each calls `step` at every step; after so many, all learn from the first rank which generation is the newest, a
    number over the group's network, and take it up there and then.  hook: this process's, None where it is off.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, *, hook: Callable[[], Hook | None], every: int) -> None:
        self._group, self._hook, self._every = group, hook, every
        self._steps = 0
        self._known = 0
        self._looked: tuple[int, int] | None = None

    def step(self) -> None:
        """One step has begun. Collective at every so many."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.look()

    def look(self) -> None:
        """Take up what is newest now. Collective."""
        newest = of_first(self._newest, self._group)
        if newest != self._known:
            self._known = newest
            reload_group(self._hook(), self._group)

    def _newest(self) -> int:
        """Of the published table, as this rank sees it; what is known where it cannot be read."""
        hook = self._hook()
        if hook is None:
            return self._known
        try:
            facts = (hook.settings.config_dir / MANIFEST).stat()
            if (facts.st_ino, facts.st_mtime_ns) != self._looked:
                manifest = read_manifest(hook.settings.config_dir)
                self._looked = facts.st_ino, facts.st_mtime_ns  # only now: what could not be read is read again
                return self._known if manifest is None else manifest.generation
        except (OSError, GemmtunedError):
            pass
        return self._known


def is_shared(group: torch.distributed.ProcessGroup | None) -> TypeGuard[torch.distributed.ProcessGroup]:
    """Whether there is a group, and more than one rank in it."""
    import torch.distributed as dist

    return group is not None and dist.get_world_size(group) > 1


def of_first(number: Callable[[], int], group: torch.distributed.ProcessGroup) -> int:
    """What the group's first rank, which alone asks, finds. Collective."""
    import torch
    import torch.distributed as dist

    box = torch.tensor([number() if dist.get_rank(group) == 0 else 0])
    dist.broadcast(box, group=group, group_src=0)
    return int(box)


def _distributed() -> Any:
    return sys.modules.get("torch.distributed")


def _size() -> int:
    dist = _distributed()
    try:
        return int(dist.get_world_size()) if dist is not None and dist.is_available() and dist.is_initialized() else 0
    except (AttributeError, RuntimeError, ValueError):  # half imported, or being taken down
        return 0
