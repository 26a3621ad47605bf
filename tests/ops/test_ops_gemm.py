"""The public ops against exact results, as AITER's users call them; and how they go together with the hook."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked import Home, published
from torch import Tensor

from gemmtuned.commands.spot_checking import check_tables, check_waiting
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import columns_for, tuned_texts
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.ops import (
    ShuffleError,
    TunedGemm,
    gemm_a16w16,
    gemm_a16w16_atomic,
    shuffle_weight,
    tgemm,
    triton_gemm_a16w16,
)
from gemmtuned.ops.stock_gemm import as_weight

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # some units in the last place
BF16 = FAMILIES["bf16"]


def near(y: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """y is the exact result but for roundings of this dtype, relative to the size of what was summed."""
    assert y.shape == exact.shape
    off = (y.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    assert off <= 4 * ROUNDING[dtype], f"off by {off:.1e}"


def exact(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ w.double().t()
    return y if bias is None else y + bias.double()


# --- against exact results


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("shape", "n"), [((1, 64), 48), ((7, 33), 129), ((2, 5, 64), 64), ((3, 1, 2, 17), 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_right(dtype: torch.dtype, shape: tuple[int, ...], n: int, with_bias: bool) -> None:
    x, w = torch.randn(shape).to(dtype), torch.randn(n, shape[-1]).to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None

    y = gemm_a16w16(x, w, bias)

    assert y.dtype == dtype
    near(y, exact(x, w, bias), dtype)
    assert torch.equal(tgemm.mm(x, w, bias), y)


def test_the_result_has_the_dtype_asked_for() -> None:
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16()

    y = gemm_a16w16(x, w, otype=torch.float32)

    assert y.dtype == torch.float32
    near(y, exact(x, w), torch.bfloat16)
    assert gemm_a16w16(x, w, otype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(("n", "k"), [(48, 64), (1, 64), (64, 1), (1, 1)])
def test_a_transposed_view_of_the_weight_is_told_by_its_sizes(n: int, k: int) -> None:
    x, w = torch.randn(5, k), torch.randn(n, k)

    near(gemm_a16w16(x, w.t()), exact(x, w), torch.float32)
    near(gemm_a16w16(x, w), exact(x, w), torch.float32)


def test_a_square_weight_is_what_it_says_however_it_lies_in_memory() -> None:
    wide, x = torch.randn(64, 128), torch.randn(3, 64)
    by_columns = torch.randn(64, 64).t()

    for w in (wide[:, :64], wide[:, ::2], wide[:, :64].t(), by_columns):
        near(gemm_a16w16(x, w), exact(x, w), torch.float32)
        near(tgemm.linear(x, w), exact(x, w), torch.float32)


def test_operands_that_do_not_fit_are_named() -> None:
    with pytest.raises(GemmtunedError, match=r"the weight is 3x5 and x has K = 4"):
        gemm_a16w16(torch.ones(2, 4), torch.ones(3, 5))
    with pytest.raises(GemmtunedError, match="1 dimensions"):
        as_weight(torch.ones(4), 4)
    with pytest.raises(GemmtunedError, match="scale_c"):
        gemm_a16w16(torch.ones(2, 4), torch.ones(3, 4), scale_c=torch.ones(1))


def test_x_need_not_be_contiguous_and_may_be_empty() -> None:
    x, w = torch.randn(6, 4, 32).transpose(0, 1), torch.randn(16, 32)

    near(gemm_a16w16(x, w), exact(x, w), torch.float32)
    assert gemm_a16w16(torch.ones(0, 32), w).shape == (0, 16)


@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_fp8_operands(with_bias: bool) -> None:
    x, w = torch.randn(3, 8, 64).to(torch.float8_e4m3fn), torch.randn(32, 64).to(torch.float8_e4m3fn)
    bias = torch.randn(32).bfloat16() if with_bias else None
    a, b = torch.tensor([0.5]), torch.tensor(3.0)

    y = gemm_a16w16(x, w, bias, torch.bfloat16, a, b)

    wanted = exact(x.float(), w.float()) * 1.5 + (0 if bias is None else bias.double())
    near(y, wanted, torch.bfloat16)
    near(gemm_a16w16(x, w, otype=torch.float32), exact(x.float(), w.float()), torch.bfloat16)


def test_scales_count_for_other_operands_too() -> None:
    x, w, bias = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()

    y = gemm_a16w16(x, w, bias, scale_a=torch.tensor([2.0]), scale_b=torch.tensor([0.25]))

    near(y, exact(x, w) * 0.5 + bias.double(), torch.bfloat16)


def test_the_atomic_op_writes_where_it_is_told() -> None:
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    y = torch.full((5, 32), 7.0, dtype=torch.bfloat16)

    assert gemm_a16w16_atomic(x, w, y=y, config={"NUM_KSPLIT": 4}) is y
    near(y, exact(x, w), torch.bfloat16)
    assert gemm_a16w16_atomic(x.float(), w.float()).dtype == torch.bfloat16
    near(gemm_a16w16_atomic(x.float(), w.float(), dtype=torch.float32), exact(x, w), torch.float32)
    with pytest.raises(GemmtunedError, match="y is"):
        gemm_a16w16_atomic(x, w, y=torch.empty(5, 31, dtype=torch.bfloat16))
    with pytest.raises(GemmtunedError, match="expected"):
        gemm_a16w16_atomic(x, w.t())


@pytest.mark.parametrize("asked", [{"activation": "silu"}, {"skip_reduce": True}])
def test_what_aiters_triton_op_does_beyond_the_product_is_refused(asked: dict[str, Any]) -> None:
    x, w = torch.ones(2, 8).bfloat16(), torch.ones(4, 8).bfloat16()

    with pytest.raises(GemmtunedError, match=f"{next(iter(asked))}.*not done here"):
        triton_gemm_a16w16(x, w, **asked)


def test_gradients_pass() -> None:
    x, w, bias = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True), torch.randn(3)

    gemm_a16w16(x, w.t(), bias).sum().backward()

    assert torch.allclose(w.grad, x.detach().sum(0).expand(3, 8), atol=1e-5)


@pytest.mark.parametrize("op", [gemm_a16w16, tgemm.mm, tgemm.linear, TunedGemm(split_bias=True).mm])
def test_the_ops_compile_without_a_graph_break(op: Any) -> None:
    x, w, bias = torch.randn(4, 64), torch.randn(64, 64), torch.randn(64)
    torch._dynamo.reset()

    compiled = torch.compile(lambda x, w, bias: op(x, w.t(), bias).relu(), fullgraph=True, backend="eager")

    assert torch.equal(compiled(x, w, bias), op(x, w.t(), bias).relu())


def test_a_split_bias_is_added_to_the_rounded_product() -> None:
    x, w, bias = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    split = TunedGemm(split_bias=True)

    assert torch.equal(split.gemm_a16w16(x, w, bias), gemm_a16w16(x, w) + bias)
    assert not split.key(x, w, bias).bias
    assert tgemm.key(x, w, bias).bias


# --- shuffled weights


def test_a_shuffled_weight_gives_the_same_result_and_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    from gemmtuned.ops import tuned_gemm

    tuned_gemm._warned.clear()
    w = torch.randn(256, 256).bfloat16()
    shuffled = shuffle_weight(w, layout="tn")

    for m in (1, 1, 200):
        x = torch.randn(m, 256).bfloat16()
        assert torch.equal(gemm_a16w16(x, shuffled), gemm_a16w16(x, w))

    assert caplog.text.count("below M=128 is slower") == 1
    assert caplog.text.count("turned back at every call") == 1


def test_a_lost_mark_can_be_said_aloud() -> None:
    w, x = torch.randn(32, 64).bfloat16(), torch.randn(200, 64).bfloat16()
    unmarked = torch.nn.Parameter(shuffle_weight(w), requires_grad=False)

    assert torch.equal(gemm_a16w16(x, unmarked, bpreshuffle=True), gemm_a16w16(x, w))
    assert not torch.equal(gemm_a16w16(x, unmarked), gemm_a16w16(x, w))
    assert torch.equal(gemm_a16w16(x, w, bpreshuffle=False), gemm_a16w16(x, w))


def test_a_view_of_a_shuffled_weight_is_refused_unless_it_is_said_what_it_is() -> None:
    w, x = torch.randn(64, 32).bfloat16(), torch.randn(200, 32).bfloat16()
    shuffled = shuffle_weight(w)

    for view in (shuffled.t(), shuffled[:16], shuffled.view(64, 32)):
        for gemm in (gemm_a16w16, torch.compile(gemm_a16w16, backend="eager", fullgraph=True)):
            with pytest.raises((ShuffleError, torch._dynamo.exc.TorchDynamoException), match="view of a shuffled"):
                gemm(x, view)
    assert torch.equal(gemm_a16w16(x, shuffled.t(), bpreshuffle=True), gemm_a16w16(x, w))
    assert torch.equal(gemm_a16w16(x, w.t()), gemm_a16w16(x, w))


# --- tables


def ours(m: int, n: int, k: int, *, covers: str = "exact") -> Solution:
    problem = Problem(m=m, n=n, k=k, dtype="fp32", threads=torch.get_num_threads())
    return published(problem, "torch_swap", covers=covers)


def export(path: Path, *solutions: Solution) -> Path:
    rows = [[*tuned_texts(s, BF16, cpu_device()).values()] for s in solutions]
    write_file(path, columns_for(BF16, kind="tuned"), rows)
    return path


class Spy:
    """Counts the calls of a route."""

    def __init__(self, run: Any) -> None:
        self.run, self.calls = run, 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        self.calls += 1
        return self.run(a, b, bias)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """load_config tells the hook of this process, should it come on later; other tests must not see that."""
    from gemmtuned.hooks import activate

    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    yield
    activate._tables.clear()


@pytest.mark.long
@pytest.mark.usefixtures("tables")
def test_a_row_of_our_export_is_run_where_it_was_proven_and_nowhere_else(tmp_path: Path) -> None:
    gemm = TunedGemm()
    other = replace(ours(32, 48, 64), device="cpu-another-00000000")
    rows = (ours(8, 48, 64), ours(16, 96, 64, covers="fine"), other)
    assert gemm.load_config(export(tmp_path / "t.csv", *rows)) == 3
    assert gemm._routes == {}  # nobody has tried them on this machine
    assert check_waiting(Settings.from_env()) == 2
    assert gemm.load_config(tmp_path / "t.csv") == 3
    assert set(gemm._routes) == {rows[0], rows[1]}  # the third is of another device
    spies = {row: Spy(run) for row, run in gemm._routes.items()}
    gemm._routes = dict(spies)

    def runs(m: int, n: int, *, threads: int | None = None) -> int:
        x, w = torch.randn(m, 64), torch.randn(n, 64)
        before, usual = sum(s.calls for s in spies.values()), torch.get_num_threads()
        torch.set_num_threads(threads or usual)
        try:
            near(gemm.gemm_a16w16(x, w), exact(x, w), torch.float32)
        finally:
            torch.set_num_threads(usual)
        return sum(s.calls for s in spies.values()) - before

    assert runs(8, 48) == 1
    assert runs(5, 48) == 0  # AITER would take the row for M = 8; it was proven at 8 alone
    assert runs(16, 96) == runs(3, 96) == 1  # proven for the bucket
    assert runs(17, 96) == 0
    assert runs(8, 48, threads=torch.get_num_threads() + 1) == 0
    assert runs(32, 48) == 0


@pytest.mark.usefixtures("tables")
def test_amds_guides_table_is_looked_up_by_aiters_rules(tmp_path: Path) -> None:
    (tmp_path / "tuned_gemm_config.csv").write_text(
        "M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n"
        "532,2048,2048,asm,bf16gemm_fp32bf16_tn_96x64_pf3_splitk,266.78,761.98\n"
        "544,2048,2048,hipblaslt,,540.44,1312.74\n"
    )
    gemm = TunedGemm()
    assert gemm.load_config(str(tmp_path / "tuned_gemm_config.csv")) == 2

    def choice(m: int) -> tuple[str, int | None]:
        x, w = torch.empty(m, 2048, dtype=torch.bfloat16), torch.empty(2048, 2048, dtype=torch.bfloat16)
        found = gemm.config(gemm.key(x, w))
        return found.libtype, found.padded_m

    assert choice(532) == ("asm", 532)
    assert choice(533) == ("hipblaslt", 544)  # up to a multiple of 32
    assert choice(500) == ("torch", None)
    x, w = torch.randn(532, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    assert torch.equal(gemm.gemm_a16w16(x, w), torch.nn.functional.linear(x, w))  # no AITER here: torch serves it

    (tmp_path / "more.csv").write_text("M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n500,2048,2048,asm,k,1,1\n")
    assert gemm.load_config(tmp_path / "more.csv") == 3
    assert choice(500) == ("asm", 500)  # what was looked up before is forgotten
    assert choice(532) == ("asm", 532)


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")

    with pytest.raises(TableError, match=r"x\.csv"):
        TunedGemm().load_config(tmp_path / "x.csv")
    tuned = TunedGemm()
    (tmp_path / "good.csv").write_text("M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n8,8,8,asm,k,1,1\n")
    assert tuned.load_config(tmp_path / "good.csv") == 1
    for paths in ((tmp_path / "nowhere.csv",), (tmp_path / "good.csv", tmp_path / "nowhere.csv")):
        with pytest.raises(TableError, match=r"nowhere\.csv: no such file"):
            tuned.load_config(*paths)


# --- together with the hook

COUNTED = """
    import time, torch
    from gemmtuned.ops import gemm_a16w16, gemm_a16w16_atomic, tgemm
    torch.set_num_threads(2)
    x, w, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    gemm_a16w16(x, w)
    tgemm.mm(x.reshape(2, 2, 16), w.t())
    gemm_a16w16_atomic(x, w, dtype=torch.float32)
    tgemm.linear(x, w, bias)
    torch.compile(gemm_a16w16, fullgraph=True, backend="eager")(x, w)
