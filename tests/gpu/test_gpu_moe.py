"""fused_moe on a real GPU: its two launches and torch's own form against fp64, alone, in graphs, threads and tables.

Run it in a process of its own: `pytest tests/gpu/test_gpu_moe.py`.  Sizes are small, so that most of its time is the
compiler's: the kernels are compiled for every layer and each power of two of tokens.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu_needs import SM_90, TWO
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import mixture
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.cuda import moe_compile, moe_run
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.mixture import How
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import fused_moe
from gemmtuned.ops import moe as op

pytestmark = [
    pytest.mark.gpu,
    SM_90,
]
GPU = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
QUANTS = ("No", "per_Tensor", "per_Token", "per_1x128", "per_Group", "per_1x32")
# Largest distance from fp64 by norm: half a last digit of H, of Y, and of weights of 4 bits times their scales, each
NEAR = {BF16: 6e-3, FP16: 8e-4}


@dataclass
class Layer:
    """What fused_moe is called with besides tokens, and the weights' values in fp64."""

    given: dict[str, Any]
    w1: Tensor
    w2: Tensor
    how: How
    dtype: torch.dtype

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, **more: Any) -> Tensor:
        """By fused_moe."""
        w1, w2, *_ = (self.given[name] for name in ("w1", "w2"))
        rest = {name: value for name, value in self.given.items() if name not in ("w1", "w2")}
        return fused_moe(x, w1, w2, weights, ids, **rest | more)

    def exact(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """In fp64, expert after expert, H rounded as the kernels do it."""
        y = torch.zeros(x.shape, dtype=torch.float64, device=GPU)
        b1, b2 = self.given.get("bias1"), self.given.get("bias2")
        for e in ids.unique().tolist():
            if not 0 <= e < len(self.w1):
                continue
            token, slot = (ids == e).nonzero(as_tuple=True)
            factor = weights[token, slot].double()
            sums = x[token].double() @ self.w1[e].t()
            h = mixture.hidden(self.how, sums, factor, None if b1 is None else b1[e].double()).to(self.dtype).double()
            part = h @ self.w2[e].t() + (0 if b2 is None else b2[e].double())
            y.index_add_(0, token, part if self.how.weighted else part * factor[:, None])
        return y


def spread(scale: Tensor, rows: int, k: int, block: int) -> Tensor:
    return scale.double().repeat_interleave(block, 1)[:, :rows].repeat_interleave(block, 2)[..., :k]


def weight(quant: str, size: tuple[int, int, int], dtype: torch.dtype, group: int = 32) -> tuple[Tensor, Any, Tensor]:
    """(as it lies, its scales, its values in fp64) of [experts, rows, K]; sums over K of about 1."""
    e, rows, k = size
    small = k**-0.5
    if quant == "No":
        w = (torch.randn(size, device=GPU) * small).to(dtype)
        return w, None, w.double()
    if quant in ("per_Group", "per_1x32"):
        codes = torch.randint(0, 16, size, device=GPU)
        lies = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        if quant == "per_1x32":
            powers = torch.randint(120, 124, (e, rows, k // 32), device=GPU)
            factors = torch.exp2(powers.double() - 127).repeat_interleave(32, 2)
            return lies, powers.to(torch.uint8), torch.tensor(E2M1, device=GPU, dtype=torch.float64)[codes] * factors
        scale = (torch.rand(e, rows, k // group, device=GPU) * small / 2).to(dtype)
        return lies, scale, (codes - 8).double() * scale.double().repeat_interleave(group, 2)
    w = (torch.randn(size, device=GPU) * 16).to(torch.float8_e4m3fn)
    shape = {"per_Tensor": (e, 1, 1), "per_Token": (e, rows, 1), "per_1x128": (e, -(-rows // 128), -(-k // 128))}[quant]
    scale = (torch.rand(shape, device=GPU) + 0.5) * small / 16
    whole = spread(scale, rows, k, 128) if quant == "per_1x128" else scale.double()
    return w, scale, w.double() * whole


def layer(
    quant: str = "No", dtype: torch.dtype = BF16, *, experts: int = 16, width: int = 512, inter: int = 192,
    act: str = "Silu", bias: bool = False, weighted: bool = False, group: int = 32,
) -> Layer:  # fmt: skip
    torch.manual_seed(experts + width)
    (w1, s1, v1), (w2, s2, v2) = (
        weight(quant, size, dtype, group) for size in ((experts, 2 * inter, width), (experts, width, inter))
    )
    given = {"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2, "activation": act, "quant_type": quant}
    given |= {"interleaved": act == "Swiglu", "doweight_stage1": weighted}
    if bias:
        given |= {f"bias{i}": torch.randn(experts, n, device=GPU).to(dtype) for i, n in ((1, 2 * inter), (2, width))}
    how = How(act=act.lower(), interleaved=act == "Swiglu", weighted=weighted)
    return Layer(given, v1, v2, how, dtype)


def drawn(of: Layer, tokens: int, topk: int = 4, kind: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    """(x, routing weights, ids), every token's experts all different."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, of.w2.shape[1], device=GPU).to(of.dtype)
    ids = torch.rand(tokens, len(of.w1), device=GPU).topk(topk, 1).indices.to(kind)
    return x, torch.rand(tokens, topk, device=GPU) / topk + 0.05, ids


def assert_near(y: Tensor, right: Tensor) -> None:
    assert y.dtype in NEAR and not y.isnan().any()
    off = float((y.double() - right).norm() / right.norm())
    assert off <= NEAR[y.dtype], off


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[moe_run.Launches]:
    """Which launches have run: results by torch's own form would be as right, and say nothing about ours."""
    seen: list[moe_run.Launches] = []
    usual = moe_run.Launches.__call__

    def call(self: moe_run.Launches, o: Any) -> Tensor:
        y = usual(self, o)
        seen.append(self)
        return y

    monkeypatch.setattr(moe_run.Launches, "__call__", call)
    monkeypatch.setattr(op, "_waits_for_daemon", lambda o, how: False)
    return seen


@pytest.mark.parametrize(("dtype", "tokens"), [(BF16, 17), (FP16, 5)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("quant", QUANTS)
def test_every_kind_of_weight(
    program: Program, launched: list[Any], quant: str, dtype: torch.dtype, tokens: int
) -> None:
    of = layer(quant, dtype)
    given = drawn(of, tokens)
    assert_near(of(*given), of.exact(*given))
    assert len(launched) == 1


@pytest.mark.parametrize("group", [64, 128])
def test_larger_groups(program: Program, launched: list[Any], group: int) -> None:
    of = layer("per_Group", group=group, inter=256)
    given = drawn(of, 9)
    assert_near(of(*given), of.exact(*given))
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("quant", "flags"),
    [
        ("No", {"act": "Gelu", "bias": True}), ("No", {"act": "Swiglu", "bias": True}), ("No", {"weighted": True}),
        ("per_1x32", {"act": "Swiglu", "bias": True, "width": 352}), ("per_1x128", {"act": "Gelu", "weighted": True}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_every_activation_and_flag(
    program: Program, launched: list[Any], quant: str, flags: dict[str, Any], kind: torch.dtype
) -> None:
    of = layer(quant, **flags)
    given = drawn(of, 6, kind=kind)
    assert_near(of(*given), of.exact(*given))
    assert len(launched) == 1


ROUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "all tokens to one expert": lambda ids: torch.full_like(ids, 3),
    "an expert named twice": lambda ids: torch.where(torch.arange(4, device=GPU) % 2 == 1, ids[:, :1], ids),
    "half of the pairs are nobody's": lambda ids: torch.where(torch.rand(ids.shape, device=GPU) < 0.5, -1, ids),
    "nobody's but one": lambda ids: torch.where(torch.arange(ids.numel(), device=GPU).view_as(ids) == 7, ids, -1),
    "numbers that are no expert": lambda ids: torch.where(ids > 9, ids + (1 << 20), ids),
    "eight of the experts": lambda ids: ids % 8,
}


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("tokens", [3, 40])
def test_every_routing(program: Program, launched: list[Any], name: str, kind: torch.dtype, tokens: int) -> None:
    """With NaN in the weights of every expert that no token visits; what nobody is asked for is zero."""
    of = layer()
    x, weights, ids = drawn(of, tokens)
    ids = ROUTED[name](ids).to(kind)
    for e in set(range(16)) - set(ids.flatten().tolist()):
        for w in (of.given["w1"], of.given["w2"]):
            w[e] = math.nan
    ids[0] = -1
    y = of(x, weights, ids)
    assert_near(y, of.exact(x, weights, ids))
    assert not y[((ids < 0) | (ids >= 16)).all(1)].any()
    assert len(launched) == 1


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_a_mask_and_padded_tokens(program: Program, launched: list[Any], kind: torch.dtype) -> None:
    """Ids count 32 experts, of which the odd ones are here; rows from the 20th on are NaN and would visit NaN."""
    of = layer()
    of.given["w1"][5] = of.given["w2"][5] = math.nan
    x, weights, _ = drawn(of, 24)
    ids = torch.rand(24, 32, device=GPU).topk(4, 1).indices.to(kind)
    ids[ids == 11] = 12
    local = torch.where(ids % 2 == 1, ids // 2, -1)
    x[20:], ids[20:], local[20:] = math.nan, 11, -1
    mask, real = torch.arange(32, device=GPU) % 2, torch.tensor([20], device=GPU, dtype=torch.int32)
    y = of(x, weights, ids, expert_mask=mask, num_local_tokens=real)
    assert_near(y[:20], of.exact(x[:20], weights[:20], local[:20]))
    assert not y[20:].any() and len(launched) == 1


@pytest.mark.parametrize(("experts", "topk"), [(160, 6), (384, 8)])
def test_many_experts(program: Program, launched: list[Any], experts: int, topk: int) -> None:
    of = layer(experts=experts, width=256, inter=64)
    for tokens in (7, 64):
        given = drawn(of, tokens, topk)
        assert_near(of(*given), of.exact(*given))
    assert len(launched) == 2


def test_every_batch_up_to_65(program: Program, launched: list[Any]) -> None:
    of = layer(width=256, inter=96)
    for tokens in range(1, 66):
        given = drawn(of, tokens)
        assert_near(of(*given), of.exact(*given))
    assert len(launched) == 65


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_the_same_bits_in_twenty_runs(program: Program, launched: list[Any], tokens: int) -> None:
    of = layer()
    x, weights, ids = drawn(of, tokens)
    ids[:, 1] = ids[:, 0]  # two parts of one token's sum, of one expert
    y = of(x, weights, ids)
    assert all(torch.equal(y, of(x, weights, ids)) for _ in range(20))
    assert len(launched) == 21


def whole(quant: str, size: tuple[int, int, int], dtype: torch.dtype, factor: Tensor) -> tuple[Tensor, Any, Tensor]:
    """As `weight`, of -1, 0 and 1 times a power of two for each row, [1, rows, 1]."""
    e, rows, k = size
    sign = torch.randint(-1, 2, size, device=GPU)
    values = sign.double() * factor
    if quant == "No":
        return values.to(dtype), None, values
    if quant in ("per_Group", "per_1x32"):
        codes = sign + 8 if quant == "per_Group" else torch.where(sign < 0, 10, 2 * sign)
        lies = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        scale = factor.expand(e, rows, k // 32)
        return lies, (scale.to(dtype) if quant == "per_Group" else (scale.log2() + 127).to(torch.uint8)), values
    if quant == "per_Token":
        return sign.float().to(torch.float8_e4m3fn), factor.float().expand(e, rows, 1).contiguous(), values
    shape = (e, 1, 1) if quant == "per_Tensor" else (e, -(-rows // 128), -(-k // 128))
    scale = torch.exp2(torch.randint(0, 2, shape, device=GPU).double())
    values = values * (spread(scale, rows, k, 128) if quant == "per_1x128" else scale)
    return (sign * factor).float().to(torch.float8_e4m3fn), scale.float(), values


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("quant", QUANTS)
def test_exact_on_integers(program: Program, launched: list[Any], quant: str, dtype: torch.dtype) -> None:
    """Gates are multiples of a number where silu is the gate itself or nothing, so that all sums are exact in fp32."""
    experts, width, inter, topk = 12, 256, 128, 4
    torch.manual_seed(3)
    up = torch.ones(1, inter, 1, device=GPU, dtype=torch.float64)
    (w1, s1, v1), (w2, s2, v2) = (
        whole(quant, (experts, 2 * inter, width), dtype, torch.cat([(128 if dtype == BF16 else 64) * up, up], 1)),
        whole(quant, (experts, width, inter), dtype, up.new_ones(1, width, 1)),
    )
    given = {"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2, "quant_type": quant}
    of = Layer(given, v1, v2, How(), dtype)
    x = torch.where(torch.rand(9, width, device=GPU) < 0.15, torch.randint(-1, 2, (9, width), device=GPU), 0).to(dtype)
    ids = torch.randint(0, experts, (9, topk), device=GPU, dtype=torch.int32)
    weights = torch.exp2(torch.randint(-6, -3, (9, topk), device=GPU).float())
    y, right = of(x, weights, ids), of.exact(x, weights, ids)
    assert right.isfinite().all() and float(right.abs().max()) > 4
    assert torch.equal(y, right.to(dtype)) and len(launched) == 1


def test_replays_of_a_graph_with_another_routing(program: Program, launched: list[Any]) -> None:
    of = layer()
    given = drawn(of, 8)
    of(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = of(*given)
    assert len(launched) == 2
    for _ in range(4):
        x, weights, ids = drawn(of, 8)
        x, ids = torch.randn_like(x), torch.randint(-1, 16, ids.shape, device=GPU, dtype=torch.int32)
        for to, new in zip(given, (x, weights, ids), strict=True):
            to.copy_(new)
        graph.replay()
        assert_near(y, of.exact(x, weights, ids))


def test_a_graph_whose_kernels_were_never_loaded(program: Program, launched: list[Any]) -> None:
    of = layer(width=384)
    given = drawn(of, 4, kind=torch.int64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = of(*given)
    graph.replay()
    assert_near(y, of.exact(*given))
    assert len(launched) == 1


def in_a_thread(work: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor | BaseException] = []

    def run() -> None:
        try:
            with torch.inference_mode():
                found.append(work())
        except BaseException as err:
            found.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(found[0], Tensor), found[0]
    return found[0]


@pytest.mark.parametrize("width", [512, 448], ids=["loaded", "loaded there"])
def test_a_thread_whose_first_use_of_the_gpu_it_is(program: Program, launched: list[Any], width: int) -> None:
    of = layer(width=width)
    given = drawn(of, 8)
    right = of.exact(*given)
    assert_near(in_a_thread(lambda: of(*given)), right)
    assert len(launched) == 1


def test_another_stream(program: Program, launched: list[Any]) -> None:
    of = layer()
    given = drawn(of, 8)
    right, stream = of.exact(*given), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = of(*given)
    stream.synchronize()
    assert_near(y, right)
    assert len(launched) == 1


@TWO
def test_the_device_of_the_operands_whatever_is_current(program: Program, launched: list[Any]) -> None:
    of = layer()
    given = drawn(of, 8)
    right = of.exact(*given)
    there = replace(of, given={n: v.to("cuda:1") if isinstance(v, Tensor) else v for n, v in of.given.items()})
    for current in (0, 1):
        with torch.cuda.device(current):
            y = there(*(t.to("cuda:1") for t in given))
            assert_near(of(*given), right)
        assert y.device.index == 1
        assert_near(y.to("cuda:0"), right)
    assert len(launched) == 4


# ---- tables


MOE = Problem.parse("moe:bf16:8x512x512,math=reduced,experts=16,topk=4,inter=192,act=silu_gated")


def published(program: Program, candidate: Candidate) -> Solution:
    stamp = environment(program.device).stamp_of(candidate)
    return Solution(
        problem=MOE, device=program.device.key, mode="eager", covers="exact", backend=candidate.backend,
        config=candidate.config, stamp=stamp, us=1.0, baseline_us=2.0, gain_low=1.5, err=1e-3, baseline_err=1e-3,
        state="published",
    )  # fmt: skip


def counted(program: Program) -> Counter[str]:
    """Calls of MOE by outcome since the last time."""
    found: Counter[str] = Counter()
    for s in program.hook.drain():
        if s.problem == MOE:
            found[s.outcome] += s.calls
    return found


def kernels_of(work: Callable[[], object]) -> set[str]:
    """Names of the kernels that ran."""
    with torch.profiler.profile() as profile:
        work()
        torch.cuda.synchronize()
    return {event.name for event in profile.events()}


def test_candidates_pass_the_gate(program: Program) -> None:
    found = list(BACKENDS["moe_decode"].candidates(MOE))
    assert len(found) == 36
    chosen = (Candidate("torch"), found[0], found[-1])
    with as_called(MOE):
        kernels = {c: BACKENDS[c.backend].prepare(c, MOE) for c in chosen}
        said = verify(MOE, kernels, family_of(MOE).default(MOE), device=GPU)
    assert {c: v.note or v.outcome for c, v in said.items()} == dict.fromkeys(chosen, "ok")


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_a_published_solution_serves_the_call(program: Program, launched: list[Any], kind: torch.dtype) -> None:
    """One that nobody would take without a table, in eager and in a graph, for ids of either type."""
    of = layer()
    given = drawn(of, 8, kind=kind)
    candidate = list(BACKENDS["moe_decode"].candidates(MOE))[7]
    program.publish(published(program, candidate))
    counted(program)
    right = of.exact(*given)
    assert_near(of(*given), right)
    assert counted(program) == {"exact": 1} and not program.hook.native.failures()
    assert launched[-1]._how == moe_compile.stages_of(candidate)
    names = kernels_of(lambda: of(*given))
    assert {f"moe_{part}" for part in ("up", "down") for n in names if f"gemmtuned_moe_{part}_" in n} == {
        "moe_up", "moe_down",
    }, names  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    counted(program)
    with torch.cuda.graph(graph):
        y = of(*given)
    graph.replay()
    assert_near(y, right)
    assert set(counted(program)) == {"exact"}


def test_operands_it_was_not_compiled_for_are_a_miss(program: Program, launched: list[Any]) -> None:
    of = layer()
    of.given["w1"] = of.given["w1"].mT.contiguous().mT
    given = drawn(of, 8)
    program.publish(published(program, next(BACKENDS["moe_decode"].candidates(MOE))))
    counted(program)
    assert_near(of(*given), of.exact(*given))
    assert counted(program) == {"miss": 1} and not launched


@pytest.mark.parametrize("error", [CandidateFailed("no"), Declined("no memory")], ids=str)
def test_a_failing_solution_ends_at_torch(program: Program, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """One that is to blame is reported, and never called again."""
    of, calls = layer(), []
    given = drawn(of, 8)
    solution = published(program, list(BACKENDS["moe_decode"].candidates(MOE))[3])
    program.publish(solution)
    told: list[Solution] = []
    monkeypatch.setattr(program.hook.account, "fail_op", lambda solution, reason: told.append(solution))

    def call(self: moe_run.Launches, o: Any) -> Tensor:
        calls.append(self)
        raise error

    monkeypatch.setattr(moe_run.Launches, "__call__", call)
    counted(program)
    right = of.exact(*given)
    for _ in range(3):
        assert_near(of(*given), right)
    assert counted(program) == {"miss": 3}
    assert [s.config for s in told] == ([] if isinstance(error, Declined) else [solution.config])
    monkeypatch.undo()
    moe_run._loaded.clear()
