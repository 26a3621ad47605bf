"""Contracts for pytest: what every backend, family and kernel must keep, ours and those of other packages.

    from gemmtuned.testing import BackendContract

    class TestFast(BackendContract):
        backend = FAST
        problems = (Problem.parse("bf16:8x64x128"), Problem.parse("bf16:1x96x64+bias"))

pytest runs the tests that the class inherits.  They need pytest, torch and no GPU: a class says with `device` where its
subject runs, and what cannot run there is skipped.  docs/extending.md walks through it.
"""

from gemmtuned.testing.backends import BackendContract
from gemmtuned.testing.families import FamilyContract
from gemmtuned.testing.kernels import KernelContract

__all__ = ["BackendContract", "FamilyContract", "KernelContract"]
