"""Which of the candidates that backends and kernels offer are admitted to a search.

Each candidate costs device time, so a search has MOST of them.  budget.json says how many each backend, and each kernel
of ours, may have for how many rows of X; one that was never good there has none.  A kernel's candidates come in the
order of their estimated times, but of those that are alike (same rows of W and slices of K, say) only a few come first
and the others after everything else: estimates do not distinguish numbers of stages or blocks of K well enough to try
these before other groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.arch import has_clusters
from gemmtuned.kernels.own_kernel import Offer

MOST: Final = 30  # candidates of a search, seeds included
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Shares:
    """How many candidates are admitted for a problem.

    backends: the most by name; a backend without an entry has no limit.  kernels: the most by
    `backend.kernel`; one without an entry has `unmeasured`.  alike: how many like candidates of a kernel come first; of
    one without an entry all.
    """

    backends: Mapping[str, int]
    kernels: Mapping[str, int]
    alike: Mapping[str, int]
    unmeasured: int

    def of_backend(self, name: str) -> int:
        """The most that it may have."""
        return min(self.backends.get(name, MOST), MOST)

    def of_kernel(self, name: str) -> int:
        """The most that it may have."""
        return self.kernels.get(name, self.unmeasured)


def deal(problem: Problem, device: Device, offers: Mapping[str, Iterable[Offer]]) -> dict[str, list[Candidate]]:
    """Each backend's offers that are admitted for this problem, the best first; backends in the order given."""
    found = {name: list(offered) for name, offered in offers.items()}
    shares = shares_for(problem, device, {offer.kernel for offered in found.values() for offer in offered})
    return {name: chosen_of(offered, shares, shares.of_backend(name)) for name, offered in found.items()}


def in_turns(lists: Iterable[Iterable[_T]]) -> Iterator[_T | None]:
    """The first of each list, then the second of each, and so on; None for lists that have ended."""
    return chain.from_iterable(zip_longest(*lists))


def shares_for(problem: Problem, device: Device, kernels: Iterable[str]) -> Shares:
    """The shares that `row_for` gives."""
    table, row = _table(), row_for(problem, device, kernels)
    return Shares(row["backends"], row["kernels"], table["alike"], table["unmeasured"])


def row_for(problem: Problem, device: Device, kernels: Iterable[str]) -> dict[str, Any]:
    """The first row of budget.json for this many rows of X, this device, and kernels that have offers."""
    there = set(kernels)
    for row in _table()["rows"]:
        if (
            problem.m <= row["up_to_m"]
            and row.get("clusters", has_clusters(device.arch)) == has_clusters(device.arch)
            and ("with" not in row or row["with"] in there)
            and ("without" not in row or row["without"] not in there)
        ):
            found: dict[str, Any] = row
            return found
    raise AssertionError("the last row of budget.json is about every problem")


def chosen_of(offered: list[Offer], shares: Shares, most: int) -> list[Candidate]:
    """At most `most` of these: offers with an estimate in its order, others in their own."""
    taken: Counter[object] = Counter()
    chosen: list[Offer] = []
    passed: list[Offer] = []
    for offer in sorted(offered, key=_us):
        group = (offer.kernel, offer.alike)
        if offer.kernel and taken[offer.kernel] == shares.of_kernel(offer.kernel):
            continue
        if offer.kernel and taken[group] == shares.alike.get(offer.kernel, MOST):
            passed.append(offer)
            continue
        taken[offer.kernel] += 1
        taken[group] += 1
        chosen.append(offer)
    for offer in passed:
        if taken[offer.kernel] < shares.of_kernel(offer.kernel):
            taken[offer.kernel] += 1
            chosen.append(offer)
    return [offer.candidate for offer in sorted(chosen[:most], key=_us)]


def _us(offer: Offer) -> float:
    return 0.0 if offer.us is None else offer.us


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return table
