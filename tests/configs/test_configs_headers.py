"""Headers of tables, mutated: never a wrong problem, never a row that nobody counts."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import BESIDE
from published import DATA as PUBLISHED

from gemmtuned.configs.aiter_csv import read_file, read_lines
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import problem_of, time_of
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import read_any, rows_in
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import UserTables
from gemmtuned.hooks.user_tables import UserLoader

DATA = Path(__file__).parents[1] / "data/aiter"
FILES = sorted(path for path in DATA.rglob("*.csv") if 200 < path.stat().st_size < 60_000)
TEXTS = {path: path.read_text().split("\n") for path in FILES}
ROWS = 40  # of each are enough
NEW_NAMES = ("x", "alpha", "group_size", "a_dtype", "transA", "dtypes", "M2", "layout", "quant", "N_pad", "m", "split")
COLUMN = st.integers(0, 60)
MUTATION = st.one_of(
    st.tuples(st.just("rename"), COLUMN, st.sampled_from(NEW_NAMES)),
    st.tuples(st.just("drop"), COLUMN, st.just("")),
    st.tuples(st.just("drop with its cells"), COLUMN, st.just("")),
    st.tuples(st.just("add"), COLUMN, st.sampled_from(NEW_NAMES)),
    st.tuples(st.just("move with its cells"), COLUMN, st.just("")),
    st.tuples(st.just("glue to the next"), COLUMN, st.just("")),
    st.tuples(st.just("glue the first row"), COLUMN, st.just("")),
    st.tuples(st.just("mark, line ends, remarks"), COLUMN, st.just("")),
    st.tuples(st.just("other separator"), COLUMN, st.sampled_from([";", "\t", "|"])),
    st.tuples(st.just("cut the last row"), COLUMN, st.just("")),
    st.tuples(st.just("double"), COLUMN, st.just("")),
    st.tuples(st.just("double with its cells"), COLUMN, st.just("")),
    st.tuples(st.just("take the name away"), COLUMN, st.just("")),
    st.tuples(st.just("swap two names"), COLUMN, st.just("")),
    st.tuples(st.just("leave the first cell out"), COLUMN, st.just("")),
    st.tuples(st.just("conflict"), COLUMN, st.just("")),
)
# What a table of an age without these columns says: a product of that age, which is another one than with them
SIZES = {
    "M", "N", "K", "B", "token", "model_dim", "inter_dim", "expert", "topk", "cu_num", "gfx", "q_dtype_a", "q_dtype_w",
    "dtype", "outdtype", "scaleAB", "bias", "bpreshuffle", "use_g1u1", "doweight_stage1",
}  # fmt: skip
AGES = {"q_dtype_w", "bpreshuffle", "bias", "outdtype", "scaleAB", "dtype", "gfx", "cu_num", "gate_mode"}


def original(path: Path) -> tuple[list[str], list[list[str]]]:
    header, *lines = [line.rstrip("\r\t ") for line in TEXTS[path] if line.strip(", \t\r")]
    columns = header.rstrip(",").split(",")
    rows = [[cell.strip() for cell in line.split(",")][: len(columns)] for line in lines]
    return columns, [row + [""] * (len(columns) - len(row)) for row in rows][:ROWS]


def mutated(columns: list[str], rows: list[list[str]], mutation: tuple[str, int, str]) -> str:
    """The file's text after one change."""
    kind, place, word = mutation
    at = place % len(columns)
    head, body = [*columns], [[*row] for row in rows]
    if kind == "rename":
        head[at] = word
    elif kind == "drop":
        del head[at]
    elif kind == "drop with its cells":
        del head[at]
        for row in body:
            del row[at]
    elif kind == "add":
        head.insert(at, word)
    elif kind == "move with its cells":
        for row in (head, *body):
            row.append(row.pop(at))
    elif kind.startswith("double"):
        head.append(head[at])
        for row in body if kind.endswith("cells") else ():
            row.append(row[at])
    elif kind == "take the name away":
        head[at] = ""
    elif kind == "swap two names" and at + 1 < len(head):
        head[at], head[at + 1] = head[at + 1], head[at]
    elif kind == "leave the first cell out":
        for row in body:
            del row[0]
    elif kind == "glue to the next" and at + 1 < len(head):
        head[at : at + 2] = [head[at] + head[at + 1]]
    elif kind == "quotes":
        head, *body = [[f'"{cell}"' for cell in row] for row in (head, *body)]
    elif kind == "empty columns at the end":
        head, *body = [[*row, *[""] * (at % 3 + 1)] for row in (head, *body)]
    elif kind == "another table below":
        turn = max(at, 1)
        body[2:] = [row[turn:] + row[:turn] for row in (head, *body[2:])]
    comma = word if kind == "other separator" else ","
    lines = [comma.join(row) for row in (head, *body)]
    if kind == "glue the first row":
        lines[:2] = [lines[0] + lines[1]]
    if kind == "cut the last row":
        row = lines.pop().split(",")
        return "\n".join([*lines, ",".join(row[: max(place % len(row), 1)])])
    if kind == "header again":
        quote = '"' if '"' in word else ""
        lines[3:3] = [quote + word.join(head) + quote]
    if kind == "conflict":
        lines[1:1] = ["<<<<<<< HEAD"]
    if kind == "mark, line ends, remarks":
        return "\ufeff# made by hand\r\n" + "\r\n".join([*lines[:2], "# half time", "", *lines[2:]]) + "\r\n"
    return "\n".join(lines) + "\n"


