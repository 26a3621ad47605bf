"""What the hook counted beside what torch's own profiler saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from gemmtuned.configs.problem import Problem

CPU = frozenset(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_int_mm"))
# on the CPU these two are made of the others, and counted there
LEAVES = {
    "cpu": CPU,
    "cuda": CPU | {"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_grouped_mm", "aten::_scaled_grouped_mm"},
}


@dataclass
class Profile:
    """gemms: calls of aten's leaf GEMMs that multiplied anything, not counting those that another one made inside."""

    gemms: int = 0


@contextmanager
def profiled(device: str = "cpu") -> Iterator[Profile]:
    """Profile the block; the Profile is filled in at its end."""
    said = Profile()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        yield said
    said.gemms = sum(_is_gemm(event, LEAVES[device]) for event in seen.events() or ())


def counted(hook: Any) -> Counter[Problem]:
    """Problem -> calls since the last time, of all outcomes and places."""
    calls: Counter[Problem] = Counter()
    for sighting in hook.drain():
        calls[sighting.problem] += sighting.calls
    return calls


def _is_gemm(event: FunctionEvent, leaves: frozenset[str]) -> bool:
    if event.name not in leaves:
        return False
    first = 1 if "add" in event.name else 0
    if any(0 in shape for shape in event.input_shapes[first : first + 2]):
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in leaves or parent.name.endswith("(dynamo_timed)"):  # traced on tensors without data
            return False
        parent = parent.cpu_parent
    return True
