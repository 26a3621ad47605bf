"""Tables of every age and fork: each is of a known tool, family and age, or says by name why it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hooked import solution

from gemmtuned.configs.aiter_csv import read_lines
from gemmtuned.configs.aiter_rows import problem_of, problem_or_reason, time_of
from gemmtuned.configs.aiter_untuned import read_untuned
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import aiter, read_any
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device


def test_every_header_of_every_age_is_read_as_its_family() -> None:
    lines = (Path(__file__).parents[1] / "data/aiter_ages.txt").read_text().splitlines()
    ages = [line.split(" ", 3) for line in lines if not line.startswith("#")]

    found = [(read_lines([header], name=name).header, family, kind) for family, kind, name, header in ages]

    assert len(found) == 151
    assert [(header.family.name, header.kind) for header, _, _ in found] == [(f, kind) for _, f, kind in found]


def test_a_list_of_shapes_alone_is_kept_and_no_data_type_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "Llama-3.1-8B-Instruct-TP1.csv"  # of AITER's a8w8_gemm_model_config
    path.write_text("M,N,K\n1,6144,4096\n2,6144,4096\n")
    found = read_any(path)

    assert (found.family, found.used, len(found.hints)) == ("shapes", 0, 2)
    assert "--family does" in next(iter(found.kept))
    assert {hint.problem for hint in read_any(path, family="a4w4_blockscale").hints} == {
        Problem.parse(f"scaled:fp4_e2m1>bf16:{m}x6144x4096,scale=1x32") for m in (1, 2)
    }
    assert read_untuned(path.read_text().splitlines(), name=path.name, dtype="fp16", threads=1).problems == tuple(
        Problem(m=m, n=6144, k=4096, dtype="fp16", threads=1) for m in (1, 2)
    )


MOE = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
MIXTURE = "16,4096,384,128,8,ActivationType.Silu,torch.bfloat16,torch.int8,torch.int8,QuantType.per_Token,1,0"


@pytest.mark.parametrize(
    ("columns", "cells", "said"),
    [
        ("bias,hidden_pad,intermediate_pad", "False,0,0", ""),
        ("bias", "True", "bias is True"),
        ("hidden_pad,intermediate_pad", "192,0", "hidden_pad is 192"),
        ("swiglu_limit", "7.0", "swiglu_limit is 7.0"),
        ("swiglu_limit", "", ""),
        ("ep", "8", "ep is 8"),
        ("q_dtype_a2,q_dtype_w2,q_type2", "torch.int8,torch.int8,QuantType.per_Token", ""),
        ("q_dtype_a2,q_dtype_w2,q_type2", "torch.int8,torch.int4,QuantType.No", "q_dtype_w2 is not its"),
        ("stage,us", "stage2,4.0", "stage is stage2"),
        ("block_m,block_m2,us1,us2,total_us", "16,32,3.0,4.0,7.5", ""),
    ],
)  # fmt: skip
def test_a_column_of_some_age_makes_the_row_another_product_only_where_it_says_something(
    columns: str, cells: str, said: str
) -> None:
    (row,) = read_lines([f"{MOE},{columns}", f"{MIXTURE},{cells}"], name="tuned_fmoe.csv").rows
    found = problem_or_reason(row)

    assert isinstance(found, Problem) if not said else said in str(found)
    if "total_us" in columns:
        assert time_of(row) == 7.5


@pytest.mark.parametrize("word", ["torch.int32", "torch.uint32", "torch.int4"])
def test_eight_int4_in_a_word_are_int4_and_no_activations(word: str) -> None:
    rows = [
        MIXTURE.replace("torch.int8,torch.int8", f"torch.float8_e4m3fn,{word}"),
        MIXTURE.replace("torch.int8", word),
    ]
    weights, activations = map(problem_or_reason, read_lines([MOE, *rows], name="untuned_fmoe.csv").rows)

    assert isinstance(weights, Problem) and (weights.wdtype, weights.dtype) == ("i4", "bf16")
    assert "no mixture multiplies it" in str(activations)


def test_a_mixtures_solution_is_a_row_of_aiters_table_and_read_again(tmp_path: Path) -> None:
    problem = Problem(family="moe", m=16, n=2048, k=2048, inter=768, experts=128, topk=8, act="silu_gated")
    device = Device(key="cuda-h200-132", kind="cuda", name="NVIDIA H200", arch="sm_90", units=132)
    written = solution(problem, "triton", device.key, "2.13", us=5.0)
    left = aiter.Left()

    ((name, (columns, rows)),) = aiter.csv_tables([written], {device.key: device}, left).items()

    assert (name, left.out) == ("tuned_fmoe.csv", [])
    cells = dict(zip(columns, rows[0], strict=True))
    key = "16,2048,768,128,8,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0"
    assert ",".join(cells[column] for column in MOE.split(",")) == key
    filled = {column for column, cell in cells.items() if cell} - {*MOE.split(","), "gemmtuned"}
    assert filled == {"gfx", "cu_num", "us", "tflops", "bw", "kernelName1"}
    write_file(tmp_path / name, columns, rows)
    (hint,) = read_any(tmp_path / name).hints
    assert (hint.problem, hint.us, hint.solution) == (problem, 5.0, written)


def test_rows_that_stand_one_column_off_are_refused() -> None:
    header = "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName"
    lines = [header, "gfx950,256,8,64,128,3,0,5.5,k", "256,8,64,128,3,0,5,5.5,k", "256,8,64,128,3,0,5.5,k"]
    found = read_lines(lines, name="a4w4_blockscale_tuned_gemm.csv")

    assert len(found.rows) == 1 and found.rejected == 2
    assert "column gfx: '256' is no architecture" in found.complaints[0]
    nameless = read_lines(["M,N,K,,q_dtype_w", "1,64,128,torch.int8"], name="a8w8_untuned_gemm.csv")
    assert nameless.complaints == [
        "a8w8_untuned_gemm.csv line 2, cell 4 stands under a column without a name: 'torch.int8'"
    ]


def test_shuffled_weights_and_data_types_of_tomorrow_are_no_others() -> None:
    lines = ["M,N,K,libtype,kernelId,preshuffleB,us", "8,64,128,ck,1,False,5", "8,64,128,ck,1,True,4"]
    rows = read_lines(lines, name="a8w8_blockscale_tuned_gemm.csv").rows
    assert [problem.weight_state for problem in map(problem_of, rows) if problem] == ["plain", "shuffled"]

    lines = ["M,N,K,dtype", "8,64,128,nvfp4_bf16", "8,64,128,ck"]
    found = read_lines(lines, name="untuned_gemm.csv")
    assert [problem_or_reason(row) for row in found.rows] == [
        "no problem of gemmtuned's: no word for data type nvfp4_bf16"
    ]
    assert found.rejected == 1


TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}


def test_tiles_say_why_they_are_no_problem(tmp_path: Path) -> None:
    said = {
        "gfx950-GEMM-A8W8-N=64-K=128.json": "int8 or fp8",
        "gfx950-GEMM-A16W16-gated-N=64-K=128.json": "kernel GEMM-A16W16-gated is no problem",
        "gfx950-GEMM-A16W16.json": "for every N and K",
        "gfx950-GEMM-A16W16-N=64-K=128.json": "without a bound",
    }
    for name, why in said.items():
        (tmp_path / name).write_text(
            json.dumps({"_note": "by hand", "medium_M256": TILE, "any": {**TILE, "env_vars": {}}})
        )
        found = read_any(tmp_path / name)
        assert (len(found.hints), found.used, found.rejected) == (2, 0, 0)
        assert why in next(iter(found.kept))
        assert found.notes == [f"{tmp_path / name}: _note: by hand"]
    (tmp_path / "gfx950-MHC_FUSED-C=128.json").write_text(json.dumps({"any": TILE}))
    with pytest.raises(TableError, match="kernel 'gfx950-MHC_FUSED-C=128', which is no matrix product"):
        read_any(tmp_path / "gfx950-MHC_FUSED-C=128.json")


def test_channelwise_tiles_are_scaled_products_with_a_scale_a_row(tmp_path: Path) -> None:
    kind = "N=64,K=128,device_name=AMD_Radeon_R9700,dtype=fp8_w8a8_per_token"
    names = {
        f"{kind},input_dtype=float8_e4m3fn,out_dtype=bfloat16.json": ("fp8_e4m3", "bf16"),
        f"{kind},input_dtype=float8_e4m3fnuz,out_dtype=float16.json": ("fp8_e4m3fnuz", "fp16"),
        f"{kind},input_dtype=int8,out_dtype=float16.json": None,
        f"{kind}.json": None,
    }
    for name, dtypes in names.items():
        (tmp_path / name).write_text(json.dumps({"8": TILE}))
        (hint,) = read_any(tmp_path / name).hints
        if dtypes is None:
            assert hint.problem is None
        else:
            assert hint.problem == Problem(
                family="scaled", m=8, n=64, k=128, dtype=dtypes[0], out_dtype=dtypes[1], scale="row"
            )
