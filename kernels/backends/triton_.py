"""Our Triton kernels on CUDA devices: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it (`launch_of`); running programs
launch that without Triton, so what is measured and checked here is the same binary.  Importing this file does not
import Triton: a machine without it only lacks the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.launched import WARP_SIZE, OwnKernels, bound
from gemmtuned.kernels.triton.kernel import is_interpreted

if TYPE_CHECKING:
    from gemmtuned.kernels.triton.launch import LaunchRecord


@dataclass(frozen=True, slots=True)
class Triton(OwnKernels):
    """The backend of our Triton kernels."""

    name: str = "triton"

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Compiled (or found in Triton's cache) and loaded. Raises CandidateFailed when it cannot run the problem."""
        from gemmtuned.kernels.compile import compile_record
        from gemmtuned.kernels.triton.python_launch import launcher

        kernel, record = catalog.record_of(candidate, problem)
        arch = self.here().arch
        if not is_interpreted(kernel.function):
            compile_record(record, arch)  # refuses what spills
        return _Launched(record, launcher(kernel.function, record, arch), problem)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        from gemmtuned.kernels.compile import compile_record

        _, record = catalog.record_of(candidate, problem)
        binary = compile_record(record, self.here().arch)
        launch = record.launch
        launch = replace(
            launch, binary=binary.sha256, name=binary.name, shared=binary.shared_bytes,
            threads=WARP_SIZE * binary.num_warps, arguments=(*launch.arguments, *("null",) * binary.null_pointers),
        )  # fmt: skip
        return launch.text(), binary.data


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
