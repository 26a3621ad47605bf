"""What a backend promises.

A backend is a library that can run problems.  It is stateless: the closure that a kernel's bind() gives reads the
weight's memory at every call, unless the problem says that the weight is packed, which a user asks for explicitly.
So a weight edited in place, or freed and its address used again, can never give a stale result.

Every result has the dtype, shape and strides that torch's own has, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol, runtime_checkable

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.kernel import Kernel, Run, StatelessKernel
from gemmtuned.kernels.own_kernel import Offer

__all__ = [
    "COMPILED",
    "AheadBackend",
    "Backend",
    "CompiledBackend",
    "Kernel",
    "LaunchedBackend",
    "Run",
    "StatelessKernel",
]
COMPILED: Final = 90  # `order` of those that compile our kernels


class Backend(Protocol):
    """A library that can run problems."""

    @property
    def name(self) -> str:
        """The name in tables and logs."""

    @property
    def order(self) -> int:
        """How simple it is: at a tie the lower number wins. torch itself is 0."""

    def stamps(self, device: Device) -> dict[str, str]:
        """What must be equal for its solutions to hold: {} when it is not available on this device.

        One, under its own name; or one for each kernel that its configs name, as `kernel_stamps` makes them, so that
        a change of one kernel leaves the solutions by the others as they are.
        """

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """What is worth trying, pruned by what is known without running anything."""

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed when it cannot run the problem."""


@runtime_checkable
class LaunchedBackend(Backend, Protocol):
    """A backend whose solutions the native hook runs by a launch record, without Python and without the backend."""

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes | None]:
        """(launch record as canonical JSON, the binary it names, if any) for the problem and every smaller M.

        The fields of the record are those that configs/launch.py checks.  Raises CandidateFailed as prepare does.
        """


@runtime_checkable
class OfferingBackend(Backend, Protocol):
    """A backend with more candidates than a search admits, that can guess what each is worth."""

    def offers(self, problem: Problem) -> list[Offer]:
        """All that could be tried; `candidates` has those that are admitted where no other backend offers anything."""


@runtime_checkable
class AheadBackend(Backend, Protocol):
    """One whose candidates kernels/compile_candidate.py can compile where there is no device."""

    @property
    def ahead(self) -> bool:
        """True."""


@runtime_checkable
class CompiledBackend(LaunchedBackend, Protocol):
    """One that compiles its candidates: the binary is what is published."""

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """Whether the candidate is one for this size; nothing is compiled."""
