"""fused_moe where operands are not what they seem: sides in another order, odd types, no values at all, tracers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels import mixture
from gemmtuned.ops import fused_moe, shuffle_weight

T, D, INTER, E, TOPK = 5, 64, 32, 6, 2
RANDOM = torch.Generator().manual_seed(5)
QUANTS = ("per_Tensor", "per_Token", "per_1x32", "per_Group")


def operands(quant: str = "No") -> dict[str, Any]:
    def scale(*shape: int) -> Tensor:
        if quant == "per_1x32":
            return torch.randint(120, 125, shape, generator=RANDOM).to(torch.uint8)
        return (torch.rand(shape, generator=RANDOM) + 0.5) / 64

    found: dict[str, Any] = {
        "hidden_states": torch.randn(T, D, generator=RANDOM), "topk_weight": torch.rand(T, TOPK, generator=RANDOM),
        "topk_ids": torch.rand(T, E, generator=RANDOM).topk(TOPK, 1).indices.int(), "quant_type": quant,
    }  # fmt: skip
    for name, rows, k in (("w1", 2 * INTER, D), ("w2", D, INTER)):
        if quant in ("per_1x32", "per_Group"):
            found[name] = torch.randint(0, 256, (E, rows, k // 2), generator=RANDOM).to(torch.uint8)
        else:
            w = torch.randn(E, rows, k, generator=RANDOM)
            found[name] = w / 8 if quant == "No" else (8 * w).to(torch.float8_e4m3fn)
        sides = {"per_Tensor": (), "per_Token": (rows,), "per_1x32": (rows, k // 32), "per_Group": (rows, 4)}
        if quant != "No":
            found[f"{name}_scale"] = scale(E, *sides[quant])
    return found


@pytest.mark.parametrize("quant", QUANTS)
def test_scales_may_lie_flat_or_with_sides_of_one_and_in_no_other_order(quant: str) -> None:
    given = operands(quant)
    y, scale = fused_moe(**given), given["w1_scale"]
    for same in (scale.flatten(), scale.reshape(-1, *scale.shape[2:]), scale[..., None], scale[:, None]):
        assert torch.equal(fused_moe(**given | {"w1_scale": same}), y)
    if scale.dim() > 1:
        with pytest.raises(GemmtunedError, match=r"w1_scale is \(\d+, \d+.*expected \[6, 64"):
            fused_moe(**given | {"w1_scale": scale.transpose(0, 1).contiguous()})
    if scale.dim() > 2:
        with pytest.raises(GemmtunedError, match=r"w1_scale is \(6, \d, 64\), expected \[6, 64, \d\]"):
            fused_moe(**given | {"w1_scale": scale.mT.contiguous()})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_scales_of_a_type_that_means_something_else_are_said(quant: str, dtype: torch.dtype) -> None:
    given = operands(quant)
    with pytest.raises(GemmtunedError, match=f"w2_scale is {dtype}, expected"):
        fused_moe(**given | {"w2_scale": given["w2_scale"].float().to(dtype)})


def test_powers_of_two_as_e8m0_are_scales_of_8_bit_weights_too() -> None:
    given = operands("per_Token")
    powers = {name: torch.exp2(given[name].log2().round()) for name in ("w1_scale", "w2_scale")}
    e8m0 = {name: t.to(torch.float8_e8m0fnu) for name, t in powers.items()}
    assert torch.equal(fused_moe(**given | e8m0), fused_moe(**given | powers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_mask": torch.ones(E - 1)}, r"expert_mask is \(5,\), expected .* 6 or more"),
        ({"expert_mask": torch.ones(0)}, r"expert_mask is \(0,\)"),
        ({"expert_mask": [1] * E}, r"expert_mask is \[1, .*expected a tensor"),
        ({"expert_mask": torch.ones(E, device="meta")}, "expert_mask is on meta, hidden_states on cpu"),
        ({"num_local_tokens": 3}, "num_local_tokens is 3, expected a tensor"),
        ({"num_local_tokens": torch.tensor([3, 3])}, r"num_local_tokens is \(2,\), expected one number"),
        ({"num_local_tokens": torch.tensor(3, device="meta")}, "num_local_tokens is on meta"),
        ({"bias1": torch.ones(E, 2 * INTER) * 1j}, "bias1 is .*complex64, expected .* of floats"),
        ({"bias2": torch.ones(E, D).to(torch.float8_e4m3fn)}, "bias2 is .*float8_e4m3fn, expected .* of floats"),
        ({"w1": shuffle_weight(torch.zeros(E, 2 * INTER, D))[:]}, "w1 or w2 is shuffled, or a view"),
        ({"hidden_states": torch.zeros(T, D, device="meta")}, "w1 is on cpu, hidden_states on meta"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GemmtunedError, match=message):
        fused_moe(**operands() | change)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(torch.ones(T, 1).int(), "a1_scale is torch.int32"), (torch.ones(T, 1, device="meta"), "a1_scale is on meta")],
    ids=["int32", "meta"],
)
def test_scales_of_activations_are_looked_at_too(scale: Tensor, message: str) -> None:
    given = operands("per_Token")
    eight = {"hidden_states": given["hidden_states"].to(torch.float8_e4m3fn), "dtype": torch.bfloat16}
    with pytest.raises(GemmtunedError, match=message):
        fused_moe(**given | eight, a1_scale=scale)


@pytest.mark.parametrize("quant", ["No", *QUANTS])
def test_tensors_without_values_have_a_result_without_values(quant: str) -> None:
    """For who plans memory, or builds a model on no device."""
    given = operands(quant)
    y = fused_moe(**{name: t.to("meta") if isinstance(t, Tensor) else t for name, t in given.items()}, dtype=torch.half)
    assert y.is_meta and y.shape == (T, D) and y.dtype == torch.half
    with FakeTensorMode() as mode:
        y = fused_moe(**{name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in given.items()})
    assert y.shape == (T, D) and y.device.type == "cpu"


@pytest.mark.parametrize("tracer", ["make_fx", "jit"])
@pytest.mark.parametrize("quant", ["No", "per_1x32"])
def test_a_tracer_does_not_keep_which_experts_were_visited(quant: str, tracer: str) -> None:
    given = operands(quant)
    others = (given["topk_ids"] + 1) % E

    def routed(ids: Tensor) -> Tensor:
        return fused_moe(**given | {"topk_ids": ids})

    traced: Any = make_fx(routed)(given["topk_ids"]) if tracer == "make_fx" else (
        torch.jit.trace(routed, (given["topk_ids"],), check_trace=False))  # fmt: skip
    for ids in (given["topk_ids"], others):
        assert torch.equal(traced(ids), routed(ids))
    assert not torch.equal(routed(others), routed(given["topk_ids"]))


def test_derivatives_in_compiled_code_are_those_of_eager_code() -> None:
    given = operands()
    names = ("hidden_states", "w1", "w2", "topk_weight")

    def gradients(call: Any) -> list[Tensor]:
        leaves = {name: given[name].clone().requires_grad_() for name in names}
        (2 * call(given | leaves)).square().sum().backward()
        return [t.grad for t in leaves.values()]  # type: ignore[misc]

    compiled = torch.compile(lambda o: fused_moe(**o), backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled), gradients(lambda o: fused_moe(**o)), strict=True))
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    with torch.no_grad():
        y = torch.compile(lambda o: fused_moe(**o), backend="aot_eager", fullgraph=True)(given | leaves)
    assert torch.equal(y, fused_moe(**given))


@pytest.mark.parametrize("form", [mixture.by_expert, mixture.every_expert, mixture.every_pair])
def test_under_autocast_each_form_gives_the_type_of_its_operands(form: Any) -> None:
    x, w1, w2 = (torch.randn(shape, generator=RANDOM) / 4 for shape in ((T, 16), (E, 16, 16), (E, 16, 8)))
    weights, ids = torch.rand(T, TOPK, generator=RANDOM), torch.randint(-1, E, (T, TOPK), generator=RANDOM)
    o = mixture.Operands(x=x, w1=w1, w2=w2, weights=weights, ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        found, alone = form(o, mixture.How()), mixture._expert(o, mixture.How(), 0, x, weights[:, 0])
    assert found.dtype == alone.dtype == torch.float32
    assert torch.allclose(found, form(o, mixture.How()), atol=0.1) and not math.isnan(found.sum())


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_autocast_of_another_type_than_the_operands_changes_nothing_but_rounding(
    dtype: torch.dtype, autocast: torch.dtype
) -> None:
    given = {name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
             for name, t in operands().items()}  # fmt: skip
    o = mixture.Operands(x=given["hidden_states"], w1=given["w1"], w2=given["w2"],
                         weights=given["topk_weight"].float(), ids=given["topk_ids"])  # fmt: skip
    right = mixture.by_expert(o, mixture.How())
    with torch.autocast("cpu", autocast):
        found = [fused_moe(**given), *(form(o, mixture.How()) for form in (mixture.every_pair, mixture.every_expert))]
    for y in found:
        assert y.dtype == dtype and torch.allclose(y.float(), right.float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_a_map_of_experts_is_taken_for_what_it_says(kind: torch.dtype) -> None:
    """vLLM's expert_map: the local number of each global expert, in any order, and -1 for those of other ranks."""
    given = operands()
    of_ranks = torch.tensor([-1, 3, 0, -1, 5, 1, -1, 2, 4], dtype=kind)
    ids = torch.tensor([[1, 2], [0, 4], [8, 5], [-1, 7], [9, 3]], dtype=torch.int32)
    local = torch.tensor([[3, 0], [-1, 5], [4, 1], [-1, 2], [-1, -1]])
    y = fused_moe(**given | {"topk_ids": ids}, expert_mask=of_ranks)
    assert torch.equal(y, fused_moe(**given | {"topk_ids": local}))
    first = torch.tensor([*range(E), -1, -1, -1], dtype=kind)
    assert torch.equal(fused_moe(**given, expert_mask=first), fused_moe(**given))


@pytest.mark.parametrize("quant", ["No", "per_Token"])
@pytest.mark.parametrize("tokens", [0, T])
def test_a_rank_whose_experts_nobody_visits_has_derivatives_of_zero(quant: str, tokens: int) -> None:
    given = operands(quant)
    names = ("hidden_states", "topk_weight", "w1", "w2") if quant == "No" else ("hidden_states", "w1_scale", "w2_scale")
    cut = {name: given[name][:tokens] for name in ("hidden_states", "topk_weight")}
    given |= cut | {"topk_ids": torch.full((tokens, TOPK), -1)}
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    y = fused_moe(**given | leaves)
    y.sum().backward()
    assert y.shape == (tokens, D) and not any(leaf.grad.any() for leaf in leaves.values())  # type: ignore[union-attr]
