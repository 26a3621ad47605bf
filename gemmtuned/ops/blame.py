"""Whose fault it is when a kernel of ours fails in a call of an op: hooks/native/blame.h in Python.

A shortage of memory, a fault that an earlier kernel left on the device, a capture that the program broke say nothing
about the kernel: the call runs on stock torch, and nothing is switched off or reported.
"""

from __future__ import annotations

from typing import Final

import torch

from gemmtuned.configs.errors import CandidateFailed, Declined

FAILURES: Final = (
    RuntimeError,
    MemoryError,
    CandidateFailed,
)  # what kernels raise; the program's own errors are others
_SHORTAGE: Final = (
    "DefaultCPUAllocator", "not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory",
    "could not create a memory object", "bad_alloc", "ENOMEM",
)  # fmt: skip
# How calls of torch and of Triton fail after a fault
_DEVICE: Final = ("CUDA error", "CUDA driver error", "HIP error", "Triton Error [")


def is_to_blame(err: Exception) -> bool:
    """Whether this error is evidence against the kernel in whose call it came up."""
    if isinstance(err, Declined | MemoryError | NotImplementedError | torch.OutOfMemoryError):
        return False
    return not any(part in str(err) for part in (*_SHORTAGE, *_DEVICE))
