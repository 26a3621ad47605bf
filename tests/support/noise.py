"""A clock that makes times up: true times by arm, under the noise of a shared machine."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from gemmtuned.daemon.child.measure import Arm


class NoisyClock:
    """Times by arm name (`default_us` for others) x drift x jitter x bursts; nothing is run.

    jitter: sigma of the lognormal noise of a call.  drift: an AR(1) walk in the logarithm (other load, clock speed).
    Bursts: with probability `burst` a call starts a burst in which this call and, with probability 0.5 each, the ones
    after it take 3 to 10 times as long.  second: whatever runs after another arm is this much slower (caches).
    """

    def __init__(
        self,
        true_us: Mapping[str, float] | None = None,
        *,
        default_us: float = 200.0,
        jitter: float = 0.08,
        drift: float = 0.02,
        burst: float = 0.02,
        second: float = 0.03,
        seed: int = 0,
    ) -> None:
        self.true_us = dict(true_us or {})
        self.default_us = default_us
        self.jitter, self.drift, self.burst, self.second = jitter, drift, burst, second
        self.random = random.Random(seed)
        self.level = 0.0
        self.in_burst = False
        self.calls: list[str] = []

    def forget(self, arm: Arm) -> None: ...

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        draw = self.random
        self.level = 0.98 * self.level + draw.gauss(0, self.drift)
        self.in_burst = draw.random() < (0.5 if self.in_burst else self.burst)
        slow = draw.uniform(3, 10) if self.in_burst else 1.0
        after = self.second if self.calls and self.calls[-1] != arm.name else 0.0
        self.calls.append(arm.name)
        true = self.true_us.get(arm.name, self.default_us)
        return true * math.exp(self.level + draw.gauss(0, self.jitter)) * slow * (1 + after)
