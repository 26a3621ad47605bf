"""A header that names two columns the wrong way round is refused where the rows' own figures tell it."""

from __future__ import annotations

import pytest

from gemmtuned.configs.aiter_csv import read_lines
from gemmtuned.configs.errors import TableError

BATCHED = "gfx,cu_num,B,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
PLAIN = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
SHAPES = [(1, 1280, 8192), (16, 2112, 7168), (64, 7168, 2304), (512, 4096, 512), (4, 64, 128)]


def rows(header: str, *, us: float = 10.0, figure: float = 1.0) -> list[str]:
    """Of kernels 1 to 5, with the figures of their operations, times `figure`."""
    lines = []
    for number, (m, n, k) in enumerate(SHAPES, 1):
        batch = 8 if "B" in header.split(",") else 1
        tflops = 2 * batch * m * n * k / us / 1e6 * figure
        found = {
            "gfx": "gfx942", "cu_num": 304, "B": batch, "M": m, "N": n, "K": k, "libtype": "ck", "kernelId": number,
            "splitK": 0, "us": us, "kernelName": f"name{number}", "tflops": f"{tflops:.2f}", "bw": 100.0, "errRatio": 0,
        }  # fmt: skip
        lines.append(",".join(str(found[column]) for column in header.split(",")))
    return lines


def named(header: str, one: str, other: str) -> str:
    return ",".join({one: other, other: one}.get(column, column) for column in header.split(","))


@pytest.mark.parametrize("header, name", [(BATCHED, "a8w8_tuned_batched_gemm.csv"), (PLAIN, "a8w8_tuned_gemm.csv")])
@pytest.mark.parametrize("size", ["M", "N", "K"])
@pytest.mark.parametrize("other", ["kernelId", "cu_num"])
def test_sizes_exchanged_with_another_number_are_refused_by_name(header: str, name: str, size: str, other: str) -> None:
    lines = [named(header, size, other), *rows(header)]
    with pytest.raises(TableError, match=f"contradict {size}, and fit what stands under {other}"):
        read_lines(lines, name=name)


def test_the_first_line_that_shows_it_is_told() -> None:
    first, *others = rows(PLAIN)
    silent = first.replace(",10.0,", ",nan,")
    with pytest.raises(TableError, match=r"Line 3: 10\.0 us at 2\.10 tflops fit a K of 8192, not of 1$"):
        read_lines([named(PLAIN, "K", "kernelId"), silent, first, *others], name="a8w8_tuned_gemm.csv")


def test_a_batch_exchanged_with_a_number_is_refused() -> None:
    with pytest.raises(TableError, match="contradict B, and fit what stands under kernelId"):
        read_lines([named(BATCHED, "B", "kernelId"), *rows(BATCHED)], name="a8w8_tuned_batched_gemm.csv")


@pytest.mark.parametrize(
    "us, figure",
    [(10.0, 1.0), (0.01, 1e-3), (10.0, 10.0), (10.0, 0.0)],
    ids=["as it is", "times in ms", "figures left behind", "none"],
)
def test_figures_of_another_unit_refuse_no_table(us: float, figure: float) -> None:
    """AITER's own minimax_m3_bf16_tuned_gemm.csv has its times in milliseconds."""
    table = read_lines([PLAIN, *rows(PLAIN, us=us, figure=figure)], name="a8w8_tuned_gemm.csv")
    assert [(row["M"], row["N"], row["K"]) for row in table.rows] == [tuple(map(str, shape)) for shape in SHAPES]
    assert not table.rejected


def test_a_few_rows_with_figures_of_others_cost_nothing() -> None:
    lines = rows(PLAIN)
    copied = [lines[0].replace("gfx942,304,1,", "gfx942,304,32,")] * 2
    table = read_lines([PLAIN, *copied, *lines], name="a8w8_tuned_gemm.csv")
    assert len(table.rows) == len(lines) + 2
