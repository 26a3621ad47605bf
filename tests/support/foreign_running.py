"""What the programs of other people share, and how one of them is run.

Each program makes its own inputs and returns tensors, texts and numbers in any nesting: values, graphs, the calls that
a mode saw.  An exception and the warnings on the way are part of its outcome.  `arrive` is called in the middle of
some: there a new table comes, where there is a hook.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hooked import publish
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only

import gemmtuned
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks import activate

K, N, ROWS = 64, 48, 6
TABLE: list[Solution] = []
aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """What runs, and the coarsest type that its numbers pass through, whatever type they come back in."""

    run: Callable[[], Any]
    coarsest: torch.dtype


PROGRAMS: dict[str, Program] = {}


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """A program that computes in fp32."""
    PROGRAMS[run.__name__] = Program(run, torch.float32)
    return run


def coarse_program(run: Callable[[], Any]) -> Callable[[], Any]:
    """A program whose numbers pass through bfloat16, or through eight-bit integers, which are as coarse."""
    PROGRAMS[run.__name__] = Program(run, torch.bfloat16)
    return run


def arrive() -> None:
    """A table of a new generation, with the rows of the last one, is taken up where the hook is on."""
    hook = activate.current()
    if hook is not None:
        publish(hook.settings.config_dir, TABLE, gemmtuned.generation() + 1)
        gemmtuned.reload()


def outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What a program gives, or raises, and the warnings on the way."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            value = run()
        except Exception as err:
            value = f"{type(err).__name__}: {plain(str(err))}"
    value = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)
    words = [f"{w.category.__name__}: {plain(str(w.message))}" for w in told]
    return {"value": tree_map_only(str, plain, value), "warnings": words}


def plain(text: str) -> str:
    """Without addresses, which are others in each process."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


# ---- models


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N, bias=bias), nn.ReLU(), nn.Linear(N, K, bias=bias))


def rows(n: int = ROWS, k: int = K) -> Tensor:
    return torch.randn(n, k)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    (y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def nodes(graph: Any) -> list[str]:
    """What a graph does, with whom: the identity of functions shows in their names."""
    return [
        f"{node.op} {node.target if isinstance(node.target, str) else resolve(node.target)}" for node in graph.nodes
    ]


def resolve(target: Any) -> str:
    if target is F.linear:
        return "F.linear itself"
    return str(resolve_name(target) or target)
