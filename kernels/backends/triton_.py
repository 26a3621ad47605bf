"""Our Triton kernels on CUDA devices: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it (`launch_of`); running programs
launch that without Triton, so what is measured and checked here is the same binary.  Importing this file does not
import Triton: a machine without it only lacks the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import catalog, stamps
from gemmtuned.kernels.backends.base import COMPILED, Kernel, Run
from gemmtuned.kernels.backends.launched import WARP_SIZE, bound
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.own_kernel import Offer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmtuned.kernels.triton.launch import LaunchRecord


@dataclass(frozen=True, slots=True)
class Triton:
    """device: what to compile for and to fill; None is this process's current CUDA device.

    With a device given, everything but running works in a process that must not or cannot touch one.
    """

    name: str = "triton"
    order: int = COMPILED
    device: Device | None = None

    def stamps(self, device: Device) -> dict[str, str]:
        """One a kernel: Triton's version, the architecture, the kernel's source; none on other devices than CUDA's."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """The candidates that get a place among our own kernels."""
        try:
            found = catalog.candidates(problem, self._device())
        except CandidateFailed:
            return
        yield from found.get(self.name, ())

    def offers(self, problem: Problem) -> list[Offer]:
        """As OfferingBackend.offers."""
        try:
            return catalog.offers(problem, self._device()).get(self.name, [])
        except CandidateFailed:
            return []

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Compiled (or found in Triton's cache) and loaded. Raises CandidateFailed when it cannot run the problem."""
        from gemmtuned.kernels.compile import compile_record
        from gemmtuned.kernels.triton.python_launch import is_interpreted, launcher

        kernel, record = catalog.record_of(candidate, problem)
        arch = self._device().arch
        if not is_interpreted(kernel.function):
            compile_record(record, arch)  # refuses what spills
        return _Launched(record, launcher(kernel.function, record, arch), problem)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        from gemmtuned.kernels.compile import compile_record

        _, record = catalog.record_of(candidate, problem)
        binary = compile_record(record, self._device().arch)
        launch = record.launch
        launch = replace(
            launch, binary=binary.sha256, name=binary.name, shared=binary.shared_bytes,
            threads=WARP_SIZE * binary.num_warps, arguments=(*launch.arguments, *("null",) * binary.null_pointers),
        )  # fmt: skip
        return launch.text(), binary.data

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        try:
            catalog.record_of(candidate, problem)
        except Exception:  # other people's tables may hold anything: a tile of no rows, for one
            return False
        return True

    def _device(self) -> Device:
        return self.device or current_cuda_device()


class _Launched:
    """A loaded kernel with one workspace: its launches must follow one another, as those of one stream do."""

    def __init__(self, record: LaunchRecord, launch: Any, problem: Problem) -> None:
        self._record, self._launch, self._problem = record, launch, problem
        self._space: Tensor | None = None

    def bind(self, *weights: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        from gemmtuned.kernels.triton.python_launch import new_workspace

        record, launch = self._record, self._launch
        if self._space is None:
            self._space = new_workspace(record, weights[0].device)
        elif record.workspace_bytes:  # a partial sum that is read before it is written shall show
            self._space[record.partials_offset :].fill_(0xFF)
        space = self._space
        return bound(self._problem, weights, record.launch.checked, lambda operands: launch(operands, space))


TRITON: Final = Triton()
BACKENDS: Final = (TRITON,)
