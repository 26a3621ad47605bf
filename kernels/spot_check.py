"""Is a solution that somebody hands us right here? One set of inputs, against the exact result.

For solutions measured on this kind of device with these versions (their device and stamp agree) and brought in a
table, not published by the daemon of this machine.  The daemon's own check (daemon/child/verify.py) is far wider.

    python -m gemmtuned.kernels.spot_check        # rows of solutions on stdin, a list of reasons on stdout; both JSON

A running program has it done so: a kernel that crashes takes a child along and nothing else, and what the check
multiplies is not counted among the program's calls.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import torch

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.passing import with_lack
from gemmtuned.configs.priority import give_way
from gemmtuned.configs.solution import Solution
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.error import Spread, held_to, limits, measure_error
from gemmtuned.kernels.families.operand import Sample

MAX_ELEMENTS: Final = 1 << 27  # X, W and Y together: 512 MiB in fp32 for a moment
MAX_FLOPS: Final = 1e12
_COLUMNS: Final = 64  # columns of Y that are compared, half of them the last


def spot_check(solution: Solution, *, device: torch.device) -> str:
    """Why the solution must not be used here; "" when it may.

    At the M it is filed under, on inputs whose K tail cannot be lost unseen.
    """
    p = solution.problem
    backend = BACKENDS.get(solution.backend)
    if backend is None:
        return f"backend {solution.backend} is not known to this version"
    if p.batch * (p.m * p.k + p.n * p.k + p.m * p.n) > MAX_ELEMENTS or p.flops > MAX_FLOPS:
        return "too large for a spot check"
    try:
        family = family_of(p)
        inputs = family.make(p, kind="tail", seed=1, device=device)
        all_of_it = family.sample(p, seed=1, device=device)
        ends = torch.cat([all_of_it.cols[: _COLUMNS // 2], all_of_it.cols[_COLUMNS // 2 :][-_COLUMNS // 2 :]])
        sample = Sample(all_of_it.rows, ends)
        exact = family.reference(p, inputs, sample)
        kernel = backend.prepare(solution.candidate, p)
        with torch.no_grad():
            y = inputs.run(kernel)
            default = inputs.run(family.default(p))
        if y.shape != default.shape or y.dtype != default.dtype:
            return f"gives {tuple(y.shape)} {y.dtype}, torch gives {tuple(default.shape)} {default.dtype}"
        found = measure_error(sample.of(y), exact)
        allowed = limits(
            held_to(p, kernel),
            measure_error(sample.of(default), exact),
            Spread.of(exact, family.x_rows(p, inputs, sample)),
        )
    except (GemmtunedError, RuntimeError, ValueError, TypeError, IndexError, MemoryError, OSError) as err:
        return with_lack(f"spot check: {str(err).splitlines()[0] if str(err) else type(err).__name__}", err)
    if not found.within(allowed):
        return f"spot check: error {found.r:.1e}, allowed {allowed.r:.1e}"
    return ""


def main() -> int:
    """Check what stdin says, on the CPU, giving way to everything else."""
    give_way(19)
    reasons = []
    for row in json.load(sys.stdin):
        try:
            solution = Solution.from_row(row)
            torch.set_num_threads(solution.problem.threads or 1)
            reasons.append(spot_check(solution, device=torch.device("cpu")))
        except (GemmtunedError, RuntimeError) as err:  # noqa: PERF203  one costs that one
            reasons.append(with_lack(f"spot check: {err}", err))
    sys.stdout.write(json.dumps(reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
