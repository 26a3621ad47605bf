"""Our kernels' PTX, run on the CPU: clusters, and products whose operands Triton does not lay out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import ptx
import ptx_code

from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.triton import fragments, gemv, python_launch, selected, tiles, warp_split_k
from gemmtuned.kernels.triton.launch import SHARED_BEGINS

GEMV = {"rows": 2, "block_k": 512, "split": 1, "warps": 2, "unroll": 2, "mma": 0, "hold": 0}
WARPS = {"rows": 16, "tokens": 8, "block_k": 64, "split": 3, "cluster": 1, "warps": 2, "stages": 3}
TILES = {"rows": 32, "tokens": 16, "block_k": 64, "split": 3, "cluster": 1, "group": 1, "swap": 0, "warps": 4}
TILES |= {"stages": 3}
FRAGMENTS = {"rows": 8, "tokens": 4, "split": 1, "warps": 1, "ahead": 2, "chains": 1, "registers": 0}

SELECTED = {"rows": 8, "split": 1, "warps": 1, "ahead": 2, "registers": 0}


def operands(m: int, n: int, k: int, *, bias: bool, apart: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """x, w, bias; between the rows of x and w lie `apart` NaN."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.full((rows, k + apart), float("nan"), dtype=dtype)[:, :k] for rows in (m, n))
    for t in (x, w):
        t.copy_(torch.randn(t.shape, generator=generator))
    return x, w, torch.randn(n, generator=generator).to(dtype) if bias else None


