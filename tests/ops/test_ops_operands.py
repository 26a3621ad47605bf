"""Each op says by name which operand is no tensor, or one of a layout that it does not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gemmtuned import ops
from gemmtuned.configs.errors import GemmtunedError

E4M3 = torch.float8_e4m3fn
X16, W16 = torch.ones(4, 256).bfloat16(), torch.ones(32, 256).bfloat16()
X8, W8, ONE, N = torch.ones(4, 256).to(torch.int8), torch.ones(32, 256).to(torch.int8), torch.ones(1), torch.ones(32)
CODES, POWERS = torch.ones(32, 128, dtype=torch.uint8), torch.full((32, 8), 127, dtype=torch.uint8)
HIDDEN, W1, W2 = torch.ones(4, 64), torch.ones(2, 32, 64), torch.ones(2, 64, 16)
IDS = torch.zeros(4, 1, dtype=torch.int32)
SHARES = torch.ones(4, 1)

EIGHTS, FOURS = {"XQ": "x", "WQ": "the weight"}, {"B": "the weight"}

OPS: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor], dict[str, str]]] = {
    "gemm_a8w8": (ops.gemm_a8w8, {"XQ": X8, "WQ": W8, "x_scale": ONE, "w_scale": ONE, "bias": N}, EIGHTS),
    "gemm_a8w8_bpreshuffle": (
        ops.gemm_a8w8_bpreshuffle,
        {"XQ": X8, "WQ": ops.shuffle_weight(W8), "x_scale": ONE, "w_scale": ONE, "bias": N}, EIGHTS,
    ),
    "gemm_a8w8_blockscale": (
        ops.gemm_a8w8_blockscale,
        {"XQ": X8.to(E4M3), "WQ": W8.to(E4M3), "x_scale": torch.ones(4, 2), "w_scale": torch.ones(1, 2)},
        {"XQ": "x", "WQ": "w"},
    ),
    "gemm_a4w4": (ops.gemm_a4w4, {"A": CODES, "B": CODES, "A_scale": POWERS, "B_scale": POWERS, "bias": N}, FOURS),
    "gemm_a16w8": (ops.gemm_a16w8, {"x": X16, "w": W8, "w_scale": ONE, "bias": N}, {"w": "the weight"}),
    "gemm_a16w4": (
        ops.gemm_a16w4, {"x": X16, "w": CODES, "w_scale": torch.ones(32, 8), "w_zeros": torch.ones(32, 8), "bias": N},
        {"w": "the weight"},
    ),
    "batched_gemm_bf16": (
        ops.batched_gemm_bf16, {"XQ": X16[None], "WQ": W16[None], "bias": N[None, None]}, {"WQ": "the weight"},
    ),
    "batched_gemm_a8w8": (
        ops.batched_gemm_a8w8,
        {
            "XQ": X8[None], "WQ": W8[None], "x_scale": torch.ones(1, 4, 1), "w_scale": torch.ones(1, 1, 32),
            "bias": N[None, None],
        },
        {"WQ": "the weight"},
    ),
    "gemm_a16w16": (
        ops.gemm_a16w16, {"x": X16, "weight": W16, "bias": N.bfloat16(), "scale_a": ONE, "scale_b": ONE},
        {"weight": "the weight"},
    ),
    "gemm_a16w16_atomic": (ops.gemm_a16w16_atomic, {"x": X16, "w": W16, "y": torch.ones(4, 32).bfloat16()}, {}),
    "fused_moe": (
        ops.fused_moe,
        {
            "hidden_states": HIDDEN, "w1": W1, "w2": W2, "topk_weight": SHARES, "topk_ids": IDS,
            "expert_mask": torch.ones(2, dtype=torch.int32), "bias1": torch.ones(2, 32), "bias2": torch.ones(2, 64),
        },
        {},
    ),
    "shuffle_weight": (ops.shuffle_weight, {"x": W8}, {"x": "the weight"}),
    "unshuffle_weight": (ops.unshuffle_weight, {"x": W8}, {"x": "the weight"}),
}  # fmt: skip
STRIDED_ALONE = [name for name in OPS if not name.startswith("gemm_a16w16")]  # which is torch's own product
PLACES = [(op, operand) for op, (_, given, _) in OPS.items() for operand in given]


@pytest.mark.parametrize(("op", "operand"), PLACES)
@pytest.mark.parametrize("kind", ["number", "text", "list", "array", "module"])
def test_what_is_no_tensor_is_named(op: str, operand: str, kind: str) -> None:
    call, given, names = OPS[op]
    call(**given)
    wrong: Any = {"number": 3, "text": "x", "list": [[1.0] * 99] * 99, "array": np.ones((99, 99)), "module": np}[kind]
    with pytest.raises(GemmtunedError, match=rf"{names.get(operand, operand)} is .{{1,60}}, expected a tensor") as told:
        call(**given | {operand: wrong})
    assert len(str(told.value)) < 150


@pytest.mark.filterwarnings("ignore:.*quantize|.*nested")
@pytest.mark.parametrize(("op", "operand"), [place for place in PLACES if place[0] in STRIDED_ALONE])
def test_what_lies_in_another_way_is_named(op: str, operand: str) -> None:
    call, given, names = OPS[op]
    numbers = given[operand].float()
    for wrong, message in (
        (numbers.to_sparse(), "is of layout torch.sparse_coo, expected a plain tensor"),
        (torch.nested.nested_tensor([numbers]), "is a nested tensor without sizes"),
        (torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8), "is of torch's quantized type torch.qint8"),
    ):
        with pytest.raises(GemmtunedError, match=f"{names.get(operand, operand)} {message}"):
            call(**given | {operand: wrong})


@pytest.mark.parametrize(
    "op", ["batched_gemm_bf16", "fused_moe", "gemm_a16w16", "shuffle_weight", "gemm_a8w8_bpreshuffle"]
)
def test_an_operand_that_was_forgotten_is_named(op: str) -> None:
    call, given, names = OPS[op]
    for operand in list(given)[: {"fused_moe": 5, "shuffle_weight": 1}.get(op, 2)]:
        with pytest.raises(GemmtunedError, match=f"{names.get(operand, operand)} is None, expected a tensor"):
            call(**given | {operand: None})


def test_a_weight_on_another_device_is_told_where_torch_gives_any_numbers() -> None:
    for call in (ops.gemm_a16w16, ops.gemm_a16w16_atomic, ops.triton_gemm_a16w16, ops.tgemm.mm):
        with pytest.raises(GemmtunedError, match="x is on cpu and the weight on meta"):
            call(X16, W16.to("meta"))


def test_a_type_that_is_none_and_a_layout_that_is_no_pair_are_told() -> None:
    for wrong in ("bf16", 3, [1], ONE):
        with pytest.raises(GemmtunedError, match=r"otype is .*, expected a torch.dtype"):
            ops.gemm_a16w16(X16, W16, otype=wrong)  # type: ignore[arg-type]
    for layout in (None, 3, torch.int8, (16,), (16.0, 16)):
        with pytest.raises(ops.ShuffleError, match="expected 'tn', or a pair"):
            ops.shuffle_weight(W8, layout)  # type: ignore[arg-type]


def test_a_jagged_x_is_multiplied_as_torch_does() -> None:
    rows = [torch.ones(2, 256), torch.ones(5, 256)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    y = ops.gemm_a16w8(x, W8, ONE)
    assert [part.tolist() for part in y.unbind()] == [[[256.0] * 32] * len(each) for each in rows]
