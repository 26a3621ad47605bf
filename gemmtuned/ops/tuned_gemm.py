"""AITER's tuned GEMM as a Python object: `TunedGemm`, and `tgemm`, a shared instance of it.

A call is run by the first of these that applies:
    the matching row of a loaded table (exact M, then AITER's two padded ones): a kernel of ours if the row has our
    solution and that is valid here, a kernel of AITER's if AITER is installed
    AITER's fallback, if AITER is installed
    torch's own F.linear, which the hook counts and routes as in any program
A hook that dispatches also takes the loaded table, so that compiled code and nn.Linear use it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.aiter_columns import SHORT_NAMES
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import solution_of
from gemmtuned.configs.errors import GemmtunedError, ProblemError, TableError
from gemmtuned.configs.merge import TunedTable, merge
from gemmtuned.configs.problem import Problem, as_by_default
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks import activate
from gemmtuned.ops.aiter_calls import Choice, GemmKey, Operands, calls, fallback
from gemmtuned.ops.plans import Plan, Run, chosen, device_of, gemm_key, is_plain, place_of, serves, usable_routes
from gemmtuned.ops.shuffle import (
    PRESHUFFLE_M_THRESHOLD,
    ShuffleError,
    is_shuffled,
    is_view_of_shuffled,
    unshuffle_weight,
)
from gemmtuned.ops.stock_gemm import as_weight, stock_gemm
from gemmtuned.ops.tensors import some_tensor

log = logging.getLogger("gemmtuned.ops")
CACHED: Final = 4096  # AITER's
_FAMILY: Final = "bf16"
_warned: set[str] = set()


class TunedGemm:
    """Y = X @ W.T (+ bias) through the best kernel known. Calls may come from any thread.

    split_bias: add the bias after the product, so that the product is looked up without a bias and Inductor can fuse
    the addition with what follows.
    """

    def __init__(self, *, split_bias: bool = False) -> None:
        self.split_bias = split_bias
        self._paths: list[Path] = []
        self._table = TunedTable(FAMILIES[_FAMILY])
        self._routes: dict[Solution, Run] = {}
        self._failed: set[GemmKey] = set()
        self._plan: Callable[..., Plan | None] = lru_cache(CACHED)(self._make_plan)

    def load_config(self, *paths: str | Path) -> int:
        """Use these tuned tables too, besides those loaded before; returns how many rows are in use now.

        AITER's bf16 table of any age, AMD's guide's `M,N,K,lib,kernel_name,...`, or what `gemmtuned export` wrote.  Of
        rows for one shape the fastest wins; the files are only read.  Rows that carry a solution of ours are checked
        in a process of their own, which takes some seconds.  Raises TableError when a file is not there, or none of
        these.
        """
        new = tuple(Path(path).expanduser().absolute() for path in paths)
        for path in new:
            if not path.is_file():
                raise TableError(f"{path}: no such file, so none was loaded")
        wanted = [*self._paths, *new]
        here = device_of("cpu") if not torch.cuda.is_available() else device_of("cuda:0")
        table = merge(list(dict.fromkeys(wanted)), family=_FAMILY, here=here.arch)
        self._routes = usable_routes([solution for row in table.rows if (solution := solution_of(row)) is not None])
        self._table, self._paths = table, wanted
        self._plan = lru_cache(CACHED)(self._make_plan)
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
        fused = bias is not None and not self.split_bias
        return gemm_key(
            x.shape, weight.shape, fused, x.dtype, otype or x.dtype, scaled, bpreshuffle, place_of(x.device)
        )

    def config(self, key: GemmKey, device: str = "cpu") -> Choice:
        """What a call with this key would run on a device (`cpu`, `cuda:0`), whether or not that can run here."""
        return self._look_up(key, device)[0]

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
        if scale_c is not None:
            raise GemmtunedError("scale_c is for fp8 results, which this version does not make: scale the result")
        _check_operands(x, weight, bias, otype)
        shuffled = is_shuffled(weight) if bpreshuffle is None else bpreshuffle
        if bpreshuffle is None and is_view_of_shuffled(weight):
            raise ShuffleError(
                "the weight is a view of a shuffled one, without its mark: hand the shuffled weight itself, or say "
                "bpreshuffle=True or False"
            )
        if not x.dim():
            raise GemmtunedError("gemm_a16w16: x is a single number, expected [.., K]")
        w = as_weight(weight, x.shape[-1])
        out = otype or x.dtype
        fused, late = (None, bias) if self.split_bias else (bias, None)
        y = None
        # Inside torch.compile the call must be torch's own, which the hook routes under aten
        if not torch.compiler.is_compiling() and (shuffled or self._paths or calls()):
            y = self._tuned(x, w, fused, out, scale_a, scale_b, shuffled=shuffled)
        if y is None:
            y = stock_gemm(x, _unshuffled(w) if shuffled else w, fused, scale_a, scale_b, out)
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
        """A replacement for torch.nn.functional.linear: input [..., K], weight [N, K], bias [N]."""
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
        """The result by a kernel of ours or of AITER's; None if torch is to run the call."""
        if not (x.numel() and is_plain(x, w, bias)):
            return None
        scaled = scale_a is not None or scale_b is not None
        plan = self._plan(x.shape, w.shape, bias is not None, x.dtype, otype, scaled, shuffled, x.device)
        if plan is None:
            return None
        x2 = x.reshape(-1, plan.key.K)
        try:
            if plan.route is not None:
                if activate.is_active() or not serves(plan.solution, x2, w, bias):
                    return None  # an active hook has the same table, and counts
                y = plan.route(x2, w.t(), bias)
            else:
                operands = Operands(x2, w, bias, otype, scale_a, scale_b, None, shuffled, plan.key.cu_num)
                y = plan.call(operands, plan.choice)
                _count(plan.key, place_of(x.device))
        except (RuntimeError, TypeError, ValueError) as err:
            self._failed.add(plan.key)
            self._plan = lru_cache(CACHED)(self._make_plan)
            _tell_once(f"{plan.choice.libtype} fails for {plan.key}, torch serves it from now on: {err}")
            return None
        return y.view(*x.shape[:-1], plan.key.N).to(otype)

    def _make_plan(
        self,
        x_shape: torch.Size,
        w_shape: torch.Size,
        bias: bool,
        dtype: torch.dtype,
        otype: torch.dtype,
        scaled: bool,
        shuffled: bool,
        device: torch.device,
    ) -> Plan | None:
        """The kernel for calls with operands of this kind; None for torch's own."""
        place = place_of(device)
        key = gemm_key(x_shape, w_shape, bias, dtype, otype, scaled, shuffled, place)
        if key in self._failed:
            return None
        if shuffled and key.M < PRESHUFFLE_M_THRESHOLD:
            _tell_once(f"a shuffled weight below M={PRESHUFFLE_M_THRESHOLD} is slower than a plain one: hand that one")
        choice, solution = self._look_up(key, place)
        if solution is not None:
            route = self._routes.get(solution)
            fits = route is not None and not scaled and otype == dtype
            return Plan(key, choice, solution, route) if fits else None
        call = calls().get(choice.libtype)
        return Plan(key, choice, call=call) if call is not None else None

    def _look_up(self, key: GemmKey, place: str) -> tuple[Choice, Solution | None]:
        device = device_of(place)
        found = self._table.find(
            gfx=device.arch, cu_num=key.cu_num, M=key.M, N=key.N, K=key.K, bias=key.bias,
            dtype=SHORT_NAMES.get(key.dtype, key.dtype), outdtype=SHORT_NAMES.get(key.outdtype, key.outdtype),
            scaleAB=key.scaleAB, bpreshuffle=key.bpreshuffle,
        )  # fmt: skip
        return (fallback(key, device.arch), None) if found is None else chosen(found)


