"""What serves calls of one kind, found out once: AITER's key, the row that fits, and whether it may be used here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gemmtuned.configs.aiter_rows import candidate_of, solution_of
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.merge import Found
from gemmtuned.configs.numbers import signed
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import DEFAULT_BACKEND, Device, Solution
from gemmtuned.configs.verdicts import Verdicts
from gemmtuned.ops.aiter_calls import Call, Choice, GemmKey
from gemmtuned.ops.plain import PLAIN, describe, plain_call

log = logging.getLogger("gemmtuned.ops")
Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What serves calls of one kind: a route for a solution of ours, or a kernel of AITER's."""

    key: GemmKey
    choice: Choice
    solution: Solution | None = None
    route: Run | None = None
    call: Call = lambda operands, choice: operands.x


def gemm_key(
    x_shape: torch.Size,
    w_shape: torch.Size,
    bias: bool,
    dtype: torch.dtype,
    otype: torch.dtype,
    scaled: bool,
    shuffled: bool,
    place: str,
) -> GemmKey:
    """AITER's nine columns of a call with an x [..., K] and a weight [N, K] of these sizes."""
    n, k = w_shape
    return GemmKey(
        device_of(place).units, x_shape[:-1].numel(), n, k, bias, str(dtype), str(otype), scaled, shuffled
    )  # fmt: skip


def chosen(found: Found) -> tuple[Choice, Solution | None]:
    """What a row says: AITER's library and kernel, and our solution where it carries one."""
    row = found.row
    candidate = candidate_of(row)
    if candidate is None:
        return Choice(DEFAULT_BACKEND, padded_m=found.m), None
    texts = {name: row[name].partition(".")[0] for name in ("solidx", "splitK")}
    numbers = {name: signed(text) for name, text in texts.items()}
    kernel = row["kernelName"] or row["kernel_name"]
    choice = Choice(candidate.backend, numbers["solidx"] or 0, numbers["splitK"], kernel, found.m)
    return choice, solution_of(row)


def is_plain(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether a kernel that is not torch's may serve the call: no derivative, autocast, subclass or other device."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    kind = x.device.type
    return (
        kind in ("cpu", "cuda")
        and type(x) in PLAIN
        and type(w) in PLAIN
        and not torch.is_autocast_enabled(kind)
        and torch._C._functorch.maybe_current_level() is None
    )


def serves(solution: Solution | None, x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether this is the very problem that the solution was proven for: AITER's key says less than ours."""
    if solution is None or not plain_call(x, w, bias):
        return False
    try:
        problem = describe(x, w, bias)
    except ProblemError:
        return False
    m = padded_m(problem.m, problem.n, solution.covers)
    return problem.with_m(m) == solution.problem


def usable_routes(solutions: list[Solution]) -> dict[Solution, Run]:
    """Solutions of ours that may run on this CPU, and how: device and versions agree, and a check passed.

    What nobody has tried here yet is left for `gemmtuned run` or the daemon to try, and used when it is loaded next.
    """
    from gemmtuned.kernels.backends import environment

    here = environment(device_of("cpu"))
    fit = [
        s for s in dict.fromkeys(solutions)
        if s.device == here.device.key and here.accepts(s.backend, s.stamp) and s.backend != DEFAULT_BACKEND
    ]  # fmt: skip
    routes = {}
    verdicts = Verdicts(Settings.from_env().home)
    unknown = [solution for solution in fit if verdicts.of(solution) is None]
    if unknown:
        verdicts.ask(unknown)
        log.warning("rows not used yet rows=%d reason='not tried here: gemmtuned run or the daemon does'", len(unknown))
    for solution in fit:
        reason = verdicts.of(solution)
        if reason is None:
            continue
        if reason:
            log.warning("row not used problem=%s backend=%s reason=%r", solution.problem, solution.backend, reason)
            continue
        routes[solution] = _runner(solution)
    return routes


def _runner(solution: Solution) -> Run:
    """y = run(a, b, bias), b the [K, N] operand. Raises GemmtunedError when the backend does not offer it."""
    from gemmtuned.kernels.backends import BACKENDS

    kernel = BACKENDS[solution.backend].prepare(solution.candidate, solution.problem)
    return lambda x, w, bias: kernel.bind(w)(x, bias)


@lru_cache(64)
def device_of(place: str) -> Device:
    """The device at `cpu` or `cuda:0`, as tables are keyed by it."""
    from gemmtuned.kernels.device import device_at

    return device_at(place)


def place_of(device: torch.device) -> str:
    """`cpu` or `cuda:<index>`."""
    return "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
