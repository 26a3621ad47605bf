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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import OPERANDS, TURNED, Condition, OperatorLaunch
from gemmtuned.configs.launch_values import checker
from gemmtuned.configs.operator_arguments import TEXT, Argument
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.other_packages import GUESTS, installed, reason_of

OUT_DTYPE: Final = "out_dtype"
OTHERS: Final = 60  # `order` of a backend that says nothing: after torch's own libraries, before what we compile


@dataclass(frozen=True, eq=False)
class OperatorBackend:
    """A backend whose one candidate is a registered operator, which returns its result or writes it into `y`.

    package: the distribution whose version its solutions hold for, or names that it has had: the one that is installed
    counts.  imports: modules that register the operator.  operator: `namespace::name` or `namespace::name.overload`.
    arguments: of the operator, in its order, or by the names that its schema has, whose other arguments have their
    defaults, and which may lack a name that ends in `?`: `x` [M, K], `w` [N, K], `b` [K, N] as torch.mm takes it,
    `bias` [N] or None, `y` [M, N] to write into, `out_dtype` for torch's number of Y's data type; a text is `=nk`, and
    anything else is passed as it is.
    suits: problems that it runs.  kinds: of devices.  contiguous: operands that must be, else torch runs the call;
    conditions: what else operands must meet.  order: at a tie the backend with the lower one wins.
    compiles: whether it compiles at a first call with new sizes, for which the daemon then waits ten minutes.
    """

    name: str
    package: str | tuple[str, ...]
    operator: str
    arguments: tuple[Argument, ...] | Mapping[str, Argument]
    suits: Callable[[Problem], bool]
    imports: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("cuda",)
    contiguous: tuple[str, ...] = ("x", "w")
    conditions: tuple[Condition, ...] = ()
    order: int = OTHERS
    compiles: bool = False

    def stamps(self, device: Device) -> dict[str, str]:
        """The version of its package; none on other devices, and where package or operator are not there."""
        if device.kind not in self.kinds:
            return {}
        try:
            package, stamp = installed(self.package)
            GUESTS.load(self.imports, package)
            self._function  # noqa: B018  raises where it is not registered
        except (ModuleNotFoundError, PackageNotFoundError, CandidateFailed):
            return {}
        except BaseException as err:  # a package that is installed, and broken, is its owner's matter
            GUESTS.leave_out(self.name, reason_of(err))
            return {}
        return {self.name: stamp}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """One, without a config, for what suits."""
        if self.suits(problem):
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed for what does not suit, and where the operator is not registered."""
        if candidate != Candidate(self.name) or not self.suits(problem):
            raise CandidateFailed(f"{candidate} does not run {problem}")
        function, arguments, takes = self._function, self._arguments(problem), checker(self._conditions)
        family = family_of(problem)
        stock, names = family.default(problem).call, [o.name for o in family.operands if not o.result]
        writes, out = "y" in arguments, torch_dtype(problem.out_dtype)
        by_name = [a.name for a in function._schema.arguments[: len(arguments)] if a.kwarg_only]
        first_named = len(arguments) - len(by_name)

        def run(*tensors: Tensor | None) -> Tensor:
            given: dict[str, Any] = {"alpha": 1, "beta": 1, **dict(zip(names, tensors, strict=False))}
            for as_torch, slot in TURNED.items():  # a record has them by rows of W
                t = given[as_torch] = given.get(slot)
                given[slot] = t.mT if t is not None and t.dim() > 1 else t
            if not takes(given):
                return stock(*tensors)
            if writes:
                x, b = given["x"], given["b"]
                given["y"] = x.new_empty((*x.shape[:-1], b.shape[-1]), dtype=out)
            values = [_passed(a, given) for a in arguments]
            try:
                y: Tensor = function(*values[:first_named], **dict(zip(by_name, values[first_named:], strict=True)))
            except RuntimeError:  # torch's own kind
                raise
            except (Exception, SystemExit) as err:  # a library that compiles at its first call may raise anything there
                raise CandidateFailed(f"{self.operator}: {reason_of(err)}") from err
            return given["y"] if writes else y

        return StatelessKernel(run)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes | None]:
        """As LaunchedBackend.launch_of: what the native hook calls, and what must be equal there."""
        self.prepare(candidate, problem)
        package, stamp = installed(self.package)
        record = OperatorLaunch(
            operator=self.operator, schema=str(self._function._schema), arguments=self._arguments(problem),
            package=package, version=stamp,
            conditions=(Condition("x.size0", "<=", problem.m), *self._conditions),
        )  # fmt: skip
        return record.text(), None

    @property
    def _conditions(self) -> tuple[Condition, ...]:
        return (*(Condition(f"{name}.contiguous", "==", 1) for name in self.contiguous), *self.conditions)

    def _arguments(self, problem: Problem) -> tuple[Argument, ...]:
        """What is passed in a call, in the operator's order. Raises CandidateFailed for names that nothing has."""
        given = self.arguments
        if isinstance(given, Mapping):
            given = _in_order(self.name, given, self._function._schema)
        strays = [
            x for x in (*given, *self.contiguous)
            if isinstance(x, str) and not x.startswith(TEXT) and x not in (*OPERANDS, OUT_DTYPE)
        ]  # fmt: skip
        if strays:
            raise CandidateFailed(
                f"backend {self.name}: {strays[0]!r} is no operand, expected {', '.join((*OPERANDS, OUT_DTYPE))}"
            )
        return tuple(DTYPES[problem.out_dtype] if x == OUT_DTYPE else x for x in given)

    @cached_property
    def _function(self) -> Any:
        namespace, _, name = self.operator.partition("::")
        base, _, overload = name.partition(".")
        try:
            return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError as err:
            raise CandidateFailed(f"backend {self.name}: operator {self.operator} is not registered") from err


def _passed(argument: Argument, given: Mapping[str, Any]) -> Any:
    if not isinstance(argument, str):
        return argument
    return argument.removeprefix(TEXT) if argument.startswith(TEXT) else given.get(argument)


def _in_order(backend: str, named: Mapping[str, Argument], schema: Any) -> tuple[Argument, ...]:
    """Arguments in the order of a schema (torch.FunctionSchema). Raises CandidateFailed where they do not fit it."""
    left, found = dict(named), []
    for argument in schema.arguments:
        known = next((name for name in (argument.name, f"{argument.name}?") if name in left), None)
        if known:
            found.append(left.pop(known))
            continue
        if not argument.has_default_value() and not isinstance(argument.type, torch.OptionalType):
            raise CandidateFailed(f"backend {backend}: nothing is known for argument {argument.name} of {schema}")
        value = argument.default_value if argument.has_default_value() else None
        if not (value is None or isinstance(value, str | int | float)):
            raise CandidateFailed(
                f"backend {backend}: the default of argument {argument.name} of {schema} is no number"
            )
        found.append(TEXT + value if isinstance(value, str) else value)
    missing = [name for name in left if not name.endswith("?")]
    if missing:
        raise CandidateFailed(f"backend {backend}: {schema} has no argument {', '.join(missing)}")
    return tuple(found)
