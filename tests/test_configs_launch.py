"""Launch records and binaries: every field is checked, and a file is read only if nobody else could write it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cases import LAUNCH as GOOD
from cases import LIBRARY_LAUNCH

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch import ARGUMENTS, read_launch
from gemmtuned.configs.manifest import BINARIES, read_binary, write_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution


def row(launch: object) -> dict[str, Any]:
    solution = Solution(
        problem=Problem(m=8, n=256, k=1024), device="cuda-x-132", mode="graph", covers="exact", backend="triton",
        config="{}", stamp="3.6/sm_90", us=1.0, baseline_us=2.0, gain_low=1.5, err=1e-3, baseline_err=1e-3,
        state="published",
    )  # fmt: skip
    return {**solution.to_row(), "launch": launch}


def test_a_row_keeps_its_launch_record_and_one_without_has_no_such_column() -> None:
    text = json.dumps(GOOD)
    solution = Solution.from_row(row(text))

    assert solution.launch == text and solution.to_row()["launch"] == text
    assert "launch" not in Solution.from_row(row("")).to_row()
    assert read_launch(text) == GOOD


def test_a_record_from_before_there_were_clusters_is_one_without() -> None:
    old = {name: value for name, value in GOOD.items() if name != "cluster"}

    assert read_launch(json.dumps(old)) == GOOD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"binary": "../../etc/passwd"}, "binary"),
        ({"binary": "0A" * 32}, "binary"),
        ({"name": "a; rm"}, "name"),
        ({"name": ""}, "name"),
        ({"shared": -1}, "shared"),
        ({"shared": True}, "shared"),
        ({"shared": 1.5}, "shared"),
        ({"warps": 0}, "warps"),
        ({"warps": 32, "warp_size": 64}, "threads"),
        ({"warp_size": 33}, "power of two"),
        ({"cluster": 0}, "cluster"),
        ({"cluster": 17}, "cluster"),
        ({"max_m": 0}, "max_m"),
        ({"max_m": 1 << 40}, "max_m"),
        ({"null_pointers": 4}, "null_pointers"),
        ({"ld_multiple": 3}, "power of two"),
        ({"grid": GOOD["grid"][:2]}, "three axes"),
        ({"grid": [{"over": "k", "block": 1}] * 3}, "grid"),
        ({"grid": [{"over": [], "block": 1}] * 3}, "grid"),
        ({"grid": [{"over": "n", "block": 0}] * 3}, "grid.block"),
        ({"grid": [{"over": "", "block": 65536}] * 3}, "grid.block"),
        ({"arguments": ["x", "w"]}, "arguments"),
        ({"arguments": ["x", "w", "y", "y"]}, "arguments"),
        ({"arguments": ["x", "w", "y", "shell"]}, "arguments"),
        ({"arguments": ["x", "w", "y", []]}, "arguments"),
        ({"workspace_bytes": 65536}, "workspace"),
        ({"counters_bytes": 65540}, "workspace"),
        ({"more": 1}, "more"),
    ],
)
def test_a_launch_record_with_a_wrong_field_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TableError, match=named):
        Solution.from_row(row(json.dumps({**GOOD, **change})))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"library": "libc"}, "library"),
        ({"algo": "00" * 63}, "algo"),
        ({"algo": "zz" * 64}, "algo"),
        ({"algo": 5}, "algo"),
        ({"dtype": "fp8_e4m3"}, "dtype"),
        ({"layout": "ns"}, "layout"),
        ({"tf32": 1}, "tf32"),
        ({"cluster": 0}, "cluster"),
        ({"cluster": 17}, "cluster"),
        ({"max_m": 0}, "max_m"),
        ({"workspace_bytes": -1}, "workspace_bytes"),
        ({"ld_multiple": 6}, "power of two"),
        ({"binary": "0a" * 32}, "binary"),
    ],
)
def test_a_librarys_launch_record_with_a_wrong_field_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    assert read_launch(json.dumps(LIBRARY_LAUNCH)) == LIBRARY_LAUNCH
    with pytest.raises(TableError, match=named):
        read_launch(json.dumps({**LIBRARY_LAUNCH, **change}))


@pytest.mark.parametrize("text", ["[]", "null", "{", "[" * 3000, "{}", " " * 5000, 7, None, {"binary": 1}])
def test_what_is_no_launch_record_at_all_is_refused(text: object) -> None:
    with pytest.raises(TableError, match="launch"):
        Solution.from_row(row(text))


def test_no_field_may_be_missing() -> None:
    for good in (GOOD, LIBRARY_LAUNCH):
        for name in good.keys() - {"cluster"}:
            with pytest.raises(TableError, match="expected"):
                read_launch(json.dumps({key: value for key, value in good.items() if key != name}))


def test_kernels_and_the_hook_agree_on_the_arguments() -> None:
    header = Path(__file__).parent.parent / "hooks" / "native" / "cuda_launch.h"
    inside = header.read_text().split("enum Argument : uint8_t {", 1)[1].split("}", 1)[0]

    assert [name.strip().lower() for name in inside.split(",")] == [{"m": "rows"}.get(name, name) for name in ARGUMENTS]


def test_a_binary_comes_back_whole_under_its_hash(tmp_path: Path) -> None:
    digest = write_binary(tmp_path, b"kernel")

    assert digest == sha256(b"kernel").hexdigest() == write_binary(tmp_path, b"kernel")
    assert read_binary(tmp_path, digest) == b"kernel"
    assert [p.name for p in (tmp_path / BINARIES).iterdir()] == [digest]


def test_a_binary_that_changed_or_that_others_may_write_is_refused_and_written_anew(tmp_path: Path) -> None:
    digest = write_binary(tmp_path, b"kernel")
    path = tmp_path / BINARIES / digest

    path.write_bytes(b"other")
    with pytest.raises(TableError, match="does not match"):
        read_binary(tmp_path, digest)
    assert write_binary(tmp_path, b"kernel") == digest and read_binary(tmp_path, digest) == b"kernel"
    path.chmod(0o666)
    with pytest.raises(TableError, match="written by others"):
        read_binary(tmp_path, digest)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TableError, match="cannot be opened"):
        read_binary(tmp_path, digest)
    with pytest.raises(TableError, match="not named by a SHA-256"):
        read_binary(tmp_path, "../" + digest)
    (tmp_path / BINARIES).chmod(0o777)
    with pytest.raises(TableError, match="written by others"):
        read_binary(tmp_path, digest)
