"""The order of AITER's pre-shuffled weights: how it is made and undone (aiter/ops/shuffle.py, `shuffle_weight`).

A weight [..., N, K] in this order has the shape of the plain one.  It is of tiles of `rows` rows by `columns` of K, one
row of tiles after another; in a tile lie first all rows' first `run` elements, then their second ones, and so on.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.tunable import SHUFFLED_TILE

TILE_ROWS, TILE_K = SHUFFLED_TILE  # for 8-bit weights, whose bytes are numbers
RUN: Final = 16


def in_order(w: Tensor, rows: int = TILE_ROWS, columns: int = TILE_K, run: int = RUN) -> Tensor:
    """A copy of the plain weight in this order, with the shape [..., N/rows, K/columns, columns/run, rows, run]."""
    n, k = w.shape[-2:]
    tiles = w.reshape(w.shape[:-2].numel(), n // rows, rows, k // columns, columns // run, run)
    return tiles.permute(0, 1, 3, 4, 2, 5).clone(memory_format=torch.contiguous_format)


def plain(w: Tensor, rows: int = TILE_ROWS, columns: int = TILE_K, run: int = RUN) -> Tensor:
    """The plain weight [..., N, K] of one in this order, as a copy."""
    n, k = w.shape[-2:]
    tiles = w.reshape(w.shape[:-2].numel(), n // rows, k // columns, columns // run, rows, run)
    return tiles.permute(0, 1, 4, 2, 3, 5).clone(memory_format=torch.contiguous_format).view(w.shape)
