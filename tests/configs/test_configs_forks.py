"""Tables of AITER's forks and of what people make of them: pandas, spreadsheets, other units, names that contradict."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtuned.configs.aiter_csv import read_lines
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_names import canonical_name, contradiction
from gemmtuned.configs.aiter_rows import problem_of, problem_or_reason
from gemmtuned.configs.aiter_untuned import read_untuned
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import read_any, rows_in
from gemmtuned.configs.problem import Problem
from gemmtuned.reports.tuned_files import TunedTable

HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
ROW = "gfx950,256,{m},1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,3,2,{us},_ZN5k,0.0,{tflops},2800"
RIGHT = [Problem(m=m, n=1280, k=8192) for m in (16, 32, 64)]


def rows(times: float = 1.0) -> list[str]:
    sizes = ((16, 7.5), (32, 8.25), (64, 10.5))
    return [ROW.format(m=m, us=us * times, tflops=f"{2 * m * 1280 * 8192 / us / 1e6:.2f}") for m, us in sizes]


GRADLIB = "M,N,K,bias,dtype,libtype,solidx,soltimes"


def test_vllms_gradlib_has_the_weights_rows_under_m_and_milliseconds() -> None:
    """Its TunedGemm asks for m = weights.shape[0], n = inp.shape[0]: AITER's first commit had that, too."""
    table = read_lines([GRADLIB, "12288,8,4096,True,torch.float16,hipblaslt,1234,0.0123"], name="mistral_tuned.csv")
    (row,) = table.rows

    assert problem_of(row) == Problem(m=8, n=12288, k=4096, bias=True, dtype="fp16")
    assert row.us == pytest.approx(12.3)
    assert "vLLM's gradlib" in table.notes[0]
    # written by pandas with its numbers, and without what its first version did not have
    first = read_lines([",M,N,K,libtype,solidx,soltimes", "0,64,8,32,rocblas,1,1.5"], name="tuned.csv", family="bf16")
    assert [problem_of(row) for row in first.rows] == [Problem(m=8, n=64, k=32)]


