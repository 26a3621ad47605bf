"""Programs of several ranks: their tables change on all ranks at one point of the program, or on none.

Two kernels for one problem may round differently.  Where each rank computes the same thing for itself (a router, a
sampler), a near tie may then be decided differently on two ranks, which diverge from there on.  So a rank takes up a
table when it starts and after that only in `gemmtuned.reload(group)`.  A launcher says by WORLD_SIZE that there are
several ranks; in other programs (multiprocessing, Ray) it shows once torch.distributed is initialised.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs import clock
from gemmtuned.configs.settings import MANIFEST
from gemmtuned.configs.stderr_lines import tell

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch

    from gemmtuned.hooks.hook import Hook

log = logging.getLogger("gemmtuned.hooks")
AGREE_S: Final = 15.0  # the ranks of one program come to the same line within this time
RETRY_S: Final = 10.0  # after this time a table that could not be taken up is read again

Rows = tuple[int, list[str]]  # generation, rows of the table, each a line of JSON


def several() -> bool:
    """True when this process is one of several ranks, by torch.distributed; imports nothing."""
    return _size() > 1


def rank() -> int | None:
    """This process's rank by torch.distributed; None before that is initialised."""
    return int(_distributed().get_rank()) if _size() else None


def reload_group(hook: Hook | None, group: torch.distributed.ProcessGroup) -> None:
    """All ranks of the group take up the table that its first rank reads now. Collective, hook or no hook."""
    import torch.distributed as dist

    _take_up(hook, group, _read(hook) if dist.get_rank(group) == 0 else None)


def _take_up(hook: Hook | None, group: torch.distributed.ProcessGroup, table: Rows | None) -> None:
    """Have all ranks of the group use the table that its first rank sends. Collective."""
    import torch.distributed as dist

    box = [table]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box[0] is not None and hook is not None:
        hook.tables.take_rows(*box[0])


def _read(hook: Hook | None) -> Rows | None:
    """The published table to send to the other ranks; None for none. Never raises, because the other ranks wait."""
    try:
        loaded = hook.tables.loader.load(newer_than=0) if hook is not None else None
        if hook is None or loaded is None or hook.tables.refuses(loaded[0]):
            return None
        from gemmtuned.configs.manifest import line  # it has been imported with the table

        return loaded[0], [line(solution) for solution in loaded[1]]
    except Exception as err:
        tell(log, logging.WARNING, "table not taken reason=%s", f"{type(err).__name__}: {err}")
        return None


def all_agree(group: torch.distributed.ProcessGroup, said: str) -> bool:
    """Whether every rank of the group calls this with the same words within AGREE_S; all that do get the same answer.

    It is no collective, because a rank that never comes would leave the group broken.  The ranks meet in the store
    that torch.distributed was initialised with, and what the first of them decides there holds.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore(f"gemmtuned/{group.group_name}", _get_default_store())
    keys = [str(rank) for rank in dist.get_process_group_ranks(group)]
    store.set(str(dist.get_rank()), said)
    try:
        store.wait(keys, timedelta(seconds=AGREE_S))
        same = all(store.get(key) == said.encode() for key in keys)
    except RuntimeError:  # some have not come
        same = False
    verdict: bytes = store.compare_set("all agree", "", "yes" if same else "no")
    return verdict == b"yes"


class Together:
    """Changes tables on all ranks of a group at the same step of the program, which need not ask for it.

    Each rank calls `step` at every step.  Once in `every` steps the first rank sends the number of the generation that
    it has read, and all ranks take that generation up at once.  hook: this process's, None where it is off.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, *, hook: Callable[[], Hook | None], every: int) -> None:
        self._group, self._hook, self._every = group, hook, every
        self._steps = 0
        self._known = 0  # the generation that all ranks have
        self._looked: tuple[int, int] | None = None  # the manifest that was taken up last
        self._not_before_s = 0.0  # a time of clock.monotonic()

    def step(self) -> None:
        """One step has begun. Collective once in `every` steps."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.look()

    def look(self) -> None:
        """Take up what is newest now. Collective."""
        import torch.distributed as dist

        table = self._newer() if dist.get_rank(self._group) == 0 else None
        newest = of_first(lambda: table[0] if table is not None else self._known, self._group)
        if newest != self._known:
            _take_up(self._hook(), self._group, table)
            self._known = newest  # only once it was read: otherwise it is read again

    def _newer(self) -> Rows | None:
        """The published table's generation, if it is not the one that all ranks have."""
        hook = self._hook()
        if hook is None or clock.monotonic() < self._not_before_s:
            return None
        try:
            facts = (hook.settings.config_dir / MANIFEST).stat()
        except OSError:
            return None
        if (facts.st_ino, facts.st_mtime_ns) == self._looked:
            return None
        table = _read(hook)
        if table is None:
            self._not_before_s = clock.monotonic() + RETRY_S
            return None
        self._looked = facts.st_ino, facts.st_mtime_ns
        return table if table[0] != self._known else None


def is_shared(group: torch.distributed.ProcessGroup | None) -> TypeGuard[torch.distributed.ProcessGroup]:
    """Whether there is a group, and more than one rank in it."""
    import torch.distributed as dist

    return group is not None and dist.get_world_size(group) > 1


def of_first(number: Callable[[], int], group: torch.distributed.ProcessGroup) -> int:
    """The answer of `ask` on the group's first rank, sent to all; 0 if it raises, since the others wait. Collective."""
    import torch
    import torch.distributed as dist

    found = 0
    if dist.get_rank(group) == 0:
        try:
            found = number()
        except Exception as err:
            tell(log, logging.WARNING, "the first rank could not look reason=%s", f"{type(err).__name__}: {err}")
    box = torch.tensor([found])
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