def problems(text: str, path: Path, tmp_path: Path) -> Iterator[tuple[int, Problem | None]]:
    """(rows counted, problem) of each row that was taken; raises TableError for a refused file."""
    file = tmp_path / path.name
    file.write_bytes(text.encode())
    table = read_file(file)
    for row in table.rows:
        yield len(table.rows) + table.rejected, problem_of(row)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(path=st.sampled_from(FILES), mutation=MUTATION)
def test_a_mutated_header_gives_no_wrong_problem_and_loses_no_row(
    path: Path, mutation: tuple[str, int, str], tmp_path: Path
) -> None:
    columns, rows = original(path)
    plain = "\n".join(",".join(row) for row in (columns, *rows)) + "\n"
    right = {problem for _, problem in problems(plain, path, tmp_path)}

    kind, place, _ = mutation
    expected = len(rows) + (kind == "conflict")
    try:
        found = list(problems(mutated(columns, rows, mutation), path, tmp_path))
    except TableError as err:
        assert path.name in str(err)
        assert rows_in(tmp_path / path.name) == expected - (kind == "glue the first row")
        return

    assert all(counted == expected for counted, _ in found)
    column = columns[place % len(columns)]
    if kind == "drop with its cells" and column in AGES:
        return  # a table of an earlier age, and right as such
    if kind == "swap two names" and {column, *columns[place % len(columns) :][1:2]} <= SIZES:
        return  # a table that says another thing, and says it well
    assert {problem for _, problem in found} <= right | {None}


FIGURES = [path for path in FILES if {"us", "tflops", "M"} <= {*original(path)[0]}]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_two_names_swapped_wherever_they_stand_give_no_wrong_problem(path: Path) -> None:
    """Every pair of a size and a column of another sort: the figures tell, or a cell is no value of its column."""
    columns, rows = original(path)
    sizes = [column for column in columns if column in ("M", "N", "K", "B")]
    plain = [",".join(row) for row in rows]
    right = {problem_of(row) for row in read_lines([",".join(columns), *plain], name=path.name).rows}
    refused = 0
    for size in sizes:
        for other in {*columns} - {*sizes}:
            head = [{size: other, other: size}.get(column, column) for column in columns]
            try:
                table = read_lines([",".join(head), *plain], name=path.name)
            except TableError as err:
                refused += "the wrong way round" in str(err)
                continue
            assert len(table.rows) + table.rejected == len(rows)
            if table.rejected > len(rows) // 2:
                continue  # such a file stops the import by its bad rows
            assert {problem_of(row) for row in table.rows} <= right | {None}, (size, other)

    assert refused


@pytest.mark.parametrize(
    ("kind", "word", "more"),
    [
        ("quotes", "", 0),
        ("empty columns at the end", "", 0),
        ("header again", ",", 0),
        ("header again", ", ", 0),
        ("header again", '","', 0),
        ("another table below", "", 1),
    ],
)
def test_quotes_and_further_headers_give_no_wrong_problem_and_lose_no_row(
    kind: str, word: str, more: int, tmp_path: Path
) -> None:
    for place, path in enumerate(FILES):
        columns, rows = original(path)
        plain = "\n".join(",".join(row) for row in (columns, *rows)) + "\n"
        right = [problem for _, problem in problems(plain, path, tmp_path)]
        found = list(problems(mutated(columns, rows, (kind, place, word)), path, tmp_path))

        assert {counted for counted, _ in found} == {len(rows) + more}, path
        assert [problem for _, problem in found] == (right[:2] if more else right), path


