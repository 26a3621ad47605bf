"""AITER's tuned GEMM as a Python object: `TunedGemm`, and `tgemm`, the one that everybody shares.

A call goes, in this order, to
    the row of a loaded table that fits (exact M, then AITER's two padded ones): a kernel of ours where the row carries
    our solution and may be used here, a kernel of AITER's where AITER is installed
    without such a row, what AITER falls back to, where AITER is installed
    torch's own F.linear, below which the hook counts and routes as it does for any program
Where the hook dispatches it is asked to take the loaded table, so that compiled code and nn.Linear use it as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.aiter_columns import torch_name
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import candidate_of, solution_of
from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.merge import Found, TunedTable, merge
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Device, Solution
from gemmtuned.hooks import activate
from gemmtuned.hooks.fallback import describe, plain_call
from gemmtuned.ops.aiter_calls import Choice, GemmKey, Operands, calls, fallback
from gemmtuned.ops.shuffle import PRESHUFFLE_M_THRESHOLD, is_shuffled, unshuffle_weight
from gemmtuned.ops.stock_gemm import as_weight, stock_gemm

if TYPE_CHECKING:
    from gemmtuned.hooks.dispatch import Run

log = logging.getLogger("gemmtuned.ops")
CACHED: Final = 4096  # AITER's
_FAMILY: Final = "bf16"
_SHORT: Final = {torch_name(short): short for short in DTYPES}
_told: set[str] = set()


class TunedGemm:
    """Y = X @ W.T (+ bias) through the best kernel known. Calls may come from any thread.

    split_bias: add the bias after the product, so that the product is looked up without one and Inductor can fuse the
    sum with what follows.
    """

    def __init__(self, *, split_bias: bool = False) -> None:
        self.split_bias = split_bias
        self._paths: list[Path] = []
        self._table = TunedTable(FAMILIES[_FAMILY])
        self._routes: dict[Solution, Run] = {}
        self._failed: set[GemmKey] = set()
        self._choose: Callable[[GemmKey, str], tuple[Choice, Solution | None]] = lru_cache(CACHED)(self._look_up)

    def load_config(self, *paths: str | Path) -> int:
        """Use these tuned tables too, besides those loaded before; returns how many rows are in use now.

        AITER's bf16 table of any age, AMD's guide's `M,N,K,lib,kernel_name,...`, or what `gemmtuned export` wrote.  Of
        rows for one shape the fastest wins; the files are only read.  Rows that carry a solution of ours are checked
        in a process of their own, which takes some seconds.  Raises TableError when a file is none of these.
        """
        new = tuple(Path(path).expanduser().absolute() for path in paths)
        wanted = [*self._paths, *new]
        here = _device("cpu") if not torch.cuda.is_available() else _device("cuda:0")
        table = merge(list(dict.fromkeys(wanted)), family=_FAMILY, here=here.arch)
        self._routes = _usable([solution for row in table.rows if (solution := solution_of(row)) is not None])
        self._table, self._paths = table, wanted
        self._choose = lru_cache(CACHED)(self._look_up)
        activate.take_tables(_FAMILY, new)
        return len(table)

    def key(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        otype: torch.dtype | None = None,
        *,
        scaled: bool = False,
        bpreshuffle: bool = False,
    ) -> GemmKey:
        """AITER's nine columns of a call with these operands; x is [..., K], weight [N, K]."""
        n, k = weight.shape
        fused = bias is not None and not self.split_bias
        units = _device(_place(x)).units
        out = str(otype or x.dtype)
        return GemmKey(units, x.numel() // k, n, k, fused, str(x.dtype), out, scaled, bpreshuffle)

    def config(self, key: GemmKey, device: str = "cpu") -> Choice:
        """What a call with this key runs on a device (`cpu`, `cuda:0`), before it is known whether that is here."""
        return self._choose(key, device)[0]

    def gemm_a16w16(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        scale_c: Tensor | None = None,
        *,
        bpreshuffle: bool | None = None,
    ) -> Tensor:
        """As `gemmtuned.ops.gemm_a16w16`."""
        shuffled = is_shuffled(weight) if bpreshuffle is None else bpreshuffle
        w = as_weight(weight, x.shape[-1])
        if scale_c is not None:
            raise GemmtunedError("scale_c is for fp8 results, which this version does not make: scale the result")
        late = bias if self.split_bias else None
        fused = None if self.split_bias else bias
        y = None
        if not torch.compiler.is_compiling() and (shuffled or len(self._table) or calls()):
            y = self._tuned(x, w, fused, otype or x.dtype, scale_a, scale_b, shuffled=shuffled)
        if y is None:
            plain = _unshuffled(x, w) if shuffled else w
            y = stock_gemm(x, plain, fused, scale_a, scale_b, otype or x.dtype)
        return y if late is None else y + late.to(y.dtype)

    def mm(
        self,
        inp: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        scale_c: Tensor | None = None,
    ) -> Tensor:
        """AITER's name and argument names for gemm_a16w16."""
        return self.gemm_a16w16(inp, weights, bias, otype, scale_a, scale_b, scale_c)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """In the place of torch.nn.functional.linear."""
        return self.gemm_a16w16(input, weight, bias)

    def _tuned(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        otype: torch.dtype,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        *,
        shuffled: bool,
    ) -> Tensor | None:
        """The call by a kernel of ours or of AITER's; None when torch is to serve it."""
        scaled = scale_a is not None or scale_b is not None
        place = _place(x)
        key = self.key(x, w, bias, otype, scaled=scaled, bpreshuffle=shuffled)
        if key.M == 0 or key in self._failed or needs_grad(x, w, bias):
            return None
        if shuffled and key.M < PRESHUFFLE_M_THRESHOLD:
            _tell_once(f"a shuffled weight below M={PRESHUFFLE_M_THRESHOLD} is slower than a plain one: hand that one")
        choice, solution = self._choose(key, place)
        route = self._routes.get(solution) if solution is not None else None
        x2 = x.reshape(-1, key.K)
        try:
            if route is not None and solution is not None:
                if activate.is_active() or not _serves(solution, x2, w, bias):
                    return None  # an active hook has the same table, and counts
                y = route(x2, w.t(), bias)
            else:
                call = calls().get(choice.libtype)
                if call is None:
                    return None
                y = call(Operands(x2, w, bias, otype, scale_a, scale_b, None, shuffled, key.cu_num), choice)
                _count(key, place)
        except (RuntimeError, TypeError, ValueError) as err:
            self._failed.add(key)
            _tell_once(f"{choice.libtype} fails for {key}, torch serves it from now on: {err}")
            return None
        return y.view(*x.shape[:-1], key.N).to(otype)

    def _look_up(self, key: GemmKey, place: str) -> tuple[Choice, Solution | None]:
        device = _device(place)
        found = self._table.find(
            gfx=device.arch, cu_num=key.cu_num, M=key.M, N=key.N, K=key.K, bias=key.bias,
            dtype=_SHORT.get(key.dtype, key.dtype), outdtype=_SHORT.get(key.outdtype, key.outdtype),
            scaleAB=key.scaleAB, bpreshuffle=key.bpreshuffle,
        )  # fmt: skip
        return (fallback(key, device.arch), None) if found is None else _chosen(found)


def _unshuffled(x: Tensor, w: Tensor) -> Tensor:
    _tell_once("no kernel here takes a shuffled weight: it is turned back at every call; hand the plain one instead")
    return unshuffle_weight(w)


def _chosen(found: Found) -> tuple[Choice, Solution | None]:
    row = found.row
    candidate = candidate_of(row)
    if candidate is None:
        return Choice(DEFAULT_BACKEND, padded_m=found.m), None
    texts = {name: row[name].partition(".")[0] for name in ("solidx", "splitK")}
    numbers = {name: int(text) if text.lstrip("-").isdigit() else None for name, text in texts.items()}
    kernel = row["kernelName"] or row["kernel_name"]
    choice = Choice(candidate.backend, numbers["solidx"] or 0, numbers["splitK"], kernel, found.m)
    return choice, solution_of(row)


def needs_grad(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd must see the call: kernels of others have no derivative."""
    return torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad))


def _serves(solution: Solution, x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether this is the very problem that the solution was proven for: AITER's key says less than ours."""
    if not plain_call(x, w, bias):
        return False
    try:
        problem = describe(x, w, bias)
    except ProblemError:
        return False
    m = padded_m(problem.m, problem.n, solution.covers)
    return problem.with_m(m) == solution.problem


def _usable(solutions: list[Solution]) -> dict[Solution, Run]:
    """Solutions of ours that may run on this CPU, and how: device and versions agree, and a check passed."""
    from gemmtuned.hooks.dispatch import runner
    from gemmtuned.hooks.user_tables import spot_checks
    from gemmtuned.kernels.backends import environment

    here = environment(_device("cpu"))
    fit = [
        s for s in dict.fromkeys(solutions)
        if s.device == here.device.key and here.accepts(s.backend, s.stamp) and s.backend != DEFAULT_BACKEND
    ]  # fmt: skip
    routes = {}
    for solution, reason in zip(fit, spot_checks(fit) if fit else (), strict=True):
        if reason:
            log.warning("row not used problem=%s backend=%s reason=%r", solution.problem, solution.backend, reason)
            continue
        route = runner(solution)
        if route is not None:
            routes[solution] = route
    return routes


def _count(key: GemmKey, place: str) -> None:
    """A call that aten did not see."""
    hook: Any = activate.current()
    if hook is None:
        return
    try:
        problem = Problem(
            family="scaled" if key.scaleAB else "dense", m=key.M, n=key.N, k=key.K, bias=key.bias,
            dtype=_SHORT[key.dtype], out_dtype=_SHORT[key.outdtype], scale="tensor" if key.scaleAB else "none",
            weight_state="shuffled" if key.bpreshuffle else "plain",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            threads=torch.get_num_threads() if place == "cpu" else 0,
        )  # fmt: skip
    except (KeyError, ProblemError):
        return
    hook.count_op(problem, place)


@lru_cache(64)
def _device(place: str) -> Device:
    from gemmtuned.kernels.device import device_at

    return device_at(place)


def _place(x: Tensor) -> str:
    return "cpu" if x.device.type == "cpu" else f"cuda:{x.device.index or 0}"


def _tell_once(what: str) -> None:
    if what not in _told:
        _told.add(what)
        log.warning("%s", what)


tgemm: Final = TunedGemm()
