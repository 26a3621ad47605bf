"""The candidates of all our kernels that are worth a device's time, by estimated time, for one problem.

At most CLOSE of a group (same kernel, rows and slices of K) are taken: the estimate knows which stages or
block of K is better within a group less surely than it costs to try another group.

Of twenty problems at M = 1 to 64 what 24 candidates gave was 0.3 % slower on average than what the whole space did, and
3 % at the worst (lab/exhaustive.py).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.cuda import offered as cuda
from gemmtuned.kernels.limits import has_clusters
from gemmtuned.kernels.ours import is_ours
from gemmtuned.kernels.triton import fragments, gemv, selected, tiles, warp_split_k
from gemmtuned.kernels.triton.launch import BACKEND

if TYPE_CHECKING:
    from gemmtuned.kernels.triton.launch import LaunchRecord

LIMIT: Final = 24
# gemv's parameters make no groups
CLOSE: Final = {"gemv": 24, "fragments": 6, "selected": 6, "warp_split_k": 5, "tiles": 5}
MODULES: Final = {module.NAME: module for module in (gemv, fragments, selected, warp_split_k, tiles)}
# (largest M, candidates of each kernel at most): what measured as hopeless there is left out, or kept to a few
_SHARES: Final = (
    (1, {"gemv": 24}),
    (8, {"fragments": 24}),
    (16, {"selected": 11, "fragments": 5, "tiles": 8}),  # the best was among these at twenty shapes
    (32, {"warp_split_k": 24, "tiles": 24}),
    (64, {"tiles": 14}),  # the best was among these at twenty shapes
    (256, {"tiles": 8}),  # here the library leads but where N is small: these tiles lack what large M needs
)
# Up to M = 16 what won before was among these, or `one_shot` is as fast; above 32 tiles won two of twenty beside it
_BESIDE_ONE_SHOT: Final = (
    (16, {"selected": 9, "fragments": 5, "tiles": 4}),
    (32, {"warp_split_k": 24, "tiles": 24}),
    (256, {"tiles": 8}),
)
_OTHERWISE: Final = {"fragments": 6, "selected": 6, "warp_split_k": 12, "tiles": 12}  # M = 2 to 16, not measured


def offered(problem: Problem, device: Device) -> list[Candidate]:
    """The shortlist for dense bf16 and fp16 problems of layout nt with plain weights, none for others."""
    if not is_ours(problem):
        return []
    beside = cuda.has_kernels(device) and bool(cuda.offered(problem, device))
    m, n, k = problem.m, problem.n, problem.k
    chosen = shortlist(m, n, k, device.units, arch=device.arch, beside_one_shot=beside)
    return [Candidate.of(BACKEND, kernel=kernel, **config) for kernel, config in chosen]


def record_of(config: str, problem: Problem) -> tuple[Any, LaunchRecord]:
    """(kernel, how it runs the problem) of a candidate's config: JSON, the kernel's name and its parameters.

    Raises CandidateFailed for what is no config of ours, or cannot run the problem.
    """
    try:
        values = json.loads(config)
        module = MODULES[values.pop("kernel")]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{BACKEND} {config}: its config names no kernel of ours ({', '.join(MODULES)})") from err
    return module.KERNEL, module.launch_record(values, problem)


def space(m: int, n: int, k: int, units: int, *, arch: str) -> list[tuple[float, str, dict[str, int]]]:
    """(estimated us, kernel, config) of all candidates that the shortlist is chosen from, the fastest first."""
    shares = _shares(m, k, arch)
    found = [
        (cost, name, config) for name in shares for cost, config in MODULES[name].scored(m, n, k, units, arch=arch)
    ]
    return sorted(found, key=lambda item: item[0])


def _shares(m: int, k: int, arch: str) -> dict[str, int]:
    if 1 < m <= 16 and (k % 8 or not has_clusters(arch)):  # where `fragments` and `selected` cannot run, or not cut K
        return _OTHERWISE
    return next((share for most, share in _SHARES if m <= most), {})


def shortlist(
    m: int, n: int, k: int, units: int, *, arch: str, limit: int = LIMIT, beside_one_shot: bool = False
) -> list[tuple[str, dict[str, int]]]:
    """(kernel, config) of at most `limit` candidates for a device with this many units, the fastest first.

    beside_one_shot: that kernel (kernels/cuda) has candidates for this problem, too.
    """
    shares = next(share for most, share in _BESIDE_ONE_SHOT if m <= most) if beside_one_shot else _shares(m, k, arch)
    taken: Counter[object] = Counter()
    chosen: list[tuple[float, str, dict[str, int]]] = []
    passed = []
    for cost, name, config in space(m, n, k, units, arch=arch):
        wide = config.get("swap") == 1 and config["warps"] >= 4  # another instruction of the tensor core
        group = (name, config["rows"], config["split"], wide)
        if taken[name] == shares[name]:
            continue
        if taken[group] == CLOSE[name]:
            passed.append((cost, name, config))
            continue
        taken[name] += 1
        taken[group] += 1
        chosen.append((cost, name, config))
    for cost, name, config in passed:
        if taken[name] < shares[name]:
            taken[name] += 1
            chosen.append((cost, name, config))
    return [(name, config) for _, name, config in sorted(chosen[:limit], key=lambda item: item[0])]
