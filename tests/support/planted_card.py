"""A GPU with a worker of ours and programs of others, as its driver would tell of them."""

from __future__ import annotations

from typing import Any

from fake_gpu import CONTEXT, Card

from gemmtuned.daemon.device.attribution import Attribution, OwnUse

WORKER = 4711
VIEWS = ("all", "none", "host")


class Scene:
    """One card watched ten times a second."""

    def __init__(self, card: Card, *, share: bool = False, neighbours: Any = lambda least, elsewhere: None) -> None:
        self.card = card
        self.now_s = 1000.0
        self.attribution = Attribution(share_resident=share, neighbours=neighbours)
        self.own: OwnUse | None = None
        self.seen: list[tuple[float | None, str]] = []

    def watch(self, seconds: float) -> list[tuple[float | None, str]]:
        seen = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            seen.append(self.attribution.others(self.card.facts(), self.own, self.now_s))
        self.seen += seen
        return seen

    def begin(self) -> Any:
        """Our worker starts: importing, then its context, then its first word."""
        self.own = OwnUse(WORKER)
        seen = self.watch(2.0)
        program = self.card.start(WORKER, share=0.05)  # it looks whether the device is well
        seen += self.watch(0.6)
        self.own = OwnUse(WORKER, 0)
        seen += self.watch(0.8)  # the driver's utilisation is an average
        program.share = 0.0
        seen += self.watch(0.3)
        assert set(seen) == {(0.0, "")}
        return program

    def work(self, program: Any, tensors: int, seconds: float) -> list[tuple[float | None, str]]:
        """Our worker measures with so many bytes of tensors; its report comes a moment after the driver's count."""
        assert self.own is not None
        self.own = OwnUse(WORKER, self.own.memory_bytes, working=True)
        program.held, program.share = CONTEXT + tensors, 0.9
        seen = self.watch(0.1)
        self.own = OwnUse(WORKER, tensors, working=True)
        return seen + self.watch(seconds)
