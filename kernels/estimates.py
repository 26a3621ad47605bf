"""What the estimates of our kernels have in common. Their constants are fitted to timings by benchmarks/fit.py."""

from __future__ import annotations

import math


def largest(*times: float) -> float:
    """A little over the largest of them: what takes about as long does not overlap perfectly."""
    return math.sqrt(math.sqrt(sum(time**4 for time in times)))


def even_steps(steps: int, most: int) -> int:
    """So many steps at once that none is left over, where that is not much less than `most`."""
    most = min(steps, most)
    even = max(u for u in range(1, most + 1) if steps % u == 0)
    return even if even > most // 2 else most
