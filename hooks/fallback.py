"""The path without a compiler: F.linear is replaced by a function that counts and routes, in Python.

It serves eager callers of torch.nn.functional.linear (so every nn.Linear) until the native hook is built, or for
good where it cannot be.  It does not see `x @ w.T`, addmm, backward, compiled code or an early
`from torch.nn.functional import linear`; `gemmtuned status` says which path is live.  About 0.95 us a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks.dispatch import Table, ident_of, runner
from gemmtuned.hooks.native import CAPTURE, DISPATCH, OFF

if TYPE_CHECKING:
    from gemmtuned.hooks.dispatch import Run

MAX_CELLS: Final = 65_536
MISS: Final = OUTCOMES[0]
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})  # subclasses, proxies and fakes are torch's business
_SHORT: Final = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.complex64: "c64", torch.complex128: "c128", torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

Linear = Callable[..., torch.Tensor]


class Cell:
    """Counts and route of one key. The counts only grow; `seen` is what the flush thread has already taken of them."""

    __slots__ = ("calls", "declined", "outcome", "problem", "route", "seen", "solution")

    def __init__(self, problem: Problem, outcome: str, solution: Solution | None, route: Run | None) -> None:
        self.problem, self.outcome, self.solution, self.route = problem, outcome, solution, route
        self.calls = self.declined = 0  # calls that ended with `outcome`; calls that torch served in spite of a route
        self.seen = (0, 0)


class Fallback:
    """Counts and routes calls of F.linear once `wrapper` stands in its place."""

    def __init__(self, stock: Linear, *, table: Table, mode: int = CAPTURE | DISPATCH) -> None:
        self.failures: list[tuple[Solution, str]] = []  # emptied by the flush thread
        self.dropped = 0
        self._mode, self._on = mode, mode != OFF
        self._table = table
        self._failed: set[int] = set()
        self._cells: dict[Any, Cell] = {}
        self._retired: tuple[list[Cell], list[Cell]] = ([], [])  # of this and of the last drain
        self.wrapper = self._make(stock)

    def load(self, table: Table) -> None:
        """Use another table from the next call on."""
        self._table = table
        self._renew()

    def set_mode(self, mode: int) -> None:
        """OFF, or CAPTURE and DISPATCH or-ed together, as the native hook has it."""
        if mode != self._mode:
            self._mode, self._on = mode, mode != OFF
            self._renew()

    def retire(self) -> None:
        """Never count or route again: the native hook has taken over, and somebody may have kept `wrapper`."""
        self.set_mode(OFF)

    def drain(self) -> Iterator[Sighting]:
        """All calls counted since the last drain. One thread at a time."""
        # a retired cell is read twice: a call may have held it when the table changed
        (fresh, old), self._retired = self._retired, ([], self._retired[0])
        for cell in [*old, *fresh, *list(self._cells.values())]:
            now = (cell.calls, cell.declined)
            for outcome, calls, seen in zip((cell.outcome, MISS), now, cell.seen, strict=True):
                if calls > seen:
                    yield Sighting(cell.problem, outcome, calls - seen)
            cell.seen = now

    def reset(self) -> None:
        """Forget all counts: a forked child starts empty."""
        self._retired = ([], [])
        self._cells.clear()

    def _renew(self) -> None:
        for key in list(self._cells):
            cell = self._cells.pop(key, None)  # emptied in place: the wrapper holds this dict
            if cell is not None:
                self._retired[0].append(cell)

    def _make(self, stock: Linear) -> Linear:
        cells = self._cells
        # dynamo folds is_dynamo_compiling; other tracers use tensors that are not in _PLAIN
        is_compiling, threads = torch.compiler.is_dynamo_compiling, torch.get_num_threads
        autocast, Parameter = torch._C._is_any_autocast_enabled, torch.nn.Parameter

        def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if is_compiling() or not self._on or type(input) not in _PLAIN or not input.is_cpu:
                return stock(input, weight, bias)
            try:
                key: Any = (input.shape, weight.shape, input.dtype, bias is None, threads(), autocast())
                # strides cost 75 ns an operand: for inputs and parameters the first call with these sizes decides
                if type(weight) is not Parameter and not weight.is_contiguous():
                    key = (*key, weight.stride())
                cell = cells.get(key) or self._first(key, input, weight, bias)
                if cell.route is None:
                    cell.calls += 1
            except Exception:  # not a GEMM: torch has the right answer or the right error
                return stock(input, weight, bias)
            if cell.route is None:
                return stock(input, weight, bias)
            return self._routed(cell, stock, input, weight, bias)

        # it stands for F.linear everywhere: for help(), pickle and torch.jit.script
        linear.__doc__, linear.__name__ = stock.__doc__, "linear"
        linear.__module__, linear.__qualname__ = "torch.nn.functional", "linear"
        linear.__wrapped__ = stock  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            torch.jit._builtins._register_builtin(linear, "aten::linear")
        return linear

    def _first(self, key: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Cell:
        if len(self._cells) >= MAX_CELLS:
            self.dropped += 1
            raise ProblemError("not counted")
        table, mode = self._table, self._mode
        problem = describe(x, w, bias)
        outcome, solution = table.find(problem) if mode & DISPATCH else (MISS, None)
        route = None
        if solution is not None:
            try:
                route = runner(solution)
            except Exception as err:
                self._fail(solution, err)
            if ident_of(solution) in self._failed:
                outcome, solution, route = MISS, None, None
        cell = Cell(problem, outcome, solution, route)
        if table is not self._table or mode != self._mode:  # changed meanwhile: good for this one call
            self._retired[0].append(cell)
            return cell
        return self._cells.setdefault(key, cell)

    def _routed(
        self, cell: Cell, stock: Linear, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        # the route is below autograd, autocast and functorch in the native path; here those calls stay with torch
        if plain_call(x, w, b) and cell.route is not None:
            try:
                y = cell.route(x.reshape(-1, x.shape[-1]), w.t(), b)
                if y.dtype is not x.dtype or y.shape != (cell.problem.m, cell.problem.n):
                    raise ProblemError(f"result is {y.dtype} {tuple(y.shape)}, not what torch returns")
                y = y.view(*x.shape[:-1], w.shape[0])
            except Exception as err:
                if cell.solution is not None:
                    self._fail(cell.solution, err)
                self._renew()
            else:
                cell.calls += 1
                return y
        cell.declined += 1
        return stock(x, w, b)

    def _fail(self, solution: Solution, err: Exception) -> None:
        ident = ident_of(solution)
        if ident not in self._failed:
            self._failed.add(ident)
            self.failures.append((solution, f"{type(err).__name__}: {err}"))


def plain_call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    """True when nothing stands between the caller and the CPU kernel: no autograd, autocast, transform or subclass."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)):
        return False
    return (
        type(x) in _PLAIN
        and type(w) in _PLAIN
        and x.device.type == "cpu"
        and w.dtype is x.dtype
        and w.is_contiguous()
        and x.is_contiguous()
        and (b is None or (type(b) in _PLAIN and b.dtype is x.dtype and b.shape == w.shape[:1] and b.is_contiguous()))
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )


