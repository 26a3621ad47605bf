"""AITER's Triton tile files: read, looked up by AITER's rules, written, and their defaults derived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtuned.configs import triton_json
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats.aiter import read_tiles
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.triton_json import (
    BOUNDS,
    Config,
    TileFile,
    find,
    kernel_files,
    least_regret,
    most_common,
    read_file,
    write_file,
)

DATA = Path(__file__).parents[1] / "data/aiter/triton"
FILES = sorted(DATA.rglob("*.json"))
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128}


def tiles(name: int) -> Config:
    return {**TILE, "num_warps": name}


def file(sizes: dict[str, int] | None = None, **buckets: int) -> TileFile:
    return TileFile(Path("x.json"), "gfx942", "GEMM-A16W16", sizes or {}, {k: tiles(v) for k, v in buckets.items()})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_is_read_whole_and_written_back_equal(path: Path, tmp_path: Path) -> None:
    found = read_file(path)
    raw = json.loads(path.read_text())

    assert found.buckets == raw
    assert found.complaints == []
    write_file(tmp_path / path.name, found.buckets)
    assert json.loads((tmp_path / path.name).read_text()) == raw


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("gfx942-GEMM-A16W16.json", ("gfx942", "GEMM-A16W16", {})),
        ("gfx950-GEMM-A16W16-ATOMIC-N=256-K=7168.json", ("gfx950", "GEMM-A16W16-ATOMIC", {"N": 256, "K": 7168})),
        ("legacy_categories/R9700-GEMM-A16W16-ATOMIC.json", ("gfx1201", "GEMM-A16W16-ATOMIC", {})),
        ("nested_gfx950_gemm_afp4wfp4/DEFAULT.json", ("gfx950", "GEMM-AFP4WFP4", {})),
        (
            "nested_gfx950_gemm_afp4wfp4/GEMM-AFP4WFP4-N=16384-K=16384.json",
            ("gfx950", "GEMM-AFP4WFP4", {"N": 16384, "K": 16384}),
        ),
    ],
)
def test_a_files_name_and_folders_tell_architecture_kernel_and_sizes(path: str, told: tuple[object, ...]) -> None:
    found = read_file(DATA / path)

    assert (found.arch, found.name, found.sizes) == told


def test_the_nested_layout_and_batches_are_told_too(tmp_path: Path) -> None:
    folder = tmp_path / "gfx950/triton/gemm/batched_gemm_a16w16"
    folder.mkdir(parents=True)
    for name in ("DEFAULT.json", "BATCHED_GEMM-A16W16-B=16-N=512-K=128.json"):
        (folder / name).write_text(json.dumps({"any": TILE}))

    assert read_file(folder / "DEFAULT.json").name == "BATCHED_GEMM-A16W16"
    assert read_file(folder / "DEFAULT.json").arch == "gfx950"
    found = read_file(folder / "BATCHED_GEMM-A16W16-B=16-N=512-K=128.json")
    assert (found.arch, found.name, found.sizes) == ("gfx950", "BATCHED_GEMM-A16W16", {"B": 16, "N": 512, "K": 128})


@given(m=st.integers(1, 20_000), leq=st.sets(st.sampled_from(BOUNDS)), geq=st.sets(st.sampled_from(BOUNDS)))
def test_a_look_up_takes_the_smallest_bound_above_then_the_largest_below_then_any(
    m: int, leq: set[int], geq: set[int]
) -> None:
    names = {**{f"M_LEQ_{x}": x for x in leq}, **{f"M_GEQ_{x}": 10_000 + x for x in geq}, "any": 1}
    found = find([file(**names)], m=m, n=1, k=1)

    above, below = [x for x in leq if x >= m], [10_000 + x for x in geq if x <= m]
    want = (tiles(min(above)), True) if above else (tiles(max(below)), True) if below else (tiles(1), False)
    assert found == want


def test_the_file_for_n_and_k_stands_for_the_whole_default() -> None:
    default, special = file(M_LEQ_8=1, any=2), file({"N": 64, "K": 32}, M_LEQ_16=3)
    batch = file({"B": 4, "N": 64, "K": 32}, any=5)

    assert find([default, special], m=4, n=64, k=32) == (tiles(3), True)
    assert find([default, special], m=64, n=64, k=32) is None  # AITER raises: its buckets are not mixed
    assert find([default, special], m=64, n=65, k=32) == (tiles(2), False)
    assert find([default, special, batch], m=64, n=64, k=32, batch=4) == (tiles(5), False)
    assert find([special], m=4, n=64, k=32) is None  # the default file is mandatory


def test_of_several_layouts_the_first_with_a_default_is_taken(tmp_path: Path) -> None:
    nested, flat = tmp_path / "gfx950/triton/gemm/gemm_a16w16", tmp_path / "gemm"
    for folder in (nested, flat):
        folder.mkdir(parents=True)
    for path, value in {
        flat / "gfx950-GEMM-A16W16.json": 1, flat / "gfx950-GEMM-A16W16-N=64-K=32.json": 2,
        flat / "gfx950-GEMM-A16W16-ATOMIC.json": 3, flat / "gfx950-GEMM-A16W16-ATOMIC-N=128-K=32.json": 7,
        flat / "gfx950-GEMM-A16W16-ATOMIC-N=64-K=32.json": 4,
        nested / "GEMM-A16W16-N=64-K=32.json": 5,
    }.items():  # fmt: skip
        write_file(path, {"any": tiles(value)})

    def taken(n: int) -> object:
        found = find(kernel_files(tmp_path, arch="gfx950", name="GEMM-A16W16"), m=1, n=n, k=32)
        return found[0]["num_warps"] if found else None

    assert (taken(64), taken(65)) == (2, 1)  # the nested folder has no default yet
    assert taken(128) == 1  # another kernel's file, whose name begins like ours
    write_file(nested / "DEFAULT.json", {"any": tiles(6)})
    write_file(nested / "GEMM-A16W16-ATOMIC-N=128-K=32.json", {"any": tiles(7)})
    assert (taken(64), taken(65), taken(128)) == (5, 6, 6)
    assert kernel_files(tmp_path, arch="gfx942", name="GEMM-A16W16") == []


def test_a_bound_that_is_in_no_list_is_never_found() -> None:
    assert find([file(M_LEQ_320=1, any=2)], m=300, n=1, k=1) == (tiles(2), False)
    assert find([file(M_LEQ_320=1, any=2)], m=300, n=1, k=1, bounds=(64, 320)) == (tiles(1), True)


@pytest.mark.parametrize(
    ("m", "category"),
    [(1, "small"), (31, "small"), (32, "medium_M32"), (33, "medium_M64"), (64, "medium_M64"), (65, "medium_M128"),
     (128, "medium_M128"), (129, "large"), (256, "large"), (257, "xlarge"), (9999, "xlarge")],
)  # fmt: skip
def test_older_files_go_by_category_and_their_default_by_any(m: int, category: str) -> None:
    everything = {name: i for i, name in enumerate((*triton_json.CATEGORIES, "any"), 1)}
    default, special = file(**everything), file({"N": 64, "K": 32}, **everything)

    assert triton_json.category(m) == category
    assert find([default, special], m=m, n=64, k=32) == (tiles(everything[category]), True)
    assert find([default, special], m=m, n=1, k=1) == (tiles(everything["any"]), False)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"any": TILE, "M_LEQ_x": TILE}, "entry 'M_LEQ_x': not a bucket"),
        ({"any": TILE, "M_LEQ_8": [1]}, "entry 'M_LEQ_8': is list"),
        ({"any": TILE, "M_LEQ_8": {}}, "entry 'M_LEQ_8': is dict"),
        ({"any": TILE, "M_LEQ_8": {"a": [1]}}, "parameter a is no plain value"),
    ],
)
def test_a_bad_entry_costs_that_entry(content: object, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "gfx942-GEMM-A16W16.json"
    path.write_text(json.dumps(content))

    found = read_file(path)

    assert list(found.buckets) == ["any"]
    assert [complaint in line for line in found.complaints] == [True], found.complaints


def test_a_key_that_stands_twice_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "gfx942-GEMM-A16W16.json"
    path.write_text('{"any": {"a": 1}, "M_LEQ_8": {"a": 1}, "M_LEQ_8": {"a": 2, "a": 3}, "M_LEQ_8": {"a": 4}}')

    found = read_file(path)

    assert found.buckets == {"any": {"a": 1}, "M_LEQ_8": {"a": 4}}
    assert found.complaints == [f"{path} entry 'M_LEQ_8': stands 3 times, the last is taken"] * 2
    assert (read_tiles(path).rejected, len(read_tiles(path).hints)) == (2, 2)


@pytest.mark.parametrize("text", ["", "[]", "{}", "1", '{"a": 1}', "[" * 100_000, '{"any":' * 50_000, "NaN"])
def test_what_is_no_tile_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TableError, match="tile file"):
        read_file(tmp_path / "x.json")


def test_the_default_by_the_most_common_tuple_is_aiters() -> None:
    files = [file(any=1, M_LEQ_8=3), file(any=2), file(any=2, M_LEQ_8=4), file(any=1)]

    assert most_common(files) == {"M_LEQ_8": tiles(3), "any": tiles(1)}  # the first seen of equals


def test_the_default_by_least_regret_loses_least_over_all_shapes() -> None:
    names = {i: json.dumps(tiles(i), sort_keys=True) for i in (1, 2, 3)}
    shapes = {
        "a": {names[1]: 10.0, names[2]: 11.0, names[3]: 30.0},
        "b": {names[1]: 10.0, names[2]: 11.0, names[3]: 30.0},
        "c": {names[1]: 50.0, names[2]: 11.0, names[3]: 10.0},  # the most common winner is bad here
    }

    assert least_regret({"M_LEQ_8": shapes}) == {"M_LEQ_8": tiles(2)}
    # one measured on a single shape does not win by that
    assert least_regret({"any": {**shapes, "d": {names[3]: 1.0, names[2]: 1.1}}}) == {"any": tiles(2)}


def test_entries_become_problems_at_their_bound_and_candidates_of_our_kernel() -> None:
    found = read_file(DATA / "gfx950-GEMM-A16W16-ATOMIC-N=256-K=7168.json")
    key = "M_LEQ_16"

    assert triton_json.problem_or_reason(found, key) == Problem(m=16, n=256, k=7168)
    candidate = triton_json.candidate_of(found.buckets[key])
    assert candidate is not None
    assert json.loads(candidate.config)["kernel"] == "tiles"
    back = triton_json.config_of(candidate)
    assert back is not None
    assert {name: back[name] for name in TILE} == {name: found.buckets[key][name] for name in TILE}
    assert triton_json.config_of(Candidate.of("triton", kernel="gemv")) is None
    assert (
        triton_json.problem_or_reason(found, "any")
        == "a tile of kernel GEMM-A16W16-ATOMIC for a range of M without a bound"
    )


@pytest.mark.parametrize("part", ["T=1", "K=128_copy", "GATED"])
def test_a_part_of_a_files_name_that_nobody_knows_makes_no_problem(part: str, tmp_path: Path) -> None:
    path = tmp_path / f"gfx950-GEMM-A16W16-N=64-K=128-{part}.json"
    path.write_text(json.dumps({"M_LEQ_16": TILE}))
    assert triton_json.problem_or_reason(read_file(path), "M_LEQ_16") == f"{part} in the file's name is not known"
