"""From a published solution to what the native hook is given: library records, and records that belong to another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import LAUNCH, LIBRARY_LAUNCH

from gemmtuned.configs.launch import OPS, SLOTS, WHATS
from gemmtuned.configs.manifest import make_folder, write_binary
from gemmtuned.configs.packed import pack
from gemmtuned.configs.problem import FAMILIES, Problem
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.hooks.dispatch import NATIVE_CODES, Table, build_table
from gemmtuned.hooks.native import Row
from gemmtuned.hooks.native.table_rows import PackedRows
from gemmtuned.hooks.routes import Routes
from gemmtuned.kernels.backends.cublaslt import record_of

GPU = Environment(
    Device("cuda-x-132", "cuda", "x", "sm_90", 132),
    {"cublaslt": "130002/sm_90", "triton": "3.6.0/sm_90", "torch": "2.11"},
)
# The version that Python sees is not the one that the native hook calls: two of them in one process
OTHER = Environment(GPU.device, {**GPU.stamps, "cublaslt": "120900/sm_90"})
SOLUTION = Solution(
    problem=Problem(m=8, n=256, k=1024), device="cuda-x-132", mode="graph", covers="exact", backend="cublaslt",
    config="{}", stamp="130002/sm_90", us=1.0, baseline_us=2.0, gain_low=1.5, err=1e-3, baseline_err=1e-3,
    state="published", launch=json.dumps(LIBRARY_LAUNCH),
)  # fmt: skip
OPERATOR = {
    "v": 2, "operator": "aten::mm", "schema": "aten::mm(Tensor self, Tensor mat2) -> Tensor", "arguments": ["x", "b"],
    "conditions": [["x.contiguous", "==", 1]], "package": "torch", "version": "2.13.0",
}  # fmt: skip


def rows(*solutions: Solution, folder: Path = Path("/nowhere")) -> tuple[list[Row], dict[str, int]]:
    environment = OTHER if solutions[0].stamp == OTHER.stamps["cublaslt"] else GPU
    table = build_table(solutions, {"cuda:1": environment}, generation=1, failed=frozenset())
    native: Any = SimpleNamespace(cublaslt_version=130002, load_kernel=lambda *of: 77)
    found = list(Routes(native, folder).rows(table))
    return found, dict(table.refused)


def test_a_librarys_algorithm_becomes_a_route_of_its_device() -> None:
    [row], refused = rows(SOLUTION)

    launch: Any = row.launch
    assert refused == {} and (row.code, row.place) == (NATIVE_CODES["cublaslt"], "cuda:1")
    assert bytes(launch.algo).hex() == LIBRARY_LAUNCH["algo"]
    assert [launch.type_x, launch.type_w, launch.type_y, launch.type_bias, launch.compute_type] == [14] * 4 + [68]
    assert (launch.x_turned, launch.w_turned, launch.workspace_bytes) == (0, 1, 1024)
    assert row.scales_sums and len(row.conditions) == 11


def test_tf32_and_column_major_operands_reach_the_library() -> None:
    problem = replace(SOLUTION.problem, dtype="fp32", wdtype="fp32", out_dtype="fp32", layout="tn", math_mode="tf32")
    record = {**LIBRARY_LAUNCH, "dtype": "fp32", "layout": "tn", "tf32": True}
    [row], _ = rows(replace(SOLUTION, problem=problem, launch=json.dumps(record)))

    launch: Any = row.launch
    assert (launch.type_x, launch.compute_type, launch.x_turned, launch.w_turned) == (0, 77, 1, 0)


def test_a_record_that_is_not_its_solutions_costs_the_row() -> None:
    for wrong in (
        replace(SOLUTION, launch=json.dumps({**LIBRARY_LAUNCH, "dtype": "fp16"})),
        replace(SOLUTION, launch=json.dumps({**LIBRARY_LAUNCH, "layout": "nn"})),
        replace(SOLUTION, launch=json.dumps(LAUNCH)),
        replace(SOLUTION, backend="triton", stamp="3.6.0/sm_90"),
        replace(SOLUTION, launch=""),
        replace(SOLUTION, stamp=OTHER.stamps["cublaslt"]),
    ):
        assert rows(wrong) == ([], {"its kernel does not load": 1})


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "moe"])
def test_torchs_own_is_best_is_a_route_in_every_family(family: str) -> None:
    scale = {"scale": "row"} if family == "scaled" else {}
    problem = replace(SOLUTION.problem, family=family, batch=1 if family in ("dense", "scaled") else 4, **scale)
    best = replace(SOLUTION, problem=problem, backend="torch", stamp="2.11", state="default_best", launch="")

    [row], refused = rows(best)

    assert refused == {} and (row.code, row.launch) == (NATIVE_CODES["torch"], None)


@pytest.mark.parametrize("backend", ["cublaslt", "others"])
def test_batch_invariant_products_run_by_binaries_alone(backend: str) -> None:
    """X is cut into rows and laid out for a binary; a library or an operator would get it as it lies."""
    record = LIBRARY_LAUNCH if backend == "cublaslt" else OPERATOR
    problem = replace(SOLUTION.problem, batch_invariant=True)
    solution = replace(SOLUTION, backend=backend, problem=problem, launch=json.dumps(record))
    native: Any = SimpleNamespace(cublaslt_version=130002, check_operator=lambda facts: None)
    table = Table(1)
    table.put("cuda:1", solution, pack(solution))  # as if it had been taken for proven

    assert list(Routes(native, Path("/nowhere")).rows(table)) == []
    assert table.refused == {"its kernel does not load": 1}
    plain = replace(solution, problem=SOLUTION.problem)
    table = Table(1)
    table.put("cuda:1", plain, pack(plain))
    assert list(Routes(native, Path("/nowhere")).rows(table))


def test_a_solution_published_anew_with_another_record_is_another_route() -> None:
    again = replace(SOLUTION, launch=json.dumps({**LIBRARY_LAUNCH, "workspace_bytes": 2048}))

    assert rows(SOLUTION)[0][0].ident != rows(again)[0][0].ident
    assert rows(SOLUTION)[0][0].ident == rows(replace(SOLUTION, us=0.5))[0][0].ident


def test_a_record_that_leaves_an_operand_out_is_none_of_its_problem() -> None:
    problem = replace(
        SOLUTION.problem, family="scaled", dtype="fp8_e4m3", wdtype="fp8_e4m3", out_dtype="bf16", scale="row",
        wscale="row", scale_dtype="fp32", wscale_dtype="fp32",
    )  # fmt: skip
    scaled = json.loads(record_of(problem, bytes(64), 0).text())
    [row], refused = rows(replace(SOLUTION, problem=problem, launch=json.dumps(scaled)))

    launch: Any = row.launch
    assert refused == {} and (launch.type_x, launch.type_w, launch.type_y) == (28, 28, 14)
    assert (launch.scale_x, launch.scale_w, launch.fast) == (3, 3, 0)
    for wrong in ({"scale_x": "", "scale_w": ""}, {"scale_w": "tensor"}, {"types": {**scaled["types"], "w": "bf16"}}):
        assert rows(replace(SOLUTION, problem=problem, launch=json.dumps({**scaled, **wrong})))[0] == []
    plain = record_of(SOLUTION.problem, bytes(64), 0).text()
    assert rows(replace(SOLUTION, problem=problem, launch=plain))[0] == []
    assert rows(replace(SOLUTION, launch=json.dumps(scaled)))[0] == []


def test_groups_with_scales_are_routed_by_a_kernel_that_takes_both(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from gemmtuned.kernels.triton import grouped, scaled_grouped

    problem = Problem(
        family="grouped", batch=8, m=64, n=256, k=512, dtype="fp8_e4m3", out_dtype="bf16", scale="row"
    )  # fmt: skip
    config = {"rows": 64, "tokens": 16, "block_k": 256, "warps": 4, "stages": 3, "swap": 1}
    make_folder(tmp_path)
    binary = write_binary(tmp_path, b"a kernel")

    def published(of: Problem, module: Any, made_for: Problem) -> list[Row]:
        record = replace(module.launch_record(config, made_for).launch, binary=binary, name="kernel")
        solution = replace(SOLUTION, problem=of, backend="triton", stamp=GPU.stamps["triton"], launch=record.text())
        return rows(solution, folder=tmp_path)[0]

    [row] = published(problem, scaled_grouped, problem)
    launch: Any = row.launch
    of_scale_w = [
        (c.what, c.dim, c.value) for c in row.conditions if c.slot == SLOTS.index("scale_w") and c.op == OPS.index("==")
    ]
    size, stride, dim = (WHATS.index(what) for what in ("size", "stride", "dim"))
    assert (launch.function, launch.count, [a.block for a in launch.grid]) == (77, 11, [4, 11, 1])
    assert of_scale_w == [(dim, 0, 2), (size, 0, 8), (size, 1, 256), (stride, 1, 1)], "as torch takes it, [G, N]"
    plain = replace(problem, dtype="bf16", wdtype="bf16", scale="none", wscale="none")
    assert published(plain, grouped, plain) and not published(problem, grouped, plain)
    assert not published(plain, scaled_grouped, problem)
    for other in ({"scale": "tensor", "wscale": "tensor"}, {"scale": "1x128", "wscale": "128x128"}, {"bias": True}):
        assert not published(replace(problem, **other), scaled_grouped, problem), other  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(m=8, n=256, k=1024, packing="of_tomorrow"),
        Problem(family="fast.scores", m=8, n=256, k=1024, experts=100_000, topk=1, inter=1, act="silu"),
    ],
)
def test_a_row_that_the_native_table_cannot_hold_costs_that_row(problem: Problem) -> None:
    """Of a version to come, say: the whole generation was once not taken up."""
    strange = replace(SOLUTION, problem=problem, backend="torch", stamp="2.11", state="default_best", launch="")
    found, refused = rows(strange, SOLUTION, strange)
    packed = PackedRows(found)

    assert refused == {}
    assert packed.count == len(packed.array) == 1
    assert packed.array[0].id == found[1].ident
    assert packed.refused == len(found) - 1
    assert "the native table" in packed.why
