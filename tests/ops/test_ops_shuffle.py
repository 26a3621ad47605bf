"""AITER's weight order: each element where the fact sheet's formula puts it, and back again."""

from __future__ import annotations

import pytest
import torch

from gemmtuned.ops import ShuffleError, shuffle_weight, unshuffle_weight


@pytest.mark.parametrize(
    ("dtype", "run"), [(torch.bfloat16, 8), (torch.float16, 8), (torch.int8, 16), (torch.float8_e4m3fn, 16)]
)
def test_each_element_lies_where_aiters_kernels_read_it(dtype: torch.dtype, run: int) -> None:
    n, k = 32, 64
    plain = torch.arange(n * k).remainder(97).reshape(n, k).to(torch.float32).to(dtype)
    flat = shuffle_weight(plain).flatten()

    # storage: tile of 16 rows, tile of 32 columns, run within it, row, element (16 bytes)
    wanted = torch.empty_like(plain).flatten()
    for row in range(n):
        for col in range(k):
            tile_row, tile_col, inside = row // 16, col // 32, col % 32
            place = ((tile_row * (k // 32) + tile_col) * (32 // run) + inside // run) * 16 + row % 16
            wanted[place * run + inside % run] = plain[row, col]
    assert torch.equal(flat.float(), wanted.float())


@pytest.mark.parametrize("layout", [(16, 16), (32, 16), "tn"])
def test_shuffling_back_gives_the_weight(layout: tuple[int, int] | str) -> None:
    plain = torch.randn(256, 512).bfloat16()

    shuffled = shuffle_weight(plain, layout=layout)

    assert shuffled.shape == plain.shape
    assert shuffled.is_shuffled is True
    assert not torch.equal(shuffled, plain)
    assert torch.equal(unshuffle_weight(shuffled), plain)


def test_experts_are_shuffled_each_by_itself() -> None:
    plain = torch.randn(3, 32, 64).bfloat16()

    shuffled = shuffle_weight(plain)

    assert all(torch.equal(shuffled[i], shuffle_weight(plain[i])) for i in range(3))
    assert torch.equal(unshuffle_weight(shuffled), plain)


def test_what_cannot_be_shuffled_is_named() -> None:
    with pytest.raises(ShuffleError, match="N to be a multiple of 16 and K of 32, the weight is 24x64"):
        shuffle_weight(torch.zeros(24, 64, dtype=torch.bfloat16))
    with pytest.raises(ShuffleError, match="multiples of 256, the weight is 128x256"):
        shuffle_weight(torch.zeros(128, 256, dtype=torch.bfloat16), layout="tn")
    with pytest.raises(ShuffleError, match="'nt' is not known"):
        shuffle_weight(torch.zeros(256, 256), layout="nt")
    once = shuffle_weight(torch.zeros(32, 64, dtype=torch.bfloat16))
    with pytest.raises(ShuffleError, match="shuffled already"):
        shuffle_weight(once)
