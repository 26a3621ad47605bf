"""What architectures have: shared memory for a thread block, the order of NVIDIA's, clusters and what fits of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Part of the multiprocessors that clusters of this size can fill: a cluster is within a group of 16 or 18 of them.  As
# an H200's driver tells for kernels of which a multiprocessor holds one thread block (cuOccupancyMaxActiveClusters: 66,
# 39, 30, 22, 17, 15, 15 clusters).
_FILLED: Final = {2: 1.0, 3: 0.89, 4: 0.91, 5: 0.84, 6: 0.78, 7: 0.8, 8: 0.91}
_GROUP_UNITS: Final = 18  # at most: above eight thread blocks one cluster fits in each group
_SHARED: Final = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}


def shared_limit(arch: str) -> int:
    """Bytes of shared memory (LDS) a thread block can have; 64 KiB where the architecture is not in our list."""
    return _SHARED.get(arch, 65536)


def at_least_sm(arch: str, number: int) -> bool:
    """Whether this is an NVIDIA architecture, `sm_NN` with NN at least `number`."""
    return arch.startswith("sm_") and arch[3:].isdigit() and int(arch[3:]) >= number


def is_among(arch: str, archs: Iterable[str]) -> bool:
    """Whether the architecture is one of these: `sm_90` is that alone, `sm_80+` that and later, `gfx9*` all such."""
    for one in archs:
        if one.endswith("*"):
            if arch.startswith(one[:-1]):
                return True
        elif one.endswith("+"):
            if at_least_sm(arch, int(one[len("sm_") : -1])):
                return True
        elif arch == one:
            return True
    return False


def has_clusters(arch: str) -> bool:
    """Whether thread blocks of this architecture reach into each other's shared memory: sm_90 and later."""
    return at_least_sm(arch, 90)


def filled(units: int, cluster: int) -> int:
    """Multiprocessors with a thread block when each has room for one, in clusters of this size; one cluster at least.

    units: multiprocessors of the device.
    """
    if cluster == 1:
        return units
    clusters = int(units * _FILLED[cluster]) // cluster if cluster in _FILLED else units // _GROUP_UNITS
    return max(clusters, 1) * cluster