@pytest.mark.parametrize(
    ("header", "name", "said"),
    [
        ("M,N,K,trans_b", "untuned.csv", "column trans_b is not known and could decide"),
        ("M,N,K,bias,outdtype,scaleAB,bpreshuffle", "bf16_untuned_gemm.csv", "column dtype is missing"),
        ("M,N,K,dtype,group_size", "w.csv", "column group_size is not known"),
        ("M,N,K,dtype,q_dtype_w", "w.csv", "column q_dtype_w is of other families' tables"),
        ("M,N,K,K", "untuned.csv", "column K stands twice"),
        ("M,N,K", "qwen_fp8_untuned_gemm.csv", "its name says 'fp8'"),
        ("M,N,K", "w4a16.csv", "its name says 'w4a16'"),
        ("M,N,K", "a8w8_mxfp4_untuned_gemm.csv", "its name says 'mxfp4'"),
        ("m,n,k", "shapes.csv", "the header is"),
        ("M,N,K,Libtype,us", "bf16_tuned_gemm.csv", "column Libtype is libtype in AITER's tables: rename it"),
        ("M,N,K,dtype,out_dtype", "bf16_untuned_gemm.csv", "column out_dtype is outdtype in AITER's tables"),
        ("M,N,K,dtype,Scale_AB", "bf16_untuned_gemm.csv", "column Scale_AB is scaleAB in AITER's tables"),
        ("gfx,m,n,k,libtype,us", "bf16_tuned_gemm.csv", "column m is M in AITER's tables, where capitals count"),
        ("M N K us", "bf16_tuned_gemm.csv", "cells are parted by ' ', expected commas"),
        ("M:N:K:us", "bf16_tuned_gemm.csv", "cells are parted by ':', expected commas"),
        ("M,N,K,q_dtype_w", "my_bf16.csv", "neither the header nor the file's name"),
        ("M,N,K", "qwen3_next_per1x128_untuned.csv", "its name says 'per1x128'"),
        ("B,M,N,K", "list.csv", "neither the header nor the file's name"),
        ("<<<<<<< HEAD", "bf16_tuned_gemm.csv", "a merge conflict stands in it"),
    ],
)
def test_a_column_or_a_name_that_could_decide_is_refused_by_name(header: str, name: str, said: str) -> None:
    with pytest.raises(TableError, match=said):
        read_lines([header, "8,8,8,8,8,8,8"], name=name)


def test_rows_below_another_header_are_refused_and_below_the_same_one_they_are_read() -> None:
    lines = ["M,N,K,dtype\n", "1,8,16,bf16\n", '"M","N", K,"dtype"\r\n', "2,8,16,bf16\n", "N,K,M\n", "8,16,4\n"]
    table = read_lines(lines, name="u.csv")

    assert [problem_of(row) for row in table.rows] == [Problem(m=1, n=8, k=16), Problem(m=2, n=8, k=16)]
    assert table.rejected == 2
    assert "line 5, a header with other columns" in table.complaints[0]
    assert "line 6, it stands below another header, that of line 5" in table.complaints[1]


@pytest.mark.parametrize(
    "other", ["N,M,K,dtype", "#N,M,K,dtype", "# N, M, K, dtype", "n,m,k,DTYPE", "rows,cols,depth,type"]
)
def test_however_another_header_is_written_nothing_below_it_is_read(other: str) -> None:
    table = read_lines(["M,N,K,dtype\n", "1,8,16,bf16\n", f"{other}\n", "8,1,16,bf16\n"], name="u.csv")

    assert [problem_of(row) for row in table.rows] == [Problem(m=1, n=8, k=16)]
    assert table.rejected == 2 and "line 3, a header with other columns" in table.complaints[0]


