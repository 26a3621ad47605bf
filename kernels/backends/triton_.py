"""Our Triton kernels on CUDA devices: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it (`launch_of`); running programs
launch that without Triton, so what is measured and checked here is the same binary.  Importing this file does not
import Triton: a machine without it only lacks the candidates.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.launched import bound, launch_text
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.ours import is_ours
from gemmtuned.kernels.triton.launch import BACKEND, has_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmtuned.kernels.triton.launch import LaunchRecord


@dataclass(frozen=True, slots=True)
class Triton:
    """device: what to compile for and to fill; None is this process's current CUDA device.

    With a device given, everything but running works in a process that must not or cannot touch one.
    """

    name: str = BACKEND
    device: Device | None = None

    def stamp(self, device: Device) -> str | None:
        """Triton's version, the architecture, our kernels' source; None on a device not CUDA's, and without Triton."""
        if not has_kernels(device):
            return None
        return f"{import_module('triton').__version__}/{device.arch}/{source_hash()}"

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """As `gemmtuned.kernels.triton.shortlist.offered`."""
        if not is_ours(problem) or find_spec("triton") is None:
            return
        from gemmtuned.kernels.triton.shortlist import offered

        try:
            device = self._device()
        except CandidateFailed:
            return
        yield from offered(problem, device)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Compiled (or found in Triton's cache) and loaded. Raises CandidateFailed when it cannot run the problem."""
        from gemmtuned.kernels.compile import compile_record
        from gemmtuned.kernels.triton.python_launch import is_interpreted, launcher
        from gemmtuned.kernels.triton.shortlist import record_of

        kernel, record = record_of(candidate.config, problem)
        arch = self._device().arch
        if not is_interpreted(kernel):
            compile_record(record, arch)  # refuses what spills
        return _Launched(record, launcher(kernel, record, arch))

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        from gemmtuned.kernels.compile import compile_record
        from gemmtuned.kernels.triton.shortlist import record_of

        _, record = record_of(candidate.config, problem)
        binary = compile_record(record, self._device().arch)
        text = launch_text(
            binary=binary.sha256, name=binary.name, shared=binary.shared_bytes, warps=binary.num_warps,
            cluster=record.cluster, grid=((axis.over, axis.block) for axis in record.grid), arguments=record.arguments,
            ld_multiple=record.ld_multiple, max_m=record.max_m, null_pointers=binary.null_pointers,
            partials_offset=record.partials_offset, counters_bytes=record.counters_bytes,
            workspace_bytes=record.workspace_bytes,
        )  # fmt: skip
        return text, binary.data

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        from gemmtuned.kernels.triton.shortlist import record_of

        try:
            record_of(candidate.config, problem)
        except Exception:  # other people's tables may hold anything: a tile of no rows, for one
            return False
        return True

    def _device(self) -> Device:
        return self.device or current_cuda_device()


class _Launched:
    """A loaded kernel with one workspace: its launches must follow one another, as those of one stream do."""

    def __init__(self, record: LaunchRecord, launch: Any) -> None:
        self._record, self._launch = record, launch
        self._space: Tensor | None = None

    def bind(self, b: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        from gemmtuned.kernels.triton.python_launch import new_workspace

        record, launch = self._record, self._launch
        if self._space is None:
            self._space = new_workspace(record, b.device)
        elif record.workspace_bytes:  # a partial sum that is read before it is written shall show
            self._space[record.partials_offset :].fill_(0xFF)
        space = self._space
        return bound(b, record.ld_multiple, lambda a, w, bias, y: launch(a, w, bias, y, space))


@cache
def source_hash() -> str:
    """Of all our kernels as Triton compiles them, and of no other line of their files; Triton need not be here.

    Kernels without their docstrings, the constants in them, and what those are made of.
    """
    defined: dict[str, list[ast.stmt]] = {}  # by names at the top of files
    taken: list[ast.stmt] = []
    for path in sorted((Path(__file__).parents[1] / "triton").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            kernel = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
            constant = isinstance(node, ast.Assign) and "tl.constexpr(" in ast.unparse(node)
            if kernel or constant:
                taken.append(node)
            elif isinstance(node, ast.FunctionDef):
                defined.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in names:
                    defined.setdefault(ast.unparse(name), []).append(node)
    digest = sha256()
    for node in taken:  # grows
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        digest.update(_written(node).encode())
        if not (isinstance(node, ast.FunctionDef) and node.decorator_list):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and part.id in defined:
                    taken.extend(defined.pop(part.id))
    return digest.hexdigest()[:12]


def _written(node: Any) -> str:
    """A syntax tree as text that is the same under every Python: ast.unparse writes f-strings in different ways."""
    if isinstance(node, list):
        return f"[{' '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("kind", "type_comment"))
    kept = (f"{name}={_written(value)}" for name, value in fields if value not in (None, []))  # later ones have more
    return f"{type(node).__name__}({' '.join(kept)})"


TRITON: Final = Triton()
