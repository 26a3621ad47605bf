"""What architectures have: shared memory a program may use (bytes), and the order of NVIDIA's."""

from __future__ import annotations

from typing import Final

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
    """Bytes of shared memory (LDS) a program can have; 64 KiB where the architecture is not in our list."""
    return _SHARED.get(arch, 65536)


def at_least_sm(arch: str, number: int) -> bool:
    """Whether this is an NVIDIA architecture, `sm_NN` with NN at least `number`."""
    return arch.startswith("sm_") and arch[3:].isdigit() and int(arch[3:]) >= number
