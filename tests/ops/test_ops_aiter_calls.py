"""Where AITER is installed: its fallback order, and how its kernels are called. A module of its names stands in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hooked import Home

from gemmtuned.ops import aiter_calls, tuned_gemm
from gemmtuned.ops.aiter_calls import Choice, GemmKey, fallback
from gemmtuned.ops.tuned_gemm import TunedGemm

BF16, FP16, FP32 = "torch.bfloat16", "torch.float16", "torch.float32"


def key(m: int, n: int, k: int, **more: Any) -> GemmKey:
    facts = {"cu_num": 304, "bias": False, "dtype": BF16, "outdtype": BF16, "scaleAB": False, "bpreshuffle": False}
    return GemmKey(M=m, N=n, K=k, **{**facts, **more})


@pytest.mark.parametrize(
    ("asked", "gfx", "library"),
    [
        # skinny: M = 1 up to twice the CUs, M <= 4 up to the CUs, K <= 9216
        (key(1, 608, 9216), "gfx942", "skinny"),
        (key(1, 609, 9216), "gfx942", "torch"),
        (key(1, 608, 9224), "gfx942", "torch"),
        (key(1, 608, 9212), "gfx942", "torch"),  # K % 8
        (key(2, 304, 9216), "gfx942", "skinny"),
        (key(2, 305, 9216), "gfx942", "torch"),
        (key(4, 304, 9216), "gfx90a", "skinny"),
        (key(5, 304, 9216), "gfx942", "torch"),
        (key(8, 304, 5120), "gfx950", "skinny"),
        (key(8, 304, 5128), "gfx950", "torch"),
        (key(9, 304, 256), "gfx942", "skinny"),
        (key(16, 304, 264), "gfx942", "torch"),
        (key(17, 304, 256), "gfx942", "torch"),
        (key(1, 608, 1024, dtype=FP16, outdtype=FP16), "gfx942", "skinny"),
        (key(1, 608, 1024, dtype=FP32, outdtype=FP32), "gfx942", "torch"),
        (key(1, 608, 1024), "gfx1250", "triton"),
        (key(512, 4096, 4096), "gfx1250", "triton"),
        (key(512, 4096, 4096, scaleAB=True), "gfx1250", "torch"),
        (key(512, 4096, 4096), "gfx942", "torch"),
        (key(1, 128, 128), "x86_64", "torch"),
        # shuffled weights
        (key(8, 100, 100, bpreshuffle=True), "gfx942", "hipblaslt"),
        (key(8, 128, 128, bpreshuffle=True), "gfx950", "asm"),
        (key(8, 128, 128, bpreshuffle=True, outdtype=FP32), "gfx950", "asm"),
        (key(8, 128, 100, bpreshuffle=True), "gfx950", "torch"),  # AITER stops here
        (key(8, 128, 128, bpreshuffle=True, outdtype=FP16), "gfx950", "torch"),
    ],
)
def test_the_order_is_aiters(asked: GemmKey, gfx: str, library: str) -> None:
    assert fallback(asked, gfx).libtype == library


def test_hipblaslt_and_skinny_take_the_solutions_aiter_gives_them() -> None:
    assert fallback(key(8, 64, 64, bpreshuffle=True), "gfx942") == Choice("hipblaslt", -1)
    assert fallback(key(1, 64, 64), "gfx942") == Choice("skinny", 2)


class StandIn(ModuleType):
    """The functions of `aiter` that are called, computed by torch; `log` says which were."""

    def __init__(self) -> None:
        super().__init__("aiter")
        self.__spec__ = ModuleSpec("aiter", None, origin="here")
        self.log: list[tuple[Any, ...]] = []

    def hipb_create_extension(self) -> None:
        self.log.append(("create",))

    def hipb_mm(self, x: Any, w_t: Any, solution: int, bias: Any, out: Any, *rest: Any) -> torch.Tensor:
        self.log.append(("hipblaslt", solution, tuple(w_t.shape), rest))
        y = (x.double() @ w_t.double()).to(out)
        return y if bias is None else y + bias

    def gemm_a16w16_asm(self, x: Any, w: Any, y: Any, bias: Any, split: Any, name: Any, shuffled: bool) -> torch.Tensor:
        if x.shape[0] == 7:
            raise RuntimeError("this GEMM is not supported")
        self.log.append(("asm", split, name, shuffled))
        return y.copy_(x.double() @ w.double().t() + (0 if bias is None else bias))

    def wv_splitk_small_fp16_bf16(self, w: Any, x: Any, y: Any, m: int, cu_num: int) -> None:
        self.log.append(("skinny", m, cu_num))
        y.copy_(x.double() @ w.double().t())


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    aiter_calls.calls.cache_clear()
    yield module
    aiter_calls.calls.cache_clear()


HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)


def table(gemm: TunedGemm, tmp_path: Any, *rows: str) -> None:
    from gemmtuned.configs.solution import cpu_device

    here = cpu_device()
    lines = [
        f"{here.arch},{here.units},{row},9.9,{name},0.0,1.0,1.0" for row, _, name in (r.partition("/") for r in rows)
    ]
    (tmp_path / "t.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    assert gemm.load_config(tmp_path / "t.csv") == len(rows)


def test_a_row_of_aiters_runs_its_kernel_at_its_size_and_at_padded_ones(aiter: StandIn, tmp_path: Any) -> None:
    gemm = TunedGemm()
    table(
        gemm, tmp_path,
        f"16,64,128,False,{BF16},{BF16},False,False,asm,3,2/asm_16",
        f"32,64,128,False,{BF16},{BF16},False,False,hipblaslt,77,0/",
    )  # fmt: skip
    w = torch.randn(64, 128).bfloat16()
    for m, called in ((16, ("asm", 2, "asm_16", False)), (5, ("asm", 2, "asm_16", False))):
        x = torch.randn(m, 128).bfloat16()
        y = gemm.gemm_a16w16(x, w)
        assert aiter.log[-1] == called
        torch.testing.assert_close(y.float(), (x.float() @ w.float().t()), atol=0.2, rtol=0.02)
    gemm.gemm_a16w16(torch.randn(2, 16, 128).bfloat16(), w)
    assert aiter.log[-2:] == [("create",), ("hipblaslt", 77, (128, 64), (None, None, None, False))]
    gemm.gemm_a16w16(torch.randn(17, 128).bfloat16(), w)
    assert [entry[0] for entry in aiter.log].count("create") == 1


def test_a_kernel_that_refuses_costs_its_shape_and_no_call(aiter: StandIn, tmp_path: Any, caplog: Any) -> None:
    gemm = TunedGemm()
    table(gemm, tmp_path, f"7,64,128,False,{BF16},{BF16},False,False,asm,3,2/asm_7")
    x, w = torch.randn(7, 128).bfloat16(), torch.randn(64, 128).bfloat16()

    for _ in range(2):
        assert torch.equal(gemm.gemm_a16w16(x, w), torch.nn.functional.linear(x, w))
    assert aiter.log == []
    assert caplog.text.count("torch serves it from now on") == 1


def test_a_library_that_this_aiter_lacks_is_served_by_torch(aiter: StandIn, tmp_path: Any) -> None:
    gemm = TunedGemm()
    table(gemm, tmp_path, f"16,64,128,False,{BF16},{BF16},False,False,flydsl,0,0/f")
    x, w = torch.randn(16, 128).bfloat16(), torch.randn(64, 128).bfloat16()

    assert torch.equal(gemm.gemm_a16w16(x, w), torch.nn.functional.linear(x, w))
    assert gemm.config(gemm.key(x, w)).libtype == "flydsl"


def test_autograd_goes_to_torch(aiter: StandIn, tmp_path: Any) -> None:
    gemm = TunedGemm()
    table(gemm, tmp_path, f"16,64,128,False,{BF16},{BF16},False,False,asm,3,2/a")
    w = torch.randn(64, 128).bfloat16().requires_grad_()

    gemm.gemm_a16w16(torch.randn(16, 128).bfloat16(), w).sum().backward()
    assert w.grad is not None and aiter.log == []
    with torch.no_grad():
        gemm.gemm_a16w16(torch.randn(16, 128).bfloat16(), w)
    assert aiter.log[-1][0] == "asm"


def test_without_a_row_and_without_aiter_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = TunedGemm()
    monkeypatch.setattr(gemm, "_tuned", None)  # to call it would raise

    assert gemm.mm(torch.ones(2, 4), torch.ones(3, 4)).shape == (2, 3)


def test_a_kernel_of_aiters_is_counted_in_the_math_mode_that_the_hook_keys_the_product_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[str, str, str]] = []
    hook = SimpleNamespace(count_op=lambda problem, place: counted.append((problem.dtype, problem.math_mode, place)))
    monkeypatch.setattr(tuned_gemm.activate, "current", lambda: hook)
    matmul = torch.backends.cuda.matmul

    tuned_gemm._count(key(16, 64, 128), "cuda:0")
    tuned_gemm._count(key(16, 64, 128), "cpu")
    tuned_gemm._count(key(16, 64, 128, dtype=FP32, outdtype=FP32), "cuda:0")
    allowed = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = False
        tuned_gemm._count(key(16, 64, 128), "cuda:0")
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed

    assert counted == [
        ("bf16", "reduced", "cuda:0"), ("bf16", "ieee", "cpu"), ("fp32", "ieee", "cuda:0"), ("bf16", "ieee", "cuda:0"),
    ]  # fmt: skip


COUNTED = """
    import sys, types, torch
    from importlib.machinery import ModuleSpec
    torch.set_num_threads(2)
    aiter = types.ModuleType("aiter")
    aiter.__spec__ = ModuleSpec("aiter", None, origin="here")
    aiter.gemm_a16w16_asm = lambda x, w, y, *rest: y.fill_(1)
    sys.modules["aiter"] = aiter
    torch.version.hip = "6.4"
    from gemmtuned.configs.solution import cpu_device
    from gemmtuned.ops import TunedGemm
    here = cpu_device()
    with open(sys.argv[1], "w") as file:
        print("gfx,cu_num,M,N,K,dtype,outdtype,libtype,us", file=file)
        print(f"{here.arch},{here.units},16,64,128,bf16,bf16,asm,9", file=file)
    gemm = TunedGemm()
    gemm.load_config(sys.argv[1])
    x, w = torch.ones(16, 128, dtype=torch.bfloat16), torch.ones(64, 128, dtype=torch.bfloat16)
    for _ in range(3):
        assert gemm.gemm_a16w16(x, w).eq(1).all()
"""


def test_a_call_that_aten_does_not_see_is_counted_all_the_same(home: Home, tmp_path: Any) -> None:
    done = home.run(COUNTED, str(tmp_path / "t.csv"))

    assert done.code == 0, done.err
    assert home.counts() == {("bf16:16x64x128,threads=2", "miss"): 3}
