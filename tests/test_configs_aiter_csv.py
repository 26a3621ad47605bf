"""AITER's untuned tables, with the quirks of the files AITER ships."""

from __future__ import annotations

import pytest

from gemmtuned.configs.aiter_csv import read_untuned
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem


def test_an_aiter_table_is_read_with_its_quirks() -> None:
    lines = [
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle",
        "8, 384,7168\t,False,torch.bfloat16,torch.float32,False,False\t",
        ",,,,,,,",
        "",
        "16,384,7168,True,dtypes.fp16,,0,None",
        "32,384,7168",  # trailing columns missing
    ]

    found = read_untuned(lines, name="u.csv", dtype="bf16", threads=2)

    assert found.complaints == ()
    assert found.problems == (
        Problem(m=8, n=384, k=7168, dtype="bf16", out_dtype="fp32", threads=2),
        Problem(m=16, n=384, k=7168, bias=True, dtype="fp16", threads=2),
        Problem(m=32, n=384, k=7168, dtype="bf16", threads=2),
    )


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("x,384,7168,False,torch.bfloat16", "u.csv line 2, column M: 'x' is not a whole number"),
        ("8,0,7168,False,torch.bfloat16", "u.csv line 2, column N: n is 0, expected an integer from 1 to 2147483647"),
        ("8,384,7168,maybe,torch.bfloat16", "u.csv line 2, column bias: 'maybe' is neither True nor False"),
        ("8,384,7168,False,__import__('os')", "u.csv line 2, column dtype: \"__import__('os')\" is no dtype we know"),
    ],
)
def test_a_bad_row_is_named_with_line_and_column(row: str, complaint: str) -> None:
    found = read_untuned(["M,N,K,bias,dtype", row, "8,8,8,0,bf16"], name="u.csv", dtype="bf16", threads=0)

    assert found.complaints == (complaint,)
    assert len(found.problems) == 1


def test_a_batched_table_is_the_batched_family() -> None:
    found = read_untuned(["B,M,N,K", "16, 1, 1280, 8192"], name="u.csv", dtype="bf16", threads=2)

    assert found.problems == (Problem(family="batched", batch=16, m=1, n=1280, k=8192, dtype="bf16", threads=2),)


def test_a_quantised_table_is_refused_by_name() -> None:
    with pytest.raises(TableError, match="q_dtype_w"):
        read_untuned(["M,N,K,q_dtype_w", "1,1280,8192,torch.int8"], name="u.csv", dtype="bf16", threads=0)


def test_a_quantised_table_is_known_by_its_name_where_its_header_does_not_tell() -> None:
    with pytest.raises(TableError, match="quantised"):
        read_untuned(["M,N,K", "1,1280,8192"], name="a8w8_blockscale_untuned_gemm.csv", dtype="bf16", threads=0)
