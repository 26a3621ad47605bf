"""What the backends of our compiled kernels share: the record of a launch, and calls that torch takes over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels.backends.base import Run
from gemmtuned.kernels.families.dense import linear
from gemmtuned.kernels.operands import check_operands
from gemmtuned.kernels.own_kernel import POINTER_ALIGN

WARP_SIZE: Final = 32


def launch_text(
    *,
    binary: str,
    name: str,
    shared: int,
    warps: int,
    cluster: int,
    grid: Iterable[tuple[str, int]],
    arguments: Iterable[str],
    ld_multiple: int,
    max_m: int,
    null_pointers: int = 0,
    partials_offset: int = 0,
    counters_bytes: int = 0,
    workspace_bytes: int = 0,
) -> str:
    """The launch record of a binary as canonical JSON; configs/launch.py says what its fields mean.

    grid: (over, block) of each axis.
    """
    facts = {
        "binary": binary,
        "name": name,
        "shared": shared,
        "warps": warps,
        "warp_size": WARP_SIZE,
        "cluster": cluster,
        "grid": [{"over": over, "block": block} for over, block in grid],
        "arguments": list(arguments),
        "null_pointers": null_pointers,
        "ld_multiple": ld_multiple,
        "max_m": max_m,
        "partials_offset": partials_offset,
        "counters_bytes": counters_bytes,
        "workspace_bytes": workspace_bytes,
        "pointer_align": POINTER_ALIGN,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def bound(w: Tensor, ld_multiple: int, launch: Callable[[Tensor, Tensor, Tensor | None, Tensor], object]) -> Run:
    """run(x, bias) for this W [K, N], by launch(x, rows, bias, y) with its rows [N, K] and a new y.

    Operands that the binary was not compiled for go to torch, as they do in a running program.
    """
    rows = w.t()

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        try:
            check_operands(ld_multiple, x, rows, bias)
        except CandidateFailed:
            return linear(x, w, bias)
        y = torch.empty(x.shape[0], rows.shape[0], dtype=x.dtype, device=x.device)
        launch(x, rows, bias, y)
        return y

    return run
