"""Scaled products: inputs as torch takes them, exact references, and what the gate finds in kernels that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from noise import NoisyClock
from planted_kernels import Planted
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, cpu_device
from gemmtuned.daemon.child import last_check, search
from gemmtuned.daemon.child.checks import case_of
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.verify import verify
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS, candidates, environment
from gemmtuned.kernels.dtypes import bits, torch_dtype
from gemmtuned.kernels.families import family_of, tunable
from gemmtuned.kernels.families.base import PADDED
from gemmtuned.kernels.families.operand import spread_out
from gemmtuned.kernels.kernel import StatelessKernel
from gemmtuned.kernels.scaled_by_torch import block_product, blocks_as_torch_takes, rows_as_torch_takes
from gemmtuned.kernels.torch_flags import as_called

CPU = torch.device("cpu")
ROW = Problem(family="scaled", m=6, n=48, k=272, dtype="fp8_e4m3", out_dtype="bf16", scale="row", threads=1)
INT8 = replace(ROW, dtype="i8", wdtype="i8")
TENSOR = replace(ROW, m=2, scale="tensor", wscale="tensor", bias=True)  # torch's own takes 1 ms a row here
BLOCK = replace(ROW, n=320, scale="1x128", wscale="128x128", scale_layout="col", wscale_layout="row_padded", threads=1)
KINDS = (
    ROW, TENSOR, BLOCK, replace(ROW, m=1, wdtype="fp8_e5m2", out_dtype="fp16", bias=True),
    INT8, replace(TENSOR, m=1, dtype="i8", wdtype="i8", out_dtype="fp16"),
    replace(BLOCK, wscale="1x128", wscale_layout="col"), replace(ROW, math_mode="reduced", out_dtype="fp32"),
)  # fmt: skip
Parts = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


def parts(p: Problem, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Parts:
    """Values and, for each of them, its scale, in fp64."""
    family = family_of(p)
    sx = spread_out(scale_x, family.named("scale_x"), p, x.shape).double().expand(x.shape)
    sw = spread_out(scale_w, family.named("scale_w"), p, w.shape).double().expand(w.shape)
    return x.double(), w.double(), sx, sw, bias


def done(p: Problem, y: Tensor, bias: Tensor | None) -> Tensor:
    return (y if bias is None else y + bias.double()).to(torch_dtype(p.out_dtype))


def kernel(p: Problem, product: Callable[..., Tensor] = lambda x, w, sx, sw: (x * sx) @ (w * sw)) -> StatelessKernel:
    """One that multiplies so; right when nothing else is said."""

    def call(*operands: Tensor) -> Tensor:
        *some, bias = parts(p, *operands)
        return done(p, product(*some), bias)

    return StatelessKernel(call)


def short(t: Tensor) -> Tensor:
    """13 bits behind the point of the largest of the last axis, cut off: how the tensor core of sm_90 adds up."""
    unit = torch.exp2(t.abs().amax(-1, keepdim=True).clamp_min(1e-300).log2().floor() - 13)
    return (t / unit).trunc() * unit


def fast(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """Sums of 32 products at a time, never brought over to fp32; one scale a row or tensor."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for first in range(0, x.shape[1], 32):
        terms = x[:, None, first : first + 32] * w.mT[None, :, first : first + 32]
        total = short(torch.cat([total.unsqueeze(-1), terms], -1)).sum(-1)
    return total * sx[:, :1] * sw[:1]


