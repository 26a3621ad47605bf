"""dense: mm, and addmm with a bias vector. dense_add: addmm with a full C."""

from __future__ import annotations

from typing import Final

from gemmtuned.kernels.families.base import Family

DENSE: Final = Family("dense")
DENSE_ADD: Final = Family("dense_add", adds=True)
