"""Figures that cannot be read as they stand: the row is refused by its field or parameter, and never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.configs.formats import read_any
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.problem import Problem

OF_OP = "GemmTunableOp_BFloat16_TN,tn_2048_8_1024_ld_1024_1024_2048"
BF16 = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
ROW = "64,64,False,torch.bfloat16,torch.bfloat16,False,False,asm,1,0"
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}
MM = "((torch.bfloat16, [8, 1024], [1024, 1]), (torch.bfloat16, [1024, 2048], [1, 1024]))+mm"


def read(folder: Path, name: str, content: object) -> Imported:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_any(path)


@pytest.mark.parametrize("figure", ['"1,5"', "1e3us", "2.5 us", "#DIV/0!", "--", "TBD", "0x10", "1_0", "１.5"])
@pytest.mark.parametrize("column", ["us", "tflops", "err_ratio"])
def test_a_figure_that_is_no_number_costs_its_row_by_the_columns_name(column: str, figure: str, tmp_path: Path) -> None:
    cells = {"us": "1.5", "kernelName": "k", "err_ratio": "0.0", "tflops": "1", "bw": "1", column: figure}
    found = read(tmp_path, "bf16_tuned_gemm.csv", f"{BF16}\n16,{ROW},{','.join(cells.values())}\n")

    assert (len(found.hints), found.rejected) == (0, 1)
    assert f"column {column}: {figure.strip(chr(34))!r} is not a number" in found.reasons[0]


@pytest.mark.parametrize("figure", ['"1,5"', "1e3us", "0x10"])
def test_a_figure_of_the_guides_tables_is_never_taken_for_none(figure: str, tmp_path: Path) -> None:
    content = f"M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n16,64,64,hip,k,{figure},1\n32,64,64,hip,k,n/a,1\n"
    found = read(tmp_path, "guide.csv", content)

    assert found.rejected == 1 and "column tflops" in found.reasons[0]
    assert [(hint.problem, hint.us) for hint in found.hints] == [(Problem(m=32, n=64, k=64), None)]


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("Gemm_Rocblas_21,0,0079", "field 5: '0079' follows the time"),
        ("Gemm_Rocblas_21,7.9us", "field 4: '7.9us' is not a time"),
        ("Gemm_Rocblas_21,0.1,,more", "field 6: 'more' follows the time"),
        (",0.0079", "field 3: '' names no solution"),
        ("0.0079", "field 3: '0.0079' names no solution"),
    ],
)
def test_a_result_of_tunable_op_whose_time_is_not_clear_is_refused(rest: str, reason: str, tmp_path: Path) -> None:
    found = read(tmp_path, "tunableop_results0.csv", f"{OF_OP},{rest}\n{OF_OP},Gemm_Rocblas_21,0.5,\n")

    assert (len(found.hints), found.rejected) == (1, 1) and reason in found.reasons[0]
    assert found.hints[0].us == 500


def test_what_tunable_op_logs_of_blas_stands_behind_the_time_or_the_sizes(tmp_path: Path) -> None:
    logged = "BLAS_PARAMS: - { function: matmul, M: 2048, N: 8, K: 1024 }"
    found = read(tmp_path, "t.csv", f"{OF_OP},Gemm_Rocblas_21,0.5,{logged}\n{OF_OP},{logged}\n{OF_OP},\n")

    assert found.rejected == 0
    assert [(hint.kind, hint.us) for hint in found.hints] == [("tuned", 500), ("untuned", None), ("untuned", None)]


@pytest.mark.parametrize(("parameter", "value"), [("num_warps", "four"), ("num_warps", 0), ("GROUP_SIZE_M", True)])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("N=64,K=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json", "1"),
        ("gfx950-GEMM-A16W16-N=64-K=128.json", "M_LEQ_16"),
    ],
)
def test_a_tile_whose_parameter_is_no_count_is_refused(
    name: str, key: str, parameter: str, value: object, tmp_path: Path
) -> None:
    other = {"1": "2", "M_LEQ_16": "M_LEQ_32"}[key]
    found = read(tmp_path, name, {key: {**TILE, parameter: value}, other: {**TILE, "num_stages": 0}})

    assert (len(found.hints), found.rejected) == (1, 1)
    assert f"{parameter} is {value!r}, expected a whole number" in found.reasons[0]


@pytest.mark.parametrize(("parameter", "value"), [("BLOCK_M", "16"), ("BLOCK_M", 16.5), ("num_warps", True)])
def test_a_template_whose_parameter_is_no_count_is_refused(parameter: str, value: object, tmp_path: Path) -> None:
    tile: dict[str, Any] = {"template_id": "triton::mm", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
    found = read(tmp_path, "lookup.json", {MM: [{**tile, parameter: value}, tile]})

    assert (len(found.hints), found.rejected) == (1, 1)
    assert f"{parameter} is {value!r}, expected a whole number" in found.reasons[0]


X, W = "(torch.bfloat16, [8, 1024], [1024, 1])", "(torch.bfloat16, [1024, 2048], [1, 1024])"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (f"({X}, {W}, (torch.bfloat16, [s1, 2048], [1, 1024]))+mm", "is not a type, a size and strides in numbers"),
        (f"({X}, (torch.bfloat16, [s0, 2048], [1, 1024]))+mm", "is not a type, a size and strides in numbers"),
        (f"((torch.bfloat16, [{10**20}, 8, 1024], [8192, 1024, 1]), {W})+mm", "cannot be read"),
        (f"({X}, (torch.bfloat16, [512, 2048], [1, 512]))+mm", "does not fit"),
        (f"({X}, {W})+bmm", "does not fit"),
        (f"({X}, {W}, {W})+mm", "mm of 3 operands"),
        (f"((torch.float32, [2048], [1]), {X}, {W})+alpha=1&beta=1+addmm", "adds fp32 of size [2048]"),
        (f"((torch.bfloat16, [7], [1]), {X}, {W})+alpha=1&beta=1+addmm", "adds bf16 of size [7]"),
        (f"((torch.bfloat16, [2048], [1]), {X}, {W})+alpha=2&beta=1+addmm", "alpha=2&beta=1"),
        (f"({X}, {W})+conv", "operation conv"),
    ],
)
def test_a_key_of_inductors_that_names_no_product_is_kept_with_the_reason(key: str, why: str, tmp_path: Path) -> None:
    found = read(tmp_path, "lookup.json", {key: [{"template_id": "aten::mm"}], MM: [{"template_id": "aten::mm"}]})

    assert [hint.problem for hint in found.hints] == [None, Problem(m=8, n=2048, k=1024, layout="nt")]
    ((said, number),) = found.kept.items()
    assert number == 1 and why in said


def test_a_table_put_behind_another_with_its_byte_order_mark_is_read(tmp_path: Path) -> None:
    row = f"{ROW},1.5,k,0.0,1,1"
    found = read(tmp_path, "bf16_tuned_gemm.csv", f"\ufeff{BF16}\n16,{row}\n\ufeff{BF16}\n32,{row}\n\ufeff64,{row}\n")

    assert [hint.problem.m for hint in found.hints if hint.problem] == [16, 32, 64] and not found.rejected


def test_of_two_columns_of_times_the_one_that_is_read_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, "bf16_tuned_gemm.csv", f"{BF16},duration\n16,{ROW},1.5,k,0.0,1,1,9.9\n")

    assert found.hints[0].us == 1.5
    assert any("columns us, duration all tell times: us is read" in note for note in found.notes)


def test_a_last_row_that_is_refused_is_not_said_to_be_read(tmp_path: Path) -> None:
    found = read(tmp_path, "bf16_tuned_gemm.csv", f"{BF16}\n16,{ROW},1.5,k,0.0,1,1\n32,{ROW},1.5")

    assert (len(found.hints), found.rejected) == (1, 1) and "the file was cut there" in found.reasons[0]
    assert not any("read as it stands" in note for note in found.notes)