def by_block(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """Sums of 128 of K, each multiplied with its scales."""
    blocks = [slice(first, first + 128) for first in range(0, x.shape[1], 128)]
    return torch.stack([x[:, b] @ w[b] * sx[:, b][:, :1] * sw[b][:1] for b in blocks]).sum(0)


def judge(p: Problem, wrong: StatelessKernel, default: StatelessKernel | None = None) -> str:
    with as_called(p):
        found = verify(p, {Candidate("x"): wrong}, default or kernel(p), device=CPU)[Candidate("x")]
    return f"{found.outcome}: {found.note}"


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_the_reference_is_of_the_values_times_their_scales(p: Problem) -> None:
    family = family_of(p)
    for kind in (*family.kinds(p), PADDED):
        inputs = family.make(p, kind=kind, seed=2, device=CPU)
        sample = family.sample(p, seed=2, device=CPU)
        *some, bias = parts(p, *(inputs.tensors.get(o.name) for o in family.operands if not o.result))
        x, w, sx, sw = some
        expected = (x * sx) @ (w * sw) + (0 if bias is None else bias.double())
        assert torch.allclose(family.reference(p, inputs, sample), expected, rtol=1e-12, atol=1e-12), kind
        assert expected.isfinite().all(), kind


@pytest.mark.parametrize("m", [1, 64, 65, 200, 4096])
def test_the_row_that_is_huge_is_among_those_that_are_sampled(m: int) -> None:
    """Else small rows say how far apart results may be, and a right kernel that rounds it otherwise is refused."""
    p = replace(ROW, m=m)
    family = family_of(p)
    for seed in range(20):
        of_x = family.make(p, kind="huge_row", seed=seed, device=CPU)["scale_x"]
        rows = family.sample(p, seed=seed, device=CPU).rows
        assert int(of_x.argmax()) in rows and rows.numel() == rows.unique().numel() == min(m, 64)


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_operands_lie_as_torch_asks_for_them(p: Problem) -> None:
    family = family_of(p)
    for kind in ("randn", "apart", PADDED):
        made = family.make(p, kind=kind, seed=1, device=CPU)
        x, w, sx, sw = (made[name] for name in ("x", "w", "scale_x", "scale_w"))
        assert x.stride(1) == 1 and w.stride(0) == 1 and x.stride(0) % 16 == w.stride(1) % 16 == 0
        depth = -(-p.k // 128)
        if p.scale == "1x128" and p.m > 1:
            assert (sx.shape, sx.stride()) == ((p.m, depth), (1, p.m))
        if p.wscale == "128x128":  # ScaledBlas.cpp asks for columns of a multiple of four
            assert (sw.shape, sw.stride()) == ((depth, -(-p.n // 128)), (1, -(-depth // 4) * 4))
        if p.wscale == "row":
            assert sx.is_contiguous() and sw.is_contiguous() and sw.shape == (1, p.n)
        copies = family.weight_copies(p, count=3, device=CPU)
        assert len({t.data_ptr() for pair in copies for t in pair}) == 6
        for pair in copies:
            for copy, first in zip(pair, copies[0], strict=True):
                assert copy.stride() == first.stride() and torch.equal(bits(copy), bits(first))


@pytest.mark.parametrize("p", KINDS, ids=str)
def test_a_right_kernel_passes_in_whatever_order_it_adds(p: Problem) -> None:
    def in_parts(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        pieces = [((x * sx)[:, i::3].float() @ (w * sw)[i::3].float()) for i in (2, 0, 1)]
        return (pieces[0] + pieces[1] + pieces[2]).double()

    assert judge(p, kernel(p, in_parts)) == "ok: "


@pytest.mark.parametrize("p", KINDS[4:6], ids=str)
def test_int8_is_multiplied_exactly_and_scaled_after_it(p: Problem) -> None:
    after = kernel(p, lambda x, w, sx, sw: x @ w * sx[:, :1] * sw[:1])
    default = family_of(p).default(p)
    assert judge(p, kernel(p), default) == judge(p, after, default) == judge(p, default, after) == "ok: "


@pytest.mark.parametrize("p", KINDS[:4], ids=str)
def test_torchs_own_is_what_the_reference_says(p: Problem) -> None:
    if p.scale not in ("tensor", "row"):
        with pytest.raises(CandidateFailed, match="torch's own kernel fails"):
            judge(p, kernel(p), family_of(p).default(p))
        return
    assert judge(p, kernel(p), family_of(p).default(p)) == "ok: "
    assert judge(p, family_of(p).default(p)) == "ok: "


@pytest.mark.parametrize(
    ("m", "of_x", "lies"),
    [
        (1, "row", "row_padded"), (6, "col", "row"), (8, "row", "row_padded"),
        *(pytest.param(*one, marks=pytest.mark.long)
          for one in ((1, "row", "row"), (6, "col", "row_padded"), (8, "row", "row"))),
    ],
)  # fmt: skip
def test_what_torch_refuses_of_blocks_has_a_default(m: int, of_x: str, lies: str) -> None:
    """On a GPU torch refuses some; on CPUs, where this runs, all of them."""
    p = replace(BLOCK, m=m, threads=0, scale_layout=of_x, wscale_layout=lies)
    default = family_of(p).default(p)
    assert judge(p, kernel(p), default) == judge(p, default) == "ok: "
    whole = replace(p, m=4, k=512, scale_layout="col")  # torch takes this one: where it fails, it fails
    with pytest.raises(CandidateFailed, match="torch's own kernel fails"):
        judge(whole, kernel(whole), family_of(whole).default(whole))


@pytest.mark.parametrize(("m", "k"), [(1, 384), (3, 512), (8, 1280), (4, 512)])
def test_copies_that_torch_takes_of_blocks_are_as_cublaslt_reads_them(m: int, k: int) -> None:
    """cublasLt.h: X's scales of one block of K side by side, W's of one row of blocks, a multiple of four apart."""
    p = replace(BLOCK, m=m, k=k, threads=0, scale_layout="row", wscale_layout="row")
    made = family_of(p).make(p, kind="apart", seed=2, device=CPU)
    x, w, of_x, of_w = (made[name] for name in ("x", "w", "scale_x", "scale_w"))
    (rows, sx), sw = rows_as_torch_takes(x, of_x), blocks_as_torch_takes(of_w.mT)
    depth = k // 128
    assert rows.shape == (-(-m // 4) * 4, k) and sx.stride() == (1, rows.shape[0])
    assert sw.shape == (depth, 3) and sw.stride() == (1, -(-depth // 4) * 4)
    assert torch.equal(bits(rows[:m]), bits(x)) and not rows[m:].float().any()
    assert torch.equal(sx[:m], of_x) and torch.equal(sw, of_w)
    assert (rows.data_ptr() == x.data_ptr()) == (m % 4 == 0) and (sw.data_ptr() == of_w.data_ptr()) == (depth % 4 == 0)
    assert blocks_as_torch_takes(of_w.new_zeros(3 * depth + 1)[1:].view(3, depth)).data_ptr() % 16 == 0
    room = -(-depth // 4) * 4
    cut = of_w.new_ones(2 * room + depth).as_strided((3, depth), (room, 1))  # nothing lies behind its last row
    taken = blocks_as_torch_takes(cut)
    assert taken.as_strided((room, 3), (1, room)).shape == (room, 3) and torch.equal(taken, cut.mT)
    y = block_product(x, w.mT, of_x, of_w.mT, torch.float32)
    wide = block_product(rows, w.mT, sx, sw.mT, torch.float32)[:m]
    assert torch.allclose(y, wide, rtol=1e-4, atol=1e-4) and y.abs().max() > 0


WRONG = {
    "the last 16 of K": lambda x, w, sx, sw: (x * sx)[:, :-16] @ (w * sw)[:-16],
    "the scale of the next row of X": lambda x, w, sx, sw: (x * sx.roll(1, 0)) @ (w * sw),
    "the scale of the next column of W": lambda x, w, sx, sw: (x * sx) @ (w * sw.roll(128, 1)),
    "scales rounded to powers of two": lambda x, w, sx, sw: (x * torch.exp2(sx.log2().round())) @ (w * sw),
    "scales without their sign": lambda x, w, sx, sw: (x * sx.abs()) @ (w * sw),
    "NaN in scales of W lost": lambda x, w, sx, sw: (x * sx) @ (w * sw.nan_to_num(0.0)),
    "rows of zero scales skipped": lambda x, w, sx, sw: torch.where(
        (sx == 0).all(1, keepdim=True), 0.0, (x * sx) @ (w * sw)
    ),
    "parts of K in bf16": lambda x, w, sx, sw: sum(
        ((x * sx)[:, i::8] @ (w * sw)[i::8]).bfloat16().double() for i in range(8)
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("p", [ROW, BLOCK, INT8], ids=str)
def test_what_is_wrong_with_scales_is_found(p: Problem, what: str) -> None:
    assert judge(p, kernel(p, WRONG[what])).startswith("wrong"), what


def test_the_scale_of_the_next_block_of_k_is_found() -> None:
    for of in (2, 3):

        def product(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, of: int = of) -> Tensor:
            return (x * (sx.roll(128, 1) if of == 2 else sx)) @ (w * (sw.roll(128, 0) if of == 3 else sw))

        assert judge(BLOCK, kernel(BLOCK, product)).startswith("wrong")


@pytest.mark.long
def test_short_sums_are_refused_where_the_problem_does_not_allow_them_and_taken_where_it_does() -> None:
    slow = replace(ROW, k=2048, m=4, n=32)
    assert judge(slow, kernel(slow, fast)).startswith("wrong: ")
    allowed = replace(slow, math_mode="reduced")
    assert judge(allowed, kernel(allowed, fast), kernel(allowed, fast)) == "ok: "
    better = kernel(allowed, lambda x, w, sx, sw: x @ w * sx[:, :1] * sw[:1])
    assert judge(allowed, better, kernel(allowed, fast)) == "ok: "  # better than torch's is not wrong


@pytest.mark.soak
def test_a_sum_near_zero_may_be_of_either_sign_under_an_infinite_scale() -> None:
    """Seen on an H200: of some 10^4 sums a few change their sign by being added up more exactly than torch's own."""
    many = replace(ROW, k=512, m=64, n=320, math_mode="reduced")
    better = kernel(many, lambda x, w, sx, sw: x @ w * sx[:, :1] * sw[:1])
    assert judge(many, better, kernel(many, fast)) == "ok: "
    flipped = kernel(many, lambda x, w, sx, sw: x @ w * torch.where(sx.isinf(), sx.abs(), sx)[:, :1] * sw[:1])
    assert judge(many, flipped, kernel(many, fast)).startswith("wrong: ")  # not where the sum is clear


@pytest.mark.long
def test_an_infinite_scale_may_meet_parts_of_a_sum_of_both_signs() -> None:
    """A kernel that scales two halves of K before it adds them up has NaN where torch's has Inf."""
    many = replace(ROW, k=512, m=32, n=96, math_mode="reduced")

    def halves(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        first, second = ((x[:, half] @ w[half]) * sx[:, :1] * sw[:1] for half in (slice(256), slice(256, None)))
        return first + second

    assert judge(many, kernel(many, halves), kernel(many, fast)) == "ok: "
    finite = kernel(many, lambda x, w, sx, sw: x @ w * torch.where(sx.isinf(), 1.0, sx)[:, :1] * sw[:1])
    assert judge(many, finite, kernel(many, fast)).startswith("wrong: ")


@pytest.mark.long
def test_an_infinite_scale_may_meet_the_operands_of_torchs_own() -> None:
    """Where torch has no such product the default dequantises, and has NaN where a kernel that scales sums has Inf."""
    p = replace(BLOCK, m=17, k=640)
    before, after = kernel(p, lambda x, w, sx, sw: (x * sx) @ (w * sw)), kernel(p, by_block)
    assert judge(p, after, before) == judge(p, before, after) == "ok: "
    finite = kernel(p, lambda x, w, sx, sw: (x * torch.where(sx.isinf(), 1.0, sx)) @ (w * sw))
    assert judge(p, finite, before).startswith("wrong: ")


def test_whole_numbers_have_one_right_result_bit_for_bit() -> None:
    def one_bit_off(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        y = (x * sx) @ (w * sw)
        whole = bool((x.abs() <= 2).all())
        y[-1, -1] *= 1.0 + (2.0**-8 if whole else 0.0)
        return y

    p = replace(ROW, out_dtype="fp32")
    note = judge(p, kernel(p, one_bit_off))
    assert "integers" in note and "1 elements differ" in note


def test_which_kinds_can_be_tuned_depends_on_the_device() -> None:
    on_cpu, on_gpu = tunable("cpu"), tunable("cuda")
    assert INT8.operands in on_cpu and INT8.operands in on_gpu
    assert replace(BLOCK, dtype="i8", wdtype="i8").operands not in on_gpu
    assert ROW.operands in on_cpu and BLOCK.operands not in on_cpu
    assert {ROW.operands, BLOCK.operands, TENSOR.operands} <= set(on_gpu)


@pytest.mark.parametrize(
    "p",
    [
        replace(ROW, dtype="bf16", wdtype="bf16"),
        replace(ROW, out_dtype="fp8_e4m3"),
        replace(ROW, wscale="tensor"),
        replace(ROW, scale_dtype="e8m0"),
        replace(BLOCK, dtype="i8", wdtype="i8"),
        replace(BLOCK, wscale_layout="swizzled"),
    ],
    ids=str,
)
def test_what_the_family_has_not_is_refused_by_name(p: Problem) -> None:
    with pytest.raises(CandidateFailed, match="family scaled has"):
        family_of(p)


@pytest.mark.parametrize("p", [ROW, TENSOR], ids=str)
@pytest.mark.parametrize("fault", ["", "keeps the scales of W"])
def test_a_search_publishes_a_right_kernel_that_is_faster(
    p: Problem, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernel(p)

    class KeepsScales:
        def bind(self, w: Tensor, scale_w: Tensor) -> Callable[..., Tensor]:
            return right.bind(w, scale_w.clone())

    found = {"torch": BACKENDS["torch"], "fast": Planted("fast", KeepsScales() if fault else right)}
    monkeypatch.setattr(registry, "BACKENDS", found)
    monkeypatch.setattr(search, "BACKENDS", found)
    monkeypatch.setattr(last_check, "OFTEN_S", 0.02)
    clock = NoisyClock({"fast": 150.0}, jitter=0.01, drift=0.002, burst=0.0, second=0.0)
    said: list[Trial] = []
    solution, *_ = search.tune_modes(
        (p,), "exact", p, Environment(cpu_device(), dict.fromkeys(found, "1")), mode="eager", skip=(), emit=said.append,
        clock=clock, seed=1,
    )  # fmt: skip
    assert (solution.backend, solution.state) == (("torch", "default_best") if fault else ("fast", "published"))
    if fault:
        assert any(t.outcome == "wrong" and "scale of w edited" in t.note for t in said)


@pytest.mark.parametrize("torch_refuses_too", [True, False])
def test_a_size_of_a_bucket_that_torch_refuses_too_is_no_fault(torch_refuses_too: bool) -> None:
    p = BLOCK.with_m(16)

    def refusing(at_1: bool) -> StatelessKernel:
        right = kernel(p)

        def call(x: Tensor, *others: Tensor) -> Tensor:
            if at_1 and x.shape[0] == 1:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return right.call(x, *others)

        return StatelessKernel(call)

    candidate, backend, default = Candidate("x"), Planted("x", refusing(True)), refusing(torch_refuses_too)
    inputs = family_of(p).make(p, kind="randn", seed=1, device=CPU)
    case = case_of(p, default, inputs, family_of(p).sample(p, seed=1, device=CPU))
    won = last_check.Winner(
        p, p, "fine", candidate, backend, backend.kernel, default, Arm("x", []), inputs, [inputs.weights]
    )
    if torch_refuses_too:
        last_check._check_sizes(won, case, CPU, [16])
    else:
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            last_check._check_sizes(won, case, CPU, [16])


def test_backends_offer_scaled_problems_on_a_cpu() -> None:
    assert [c.backend for c in candidates(ROW, environment(cpu_device()))] == ["torch"]
    assert BACKENDS["torch"].prepare(Candidate("torch"), ROW)
