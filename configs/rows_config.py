"""The config of backend `rows`: whose calls a product is made of, and of how many rows each is."""

from __future__ import annotations

import json
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.value_class import value_class

ROWS: Final = "rows"
KERNELS: Final = ("torch", "torch_swap", "onednn")
MAX_BLOCK: Final = 4096


@value_class
class RowsConfig:
    """kernel: one of KERNELS.  block: rows of X a call at most, a multiple of `grain`, to which each call is padded."""

    kernel: str
    block: int
    grain: int


def read_rows(config: str) -> RowsConfig:
    """Read a candidate's config. Raises CandidateFailed for what is none: other people's tables may hold anything."""
    try:
        found = RowsConfig(**json.loads(config))
        whole = all(isinstance(size, int) and 0 < size <= MAX_BLOCK for size in (found.block, found.grain))
        if found.kernel in KERNELS and whole and found.block % found.grain == 0:
            return found
    except (ValueError, TypeError, RecursionError) as err:
        raise CandidateFailed(f"{ROWS} {config[:200]}: its config is none ({err})") from err
    raise CandidateFailed(
        f"{ROWS} {config[:200]}: expected kernel ({', '.join(KERNELS)}), block up to {MAX_BLOCK}, and grain, which "
        "divides it"
    )
