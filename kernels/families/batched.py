"""batched: bmm. batched_add: baddbmm."""

from __future__ import annotations

from typing import Final

from gemmtuned.kernels.families.base import Family

BATCHED: Final = Family("batched", batched=True)
BATCHED_ADD: Final = Family("batched_add", batched=True, adds=True)