def _check_operands(x: Any, weight: Any, bias: Any, otype: Any) -> None:
    """Raise GemmtunedError for what is no tensor, and for a weight on another device than x.

    Of a tensor on the CPU and one on meta torch's product returns arbitrary numbers.
    """
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        for name, given in (("x", x), ("the weight", weight), ("bias", bias)):
            some_tensor(f"gemm_a16w16: {name}", given)
    if x.device != weight.device:
        raise GemmtunedError(f"gemm_a16w16: x is on {x.device} and the weight on {weight.device}")
    if otype is not None and not isinstance(otype, torch.dtype):
        raise GemmtunedError(f"gemm_a16w16: otype is {otype!r}, expected a torch.dtype")


def _unshuffled(w: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        _tell_once(
            "no kernel here takes a shuffled weight: it is turned back at every call; hand the plain one instead"
        )
    return unshuffle_weight(w)


def _count(key: GemmKey, place: str) -> None:
    """Count a call that did not go through aten."""
    hook: Any = activate.current()
    if hook is None:
        return
    try:
        problem = Problem(
            family="scaled" if key.scaleAB else "dense", m=key.M, n=key.N, k=key.K, bias=key.bias,
            dtype=SHORT_NAMES[key.dtype], out_dtype=SHORT_NAMES[key.outdtype],
            scale="tensor" if key.scaleAB else "none", weight_state="shuffled" if key.bpreshuffle else "plain",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            threads=torch.get_num_threads() if place == "cpu" else 0,
        )  # fmt: skip
    except (KeyError, ProblemError):
        return
    if getattr(torch.backends.cuda.matmul, f"allow_{problem.dtype}_reduced_precision_reduction", False):
        problem = as_by_default(problem, gpu=place != "cpu")  # as the hook keys the same product
    hook.count_op(problem, place)


def _tell_once(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        log.warning("%s", what)


tgemm: Final = TunedGemm()
