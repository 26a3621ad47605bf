"""Files of TunableOp, vLLM, SGLang and of AITER's Triton kernels: names and lines that nobody foresaw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import read_any
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.problem import Problem

TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
H200 = "device_name=NVIDIA_H200"
BLOCK = "dtype=fp8_w8a8,block_shape=[128,128]"


def read(path: Path, entries: dict[str, Any]) -> Imported:
    path.write_text(json.dumps(entries))
    return read_any(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "ScaledGemmTunableOp_Float8_e4m3fnuz_NN,nn_64_4_32_ld_64_32_64_rw_0_bias_None,Default,0.3",
            "with these types",
        ),
        ("GemmTunableOp_Float8_e4m3fn_TN,tn_64_4_32,Default,0.3", "with these types"),
        ("GemmTunableOp_c10::complex<float>_TN,tn_64_4_32,Default,0.3", "with these types"),
        ("GemmTunableOp_Half_TN,tn_64_4_32_B_7,Default,0.3", "Gemm with a batch (B) in its sizes"),
        ("GemmStridedBatchedTunableOp_Half_TN,tn_64_4_32,Default,0.3", "without a batch (B) in its sizes"),
        ("GemmTunableOp_Half_TN,tn_64_4_32_ld_32_32_64_rw_1,Default,0.3", "rw_1 in the sizes"),
        ("GemmTunableOp_Half_TN,tn_64_4_32_bias_Half,Default,0.3", "bias_Half in the sizes"),
        ("GemmTunableOp_Half_TN,tn_64_0_32,Default,0.3", "m is 0"),
    ],
)
def test_a_product_that_tunable_op_does_not_have_is_kept_with_the_reason(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tunableop_results0.csv"
    path.write_text(f"Validator,PT_VERSION,2.6.0\n{line}\n")

    found = read_any(path)

    assert (len(found.hints), found.used, found.rejected) == (1, 0, 0)
    assert said in next(iter(found.kept))


def test_what_is_no_time_of_tunable_ops_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "tunableop_results0.csv"
    times = ["nan", "inf", "-1", "0", "", "None", "0.25"]
    lines = [f"GemmTunableOp_Half_TN,tn_64_{m}_32,Gemm_Hipblaslt_TN_14,{t}\n" for m, t in enumerate(times, 1)]
    path.write_text("Validator,PT_VERSION,2.3.0\n" + "".join(lines))

    found = read_any(path)

    assert [hint.problem for hint in found.hints] == [Problem(m=m, n=64, k=32, dtype="fp16") for m in range(1, 8)]
    assert [hint.us for hint in found.hints] == [None] * 6 + [250.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"N=64,K=256,{H200},{BLOCK}", ""),
        (f"K=256,N=64,{H200},dtype=fp8_w8a8,block_shape=[128, 128]", ""),
        (f"N=64,K=256,{BLOCK}", "device_name is missing and does not tell which fp8"),
        (f"N=64,K=256,device_name=AMD_Radeon_Graphics,{BLOCK}", "AMD_Radeon_Graphics does not tell which fp8"),
        (f"N=64,K=256,{H200},{BLOCK}_down", "_down"),
        (f"N=64,K=256,{H200},dtype=int8_w8a8,{BLOCK}", "dtype stands twice"),
        (f"N=64,N=128,K=256,{H200},{BLOCK}", "N stands twice"),
        (f"N=64,K=256,B=4,{H200},{BLOCK}", "B=4 in the file's name"),
        (f"N=64,K=256,{H200},{BLOCK},per_channel_quant=True", "per_channel_quant=True in the file's name"),
        (f"N=64,K=256,{H200},dtype=fp8_w8a8,block_shape=[1,128]", "block_shape=[1,128]: no problem"),
        (f"N=64,K=256,{H200},dtype=int4_w4a16", "dtype=int4_w4a16: no problem"),
        (f"E=8,N=64,{H200},dtype=fp8_w8a8,per_channel_quant=True", "neither the model's width nor top-k"),
        (f"E=8,N=64,K=256,{H200},{BLOCK}_down", "neither the model's width nor top-k"),
        (f"N=64,K=256,{H200},{BLOCK} (1)", "name tells neither"),
    ],
)
def test_a_dense_tile_file_is_read_where_its_name_tells_all_of_the_product(
    name: str, said: str, tmp_path: Path
) -> None:
    found = read(tmp_path / f"{name}.json", {"1": TILE, "16": TILE})

    if said:
        assert (found.used, len(found.hints), found.rejected) == (0, 2, 0)
        assert said in next(iter(found.kept))
    else:
        assert [hint.problem for hint in found.hints] == [
            Problem(family="scaled", m=m, n=64, k=256, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128")
            for m in (1, 16)
        ]


@pytest.mark.parametrize("size", ["16", True, 0, -16, 1.5, None, [16]])
def test_a_tile_whose_sizes_are_no_whole_numbers_is_refused_by_name(size: object, tmp_path: Path) -> None:
    found = read(tmp_path / f"N=64,K=256,{H200},{BLOCK}.json", {"1": TILE, "8": {**TILE, "BLOCK_SIZE_M": size}})

    assert (found.used, found.rejected) == (1, 1)
    assert "entry '8': BLOCK_SIZE_M is" in found.reasons[0]


@pytest.mark.parametrize("kernel", ["BATCHED_GEMM-A16W16", "BATCHED_GEMM-AFP4WFP4"])
def test_a_batched_tile_without_a_number_of_matrices_is_for_all_of_them(kernel: str, tmp_path: Path) -> None:
    every = read(tmp_path / f"gfx950-{kernel}-N=128-K=512.json", {"M_LEQ_16": TILE})
    some = read(tmp_path / f"gfx950-{kernel}-B=16-N=128-K=512.json", {"M_LEQ_16": TILE})

    assert (every.used, every.kept) == (0, {f"a tile of kernel {kernel} for every number of matrices (B)": 1})
    assert [hint.problem and hint.problem.batch for hint in some.hints] == [16]
    odd = read(tmp_path / "gfx950-GEMM-A16W16-B=16-N=128-K=512.json", {"M_LEQ_16": TILE})
    assert odd.used == 0


PARTS = st.lists(
    st.sampled_from([
        "E=8", "N=64", "K=256", "N=0", "B=4", "M=3", "device_name=NVIDIA_H200", "device_name=AMD_Instinct_MI300X",
        "dtype=fp8_w8a8", "dtype=int8_w8a8", "dtype=fp8_w8a8_per_token", "dtype=", "block_shape=[128,128]",
        "block_shape=[64, 64]", "per_channel_quant=True", "input_dtype=float8_e4m3fn", "out_dtype=bfloat16",
        "out_dtype=odd", "_down", "gfx950-GEMM-A16W16", "GEMM-A8W8_BLOCKSCALE-N=64-K=256", "BATCHED_GEMM-AFP4WFP4",
    ]),
    min_size=1, max_size=7,
)  # fmt: skip
KEYS = st.lists(st.sampled_from(["1", "16", "M_LEQ_16", "any", "small", "x", "triton_version"]), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, keys=KEYS)
def test_no_name_of_a_tile_file_makes_a_reader_stop_or_a_row_of_another_product(
    parts: list[str], keys: list[str], tmp_path: Path
) -> None:
    path = tmp_path / f"{','.join(parts)}.json"
    try:
        found = read(path, dict.fromkeys(keys, TILE))
    except TableError as err:
        assert path.name in str(err)
        return

    assert len(found.hints) + found.rejected == len(set(keys) - {"triton_version"}) or found.format == "triton-json"
    for hint in found.hints:
        if hint.problem is not None and found.format != "triton-json":
            named = [part.partition("=")[0] for part in parts]
            assert named.count("N") == named.count("K") == named.count("dtype") == 1
            assert {"E", "B", "M", "_down", "per_channel_quant"}.isdisjoint(named)
            assert (hint.problem.n, hint.problem.k) == (64, 256)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        ("PK\x03\x04\x14\x00", "a zip archive or a spreadsheet"),
        ("PAR1\x15\x04", "a Parquet file"),
        ("SQLite format 3\x00", "an SQLite database"),
        ("\n<!DOCTYPE html>\n", "a web page"),
        ("Git Version: 8b71e7a\ntransA,transB,batch_count,m,n,k,solution_index\n", "a tuning file of hipBLASLt"),
        ("transA,transB,M,N,batch_count,K,us,solution_index\nT,N,64,8,1,32,9,5\n", "a list of rocBLAS or hipBLASLt"),
        ("- {function: matmul, M: 4096, N: 8, K: 4096}\n", "a log of calls of rocBLAS or hipBLASLt"),
        ("Problem,Provider,OperationKind,Operation,gemm_kind,m,n,k\n", "of CUTLASS's profiler"),
        ("sep=;\nM;N;K\n1;2;3\n", "take that line out"),
        ("8,4096,4096\n16,4096,4096\n", "a list without a header"),
        ("8 4096 4096\n", "a list without a header"),
    ],
)
def test_what_is_no_table_is_refused_by_what_it_is(start: str, said: str, tmp_path: Path) -> None:
    for name in ("bf16_tuned_gemm.csv", "table.json"):
        path = tmp_path / name
        path.write_text(start)
        with pytest.raises(TableError, match=f"{name}: it is {said}" if "line" not in said else said):
            read_any(path)


def test_a_token_visits_no_more_experts_than_there_are(tmp_path: Path) -> None:
    header = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
    row = "16,512,256,{},8,ActivationType.Silu,torch.bfloat16,torch.bfloat16,torch.bfloat16,QuantType.No,1,0"
    path = tmp_path / "untuned_fmoe.csv"
    path.write_text("\n".join([header, row.format(8), row.format(4)]) + "\n")

    found = read_any(path)

    assert (found.used, found.kept) == (1, {"no problem of gemmtuned's: topk is 8, of 4 experts": 1})