@pytest.mark.part(8)
@pytest.mark.parametrize(
    ("module", "config", "m", "n", "k", "bias", "apart"),
    [
        (gemv, {"mma": 1}, 1, 5, 1544, True, 8),
        (gemv, {"mma": 1, "hold": 1}, 1, 6, 1536, False, 0),
        (gemv, {"mma": 1, "hold": 1, "rows": 1, "warps": 8, "block_k": 2048}, 1, 3, 4096, True, 0),
        (gemv, {"mma": 1, "hold": 1, "rows": 1, "warps": 4, "block_k": 1024}, 1, 3, 3072, False, 0),
        (gemv, {"mma": 1, "hold": 2, "rows": 1}, 1, 3, 1024, True, 8),
        (gemv, {"mma": 1, "hold": 1, "rows": 2, "warps": 1, "block_k": 256}, 1, 3, 1536, True, 0),
        (gemv, {"mma": 1, "hold": 2, "rows": 4, "unroll": 3}, 1, 5, 1544, True, 8),  # a row and some K beyond the end
        (gemv, {"hold": 1, "rows": 1}, 1, 3, 1544, False, 8),
        (gemv, {"split": 2, "unroll": 1}, 1, 5, 1544, True, 0),
        (warp_split_k, {}, 5, 40, 1544, True, 8),
        (warp_split_k, {"cluster": 0}, 5, 40, 1544, True, 0),
        (warp_split_k, {"split": 7, "tokens": 16, "warps": 4}, 11, 21, 3600, False, 0),
        (tiles, {}, 9, 40, 1544, True, 8),
        (tiles, {"cluster": 0}, 9, 40, 1544, False, 0),
        (tiles, {"split": 8, "tokens": 32, "group": 2}, 40, 33, 2056, True, 0),
        (fragments, {}, 3, 11, 264, True, 8),
        (fragments, {"warps": 2, "ahead": 4, "chains": 2}, 4, 40, 1544, False, 0),
        (fragments, {"warps": 2, "split": 3}, 4, 40, 1544, True, 8),
        (fragments, {"tokens": 8, "rows": 16, "warps": 2, "split": 5, "ahead": 3}, 7, 37, 1544, False, 0),
        (fragments, {"tokens": 16, "rows": 16, "split": 8, "ahead": 4, "chains": 4}, 13, 37, 2048, True, 0),
        (fragments, {"split": 7}, 4, 24, 1544, False, 0),
        (fragments, {"split": 5, "tokens": 8}, 8, 24, 1544, False, 0),
        (fragments, {"warps": 2, "tokens": 12}, 11, 37, 1544, True, 0),
        (fragments, {"warps": 2, "split": 7, "tokens": 12}, 11, 37, 1544, True, 0),
        (fragments, {"tokens": 16, "rows": 32, "warps": 4}, 16, 64, 512, True, 16),
        (fragments, {"split": 2, "warps": 2, "registers": 168}, 4, 11, 1544, True, 8),
        (fragments, {"tokens": 8, "warps": 2, "ahead": 3, "registers": 255}, 7, 19, 1544, False, 0),
        (selected, {"split": 3, "registers": 168}, 13, 11, 1544, True, 8),
        (selected, {"rows": 16, "warps": 2, "registers": 255}, 16, 19, 1544, False, 0),
        (selected, {}, 13, 37, 520, True, 8),
        (selected, {"rows": 16, "warps": 2, "ahead": 3}, 16, 24, 1544, False, 0),
        (selected, {"split": 8, "warps": 2, "ahead": 4}, 11, 37, 2048, True, 0),
        (selected, {"rows": 16, "split": 5, "warps": 4}, 9, 20, 1544, False, 16),
        (selected, {"split": 3, "warps": 4, "ahead": 1}, 16, 21, 1544, True, 0),
        (selected, {"rows": 16, "split": 2, "warps": 8, "ahead": 1}, 12, 24, 2056, False, 8),
        (selected, {"split": 2, "warps": 8, "ahead": 1}, 12, 24, 1544, True, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_ptxas_gets_is_right(
    module: Any, config: dict[str, int], m: int, n: int, k: int, bias: bool, apart: int, dtype: torch.dtype
) -> None:
    whole = {gemv: GEMV, warp_split_k: WARPS, tiles: TILES, fragments: FRAGMENTS, selected: SELECTED}[module] | config
    x, w, b = operands(m, n, k, bias=bias, apart=apart, dtype=dtype)
    record = module.launch_record(whole, python_launch.problem_of(x, w, b))
    exact = x.double() @ w.double().T + (0 if b is None else b.double())

    y = ptx.launch(record, x, w, b, arch="sm_90")

    assert ((y.double() - exact).norm() / exact.norm()).item() < (3e-3 if dtype == torch.bfloat16 else 4e-4)


def test_what_reaches_beyond_a_tensor_is_seen() -> None:
    x, w, _ = operands(3, 16, 264, bias=False)
    record = fragments.launch_record(FRAGMENTS, python_launch.problem_of(x, w, None))

    with pytest.raises(ptx_code.Wrong, match="no tensor"):
        ptx.launch(record, x, w[:8].clone(), None, arch="sm_90")


FAULTS = {
    "a lane has another row": (r"(mma\.sync[^{]*\{[^}]*\}, *\{) *(%\w+), *(%\w+)", r"\1\3, \2", "far off"),
    "bytes that are not waited for": (r"@first mbarrier\.arrive[^;]*;", "", "wait for ever"),
    "an arrival too many": (r"(mbarrier\.init[^;]*), 1;", r"\1, 2;", "wait for ever"),
    "the phase before": (r"(try_wait[^;]*), 0;", r"\1, 1;", "phase before"),
    "another barrier": (r"(try_wait[^;]*\[%\w+)\]", r"\1+8]", "another barrier"),
    "no fence": (r"@first fence[^;]*;", "", "before it is set up"),
    "others have not begun": (r"barrier\.cluster\.wait\.aligned;", "", "has not begun"),
    "sums a row further": (r"(st\.async[^;]*? \[%\w+)\]", r"\1+4]", "far off"),
    "sums half a row further": (r"(st\.async[^;]*? \[%\w+)\]", r"\1+2]", "not aligned"),
    "beyond its shared memory": (r"(st\.async[^;]*? \[%\w+)\]", r"\1+65536]", "shared memory from"),
}


COPIES = {
    "copies are not waited for": (r"cp\.async\.wait_group[^;]*;", "", "far off"),
    "nor other threads that have copied": (r"bar\.sync[^;]*;", "", "without a barrier"),
}


SUMS = {
    "sums of other warps are not waited for": (r"bar\.sync[^;]*;", "", "without a barrier"),
    "half of the warps' sums": (r"ld\.shared\.v4\.f32 \{part4[^;]*;", "mov.f32 part4, part0;", "before it was written"),
}
PARTS = {
    "the other part of K": (r"0xeeeeeeee, 0x44444444", "0x44444444, 0xeeeeeeee", "far off"),
    "values out of order": (r"0xeeeeeeee", "0xbbbbbbbb", "out of order"),
    "a neighbour's row": (r"(selp\.b32 own\d, *%\w+, *%\w+), second", r"\1, never", "far off"),
}
OWN = {
    "other warps have not put theirs there": (r"bar\.sync[^;]*;", "", "without a barrier"),
    "the sums of one warp twice": (r"(ld\.shared\.f32 of1_0, \[%\w+)[^\]]*\]", r"\1]", "far off"),
    "sums that others have sent": (r"(ld\.shared\.f32 of3_0, \[%\w+ *\+ *)\d+\]", r"\g<1>2048]", "without a barrier"),
}
OF_ONE_ROW = GEMV | {"mma": 1, "hold": 1, "rows": 1, "warps": 8, "block_k": 2048, "unroll": 1}


@pytest.mark.part(10)
@pytest.mark.parametrize(
    ("module", "config", "what", "instead", "seen"),
    [(fragments, FRAGMENTS | {"split": 4}, *fault) for fault in FAULTS.values()]
    + [(warp_split_k, WARPS, *fault) for fault in COPIES.values()]
    + [(gemv, OF_ONE_ROW, *fault) for fault in SUMS.values()]
    + [(selected, SELECTED | {"split": 4}, *fault) for fault in PARTS.values()]
    + [(selected, SELECTED | {"split": 4, "warps": 4, "ahead": 1}, *fault) for fault in OWN.values()],
    ids=[*FAULTS, *COPIES, *SUMS, *PARTS, *OWN],
)
def test_a_fault_is_seen(
    module: Any, config: dict[str, int], what: str, instead: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, _ = operands(1 if module is gemv else 4, 16, 1024, bias=False)
    record = module.launch_record(config, python_launch.problem_of(x, w, None))
    exact = x.double() @ w.double().T
    read = ptx_code.Code.__init__

    def read_changed(self: Any, text: str) -> None:
        changed, times = re.subn(what, instead, text)
        assert times
        read(self, changed)

    monkeypatch.setattr(ptx_code.Code, "__init__", read_changed)

    with pytest.raises(ptx_code.Wrong, match=seen):
        y = ptx.launch(record, x, w, None, arch="sm_90")
        if not ((y.double() - exact).norm() / exact.norm()).item() < 0.1:  # it may be no number
            raise ptx_code.Wrong("far off")


@pytest.mark.part(2)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_shared_memory_begins_where_kernels_are_told_that_have_no_name_for_it(arch: str, tmp_path: Path) -> None:
    x, w, _ = operands(4, 32, 1024, bias=False)
    binary = compile_record(warp_split_k.launch_record(WARPS, python_launch.problem_of(x, w, None)), arch)
    text = ptx.disassembled(binary.data, tmp_path)

    # ptxas puts the address of what Triton has a name for together from the thread block's rank and this
    assert "SR_CgaCtaId" in text
    assert re.search(rf"\bU?MOV U?R\d+, {SHARED_BEGINS:#x}\b", text)