@pytest.mark.parametrize(
    ("header", "lines", "said"),
    [
        (GRADLIB, ["64,8,32,False,torch.bfloat16,hipblaslt,1,0.5"], "its M and N mean each other"),
        (HEADER.replace(",us,", ",ms,").removesuffix(",tflops,bw"), [rows()[0].rpartition(",44")[0]], "not in micro"),
        (HEADER, rows(1e-3), "its times are not in microseconds"),
    ],
)
def test_no_row_of_ours_goes_into_a_table_that_would_be_read_another_way_with_it(
    header: str, lines: list[str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "bf16_tuned_gemm.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    with pytest.raises(TableError, match=said):
        TunedTable(path, FAMILIES["bf16"])


def test_a_refused_files_rows_are_counted_whatever_its_name(tmp_path: Path) -> None:
    for name in ("table.csv", "table.json", "table.txt"):
        path = tmp_path / name
        path.write_text("M,N,K,trans_b\n1,2,3,0\n#N/A,2,3,0\n")
        with pytest.raises(TableError, match="trans_b"):
            read_any(path)
        assert rows_in(path) == 2


def test_aiters_own_soltimes_are_milliseconds_until_kernel_name_came() -> None:
    early = read_lines(
        ["M,N,K,bias,dtype,outdtype,libtype,solidx,soltimes", "8,64,32,False,bf16,bf16,hipblaslt,1,0.5"],
        name="tuned_gemm.csv",
    ).rows
    later = read_lines(
        ["M,N,K,bias,dtype,outdtype,scaleAB,libtype,solidx,soltimes,kernelName", "8,64,32,0,bf16,bf16,0,rocblas,1,9,x"],
        name="tuned_gemm.csv",
    ).rows

    assert [(problem_of(row), row.us) for row in (*early, *later)] == [
        (Problem(m=8, n=64, k=32), 500.0),
        (Problem(m=8, n=64, k=32), 9.0),
    ]


def test_gradlibs_list_of_shapes_is_told_by_its_name_and_else_the_reading_is_said() -> None:
    lines = ["M,N,K,bias,dtype", "12288,8,4096,False,torch.float16"]
    theirs, ours, anyones = (
        read_lines(lines, name=name) for name in ("/tmp/vllm_untuned.csv", "my_untuned_gemm.csv", "shapes.csv")
    )

    assert [problem_of(row) for row in theirs.rows] == [Problem(m=8, n=12288, k=4096, dtype="fp16")]
    assert [problem_of(row) for row in ours.rows] == [Problem(m=12288, n=8, k=4096, dtype="fp16")]
    assert ours.notes == []
    assert "name it vllm_untuned.csv" in anyones.notes[0]
    tuned = read_untuned(["M,N,K", "12288,8,4096"], name="vllm_untuned.csv", dtype="bf16", threads=0)
    assert tuned.problems == (Problem(m=8, n=12288, k=4096),)


@pytest.mark.parametrize("index", ["", "Unnamed: 0", "index"])
def test_the_numbers_of_a_data_frame_are_no_column(index: str) -> None:
    lines = [f"{index},{HEADER}", *(f"{7 * number},{row}" for number, row in enumerate(rows()))]
    table = read_lines(lines, name="bf16_tuned_gemm.csv")

    assert [problem_of(row) for row in table.rows] == RIGHT
    assert table.complaints == []


def test_a_nameless_first_column_that_numbers_no_rows_is_refused() -> None:
    lines = [f",{HEADER.removeprefix('gfx,')}", *rows()]
    table = read_lines(lines, name="bf16_tuned_gemm.csv")
    same = read_lines([",M,N,K,dtype", "256,8,64,32,bf16", "256,16,64,32,bf16"], name="bf16_untuned_gemm.csv")

    assert (len(table.rows), table.rejected) == (0, 3)
    assert "line 2, cell 1 stands under a column without a name, and numbers no rows: 'gfx950'" in table.complaints[0]
    assert (len(same.rows), same.rejected) == (1, 1)


@pytest.mark.parametrize(
    ("column", "times", "said"),
    [
        ("us", 1.0, None),
        ("ms", 1e3, "column ms"),
        ("time_ms", 1e3, "column time_ms"),
        ("Latency (us)", 1.0, "column Latency (us)"),
        ("avg time (µs)", 1.0, "column avg time (µs)"),
        ("duration_ns", 1e-3, "column duration_ns"),
        ("elapsed_seconds", 1e6, "column elapsed_seconds"),
        ("time", None, "column time tells no unit"),
        ("us (ms)", None, None),
        ("torch_us", None, None),
    ],
)
def test_a_time_is_read_in_the_unit_that_its_column_names(column: str, times: float | None, said: str | None) -> None:
    plain = [row.rpartition(",")[0].rpartition(",")[0] for row in rows()]  # without figures that tell the unit
    header = HEADER.replace(",us,", f",{column},").removesuffix(",tflops,bw")
    table = read_lines([header, *plain], name="bf16_tuned_gemm.csv")

    assert [problem_of(row) for row in table.rows] == RIGHT
    assert [row.us for row in table.rows] == [times and pytest.approx(us * times) for us in (7.5, 8.25, 10.5)]
    assert (said is None) == (table.notes == []) and (said or "") in "".join(table.notes)


def test_of_two_columns_with_times_and_none_called_us_neither_is_taken() -> None:
    header = HEADER.replace(",us,", ",mean_us,").replace(",bw", ",min_us")
    table = read_lines([header, *rows()], name="bf16_tuned_gemm.csv")

    assert [row.us for row in table.rows] == [None] * 3
    assert "mean_us, min_us all tell times, and none is called us: none is read" in table.notes[0]


@pytest.mark.parametrize(("times", "unit"), [(1e-3, "milliseconds"), (1e-6, "seconds"), (1e3, "nanoseconds")])
def test_times_that_the_tables_own_tflops_contradict_are_read_in_the_unit_that_fits(times: float, unit: str) -> None:
    """AITER's table of MiniMax-M3 for gfx1250 had milliseconds under us for a week of 2026."""
    table = read_lines([HEADER, *rows(times)], name="bf16_tuned_gemm.csv")

    assert [row.us for row in table.rows] == [pytest.approx(us) for us in (7.5, 8.25, 10.5)]
    assert f"tflops fit times in {unit}" in table.notes[0]
    assert read_lines([HEADER, *rows()], name="bf16_tuned_gemm.csv").notes == []


@pytest.mark.parametrize("nothing", ["nan", "None", "", "NULL", "N/A", "#N/A", "<NA>", "-", "NaN"])
def test_whatever_a_spreadsheet_writes_for_nothing_is_absent_and_costs_no_row(nothing: str) -> None:
    plain = rows()[0]
    lines = [plain.replace("gfx950", nothing), plain.replace("_ZN5k", nothing), plain.replace("7.5", nothing)]
    table = read_lines([HEADER, *lines], name="bf16_tuned_gemm.csv")

    assert (len(table.rows), table.rejected) == (3, 0)
    assert [table.rows[0]["gfx"], table.rows[1]["kernelName"], table.rows[2].us] == ["", "", None]
    bad = read_lines([HEADER, plain.replace("16,1280", f"{nothing},1280")], name="bf16_tuned_gemm.csv")
    assert (len(bad.rows), bad.rejected) == (0, 1)


def test_a_data_type_that_a_row_leaves_open_is_not_guessed() -> None:
    dense = read_lines(["M,N,K,dtype", "1,64,128,", "2,64,128,nan", "4,64,128,fp16"], name="x.csv").rows
    more = read_lines(["M,N,K,bias,dtype,outdtype", "1,2,3,,bf16,bf16", "1,2,3,0,bf16,-"], name="x.csv").rows
    scaled = read_lines(["M,N,K,q_dtype_w", "1,64,128,", "2,64,128,i8"], name="a8w8_untuned_gemm.csv").rows

    assert [problem_or_reason(row) for row in dense] == [
        *["no problem of gemmtuned's: column dtype is empty"] * 2, Problem(m=4, n=64, k=128, dtype="fp16")
    ]  # fmt: skip
    assert [str(problem_or_reason(row)).partition("column ")[2] for row in more] == [
        "bias is empty",
        "outdtype is empty",
    ]
    assert isinstance(problem_or_reason(more[0], dtype="bf16"), Problem)  # `tune --dtype` says what such rows are
    assert "column q_dtype_w is empty" in str(problem_or_reason(scaled[0]))
    assert isinstance(problem_or_reason(scaled[1]), Problem)


@pytest.mark.parametrize(
    ("name", "dtype", "found"),
    [
        ("a8w8_untuned_gemm.csv", "torch.float8_e4m3fn", "fp8_e4m3"),
        ("a8w8_untuned_gemm.csv", "torch.float16", "q_dtype_w is fp16: the weights of family a8w8 are fp8 or i8"),
        ("a8w8_untuned_gemm.csv", "torch.float4_e2m1fn_x2", "q_dtype_w is fp4_e2m1"),
        ("a8w8_blockscale_untuned_gemm.csv", "torch.float8_e4m3fnuz", "fp8_e4m3fnuz"),
        ("a8w8_blockscale_untuned_gemm.csv", "torch.int8", "q_dtype_w is i8: the weights of family a8w8_blockscale"),
        ("a8w8_bpreshuffle_untuned_gemm.csv", "torch.int8", "i8"),
    ],
)
def test_the_weights_data_type_is_the_columns_and_one_that_the_family_has(
    name: str, dtype: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(f"M,N,K,q_dtype_w\n1,64,128,torch.float8_e4m3fn\n2,64,128,{dtype}\n")
    imported = read_any(path)
    problem = imported.hints[1].problem

    assert (
        problem.wdtype if problem else next(iter(imported.kept)).removeprefix("no problem of gemmtuned's: ")
    ).startswith(found)
    assert len(imported.hints) == 2


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a8w8_tuned_gemm.csv", "i8"),
        ("a8w8_fp8_tuned_gemm.csv", "fp8_e4m3"),
        ("a8w8_int8_tuned_gemm.csv", "i8"),
        ("a8w8_tuned_gemm_Qwen3-32B-FP8.csv", "fp8_e4m3"),
        ("a8w8_bpreshuffle_int8_tuned_gemm.csv", "i8"),
        ("a8w8_int8_tuned_gemm_fp8.csv", "speaks of fp8 and of int8"),
    ],
)
def test_without_a_column_the_name_tells_the_8_bit_type(name: str, found: str) -> None:
    (row,) = read_lines(["M,N,K,kernelId,us", "8,64,128,1,5"], name=name).rows
    problem = problem_or_reason(row)

    assert problem.wdtype == found if isinstance(problem, Problem) else found in problem


@pytest.mark.parametrize(
    ("name", "header", "word"),
    [
        ("tuned_gemm_a8w8_fp8_block.csv", "M,N,K,us", "block"),
        ("a8w8_ptpc_bpreshuffle_tuned_gemm.csv", "M,N,K,q_dtype_w,us", "bpreshuffle"),
        ("a8w8_tuned_gemm_bpreshuffle.csv", "M,N,K,q_dtype_w,us", "bpreshuffle"),
        ("a8w8_128x128_tuned_gemm.csv", "M,N,K,us", "128x128"),
        ("a8w8_blockscale_int8_tuned_gemm.csv", "M,N,K,us", "int8"),
        ("a8w8_blockscale_ptpc_untuned_gemm.csv", "M,N,K", "ptpc"),
        ("bf16_grouped_untuned_gemm.csv", "M,N,K", "grouped"),
        ("bf16_bmm_untuned.csv", "M,N,K", "bmm"),
        ("a8w8_tuned_gemm.csv", "M,N,K,dtype,us", "a8w8"),
        ("llama_w4a16.csv", "M,N,K,dtype", "w4a16"),
        ("mixtral_moe.csv", "M,N,K,bias,dtype", "moe"),
        ("deepseek_1x128_shapes.csv", "M,N,K,dtype", "1x128"),
    ],
)
def test_a_name_that_speaks_of_another_product_is_refused_by_its_word(name: str, header: str, word: str) -> None:
    with pytest.raises(TableError, match=rf"{name}: its name says '{word}'"):
        read_lines([header, "1,2,3,4,5"], name=name)


def test_aiters_own_names_contradict_no_family() -> None:
    families = ("bf16", "a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "a4w4_blockscale",
                "batched_bf16", "batched_a8w8")  # fmt: skip
    names = {family: canonical_name(family, kind) for family in families for kind in ("tuned", "untuned")}

    assert {family: contradiction(family, name) for family, name in names.items()} == dict.fromkeys(families, "")
    for model in ("Qwen3-32B-FP8", "mixtral-8x7b", "glm4_moe_lite"):
        assert contradiction("a8w8_blockscale", f"a8w8_blockscale_tuned_gemm_{model}.csv") == ""


def test_a_header_in_capitals_is_no_row_that_is_glued_to_another() -> None:
    with pytest.raises(TableError, match="column BIAS is bias in AITER's tables"):
        read_lines(["M,N,K,BIAS,DTYPE,OUTDTYPE,SCALEAB", "1,2,3,0,bf16,bf16,0"], name="x_bf16_untuned_gemm.csv")


@pytest.mark.parametrize(
    ("column", "cell"), [("state", "torch.int8"), ("label", "fp8"), ("notes", "QuantType.No"), ("count", "True")]
)
def test_a_remark_that_holds_a_data_type_is_none(column: str, cell: str) -> None:
    lines = [f"M,N,K,{column}", "1,2,3,", f"1,2,3,{cell}"]
    with pytest.raises(TableError, match=f"column {column} holds '{cell}'.*--ignore-column {column}"):
        read_lines(lines, name="a8w8_bpreshuffle_untuned_gemm.csv")
    assert len(read_lines(lines, name="a8w8_untuned_gemm.csv", ignore=[column]).rows) == 2
    assert len(read_lines([lines[0], "1,2,3,done"], name="a8w8_untuned_gemm.csv").rows) == 1
    assert len(read_lines(["M,N,K,verified", "1,2,3,True"], name="a8w8_untuned_gemm.csv").rows) == 1


@pytest.mark.parametrize("column", ["per_row", "scale per channel", "in dtype"])
def test_what_may_say_how_something_is_scaled_is_no_remark(column: str) -> None:
    quoted = f"'{column}'" if " " in column else column
    with pytest.raises(TableError, match=f"--ignore-column {quoted},"):
        read_lines([f"M,N,K,dtype,{column}", "1,2,3,bf16,1"], name="x.csv")
    assert read_lines(["M,N,K,dtype,us_per_call", "1,2,3,bf16,1"], name="x.csv").rows[0].us == 1.0
