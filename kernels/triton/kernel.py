"""What the KERNEL of a file in this folder is. Triton need not be here: kernel files import it, this one does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmtuned.kernels.own_kernel import OwnKernel


def is_interpreted(function: Any) -> bool:
    """Whether Triton runs this function in its interpreter (TRITON_INTERPRET was set when it was imported)."""
    return type(function).__name__ == "InterpretedFunction"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel(OwnKernel):
    """A kernel in Triton.

    function: what Triton compiles.  record gives a LaunchRecord (launch.py).
    """

    function: Any
