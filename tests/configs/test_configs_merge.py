"""Several of AITER's tables as one: who wins, what is found, and that nothing is rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtuned.configs.aiter_csv import read_file, read_lines
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.merge import TunedTable, merge
from gemmtuned.configs.padding import ck_m, coarse_m, fine_m, lookup_sizes, moe_m

DATA = Path(__file__).parents[1] / "data/aiter"
HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
ANY_M = st.one_of(st.integers(1, 9000), st.integers(1, 2**24))


def line(m: int, us: float | str, libtype: str = "asm", *, n: int = 512, gfx: str = "gfx950", cu: int = 256) -> str:
    return f"{gfx},{cu},{m},{n},5120,False,torch.bfloat16,torch.bfloat16,False,False,{libtype},1,0,{us},k,0.0,0.0,0.0"


def table(*lines: str) -> TunedTable:
    return TunedTable(FAMILIES["bf16"], read_lines([HEADER, *lines], name="t.csv").rows)


def found(tuned: TunedTable, m: int, **more: object) -> tuple[str, int] | None:
    hit = tuned.find(**{"gfx": "gfx950", "cu_num": 256, "M": m, "N": 512, "K": 5120, **more})
    return (hit.row["libtype"], hit.m) if hit else None


def test_the_lowest_valid_time_wins_whatever_the_order() -> None:
    assert found(table(line(8, 5.0, "asm"), line(8, 4.0, "triton"), line(8, 6.0, "torch")), 8) == ("triton", 8)
    assert found(table(line(8, 4.0, "asm"), line(8, 4.0, "triton")), 8) == ("asm", 8)


@pytest.mark.parametrize("us", ["0", "-1", "inf", "-inf", "nan", ""])
def test_a_placeholder_never_wins_not_even_alone(us: str) -> None:
    assert found(table(line(8, us, "asm"), line(8, 4.0, "triton")), 8) == ("triton", 8)
    assert found(table(line(8, us, "asm")), 8) is None


def test_the_whole_key_decides() -> None:
    tuned = table(line(8, 4.0))

    assert found(tuned, 8) == ("asm", 8)
    assert found(tuned, 8, gfx="gfx942") is None
    assert found(tuned, 8, cu_num=128) is None
    assert found(tuned, 8, bias=True) is None
    assert found(tuned, 8, dtype="fp16", outdtype="fp16") is None
    assert found(tuned, 8, bpreshuffle=True) is None


def test_rows_without_architecture_take_the_one_their_cu_count_stands_for() -> None:
    header, row = HEADER.removeprefix("gfx,"), line(8, 4.0).removeprefix("gfx950,")
    rows = read_lines([header, row, row.replace("256,8", "304,8"), row.replace("256,8", "77,8")], name="old.csv").rows
    tuned = TunedTable(FAMILIES["bf16"], rows, here="gfx1250")

    assert found(tuned, 8) == ("asm", 8)
    assert found(tuned, 8, gfx="gfx942", cu_num=304) == ("asm", 8)
    assert found(tuned, 8, gfx="gfx1250", cu_num=77) == ("asm", 8)


def test_a_dtype_named_fp8_is_that_of_the_rows_device() -> None:
    lines = [
        "gfx,cu_num,M,N,K,q_dtype_w,libtype,us",
        "gfx942,304,8,8,8,dtypes.fp8,ck,1",
        "gfx950,256,8,8,8,dtypes.fp8,ck,1",
    ]
    tuned = TunedTable(FAMILIES["a8w8_bpreshuffle"], read_lines(lines, name="a8w8_bpreshuffle_tuned_gemm.csv").rows)

    assert tuned.find(gfx="gfx942", cu_num=304, M=8, N=8, K=8, q_dtype_w="fp8_e4m3fnuz") is not None
    assert tuned.find(gfx="gfx950", cu_num=256, M=8, N=8, K=8, q_dtype_w="fp8_e4m3") is not None


def test_the_guides_table_serves_every_device() -> None:
    lines = ["M,N,K,lib,kernel_name,tflops,bandwidth_gb_s", "532,2048,2048,asm,k,266.78,761.98"]
    tuned = TunedTable(FAMILIES["bf16"], read_lines(lines, name="c.csv").rows)

    hit = tuned.find(gfx="", cu_num=304, M=532, N=2048, K=2048)
    assert hit is not None
    assert hit.row["lib"] == "asm"


def test_sources_are_merged_in_memory_and_never_rewritten(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("\n".join([HEADER, line(8, 5.0), line(16, 5.0), "bad"]))
    second.write_text("\n".join([HEADER, line(8, 4.0, "triton"), line(8, 9.0)]))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (first, second)}

    tuned = merge([first, second, tmp_path / "gone.csv"], family="bf16")

    assert (found(tuned, 8), found(tuned, 16), len(tuned)) == (("triton", 8), ("asm", 16), 2)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_a_merge_of_nothing_or_of_another_familys_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"gone\.csv exists"):
        merge([tmp_path / "gone.csv"], family="bf16")
    with pytest.raises(TableError, match="column M is missing"):
        merge([DATA / "configs/tuned_fmoe.csv"], family="a8w8")


# AITER's getPaddedM and its families' own rules, written down a second time: rounding by search and by doubling.
def doubled(m: int) -> int:
    power = 1
    while power < m:
        power *= 2
    return power


ENDS = (1, 16, 256, 1024, 4096, 8192, 16384, 20480, 32768, 65536, 131072)  # where a rule ends, or another begins


@given(m=ANY_M, n=st.integers(1, 40_000))
def test_padded_m_is_aiters(m: int, n: int) -> None:
    is_aiters(m, n)


def test_padded_m_is_aiters_at_the_ends_of_its_rules() -> None:
    for m in (end + more for end in ENDS for more in (-1, 0, 1) if end + more > 0):
        for n in (4096, 4097):
            is_aiters(m, n)


def is_aiters(m: int, n: int) -> None:
    step = next(step for limit, step in ((256, 16), (1024, 32), (4096, 64), (2**31, 128)) if m <= limit)
    fine = next(size for size in range(m, m + 129) if size % step == 0)
    assert fine_m(m) == fine
    assert coarse_m(m, n) == (8192 if m > 8192 and n > 4096 else doubled(m))
    assert ck_m(m) == (1 if m == 1 else 16 if m <= 16 else doubled(m) if m <= 16384 else 20480 if m <= 20480 else m)
    assert moe_m(m) == ((131072, 32768) if m >= 131072 else (32768,) if m >= 32768 else (doubled(m),))


@given(m=st.integers(1, 20_000), n=st.sampled_from([16, 4096, 4097]), tuned=st.sets(ANY_M, max_size=40))
def test_a_look_up_takes_exact_then_fine_then_coarse_and_nothing_else(m: int, n: int, tuned: set[int]) -> None:
    sizes = tuned | {fine_m(x) for x in list(tuned)[:5]} | {coarse_m(x, n) for x in list(tuned)[5:10]}
    hit = table(*(line(x, 1.0, n=n) for x in sizes)).find(gfx="gfx950", cu_num=256, M=m, N=n, K=5120)

    walk = [x for x in (m, fine_m(m), coarse_m(m, n)) if x in sizes]
    assert (hit.m if hit else None) == (walk[0] if walk else None)


def test_other_families_probe_by_their_own_rules() -> None:
    assert lookup_sizes("a8w8_blockscale", 17, 512) == (17, 32)
    assert lookup_sizes("bf16", 300, 512) == (300, 320, 512)
    assert lookup_sizes("a8w8", 300, 512) == (300, 512)
    assert lookup_sizes("batched_bf16", 3, 512) == (3, 16)
    assert lookup_sizes("fmoe", 300, 0) == (512,)  # no exact one: a row for 300 tokens can never be found
    assert lookup_sizes("fmoe", 200_000, 0) == (131072, 32768)


def test_every_tuned_row_that_is_shipped_is_found_under_its_own_key() -> None:
    for path in DATA.rglob("*tuned*.csv"):
        rows = read_file(path).rows
        if "untuned" in path.name or not rows or rows[0].header.family.name in ("gdn", "fmoe", "fhmoe"):
            continue
        tuned = TunedTable(rows[0].header.family, rows)
        for row in rows:
            named = dict(zip(row.header.family.key, row.key, strict=True))
            hit = tuned.find(gfx=row["gfx"], cu_num=int(row["cu_num"] or 0), **named)
            assert hit is not None, row.where
            assert hit.row.us is not None
            assert row.us is not None
            assert hit.row.us <= row.us, row.where


def test_the_live_trace_of_a_model_by_its_own_shipped_table() -> None:
    """56 rows exact, 306 of 1321 served after the padding walk: what AITER gives its users."""
    tuned = merge([DATA / "model_configs/glm47_bf16_tuned_gemm.csv"], family="bf16")
    trace = read_file(DATA / "model_configs/glm47_bf16_untuned_gemm.csv").rows
    hits = [
        (tuned.find(gfx="gfx950", cu_num=256, **dict(zip(row.header.family.key, row.key, strict=True))), row.key[0])
        for row in trace
    ]

    assert sum(hit is not None and hit.m == m for hit, m in hits) == 56
    assert sum(hit is not None for hit, _ in hits) == 306
