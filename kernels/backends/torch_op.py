"""Backends that are registered torch operators: a library joins with one Python file, in any package.

    FAST = OperatorBackend(
        name="fast", package="fast-gemm", imports=("fast_gemm",), operator="fast_gemm::linear",
        arguments=("x", "w", "bias"), suits=lambda p: p.family == "dense" and p.dtype == "bf16",
    )

and in the package's pyproject.toml

    [project.entry-points."gemmtuned.backends"]
    fast = "fast_gemm.for_gemmtuned:FAST"

The daemon's worker imports it, races the operator like any candidate, and publishes its name, schema and the version of
its package.  A running program calls the operator through the dispatcher, from the native hook: it imports nothing, so
it is served where it has that operator itself, in the same version.  docs/extending.md walks through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import OPERANDS, TURNED, Condition, OperatorLaunch
from gemmtuned.configs.launch_values import checker
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel
from gemmtuned.kernels.families import family_of

OTHERS: Final = 60  # `order` of a backend that says nothing: after torch's own libraries, before what we compile


@dataclass(frozen=True)
class OperatorBackend:
    """A backend whose one candidate is a registered operator that allocates its result.

    package: the distribution whose version its solutions hold for.  imports: modules that register the operator.
    operator: `namespace::name` or `namespace::name.overload`.  arguments: of the operator, in its order: `x` [M, K],
    `w` [N, K], `b` [K, N] as torch.mm takes it, `bias` [N] or None; anything else that is no text is passed as it is.
    suits: problems that it runs.  kinds: of devices.  contiguous: operands that must be, else torch runs the call.
    order: at a tie the backend with the lower one wins.
    """

    name: str
    package: str
    operator: str
    arguments: tuple[str | int | float | bool | None, ...]
    suits: Callable[[Problem], bool]
    imports: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("cuda",)
    contiguous: tuple[str, ...] = ("x", "w")
    order: int = OTHERS

    def stamps(self, device: Device) -> dict[str, str]:
        """The version of its package; none on other devices, and where package or operator are not there."""
        if device.kind not in self.kinds:
            return {}
        try:
            for module in self.imports:
                import_module(module)
            self._function  # noqa: B018  raises where it is not registered
            return {self.name: version(self.package)}
        except (ImportError, PackageNotFoundError, CandidateFailed):
            return {}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """One, without a config, for what suits."""
        if self.suits(problem):
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed for what does not suit, and where the operator is not registered."""
        if candidate != Candidate(self.name) or not self.suits(problem):
            raise CandidateFailed(f"{candidate} does not run {problem}")
        function, arguments, takes = self._function, self.arguments, checker(self._conditions)
        family = family_of(problem)
        stock, names = family.default(problem).call, [o.name for o in family.operands if not o.result]

        def run(*tensors: Tensor | None) -> Tensor:
            given: dict[str, Any] = {"alpha": 1, "beta": 1, **dict(zip(names, tensors, strict=False))}
            for as_torch, slot in TURNED.items():  # a record has them by rows of W
                t = given[as_torch] = given.get(slot)
                given[slot] = t.mT if t is not None and t.dim() > 1 else t
            if not takes(given):
                return stock(*tensors)
            y: Tensor = function(*(given.get(a) if isinstance(a, str) else a for a in arguments))
            return y

        return StatelessKernel(run)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes | None]:
        """As LaunchedBackend.launch_of: what the native hook calls, and what must be equal there."""
        self.prepare(candidate, problem)
        record = OperatorLaunch(
            operator=self.operator, schema=str(self._function._schema), arguments=self.arguments,
            package=self.package, version=version(self.package),
            conditions=(Condition("x.size0", "<=", problem.m), *self._conditions),
        )  # fmt: skip
        return record.text(), None

    @property
    def _conditions(self) -> tuple[Condition, ...]:
        return tuple(Condition(f"{name}.contiguous", "==", 1) for name in self.contiguous)

    @cached_property
    def _function(self) -> Any:
        strays = [x for x in (*self.arguments, *self.contiguous) if isinstance(x, str) and x not in OPERANDS]
        if strays:
            raise CandidateFailed(f"backend {self.name}: {strays[0]!r} is no operand, expected {', '.join(OPERANDS)}")
        namespace, _, name = self.operator.partition("::")
        base, _, overload = name.partition(".")
        try:
            return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError as err:
            raise CandidateFailed(f"backend {self.name}: operator {self.operator} is not registered") from err