"""
LOADED = """
    import json, sys, torch, gemmtuned
    from gemmtuned.ops import TunedGemm
    torch.set_num_threads(2)
    before = gemmtuned.status()["rows"]
    TunedGemm().load_config(sys.argv[1])
    x, w = torch.randn(4, 16), torch.randn(8, 16)
    torch.nn.functional.linear(x, w)
    print(json.dumps([before, gemmtuned.status()["rows"]]))
"""


@pytest.mark.long
def test_a_call_is_counted_once(home: Home) -> None:
    done = home.run(COUNTED)

    assert done.code == 0, done.err
    assert home.counts() == {
        ("fp32:4x8x16,threads=2", "miss"): 4, ("fp32:4x8x16+bias,threads=2", "miss"): 1,
    }  # fmt: skip


@pytest.mark.long
def test_the_active_hook_takes_the_table_for_everybody(home: Home, tmp_path: Path) -> None:
    table = export(tmp_path / "t.csv", published(Problem(m=4, n=8, k=16, dtype="fp32", threads=2), "torch_swap"))
    check_tables(Settings.from_env({"GEMMTUNED_HOME": str(home.path), "AITER_CONFIG_GEMM_BF16": str(table)}))

    assert home.run(LOADED, str(table)).said == [0, 1]
    assert home.counts() == {("fp32:4x8x16,threads=2", "exact"): 1}


# --- under AITER's names

SHIMMED = """
import gemmtuned.shim
gemmtuned.shim.install()
gemmtuned.shim.install()
import aiter, torch
from aiter.tuned_gemm import TunedGemm, gemm_a16w16, tgemm
from aiter.ops.shuffle import shuffle_weight
from aiter.ops.triton.gemm_a16w16 import gemm_a16w16 as triton_gemm
from aiter.ops.triton.gemm_a16w16_atomic import gemm_a16w16_atomic
import aiter.ops.triton.gemm.basic.gemm_a16w16 as newer
from aiter.ops.triton.gemm.basic.gemm_a16w16_atomic import gemm_a16w16_atomic as newer_atomic
from importlib.util import find_spec
from gemmtuned.ops.aiter_calls import is_installed
torch.version.hip = "6.4"
assert find_spec("aiter") is not None and find_spec("aiter.ops.triton.gemm_a16w16") is not None
assert find_spec("aiter.mla") is None and not is_installed()
from aiter import ActivationType, QuantType, batched_gemm_bf16_CK, gemm_a8w8
from aiter.fused_moe import fused_moe
from aiter.ops.triton.batched_gemm_a8w8 import batched_gemm_a8w8
from gemmtuned import ops
assert (gemm_a8w8, batched_gemm_a8w8) == (ops.gemm_a8w8, ops.batched_gemm_a8w8)
moe = torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4), torch.ones(3, 1), torch.zeros(3, 1, dtype=int)
assert torch.equal(fused_moe(*moe), ops.fused_moe(*moe))  # which may quantise, as AITER's does
from aiter.ops.triton.gemm_afp4wfp4 import gemm_afp4wfp4
from aiter.ops.triton.gemm.basic.gemm_afp4wfp4 import gemm_afp4wfp4 as newer_afp4wfp4
assert gemm_afp4wfp4 is newer_afp4wfp4 is ops.gemm_afp4wfp4
assert batched_gemm_bf16_CK is ops.batched_gemm_bf16 and not hasattr(aiter, "batched_gemm_bf16")
assert (ActivationType, QuantType) == (ops.ActivationType, ops.QuantType)
x, w = torch.randn(3, 32).bfloat16(), torch.randn(16, 32).bfloat16()
wanted = torch.nn.functional.linear(x, w)
for y in (gemm_a16w16(x, w), tgemm.mm(x, w), aiter.tuned_gemm.tgemm.mm(x, w), triton_gemm(x, w),
          gemm_a16w16_atomic(x, w), gemm_a16w16(x, shuffle_weight(w)), newer_atomic(x, w),
          newer.gemm_a16w16(x, w, None, activation=None, skip_reduce=False, kernel_type=None, backend=None)):
    assert torch.equal(y, wanted)
try:
    from aiter.ops import moe
except ImportError:
    pass
else:
    raise SystemExit("what we do not have must not import")
gemmtuned.shim.remove()
try:
    import aiter
except ImportError:
    print("gone")
"""


@pytest.mark.long
def test_programs_written_for_aiter_find_our_ops_once_the_shim_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", SHIMMED], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


def test_a_real_aiter_is_never_shadowed(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("real = True\n")
    code = (
        "import sys, gemmtuned.shim as shim\n"
        "try:\n    shim.install()\nexcept shim.ShimError as err:\n    print('refused', 'aiter' in sys.modules)\n"
        "import aiter\nprint(aiter.real, shim.is_installed())\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert done.stdout == "refused False\nTrue False\n", done.stderr
