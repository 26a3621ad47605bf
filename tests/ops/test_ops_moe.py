"""gemmtuned.ops.fused_moe: every flag against fp64 written out pair by pair; routings, errors, torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels import mixture
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.ops import ActivationType, QuantType, fused_moe
from gemmtuned.ops.blame import is_to_blame
from gemmtuned.ops.moe_arguments import how_of, operands_of

T, D, INTER, E, TOPK = 5, 64, 32, 6, 2
QUANTS = ("No", "per_Tensor", "per_Token", "per_1x128", "per_1x32", "per_Group")
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def weight(quant: str, rows: int, k: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """(as it lies, its scales, its values in fp64) of [E, rows, k]; the values one by one."""
    random = torch.Generator().manual_seed(seed)
    if quant == "No":
        w = (torch.randn(E, rows, k, generator=random) * k**-0.5).to(dtype)
        return w, None, w.double()
    if quant in ("per_1x32", "per_Group"):
        codes = torch.randint(0, 16, (E, rows, k), generator=random)
        lies = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        if quant == "per_1x32":
            powers = torch.randint(122, 125, (E, rows, k // 32), generator=random)
            exact = torch.tensor(E2M1)[codes].double() * torch.exp2(powers.double() - 127).repeat_interleave(32, 2)
            return lies, powers.to(torch.uint8), exact
        scale = (torch.rand(E, rows, k // 16, generator=random) / 16).to(dtype)
        return lies, scale, (codes - 8).double() * scale.double().repeat_interleave(16, 2)
    w = (torch.randn(E, rows, k, generator=random) * 16).to(torch.float8_e4m3fn)
    shape = {"per_Tensor": (E, 1, 1), "per_Token": (E, rows, 1), "per_1x128": (E, -(-rows // 128), -(-k // 128))}[quant]
    scale = (torch.rand(shape, generator=random) + 0.5) * k**-0.5 / 16
    if quant == "per_1x128":
        spread = scale.double().repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[..., :k]
    else:
        spread = scale.double().expand(E, rows, k)
    return w, scale, w.double() * spread


def exact(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, act: str, gated: bool = True,
    interleaved: bool = False, weighted: bool = False, b1: Tensor | None = None, b2: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Pair by pair in fp64, H rounded to X's type."""
    y = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for token in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            e, factor = int(ids[token, slot]), float(weights[token, slot])
            if not 0 <= e < len(w1):
                continue
            s = w1[e] @ x[token].double() * (factor if weighted else 1) + (0 if b1 is None else b1[e].double())
            halves = (s[0::2], s[1::2]) if interleaved else (s[: len(s) // 2], s[len(s) // 2 :])
            g, u = halves if gated else (s, None)
            if act == "Swiglu":
                assert u is not None
                g, u = g.clamp(max=7), u.clamp(-7, 7)
                h = g / (1 + torch.exp(-1.702 * g)) * (u + 1)
            else:
                h = g / (1 + torch.exp(-g)) if act == "Silu" else 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
                h = h if u is None else h * u
            part = w2[e] @ h.to(x.dtype).double() + (0 if b2 is None else b2[e].double())
            y[token] += part * (1 if weighted else factor)
    return y


def drawn(tokens: int = T, topk: int = TOPK, experts: int = E, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=random).topk(topk, 1).indices.int()
    return torch.randn(tokens, D, generator=random), torch.rand(tokens, topk, generator=random) + 0.1, ids


def near(y: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    most = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    return bool((y.double() - right).norm() <= most * right.norm()) and y.dtype == dtype


def call(
    quant: str = "No", dtype: torch.dtype = torch.float32, act: str = "Silu", gated: bool = True, bias: bool = False,
    ids: Tensor | None = None, **flags: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(what the op gives, what it should be)."""
    x, weights, usual = drawn(tokens=T if ids is None else len(ids))
    ids = usual if ids is None else ids
    x = x.to(dtype)
    rows = 2 * INTER if gated else INTER
    w1, s1, v1 = weight(quant, rows, D, 1, dtype)
    w2, s2, v2 = weight(quant, D, INTER, 2, dtype)
    b1 = torch.randn(E, rows).to(dtype) if bias else None
    b2 = torch.randn(E, D).to(dtype) if bias else None
    y = fused_moe(
        x, w1, w2, weights, ids, activation=ActivationType[act], quant_type=QuantType[quant], w1_scale=s1, w2_scale=s2,
        bias1=b1, bias2=b2, **flags,
    )  # fmt: skip
    told = {"interleaved": flags.get("interleaved", False), "weighted": flags.get("doweight_stage1", False)}
    return y, exact(x, v1, v2, weights, ids, act=act, gated=gated, b1=b1, b2=b2, **told)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_kind_of_weight(quant: str, dtype: torch.dtype) -> None:
    y, right = call(quant, dtype)
    assert near(y, right, dtype)


@pytest.mark.parametrize(
    "flags",
    [
        {"act": "Gelu"}, {"act": "Silu", "gated": False}, {"act": "Gelu", "gated": False}, {"act": "Swiglu"},
        {"act": "Swiglu", "interleaved": True, "bias": True}, {"act": "Silu", "interleaved": True},
        {"doweight_stage1": True}, {"doweight_stage1": True, "bias": True, "act": "Gelu"}, {"bias": True},
    ],
    ids=str,
)  # fmt: skip
def test_every_flag(flags: dict[str, Any]) -> None:
    y, right = call(**flags)
    assert near(y, right, torch.float32)


ROUTED = {
    "all to the same": [[2, 1]] * 9,
    "an expert named twice": [[3, 3], [0, 3], [3, 3]],
    "nobody's": [[-1, 2], [-1, -1], [1, E], [E + 7, 0]],
    "one token": [[5, 0]],
    "no pair at all": [[-1, -1]] * 3,
}


def by_visited(o: Operands, how: How) -> Tensor:
    """The form for CPUs."""
    return mixture.grouped(*mixture.visited(o, how))


FORMS: dict[str, Callable[[Operands, How], Tensor]] = {
    "by expert": mixture.by_expert, "every expert": mixture.every_expert, "every pair": mixture.every_pair,
    "grouped": mixture.grouped, "of visited experts": by_visited,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ROUTED)
def test_every_form_with_every_routing(name: str, form: str) -> None:
    """The forms for GPUs too; with NaN in the weights of every expert that no token visits."""
    ids = torch.tensor(ROUTED[name])
    x, weights, _ = drawn(tokens=len(ids))
    w1, _, v1 = weight("No", 2 * INTER, D, 1, torch.bfloat16)
    w2, _, v2 = weight("No", D, INTER, 2, torch.bfloat16)
    for e in set(range(E)) - set(ids.flatten().tolist()):
        w1[e] = w2[e] = math.nan
    b1, b2 = torch.randn(E, 2 * INTER).bfloat16(), torch.randn(E, D).bfloat16()
    o = Operands(x=x.bfloat16(), w1=w1, w2=w2, weights=weights, ids=ids, bias1=b1, bias2=b2)
    for weighted in (False, True):
        y = FORMS[form](o, How(weighted=weighted))
        right = exact(o.x, v1, v2, weights, ids, act="Silu", b1=b1, b2=b2, weighted=weighted)
        assert near(y, right, torch.bfloat16)
        assert not y[((ids < 0) | (ids >= E)).all(1)].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quant", QUANTS[1:])
def test_every_form_with_every_kind_of_weight(quant: str, form: str) -> None:
    """As torch's own form gives it but for the order of sums; NaN in what no token visits."""
    ids = torch.tensor([[0, 2], [2, -1], [2, 4]])
    x, weights, _ = drawn(tokens=3)
    (w1, scale1, v1), (w2, scale2, v2) = (
        weight(quant, rows, k, 1, torch.bfloat16) for rows, k in ((2 * INTER, D), (D, INTER))
    )
    for scale in (scale1, scale2):
        assert scale is not None
        scale[1::2] = 255 if scale.dtype == torch.uint8 else math.nan
    how = how_of("Silu", QuantType[quant], w1, w2, weighted=False, interleaved=False)
    o = operands_of(x.bfloat16(), w1, w2, weights, ids, scale1, scale2, None, None, None, how=how, dtype=None)
    y = FORMS[form](o, how)
    assert near(y, exact(o.x, v1, v2, weights, ids, act="Silu"), torch.bfloat16)
    assert near(y, mixture.run(o, how).double(), torch.bfloat16)


def test_the_form_in_a_graph_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pairs one by one; more of them all experts at once where torch has a grouped product, else one by one."""
    monkeypatch.setattr(mixture, "_is_captured", lambda x: True)
    ran: list[str] = []
    for name in ("grouped", "every_pair", "every_expert", "by_expert"):
        monkeypatch.setattr(mixture, name, lambda o, how, name=name: ran.append(name))
    for runs in (True, False):
        monkeypatch.setattr(mixture, "grouped_runs", lambda o, runs=runs: runs)
        for quant, tokens in (("none", 2), ("int4", 2), ("int4", 200)):
            ids = torch.zeros(tokens, 2, dtype=torch.int32)
            o = Operands(
                x=torch.zeros(tokens, 4), w1=torch.zeros(8, 8, 4), w2=torch.zeros(8, 4, 4), weights=ids, ids=ids
            )
            mixture.run(o, How(quant=quant))
    assert ran == ["grouped", "every_pair", "grouped", "every_pair", "every_pair", "every_expert"]
    monkeypatch.setattr(mixture, "grouped_runs", lambda o: True)
    for most in (8 * 8 * 8 * 4, 8 * 8 * 8 * 4 - 1):  # of int4 in fp32
        monkeypatch.setattr(mixture, "MOST_DEQUANTISED", most)
        mixture.run(o, How(quant="int4"))
    assert ran[6:] == ["grouped", "every_expert"]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_nobodys_experts_give_zeros_and_equal_calls_equal_bits(kind: torch.dtype) -> None:
    ids = torch.tensor(ROUTED["nobody's"], dtype=kind)
    y, right = call(ids=ids)
    assert near(y, right, torch.float32)
    assert not y[1].any()
    assert all(torch.equal(y, call(ids=ids)[0]) for _ in range(3))


def test_an_expert_mask_says_which_experts_are_here() -> None:
    """Ids count all experts; ours are the odd ones of twelve, in order."""
    x, weights, _ = drawn()
    mask = torch.tensor([0, 1] * E)
    w1, w2 = (weight("No", rows, k, 1, torch.float32) for rows, k in ((2 * INTER, D), (D, INTER)))
    ids = torch.tensor([[1, 2], [0, 4], [11, 3], [-1, 7], [12, 5]], dtype=torch.int32)
    local = torch.tensor([[0, -1], [-1, -1], [5, 1], [-1, 3], [-1, 2]])
    y = fused_moe(x, w1[0], w2[0], weights, ids, expert_mask=mask)
    assert near(y, exact(x, w1[2], w2[2], weights, local, act="Silu"), torch.float32)


def test_rows_that_are_not_real_touch_nothing() -> None:
    x, weights, ids = drawn()
    ids[3:] = 5
    ids[:3] = ids[:3].clamp(max=4)
    w1, w2 = (weight("No", rows, k, 1, torch.float32)[0] for rows, k in ((2 * INTER, D), (D, INTER)))
    w1[5] = math.nan
    x[3:] = math.nan
    y = fused_moe(x, w1, w2, weights, ids, num_local_tokens=torch.tensor([3], dtype=torch.int32))
    assert torch.equal(y[:3], fused_moe(x[:3], w1, w2, weights[:3], ids[:3]))
    assert not y[3:].any()


@pytest.mark.parametrize("quant", QUANTS)
def test_experts_of_padded_tokens_are_not_read_of_any_kind_of_weight(quant: str) -> None:
    x, weights, ids = drawn()
    ids[3:], ids[:3] = 5, ids[:3].clamp(max=4)
    given: dict[str, Any] = {"quant_type": quant}
    for name, rows, k in (("w1", 2 * INTER, D), ("w2", D, INTER)):
        w, scale, _ = weight(quant, rows, k, 1, torch.float32)
        spoilt = w if scale is None else scale
        spoilt[5] = 255 if spoilt.dtype == torch.uint8 else math.nan
        given |= {name: w, f"{name}_scale": scale}
    real = torch.tensor([3], dtype=torch.int32)
    y = fused_moe(x, topk_weight=weights, topk_ids=ids, num_local_tokens=real, **given)
    assert torch.equal(y[:3], fused_moe(x[:3], topk_weight=weights[:3], topk_ids=ids[:3], **given))
    assert not y[:3].isnan().any() and not y[3:].any()
    assert fused_moe(x, topk_weight=weights, topk_ids=ids, **given)[3:].isnan().all(), "they would be seen"


@pytest.mark.parametrize(
    ("experts", "kind", "batches"),
    [
        (160, torch.int32, (1, 2, 3, 7, 8, 16, 33, 64, 65)), (384, torch.int64, (1, 2, 8, 31, 64)),
        (257, torch.int64, (1, 9)), pytest.param(160, torch.int32, range(1, 66), marks=pytest.mark.long),
        pytest.param(384, torch.int64, (3, 65), marks=pytest.mark.long),
    ],
    ids=str,
)  # fmt: skip
def test_many_experts_at_every_batch(experts: int, kind: torch.dtype, batches: Sequence[int]) -> None:
    """Each batch is the first rows of one exact result; some rows name an expert twice, or nobody."""
    x, weights, ids = drawn(tokens=65, topk=8, experts=experts)
    ids[::7, 1], ids[::9, 2], ids[5] = ids[::7, 0], -1, -1
    ids[6:9] = ids[6]
    x, ids = x[:, :32], ids.to(kind)
    random = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(experts, *size, generator=random) / 6 for size in ((32, 32), (32, 16)))
    right = exact(x, w1.double(), w2.double(), weights, ids, act="Silu")
    for tokens in batches:
        y = fused_moe(x[:tokens], w1, w2, weights[:tokens], ids[:tokens])
        assert near(y, right[:tokens], torch.float32), tokens
        assert not y[5:6].any()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_rows_whose_experts_all_lie_elsewhere_are_zero(kind: torch.dtype) -> None:
    x, weights, _ = drawn()
    ids = torch.tensor([[0, 2], [-1, -1], [1, -1], [4, -1], [3, 3]], dtype=kind)
    mask = torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.int32)
    w1, _, v1 = weight("No", 2 * INTER, D, 1, torch.float32)
    w2, _, v2 = weight("No", D, INTER, 2, torch.float32)
    y = fused_moe(x, w1[:2], w2[:2], weights, ids, expert_mask=mask)
    local = torch.tensor([[-1, -1], [-1, -1], [0, -1], [-1, -1], [1, 1]])
    assert near(y, exact(x, v1[:2], v2[:2], weights, local, act="Silu"), torch.float32)
    assert not y[[0, 1, 3]].any() and y[[2, 4]].any(1).all()


def test_fp8_activations_are_taken_with_their_scales() -> None:
    x, weights, ids = drawn()
    w1, s1, v1 = weight("per_Token", 2 * INTER, D, 1, torch.bfloat16)
    w2, s2, v2 = weight("per_Token", D, INTER, 2, torch.bfloat16)
    scale = x.abs().amax(1, keepdim=True) / 448
    x8 = (x / scale).to(torch.float8_e4m3fn)
    given = {"quant_type": "per_Token", "w1_scale": s1, "w2_scale": s2, "a1_scale": scale}
    y = fused_moe(x8, w1, w2, weights, ids, dtype=torch.bfloat16, **given)  # type: ignore[arg-type]
    right = exact((x8.float() * scale).bfloat16(), v1, v2, weights, ids, act="Silu")
    assert near(y, right, torch.bfloat16)
    with pytest.raises(GemmtunedError, match="a1_scale, and dtype for the result, are needed"):
        fused_moe(x8, w1, w2, weights, ids, **given | {"a1_scale": None})  # type: ignore[arg-type]


def test_another_type_of_result_and_no_tokens() -> None:
    x, weights, ids = drawn()
    w1, w2 = (weight("No", rows, k, 1, torch.bfloat16)[0] for rows, k in ((2 * INTER, D), (D, INTER)))
    assert fused_moe(x.bfloat16(), w1, w2, weights, ids, dtype=torch.float16).dtype == torch.float16
    y = fused_moe(x[:0].bfloat16(), w1, w2, weights[:0], ids[:0])
    assert y.shape == (0, D)


def test_names_of_aiters_and_numbers_do_as_well() -> None:
    class Theirs:  # as pybind gives it
        name = "Gelu"

    x, weights, ids = drawn()
    w1, w2 = (weight("No", rows, k, 1, torch.float32)[0] for rows, k in ((2 * INTER, D), (D, INTER)))
    ways = (Theirs(), "Gelu", "ActivationType.Gelu", 1, ActivationType.Gelu)
    found = [fused_moe(x, w1, w2, weights, ids, None, way, "QuantType.No") for way in ways]
    assert all(torch.equal(found[0], y) for y in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(T, D + 1)}, r"hidden_states is \(5, 65\), expected \[tokens, 64\]"),
        ({"hidden_states": torch.zeros(T, D, dtype=torch.int32)}, "hidden_states is torch.int32, expected one of"),
        ({"hidden_states": torch.zeros(T, D).bfloat16()}, "w1 is torch.float32 and hidden_states torch.bfloat16"),
        ({"w1": torch.zeros(E, 3 * INTER, D)}, "w1 has 96 rows an expert, expected 64 .gate and up. or 32"),
        ({"w1": torch.zeros(E, D)}, "expected .experts, 2"),
        ({"w2": torch.zeros(E + 1, D, INTER)}, r"w2 is \(7, 64, 32\), expected \[6, 64, inter\]"),
        ({"topk_ids": torch.zeros(T, TOPK)}, "topk_ids is torch.float32, expected torch.int32 or torch.int64"),
        ({"topk_ids": torch.zeros(T, 3, dtype=torch.int32)}, r"expected \[5, topk\] twice"),
        ({"topk_weight": torch.ones(T, TOPK, dtype=torch.int32)}, "topk_weight is torch.int32"),
        ({"quant_type": QuantType.per_Token}, "w1_scale is needed"),
        ({"w1_scale": torch.ones(E)}, "w1_scale is given with quant_type No"),
        ({"quant_type": "per_Token", "w1_scale": torch.ones(E), "w2_scale": torch.ones(E)}, "expected an 8-bit type"),
        ({"activation": "tanh"}, "activation is 'tanh', expected one of silu, gelu, swiglu"),
        ({"quant_type": 9}, "quant_type is 9, expected one of"),
        ({"bias1": torch.zeros(E, 3)}, r"bias1 is \(6, 3\) of torch.float32, expected \[6, 64\]"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"hidden_pad": 64}, "weights of the real sizes"),
        ({"w1": torch.zeros(E, INTER, D), "activation": "Swiglu"}, "w1 has no gate rows"),
        ({"w1": torch.zeros(E, 2 * INTER, D, device="meta")}, "w1 is on meta, hidden_states on cpu"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    x, weights, ids = drawn()
    good = {
        "hidden_states": x, "w1": torch.zeros(E, 2 * INTER, D), "w2": torch.zeros(E, D, INTER), "topk_weight": weights,
        "topk_ids": ids,
    }  # fmt: skip
    fused_moe(**good)
    with pytest.raises(GemmtunedError, match=message):
        fused_moe(**good | change)


def test_a_scale_of_another_shape_is_said() -> None:
    x, weights, ids = drawn()
    w1, s1, _ = weight("per_1x32", 2 * INTER, D, 1, torch.float32)
    w2, s2, _ = weight("per_1x32", D, INTER, 2, torch.float32)
    assert s1 is not None
    with pytest.raises(GemmtunedError, match=r"w1_scale is \(6, 64, 1\), expected \[6, 64, 2\]"):
        fused_moe(x, w1, w2, weights, ids, quant_type="per_1x32", w1_scale=s1[..., :1], w2_scale=s2)


def test_derivatives_are_those_of_the_formula() -> None:
    x, weights, ids = drawn()
    w1, w2 = (weight("No", rows, k, 1, torch.float32)[0] for rows, k in ((2 * INTER, D), (D, INTER)))
    given = [t.clone().requires_grad_() for t in (x, w1, w2, weights)]
    fused_moe(*given, ids).square().sum().backward()
    step, way = 1e-2, torch.randn_like(w2)
    up, down = (fused_moe(x, w1, w2 + sign * step * way, weights, ids).double().square().sum() for sign in (1, -1))
    assert all(t.grad is not None for t in given)
    assert torch.allclose((given[2].grad * way).sum().double(), (up - down) / (2 * step), rtol=1e-3)  # type: ignore[operator]


def test_one_operator_inside_torch_compile() -> None:
    x, weights, ids = drawn()
    w1, w2 = (weight("No", rows, k, 1, torch.float32)[0] for rows, k in ((2 * INTER, D), (D, INTER)))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda *o: fused_moe(*o, activation="Gelu") + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, w1, w2, weights, ids), fused_moe(x, w1, w2, weights, ids, activation="Gelu") + 1)
    assert len(graphs) == 1 and "gemmtuned.fused_moe" in graphs[0]
    given = (x, w1, w2, weights, ids, None, "silu", True, False, False, "none", *(None,) * 7)
    torch.library.opcheck(torch.ops.gemmtuned.fused_moe.default, given)


def test_masks_are_made_of_operands_alone() -> None:
    """Nothing of what the caller handed over is changed."""
    x, weights, ids = drawn()
    o = Operands(x=x, w1=torch.zeros(E, 2, D), w2=torch.zeros(E, D, 1), weights=weights, ids=ids)
    kept = ids.clone()
    found = mixture.without_others(o, torch.ones(E), torch.tensor(2))
    assert torch.equal(found.ids[:2], ids[:2]) and bool((found.ids[2:] == -1).all()) and torch.equal(ids, kept)


@pytest.mark.parametrize("form", [mixture.by_expert, mixture.every_expert, mixture.every_pair])
def test_every_form_but_the_kernels_has_all_derivatives(form: Any) -> None:
    torch.manual_seed(0)
    x, w1, w2, bias1, bias2 = (
        torch.randn(*shape, requires_grad=True) for shape in ((2, 16), (8, 16, 16), (8, 16, 8), (8, 16), (8, 16))
    )
    ids = torch.tensor([[0, 5], [7, 5]])
    o = mixture.Operands(x=x, w1=w1, w2=w2, weights=torch.rand(2, 2), ids=ids, bias1=bias1, bias2=bias2)
    form(o, mixture.How()).sum().backward()
    assert all(t.grad is not None and t.grad.any() for t in (x, w1, w2, bias1, bias2))


def test_a_fault_that_triton_reports_says_nothing_about_the_kernel() -> None:
    assert not is_to_blame(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert is_to_blame(RuntimeError("a shape that it does not take"))
