"""What a call of fused_moe says, checked: its sizes, types and devices fit each other, or a message says why not."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.dtypes import E8M0, FLOATS, FP8, PACKED_FP4
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.ops.shuffle import is_shuffled, is_view_of_shuffled
from gemmtuned.ops.tensors import tensor

_BYTES: Final = (*FP8, torch.int8)
_ACTS: Final = {"silu": "silu", "gelu": "gelu", "swiglu": "swiglu"}
_ACT_NUMBERS: Final = ("silu", "gelu", "swiglu")
_QUANTS: Final = {  # AITER's names, in small letters; the position of each is its number
    "no": "none", "per_tensor": "tensor", "per_token": "row", "per_1x32": "mxfp4", "per_1x128": "128x128",
    "per_128x128": "128x128",
}  # fmt: skip
_GROUPS: Final = {"per_group": "int4"}


def how_of(
    activation: Any, quant_type: Any, w1: Tensor, w2: Tensor, *, weighted: bool, interleaved: bool,
    quantised: bool = False,
) -> How:  # fmt: skip
    """What is computed. activation, quant_type: AITER's members, ours, their names, or their numbers.

    quantised: the caller lets X and H be quantised, which is done beside weights of e4m3 with scales of blocks.
    """
    act = _named(activation, "activation", dict(enumerate(_ACT_NUMBERS)), _ACTS)
    quant = _named(quant_type, "quant_type", {**dict(enumerate(_QUANTS)), 100: "per_group"}, {**_QUANTS, **_GROUPS})
    if tensor("w1", w1).dim() != 3 or tensor("w2", w2).dim() != 3:
        raise GemmtunedError(
            f"w1 is {tuple(w1.shape)} and w2 {tuple(w2.shape)}, expected [experts, 2 * inter or inter, width] and "
            "[experts, width, inter]"
        )
    if any(is_shuffled(w) or is_view_of_shuffled(w) for w in (w1, w2)):
        raise GemmtunedError(
            "w1 or w2 is shuffled, or a view of what is, which no kernel here reads: hand the plain weights"
        )
    inter = w2.shape[2] * (2 if quant in ("mxfp4", "int4") else 1)
    if w1.shape[1] not in (inter, 2 * inter):
        raise GemmtunedError(f"w1 has {w1.shape[1]} rows an expert, expected {2 * inter} (gate and up) or {inter}")
    gated = w1.shape[1] == 2 * inter
    if not gated and (act == "swiglu" or interleaved):
        raise GemmtunedError(f"w1 has no gate rows, which activation {act}, interleaved={interleaved} needs")
    in_groups = quantised and quant == "128x128" and w1.dtype == w2.dtype == torch.float8_e4m3fn
    return How(
        act=act, gated=gated, interleaved=interleaved, weighted=bool(weighted), quant=quant,
        activations="1x128" if in_groups else "none",
    )  # fmt: skip


def operands_of(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, scale1: Tensor | None, scale2: Tensor | None,
    scale_x: Tensor | None, bias1: Tensor | None, bias2: Tensor | None, *, how: How, dtype: torch.dtype | None,
) -> Operands:  # fmt: skip
    """The operands as the kernels take them; without copies where nothing has to change. Raises GemmtunedError."""
    if dtype is not None and dtype not in FLOATS:
        raise GemmtunedError(f"dtype is {dtype}, expected one of {', '.join(map(str, FLOATS))}")
    experts = _check_sizes(x, w1, w2, how)
    tokens = x.shape[0]
    tensor("topk_weight", weights)
    if tensor("topk_ids", ids).dim() != 2 or ids.shape[0] != tokens or weights.shape != ids.shape or not ids.shape[1]:
        raise GemmtunedError(
            f"topk_ids is {tuple(ids.shape)} and topk_weight {tuple(weights.shape)}, expected [{tokens}, topk] twice"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise GemmtunedError(f"topk_ids is {ids.dtype}, expected torch.int32 or torch.int64")
    if not weights.is_floating_point():
        raise GemmtunedError(f"topk_weight is {weights.dtype}, expected floating point numbers")
    x = _dequantised(x, scale_x, dtype)
    given = {"w1": w1, "w2": w2, "topk_weight": weights, "topk_ids": ids, "w1_scale": scale1, "w2_scale": scale2}
    for name, t in {**given, "bias1": bias1, "bias2": bias2}.items():
        if t is not None and tensor(name, t).device != x.device:
            raise GemmtunedError(f"{name} is on {t.device}, hidden_states on {x.device}")
    found = []
    for name, w, scale, bias in (("1", w1, scale1, bias1), ("2", w2, scale2, bias2)):
        if bias is not None and (bias.shape != (experts, w.shape[1]) or not _is_float(bias)):
            raise GemmtunedError(
                f"bias{name} is {tuple(bias.shape)} of {bias.dtype}, expected [{experts}, {w.shape[1]}] of floats"
            )
        found.append(_weight(f"w{name}", w, scale, x.dtype, how.quant))
    (w1, scale1), (w2, scale2) = found
    return Operands(
        x=x, w1=w1, w2=w2, weights=weights.float(), ids=ids, scale1=scale1, scale2=scale2, bias1=bias1, bias2=bias2
    )


def check_others(mask: Tensor | None, tokens: Tensor | None, o: Operands) -> None:
    """Raise GemmtunedError where expert_mask or num_local_tokens does not fit the operands."""
    experts = len(o.w1)
    for name, given in (("expert_mask", mask), ("num_local_tokens", tokens)):
        if given is not None and tensor(name, given).device != o.x.device:
            raise GemmtunedError(f"{name} is on {given.device}, hidden_states on {o.x.device}")
    if mask is not None and mask.numel() < experts:
        raise GemmtunedError(
            f"expert_mask is {tuple(mask.shape)}, expected one number for each expert of all ranks, {experts} or more"
        )
    if tokens is not None and tokens.numel() != 1:
        raise GemmtunedError(f"num_local_tokens is {tuple(tokens.shape)}, expected one number")


def _check_sizes(x: Tensor, w1: Tensor, w2: Tensor, how: How) -> int:
    packed = 2 if how.quant in ("mxfp4", "int4") else 1
    experts, width = w1.shape[0], w1.shape[2] * packed
    if x.dim() != 2 or x.shape[1] != width:
        raise GemmtunedError(f"hidden_states is {tuple(x.shape)}, expected [tokens, {width}] as w1 says")
    if w2.shape[0] != experts or w2.shape[1] != width:
        raise GemmtunedError(f"w2 is {tuple(w2.shape)}, expected [{experts}, {width}, inter] as w1 says")
    if not experts or not width or not w2.shape[2]:
        raise GemmtunedError(f"w1 is {tuple(w1.shape)} and w2 {tuple(w2.shape)}: no side may be 0")
    return experts


def _dequantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if x.dtype in FLOATS:
        return x
    if x.dtype not in _BYTES:
        raise GemmtunedError(f"hidden_states is {x.dtype}, expected one of {', '.join(map(str, FLOATS))}, or fp8")
    if scale is None or dtype is None:
        raise GemmtunedError(f"hidden_states is {x.dtype}: a1_scale, and dtype for the result, are needed")
    if not tensor("a1_scale", scale).is_floating_point():
        raise GemmtunedError(f"a1_scale is {scale.dtype}, expected floating point numbers")
    if scale.device != x.device:
        raise GemmtunedError(f"a1_scale is on {scale.device}, hidden_states on {x.device}")
    blocks = -(-x.shape[1] // 128)
    if scale.numel() == 1:
        spread = scale.reshape(1, 1)
    elif scale.numel() == x.shape[0]:
        spread = scale.reshape(-1, 1)
    elif scale.shape == (x.shape[0], blocks):
        spread = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    else:
        raise GemmtunedError(
            f"a1_scale is {tuple(scale.shape)}, expected [1], [{x.shape[0]}, 1] or [{x.shape[0]}, {blocks}]"
        )
    return (x.float() * spread.float()).to(dtype)


def _weight(name: str, w: Tensor, scale: Tensor | None, dtype: torch.dtype, quant: str) -> tuple[Tensor, Tensor | None]:
    """(the weight, its scales in the shape that the kernels take)."""
    experts, rows, columns = w.shape
    if quant == "none":
        if w.dtype != dtype:
            raise GemmtunedError(f"{name} is {w.dtype} and hidden_states {dtype}: say the quant_type, or convert one")
        if scale is not None:
            raise GemmtunedError(f"{name}_scale is given with quant_type No")
        return w, None
    if scale is None:
        raise GemmtunedError(f"{name}_scale is needed with this quant_type")
    if quant in ("mxfp4", "int4"):
        if w.dtype not in (torch.uint8, PACKED_FP4) or (quant == "int4" and w.dtype != torch.uint8):
            raise GemmtunedError(f"{name} is {w.dtype}, expected torch.uint8, two numbers a byte")
        columns *= 2
        w = w.view(torch.uint8)
        if quant == "mxfp4":
            if scale.dtype not in (torch.uint8, E8M0):
                raise GemmtunedError(f"{name}_scale is {scale.dtype}, expected e8m0 (one byte each)")
            shape = (experts, rows, -(-columns // 32))
            return w, _shaped(name, scale.view(torch.uint8), shape, whole=columns % 32 == 0)
        if not _is_float(scale):
            raise GemmtunedError(f"{name}_scale is {scale.dtype}, expected floats of 16 bits or more for int4")
        groups = scale.numel() // (experts * rows)
        return w, _shaped(name, scale, (experts, rows, groups), whole=bool(groups) and columns % groups == 0)
    if w.dtype not in _BYTES:
        raise GemmtunedError(f"{name} is {w.dtype}, expected an 8-bit type with this quant_type")
    scale = scale.float() if scale.dtype == E8M0 else scale
    if not _is_float(scale):
        raise GemmtunedError(f"{name}_scale is {scale.dtype}, expected floats of 16 bits or more, or e8m0")
    if quant == "tensor":
        return w, _shaped(name, scale, (experts,))
    if quant == "row":
        return w, _shaped(name, scale, (experts, rows))
    return w, _shaped(name, scale, (experts, -(-rows // 128), -(-columns // 128)))


def _shaped(name: str, scale: Tensor, shape: tuple[int, ...], *, whole: bool = True) -> Tensor:
    """The scale in this shape. Raises GemmtunedError where its own is not this one, or this one with sides merged."""
    if not whole or scale.numel() != math.prod(shape) or not _products(scale.shape) <= _products(shape):
        raise GemmtunedError(f"{name}_scale is {tuple(scale.shape)}, expected {list(shape)}")
    return scale.reshape(shape)


def _products(shape: tuple[int, ...]) -> set[int]:
    """How many numbers lie in one step along each side: what reshaping keeps."""
    return {math.prod(shape[at:]) for at in range(len(shape) + 1)}


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() > 1


def _named(given: Any, what: str, numbers: dict[int, str], names: dict[str, str]) -> str:
    text = getattr(given, "name", None) or (numbers.get(given) if isinstance(given, int) else given)
    text = text.rpartition(".")[2].lower() if isinstance(text, str) else ""
    if text not in names:
        raise GemmtunedError(f"{what} is {given!r}, expected one of {', '.join(names)}")
    return names[text]
