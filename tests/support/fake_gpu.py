"""A GPU as its driver describes it, with programs on it: for the rules that decide whose use it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
UUID = "GPU-11111111-2222-3333-4444-555555555555"
CONTEXT = 520 * MIB


@dataclass
class Program:
    """held: bytes of the card, its context included. share: of the time that its kernels run."""

    pid: int
    held: int = CONTEXT
    share: float = 0.0


@dataclass
class Card:
    """view: `all` (the driver names every process), `none` (a container: names nobody), `host` (a container that is
    shown the host's numbers: each pid plus 100000). by_pid: whether use is told by process.
    counts: whether memory is."""

    view: str = "all"
    by_pid: bool = True
    counts: bool = False
    uuid: str = UUID
    index: int = 0
    programs: list[Program] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    total: int = 141 << 30
    baseline: int = 4 * MIB

    def start(self, pid: int, *, held: int = CONTEXT, share: float = 0.0) -> Program:
        program = Program(pid, held, share)
        self.programs.append(program)
        return program

    def end(self, program: Program) -> None:
        self.programs.remove(program)

    def number(self, pid: int) -> int:
        return pid + 100_000 if self.view == "host" else pid

    def facts(self) -> dict[str, Any]:
        used = self.baseline + sum(p.held for p in self.programs)
        named = [] if self.view == "none" else self.programs
        by_pid = {str(self.number(p.pid)): round(100 * p.share) for p in named if p.share}
        return {
            "index": self.index, "uuid": self.uuid, "name": "NVIDIA H200", "arch": "sm_90", "units": 16896,
            "util": min(sum(p.share for p in self.programs), 1.0), "peak": None,
            "used_bytes": used, "free_bytes": self.total - used,
            "baseline_bytes": 128 * MIB,
            "pids": [self.number(p.pid) for p in named], "by_pid": by_pid if self.by_pid else None,
            "held_by_pid": {str(self.number(p.pid)): p.held for p in named} if self.counts else {},
            "compute_mode": 0, "mig": False, "driver": "580.1", **self.more,
        }  # fmt: skip


class FakeSampler:
    """Stands in for daemon/device/sampler.py: the facts of these cards."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.error = ""

    def facts(self) -> dict[str, dict[str, Any]]:
        return {card.uuid: card.facts() for card in self.cards}