@pytest.mark.parametrize("remark", ["# by hand", "#M,N,K,dtype", "# 8,1,16,bf16", "// N by K of a layer, and M"])
def test_remarks_among_the_rows_hide_none(remark: str) -> None:
    table = read_lines(["# N,M,K,dtype\n", "M,N,K,dtype\n", f"{remark}\n", "1,8,16,bf16\n"], name="u.csv")

    assert [problem_of(row) for row in table.rows] == [Problem(m=1, n=8, k=16)]
    assert table.rejected == 0


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("M,N,K\n1,8,16\n".encode("utf-16"), "UTF-16 text: save it as UTF-8"),
        ("M,N,K\n1,8,16\n".encode("utf-16-be"), "UTF-16 text: save it as UTF-8"),
        (gzip.compress(b"M,N,K\n1,8,16\n", mtime=0), "compressed, as by gzip: unpack it first"),
        (b"\x02M,N,K\n1,8,16\n", "control characters"),
    ],
    ids=["utf-16", "utf-16-be", "gzip", "control"],
)
def test_a_file_of_another_encoding_is_refused_by_what_it_is(raw: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bf16_untuned_gemm.csv"
    path.write_bytes(raw)

    with pytest.raises(TableError, match=said):
        read_any(path)


def test_a_column_is_read_over_where_somebody_says_so_and_remarks_always_are() -> None:
    lines = ["M,N,K,dtype,trans_b,note,tuned_at_time,speedup_vs_torch", "8,16,32,bf16,0,mine,today,2.0"]

    (row,) = read_lines(lines, name="u.csv", ignore=("trans_b",)).rows

    assert problem_of(row) == Problem(m=8, n=16, k=32)
    assert row["trans_b"] == "0"


def test_other_ages_tell_their_time_and_device_in_other_words() -> None:
    key = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
    moe = "16,4096,384,128,8,ActivationType.Silu,torch.bfloat16,dtypes.fp8,aiter.dtypes.fp8,QuantType.per_Token,1,0"
    lines = [
        f"arch,cu_num,{key},us1,us2",
        f"gfx942,304,{moe},10.5,-1",
        f"gfx942,304,{moe},10.5,4.5",
        f"nan,304,{moe},,",
    ]
    rows = read_lines(lines, name="tuned_fmoe.csv").rows

    assert [time_of(row) for row in rows] == [None, 15.0, None]
    assert {problem_of(row).wdtype for row in rows} == {"fp8_e4m3fnuz"}  # type: ignore[union-attr]
    int4 = moe.replace("aiter.dtypes.fp8", "torch.uint32").replace("dtypes.fp8", "torch.bfloat16")
    minus = moe.replace(",128,8,", ",128,-1,")
    rows = read_lines([key, int4, minus, moe.replace("aiter.dtypes.fp8", "mxfp8")], name="untuned_fmoe.csv").rows
    assert [problem and problem.wdtype for problem in map(problem_of, rows)] == ["i4", None, None]


def test_the_last_row_of_a_file_that_was_cut_is_told() -> None:
    header = "M,N,K,bias,dtype\n"
    cut = read_lines([header, "8,8,8,False,bf16\n", "16,640,10"], name="untuned_gemm.csv")
    whole = read_lines([header, "16,640,1024,False,bf16"], name="untuned_gemm.csv")

    last = read_lines([header, "8,8,8,False,bf16\n", "16,640,1024,False"], name="untuned_gemm.csv")

    assert cut.complaints == [
        "untuned_gemm.csv line 3, it ends after 3 of 5 cells and without a line end: the file was cut there"
    ]
    assert len(last.complaints) == 1 and "it ends after 4 of 5 cells" in last.complaints[0], "its type is in doubt"
    assert whole.notes == ["untuned_gemm.csv line 2: the last row has no line end; read as it stands"]


def test_the_header_that_the_first_row_is_glued_to_is_taken_apart() -> None:
    header = ",".join(FAMILIES["bf16"].tuned_header)
    row = "gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,asm,5,13,7.9,k,0.0,21.19,417.92"
    table = read_lines([f"{header}{row}\n", f"{row}\n"], name="bf16_tuned_gemm.csv")

    assert [r.values for r in table.rows] == [table.rows[1].values] * 2
    assert "the first row stands on the header's line" in table.notes[0]


def test_dense_block_scale_tiles_are_of_the_scaled_family_and_mixtures_are_kept(tmp_path: Path) -> None:
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    names = {
        "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json": "fp8_e4m3",
        "N=2112,K=7168,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape=[128, 128].json": "fp8_e4m3fnuz",
        "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[64,128].json": None,
        "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128],odd=1.json": None,
        "E=8,N=2112,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json": None,
        "renamed.json": None,
    }
    for name, dtype in names.items():
        (tmp_path / name).write_text(json.dumps({"1": tile, "64": tile}))
        found = read_any(tmp_path / name)
        assert len(found.hints) == 2 and found.rejected == 0
        made = [hint.problem for hint in found.hints]
        if dtype is None:
            assert made == [None, None] and found.used == 0 and found.kept.total() == 2
        else:
            assert made == [
                Problem(family="scaled", m=m, n=2112, k=7168, dtype=dtype, out_dtype="bf16", scale="1x128")
                for m in (1, 64)
            ]


def written(path: Path) -> int:
    """Rows that a CSV file holds, counted without the reader."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    lines = [line for line in lines if line.strip(",;| \t") and not line.lstrip().startswith(("#", "//"))]
    return sum(line != lines[0] for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published data: PUBLISHED_DATA says where it is")
def test_every_row_and_weight_of_the_published_data_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))

    command = [sys.executable, "-m", "gemmtuned", "import", "--dry-run", "--json", str(PUBLISHED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert done.returncode in (0, 1), done.stderr
    files = json.loads(done.stdout)["files"]
    with capsys.disabled():
        print(f"\n{'file':76} {'format':14} {'family':24} rows used refused")
        for one in files:
            shown = one["path"].removeprefix(str(PUBLISHED))[-76:]
            what = f"{one['format'] or '-':14} {one['family'] or '-':24}"
            print(f"{shown:76} {what} {one['rows']:4} {one['used']:4} {one['refused']:7}")
            if one["reasons"]:
                print(f"    {one['reasons'][0]}")
    assert files
    for one in files:
        assert one["rows"] == one["used"] + one["refused"], one
        assert one["refused"] == one["rejected"] + sum(one["kept"].values()), one
        assert not one["rejected"] or one["reasons"], one
        if one["format"] == "aiter-csv":
            glued = sum("stands on the header's line" in note for note in one["notes"])
            assert one["rows"] == written(Path(one["path"])) + glued, one
    if PUBLISHED == BESIDE:  # nothing in it is bad
        assert len(files) > 100 and done.returncode == 0
        assert not any(one["rejected"] for one in files)


@pytest.mark.soak
def test_a_hundred_thousand_rows_are_in_the_database_in_ten_seconds_and_ten_times_their_size(tmp_path: Path) -> None:
    header = ",".join(FAMILIES["bf16"].tuned_header)
    path = tmp_path / "bf16_tuned_gemm.csv"
    row = (
        "5120,False,torch.bfloat16,torch.float32,False,False,asm,5,13,7.9{i},_ZN5aiter39bf16gemm_fp32bf16_tnE,0.0,{t},4"
    )

    def line(i: int) -> str:
        m, n = i % 8192 + 1, 256 + i // 8192
        return f"gfx950,256,{m},{n},{row.format(i=i, t=round(2 * m * n * 5120 / float(f'7.9{i}') / 1e6, 4))}\n"

    with path.open("w") as file:
        file.write(f"{header}\n")
        file.writelines(map(line, range(100_000)))
    code = """if True:
        import resource, sys, time
        from gemmtuned.cli import main
        import gemmtuned.commands.import_, gemmtuned.db.store
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            sys.argv[1:1] = ["import"]
            main()
        except SystemExit:
            pass
        after = resource.getrusage(resource.RUSAGE_SELF)
        print(after.ru_utime + after.ru_stime, (after.ru_maxrss - before) * 1024)
    """
    env = {"PATH": "/usr/bin:/bin", "GEMMTUNED_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=110, env=env)

    assert "100,000 rows kept" in done.stdout, done.stderr
    took_s, grown = map(float, done.stdout.splitlines()[-1].split())
    assert took_s < 10
    assert grown < 10 * path.stat().st_size


@pytest.mark.parametrize("one, other", [(",", ";"), (",", "\t"), (";", ","), ("|", ",")])
def test_a_row_parted_by_another_sign_than_the_header_is_refused_by_both(one: str, other: str) -> None:
    lines = [one.join(("M", "N", "K", "us")), one.join("8885"), other.join("8885")]

    table = read_lines(lines, name="bf16_tuned_gemm.csv")

    assert len(table.rows) == 1
    assert table.complaints == [
        f"bf16_tuned_gemm.csv line 3, its cells are parted by {other!r}, those of the header by {one!r}"
    ]


def test_rows_that_aiters_look_up_never_asks_for_are_told(tmp_path: Path) -> None:
    key = "token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1"
    row = "4096,384,128,8,ActivationType.Silu,bf16,bf16,bf16,QuantType.No,1,0"
    path = tmp_path / "untuned_fmoe.csv"
    path.write_text("\n".join([key, *(f"{tokens},{row}" for tokens in (64, 96, 128, 192))]) + "\n")

    assert read_any(path).notes == [f"{path}: 2 rows are for token counts that AITER's look-up never asks for"]


def test_a_table_of_which_nothing_is_used_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty, others = tmp_path / "empty.csv", tmp_path / "others.csv"
    empty.write_text("M,N,K,dtype,libtype,us\n")
    others.write_text("gfx,cu_num,M,N,K,dtype,libtype,us\ngfx942,304,8,8,8,bf16,asm,5\n")
    loader = UserLoader([UserTables("AITER_CONFIG_GEMM_BF16", "bf16", (empty, others))])

    with caplog.at_level("WARNING", "gemmtuned.hooks"):
        loader.load()
        loader.load()

    said = [record.getMessage() for record in caplog.records]
    assert [("0 of 0 rows" in one, "0 of 1 rows" in one) for one in said] == [(True, False), (False, True)]
