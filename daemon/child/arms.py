"""CHILD side: the operands of a contest, several times, and every candidate's calls of them.

Every race has others: on a GPU they lie elsewhere in memory; where a family deals its rows out to weights, as a mixture
of experts does, they are also dealt out in another way, since a kernel may be the faster one for even shares alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.checks import Watch, apart_on_others
from gemmtuned.daemon.child.measure import Arm, Bench, Clock
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.verify import REFUSALS
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs


class Arms:
    """main: the most called member.  default: torch's own kernel of every member."""

    def __init__(self, main: Problem, default: dict[Problem, Kernel], device: torch.device, clock: Clock) -> None:
        self.main, self.default = main, default
        self.bench_in_use = 0  # index of the operands in use
        self.seed = 0  # for the activations in use
        # How far from torch's a result may be, by the RMS of torch's: for each that was verified, and member
        self.apart_by_rms: dict[tuple[str, Problem], float] = {}
        self._device, self._clock = device, clock
        self._benches = [Bench(main, device)]  # operands, each at an address of its own
        self._arms: dict[Candidate, Arm] = {}
        self._stock: dict[Problem, Tensor] = {}  # torch's own on the operands in use

    def __getitem__(self, candidate: Candidate) -> Arm:
        """That of a candidate at the most called member, once it was made."""
        return self._arms[candidate]

    @property
    def bench(self) -> Bench:
        """The operands in use."""
        return self._benches[self.bench_in_use]

    def arm(self, candidate: Candidate, kernel: Kernel, member: Problem) -> Arm:
        """Made once at the most called member; at others again for every race, so that packed weights do not add up."""
        arm = self._arms.get(candidate) if member == self.main else None
        if arm is None:
            arm = self.bench.arm(str(candidate), kernel, member, self.seed)
            if member == self.main:
                self._arms[candidate] = arm
        return arm

    def watch(self, member: Problem, arms: Iterable[Arm]) -> None:
        """Both arms are looked at alike, so that it costs both of them the same."""
        stock = self.stock_at(member)
        for arm in arms:
            if arm.watch is None:
                arm.watch = Watch(stock, apart_on_others(self._apart(arm, member), stock))

    def _apart(self, arm: Arm, member: Problem) -> float:
        """As apart_by_rms; where the arm was not verified, as torch's own, what any other may be."""
        of_member = [by_rms for (_, which), by_rms in self.apart_by_rms.items() if which == member]
        return self.apart_by_rms.get((arm.name, member), max(of_member, default=math.inf))

    def stock_at(self, member: Problem) -> Tensor:
        """Torch's own result on what all arms of the member read."""
        if member not in self._stock:
            self._stock[member] = self.inputs(member).run(self.default[member])
        return self._stock[member]

    def inputs(self, member: Problem) -> Inputs:
        """What all arms of the member read, with the first weights."""
        return self.bench.inputs(member, self.seed)

    def move(self, number: int) -> None:
        """Take other operands, those of the race of this number, from 0: see the module.

        On a GPU they lie where the ones before do where no more have room.  All are kept to the end of the contest:
        else their memory would be handed out again.
        """
        if isinstance(self._clock, GraphClock):
            with suppress(*REFUSALS):
                while len(self._benches) <= number:
                    self._forget_all()  # what graphs hold may be what operands need
                    bench = Bench(self.main, self._device)
                    if len(bench.weights) < len(self._benches[0].weights):  # so few might be warm
                        break
                    self._benches.append(bench)
        self._take(min(number, len(self._benches) - 1), number if family_of(self.main).routed else 0)

    def step_back(self) -> None:
        """Give the operands in use away and take those before them."""
        del self._benches[self.bench_in_use :]
        self._take(self.bench_in_use - 1, self.seed)

    def _take(self, bench: int, seed: int) -> None:
        if (bench, seed) != (self.bench_in_use, self.seed):
            self.bench_in_use, self.seed = bench, seed
            self._stock.clear()
            self._forget_all()

    def forget(self, candidate: Candidate) -> None:
        """It is not timed again: its graph's memory is free for others."""
        arm = self._arms.pop(candidate, None)
        if arm is not None:
            self._clock.forget(arm)

    def _forget_all(self) -> None:
        for candidate in list(self._arms):
            self.forget(candidate)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
