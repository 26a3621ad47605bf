"""What `hooks/native/operator_list.h` says, for docs/generate.py and for tests: the list itself is the macros there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

HEADER: Final = Path(__file__).resolve().parents[1] / "hooks/native/operator_list.h"


class Operators(NamedTuple):
    """Names without `aten::`, as `mm.out`, in the order of the list.

    compiled: those that compiled C++ calls by C functions of their own; each is one of everywhere.
    """

    everywhere: tuple[str, ...]
    gpus_alone: tuple[str, ...]
    compiled: tuple[str, ...]


def operators() -> Operators:
    """The operators that the hook stands in front of in a torch that has them all."""
    text = HEADER.read_text()
    compiled = re.findall(r"  (?:PRODUCT|SUM|INT)\(device, Device, (\w+)\)", text)
    return Operators(
        tuple(re.findall(r'  X\("([^"]+)"', text)),
        tuple(re.findall(r'  GPU\("([^"]+)"', text)),
        tuple(f"{name}.out" for name in compiled),
    )
