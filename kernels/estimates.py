"""What the estimates of our kernels have in common.

An estimate is a formula in a kernel's file and constants in the JSON file beside it, which `python -m lab fit` writes
from timings.  The file names where they come from; `fits` has the constants by name, of each kind of config its own.
For the fit, a kernel's file has
    FITS                                         what `fits` gives
    fit_of(config)                               the name of the constants for a config
    estimate(fit, m, n, k, units, config, arch=) device time in us, units: multiprocessors of the device
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StreamCosts:
    """Constants of kernels that stream W once for a few rows of X, and add up the parts of a cluster.

    bandwidth: of the device, in bytes per us.  latency_us: a multiprocessor reads at its bytes in flight over this.
    start_us: of a launch.  round_us: of each further round of thread blocks.  issue_us: of 1000 instructions on a
    multiprocessor's busiest quarter.  sum_us: of each thread block in a cluster.
    """

    bandwidth: float
    latency_us: float
    start_us: float
    round_us: float
    issue_us: float
    sum_us: float


def fits(file: str, kind: type[_T]) -> dict[str, _T]:
    """The constants in the JSON file beside a kernel's file, by name."""
    found = json.loads(Path(file).with_suffix(".json").read_text())["fits"]
    return {name: kind(**constants) for name, constants in found.items()}


def largest(*times: float) -> float:
    """A little over the largest of them: what takes about as long does not overlap perfectly."""
    return math.sqrt(math.sqrt(sum(time**4 for time in times)))


def even_steps(steps: int, most: int) -> int:
    """How many steps to take at once so that none is left over, where that is not much less than `most`."""
    most = min(steps, most)
    even = max(u for u in range(1, most + 1) if steps % u == 0)
    return even if even > most // 2 else most