def describe(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Problem:
    """The problem of F.linear(x, w, bias) as the CPU kernel will see it. Raises ProblemError for what is none."""
    if torch._C._get_tracing_state() or torch._C._functorch.maybe_current_level() is not None:
        raise ProblemError("sizes are not what they will be")
    if x.device.type != "cpu" or w.dim() != 2 or x.dim() < 2:
        raise ProblemError("not a plain linear on CPU")
    n, k = (int(d) for d in w.shape)
    if x.shape[-1] != k or (bias is not None and bias.shape != (n,)):
        raise ProblemError("torch refuses it, or broadcasts the bias")
    if x.dim() > 2 and not x.is_contiguous():
        raise ProblemError("torch decides by the strides what GEMM this becomes")
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu") and dtype in (torch.float32, torch.bfloat16, torch.float16):
        dtype = torch.get_autocast_dtype("cpu")
    name = _SHORT.get(dtype)
    if name is None:
        raise ProblemError(f"dtype {dtype} has no short name")
    return Problem(
        m=int(x.numel()) // k,
        n=n,
        k=k,
        bias=bias is not None,
        dtype=name,
        layout=_side(x.reshape(-1, k), prefer_t=False) + _side(w.t(), prefer_t=True),
        math_mode=_math_mode(name),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        threads=torch.get_num_threads(),
    )


def _side(t: torch.Tensor, *, prefer_t: bool) -> str:
    """As `side` in native/call.h."""
    n, c = t.stride(1) == 1 or t.shape[1] == 1, t.stride(0) == 1 or t.shape[0] == 1
    if prefer_t and c and (not n or t.shape[1] == 1):
        return "t"
    return "n" if n else "t" if c else "s"


def _math_mode(dtype: str) -> str:
    if dtype != "fp32":
        return "ieee"
    mode = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return mode if mode in ("tf32", "bf16") else "ieee"


assert set(_SHORT.values()) <= set(DTYPES)
