"""The path without a compiler: F.linear is replaced by a function that counts and routes, in Python.

It serves eager callers of torch.nn.functional.linear (so every nn.Linear) until the native hook is built, or for
good where it cannot be.  It does not see `x @ w.T`, addmm, backward, compiled code or an early
`from torch.nn.functional import linear`; `gemmtuned status` says which path is live.  About 0.7 us a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks.dispatch import Table, runner

if TYPE_CHECKING:
    from gemmtuned.hooks.dispatch import Run

MAX_CELLS: Final = 65_536
_SHORT: Final = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.complex64: "c64", torch.complex128: "c128", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

Linear = Callable[..., torch.Tensor]


class Cell:
    """Counts and route of one key. `calls` only grows; `seen` is what the flush thread has already taken."""

    __slots__ = ("calls", "outcome", "problem", "route", "seen", "solution")

    def __init__(self, problem: Problem, outcome: str, solution: Solution | None, route: Run | None) -> None:
        self.problem, self.outcome, self.solution, self.route = problem, outcome, solution, route
        self.calls = self.seen = 0


class Fallback:
    """Counts and routes calls of F.linear once `wrapper` stands in its place."""

    def __init__(self, stock: Linear, *, counting: bool, table: Table) -> None:
        self.failures: list[tuple[Solution, str]] = []  # emptied by the flush thread
        self.dropped = 0
        self.live = True  # false once the native hook has taken over
        self.dispatching = True
        self._table = table
        self._cells: dict[Any, Cell] = {}
        self._retired: tuple[list[Cell], list[Cell]] = ([], [])  # of this and of the last drain
        self._counting = counting
        self.wrapper = self._make(stock)

    def load(self, table: Table) -> None:
        """Use another table from the next call on."""
        self._table = table
        self._retired[0].extend(self._cells.values())
        self._cells.clear()  # emptied in place: the wrapper holds this dict

    def drain(self) -> Iterator[Sighting]:
        """All calls counted since the last drain. One thread at a time."""
        # a retired cell is read twice: a call may have held it when the table changed
        (fresh, old), self._retired = self._retired, ([], self._retired[0])
        for cell in [*old, *fresh, *list(self._cells.values())]:
            calls = cell.calls
            if self._counting and calls > cell.seen:
                yield Sighting(cell.problem, cell.outcome, calls - cell.seen)
            cell.seen = calls

    def reset(self) -> None:
        """Forget all counts: a forked child starts empty."""
        self._retired = ([], [])
        self._cells.clear()

    def _make(self, stock: Linear) -> Linear:
        cells = self._cells
        is_compiling, threads = torch.compiler.is_compiling, torch.get_num_threads
        autocast = torch._C._is_any_autocast_enabled

        def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if is_compiling():
                return stock(input, weight, bias)
            try:
                key = (input.shape, weight.shape, input.dtype, bias is None, threads(), autocast())
                cell = cells.get(key) or self._first(key, input, weight, bias)
                cell.calls += 1
            except Exception:  # not a tensor, not a GEMM: torch has the right answer or the right error
                return stock(input, weight, bias)
            if cell.route is None:
                return stock(input, weight, bias)
            return self._routed(cell, stock, input, weight, bias)

        linear.__doc__, linear.__name__ = stock.__doc__, "linear"
        linear.__wrapped__ = stock  # type: ignore[attr-defined]
        return linear

    def _first(self, key: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Cell:
        if not self.live or len(self._cells) >= MAX_CELLS:
            self.dropped += self.live
            raise ProblemError("not counted")
        problem = describe(x, w, bias)
        outcome, solution = self._table.find(problem)
        route = None
        if solution is not None:
            try:
                route = runner(solution)
            except Exception as err:
                self._fail(solution, err)
                outcome, solution = OUTCOMES[0], None
        return self._cells.setdefault(key, Cell(problem, outcome, solution, route))

    def _routed(
        self, cell: Cell, stock: Linear, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        # the route is below autograd, autocast and functorch in the native path; here those calls stay with torch
        if not self.dispatching or not plain_call(x, w, b):
            return stock(x, w, b)
        try:
            assert cell.route is not None
            y = cell.route(x.reshape(-1, x.shape[-1]), w.t(), b)
            if y.dtype is not x.dtype or y.shape != (cell.problem.m, cell.problem.n):
                raise ProblemError(f"result is {y.dtype} {tuple(y.shape)}, not what torch returns")
            return y.view(*x.shape[:-1], w.shape[0])
        except Exception as err:
            cell.route = None
            if cell.solution is not None:
                self._fail(cell.solution, err)
            return stock(x, w, b)

    def _fail(self, solution: Solution, err: Exception) -> None:
        self.failures.append((solution, f"{type(err).__name__}: {err}"))


def plain_call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    """True when nothing stands between the caller and the CPU kernel: no autograd, autocast, transform or subclass."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)):
        return False
    return (
        type(x) is torch.Tensor
        and type(w) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and w.dtype is x.dtype
        and w.is_contiguous()
        and x.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
    )


def describe(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Problem:
    """The problem of F.linear(x, w, bias) as the CPU kernel will see it. Raises ProblemError for what is none."""
    if x.device.type != "cpu" or w.dim() != 2 or x.dim() < 2 or torch._C._functorch.maybe_current_level() is not None:
        raise ProblemError("not a plain linear on CPU")
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    name = _SHORT.get(dtype)
    if name is None:
        raise ProblemError(f"dtype {dtype} has no short name")
    n, k = (int(d) for d in w.shape)
    return Problem(
        m=int(x.numel()) // k,
        n=n,
        k=k,
        bias=bias is not None,
        dtype=name,
        math_mode=_math_mode(name),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        threads=torch.get_num_threads(),
    )


def _math_mode(dtype: str) -> str:
    if dtype != "fp32":
        return "ieee"
    mode = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return mode if mode in ("tf32", "bf16") else "ieee"


assert set(_SHORT.values()) <= set(DTYPES)
