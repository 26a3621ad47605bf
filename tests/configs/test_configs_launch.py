"""Launch records and binaries: every field is checked, and a file is read only if nobody else could write it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cases import LAUNCH as GOOD
from cases import LIBRARY_LAUNCH

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch import (
    OPS,
    PLAIN,
    SLOTS,
    VERSION,
    WHATS,
    KernelLaunch,
    LibraryLaunch,
    OperatorLaunch,
    read_launch,
)
from gemmtuned.configs.manifest import BINARIES, read_binary, write_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks.native.launches import operator_call

V2: dict[str, Any] = {
    "v": 2, "binary": "0a" * 32, "name": "warp_split_k", "shared": 65536, "threads": 128, "cluster": 1,
    "grid": [{"of": "w.size0", "block": 16}, {"block": 4}, {"block": 1}],
    "arguments": [
        "x.ptr", "w.ptr", "y.ptr", "partials", "counters", "x.size0", "x.stride0", "w.stride0", "null", "null",
    ],
    "conditions": [
        ["x.size0", "<=", 8], ["x.stride1", "==", 1], ["x.stride0", "%", 8], ["x.ptr", "%", 16],
        ["w.stride1", "==", 1], ["w.stride0", "%", 8], ["w.ptr", "%", 16],
    ],
    "partials_offset": 65536, "counters_bytes": 64, "workspace_bytes": 131072,
}  # fmt: skip
LIBRARY_V2: dict[str, Any] = {
    "v": 2, "library": "cublaslt", "algo": "0102030405060708" * 8, "layout": "nt", "compute": "f32", "fast": False,
    "types": {"x": "bf16", "w": "bf16", "y": "bf16", "bias": "bf16"}, "scale_x": "", "scale_w": "",
    "workspace_bytes": 1024,
    "conditions": [
        ["x.size0", "<=", 8],
        ["x.stride1", "==", 1], ["x.stride0", "%", 8], ["x.ptr", "%", 16], ["x.stride0", ">=", "x.size1"],
        ["w.stride1", "==", 1], ["w.stride0", "%", 8], ["w.ptr", "%", 16], ["w.stride0", ">=", "w.size1"],
        ["bias.stride0", "==", 1], ["bias.ptr", "%", 16],
    ],
}  # fmt: skip


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


@pytest.mark.parametrize("figure", [10**400, float("inf"), float("nan"), -1.0, True, "1"], ids=lambda f: str(f)[:5])
def test_a_figure_that_is_no_number_is_refused(figure: object) -> None:
    for name in ("us", "err"):
        with pytest.raises(TableError, match=f"{name} is .* expected a number of at least 0"):
            Solution.from_row({**row(""), name: figure})


def test_a_record_of_version_1_is_read_as_one_of_version_2() -> None:
    read = read_launch(json.dumps(GOOD))

    assert json.loads(read.text()) == V2
    assert read_launch(json.dumps({name: value for name, value in GOOD.items() if name != "cluster"})) == read
    assert read_launch(json.dumps({**GOOD, "arguments": ["x", "w", "bias", "y"]})).conditions[-2:] == (
        ("bias.stride0", "==", 1), ("bias.ptr", "%", 16),
    )  # fmt: skip
    library = read_launch(json.dumps(LIBRARY_LAUNCH))
    assert json.loads(library.text()) == LIBRARY_V2


def test_every_record_that_was_ever_published_is_read() -> None:
    here = Path(__file__).parents[1]
    tables = [*(here / "data/home-0.1.0/configs").glob("*.jsonl"), *(here.parent / "configs/tables").glob("*/*.jsonl")]
    texts = {json.loads(line).get("launch", "") for path in tables for line in path.read_text().splitlines()} - {""}
    dump = (here / "data/home-0.1.0/tune.sql").read_text()
    texts |= {text.replace("''", "'") for text in re.findall(r"'(\{(?:\"arguments\"|\"algo\")[^']*\})'", dump)}

    records = [read_launch(text) for text in texts]
    assert {type(record) for record in records} == {KernelLaunch, LibraryLaunch}
    for record in records:
        assert read_launch(record.text()) == record  # and kept whole by version 2
        record.check_for(Problem(m=1, n=64, k=64))


def test_a_record_takes_every_operand_of_its_problem_and_no_other() -> None:
    plain, scaled = Problem(m=8, n=256, k=1024), Problem(
        family="scaled", m=8, n=256, k=1024, dtype="fp8_e4m3", wdtype="fp8_e4m3", out_dtype="bf16", scale="row",
        wscale="row", scale_dtype="fp32", wscale_dtype="fp32",
    )  # fmt: skip
    record = read_launch(json.dumps(V2))
    of_scales = read_launch(json.dumps({**V2, "arguments": [*V2["arguments"], "scale_x.ptr", "scale_w.ptr"]}))
    any_bias = read_launch(json.dumps({**V2, "arguments": [*V2["arguments"], "bias.ptr?"]}))

    record.check_for(plain)
    of_scales.check_for(scaled)
    any_bias.check_for(plain)
    any_bias.check_for(replace(plain, bias=True))
    for wrong, problem in ((record, replace(plain, bias=True)), (record, scaled), (of_scales, plain)):
        with pytest.raises(TableError, match="its launch record takes"):
            wrong.check_for(problem)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"v": 3}, "version 3"),
        ({"v": "2"}, "version 2"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", "x.tensor_map:64x128"]}, "tensor_map.* does not know"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", "ends.ptr"]}, "ends.* does not know"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", "x.size0?"]}, "null"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", "x.numel"]}, "arguments"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", "y.ptr"]}, "once"),
        ({"arguments": ["x.ptr", "w.ptr"]}, "arguments"),
        ({"arguments": ["x.ptr", "w.ptr", "y.ptr", 7]}, "arguments"),
        ({"arguments": ["x.ptr"] * 25}, "arguments"),
        ({"arguments": ["x.map64", "w.ptr", "y.map64"]}, "y.map64.* does not know"),
        ({"arguments": ["x.map64?", "w.ptr", "y.ptr"]}, "map64.* does not know"),
        ({"arguments": ["x.map12", "w.map8", "y.ptr"]}, "x.map12, expected a multiple of 8"),
        ({"arguments": ["x.map64", "w.map264", "y.ptr"]}, "w.map264, .* up to 256"),
        ({"arguments": ["x.map64", "x.map8", "w.map8", "y.ptr"]}, "more than 2 maps"),
        ({"conditions": [["x.map64", "%", 16]]}, "does not know"),
        ({"conditions": [["x.stride1", "==", -1]]}, "stride1"),
        ({"conditions": [["x.stride1", "<", 1]]}, "conditions"),
        ({"conditions": [["x.stride9", "==", 1]]}, "does not know"),
        ({"conditions": [["x.stride0", "%", 12]]}, "power of two"),
        ({"conditions": [["x.stride0", "%", 0]]}, "power of two"),
        ({"conditions": [["x.ptr", "==", 16]]}, "alignment"),
        ({"conditions": [["x.size0", "==", "w.stride0"]]}, "size"),
        ({"conditions": [["x.size0", "%", "w.size0"]]}, "size"),
        ({"conditions": [["x.size0", "=="]]}, "conditions"),
        ({"conditions": [["x.size0", "==", 1 << 31]]}, "size0"),
        ({"conditions": [["x.size0", "<=", 9]] * 33}, "at most 32"),
        ({"conditions": {}}, "conditions"),
        ({"grid": [{"of": "x.stride0", "block": 1}] * 3}, "grid"),
        ({"grid": [{"of": "bias.size0", "block": 1}] * 3}, "grid"),
        ({"grid": [{"of": 1, "block": 1}] * 3}, "grid"),
        ({"grid": [{"block": 0}] * 3}, "grid.block"),
        ({"threads": 40}, "threads"),
        ({"threads": 2048}, "threads"),
        ({"max_m": 8}, "max_m"),
    ],
)
def test_a_record_of_version_2_with_a_wrong_field_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TableError, match=named):
        read_launch(json.dumps({**V2, **change}))


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 10**40, (1 << 63) - 1, -(1 << 63), -1, True])
def test_an_operators_integer_is_one_of_64_bits(number: int) -> None:
    facts = {
        "v": VERSION, "operator": "aten::mm", "schema": "aten::mm(Tensor self)", "arguments": ["x", number],
        "conditions": [], "package": "torch", "version": "2.13.0",
    }  # fmt: skip
    if not -(1 << 63) <= number < 1 << 63:
        with pytest.raises(TableError, match=r"integer of \d+ bits"):
            read_launch(json.dumps(facts))
        return
    record = read_launch(json.dumps(facts))
    assert isinstance(record, OperatorLaunch) and operator_call(record).integer[1] == number


@pytest.mark.parametrize(
    "given", [[], [128, 128], list(range(8)), list(range(9)), [1.5], [True], ["x"], [[1]], [1 << 63]]
)
def test_an_operators_list_is_one_of_a_few_integers(given: list[Any]) -> None:
    facts = {
        "v": VERSION, "operator": "aten::mm", "schema": "aten::mm(Tensor self)", "arguments": ["x", given],
        "conditions": [], "package": "torch", "version": "2.13.0",
    }  # fmt: skip
    if len(given) > 8 or given in ([1.5], [True], ["x"], [[1]], [1 << 63]):
        with pytest.raises(TableError, match="arguments"):
            read_launch(json.dumps(facts))
        return
    record = read_launch(json.dumps(facts))
    assert isinstance(record, OperatorLaunch) and read_launch(record.text()) == record
    call = operator_call(record)
    assert [*call.integers[1]][: call.integer[1]] == given


def test_the_record_of_the_docs_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    launch = read_launch(page.split("```json\n", 1)[1].split("```", 1)[0])

    assert isinstance(launch, KernelLaunch) and launch.at_most("x.size0") == 64
    launch.check_for(Problem(m=8, n=256, k=1024, bias=True))


def test_a_version_that_is_not_ours_costs_the_row_with_one_line() -> None:
    with pytest.raises(TableError, match="this one reads versions 1 and 2"):
        Solution.from_row(row(json.dumps({"v": 7, "kernel": "of a later version"})))


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


def test_the_hook_and_the_records_agree_on_their_words() -> None:
    headers = Path(__file__).parents[2] / "hooks" / "native"

    def members(file: str, enum: str) -> list[str]:
        inside = (headers / file).read_text().split(f"enum {enum} : uint8_t {{", 1)[1].split("}", 1)[0]
        return [name.strip().lower() for name in inside.split(",")]

    assert members("slots.h", "Slot") == [*(f"slot_{name}" for name in SLOTS), "slot_count"]
    assert members("slots.h", "What") == [*(w.replace("dim", "rank") for w in WHATS), "contiguous_turned"]
    assert members("slots.h", "Op") == ["equal", "multiple", "at_most", "at_least"] and len(OPS) == 4
    assert members("cuda_launch.h", "ArgumentKind") == ["operand", *PLAIN[:2], "nothing_passed", "tensor_map"]


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
