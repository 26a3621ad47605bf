"""What a program tells of engines' operators that wait: what holds of the table in use, once for each table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmtuned.configs.engine_races import OPERATORS, Peer, text_of
from gemmtuned.configs.packed import pack
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks import unserved
from gemmtuned.hooks.dispatch import Table
from gemmtuned.hooks.unserved import Unserved

CUTLASS, SGLANG = "_C::cutlass_scaled_mm", "sgl_kernel::fp8_scaled_mm"
PROBLEM = Problem(family="scaled", m=8, n=64, k=64, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
SOLUTION = Solution(
    problem=PROBLEM, device="cuda-x", mode="eager", covers="exact", backend="cublaslt", config="{}", stamp="1", us=1.0,
    baseline_us=2.0, gain_low=1.9, err=0.0, baseline_err=0.0, state="published",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unserved, "_version_of", {CUTLASS: "0.32.0"}.get)


def table(generation: int, *solutions: Solution) -> Table:
    made = Table(generation)
    for solution in solutions:
        made.put("cuda:0", solution, pack(solution))
    return made


def called(*operators: str, graph: bool = False) -> Sighting:
    bits = sum(1 << 1 + OPERATORS.index(name) for name in operators)
    return Sighting(PROBLEM, "miss", 3, graph=graph, place="cuda:0", unserved=bits)


def test_each_operator_is_told_once_with_each_table() -> None:
    noted, first = Unserved(), table(4, SOLUTION)
    noted.note(called(CUTLASS, SGLANG), first)
    noted.note(called(CUTLASS), first)
    assert sorted(noted.take()) == [(PROBLEM, name, "cuda:0", 4) for name in sorted((CUTLASS, SGLANG))]
    noted.note(called(CUTLASS), first)
    assert list(noted.take()) == []
    noted.note(called(CUTLASS), table(5, SOLUTION))
    assert list(noted.take()) == [(PROBLEM, CUTLASS, "cuda:0", 5)]


@pytest.mark.parametrize(
    ("newer", "waits"),
    [
        (replace(SOLUTION, beside=text_of({"vllm_cutlass": Peer("0.32.0", 1.2)})), False),
        (replace(SOLUTION, beside=text_of({"vllm_cutlass": Peer("0.32.0", 0.9)})), False),
        (replace(SOLUTION, backend="vllm_cutlass"), False),
        (replace(SOLUTION, backend="torch", state="default_best"), False),
        (None, False),
        (replace(SOLUTION, beside=text_of({"vllm_cutlass": Peer("0.33.0", 1.2)})), True),
        (replace(SOLUTION, beside=text_of({"vllm_cutlass": Peer("0.32.0", None)})), True),
    ],
)
def test_calls_before_a_table_came_are_not_told_of_what_it_has(newer: Solution | None, waits: bool) -> None:
    """The last calls before a program takes up a solution are counted after it."""
    noted = Unserved()
    noted.note(called(CUTLASS), table(4, SOLUTION))
    list(noted.take())
    noted.note(called(CUTLASS), table(5, *(() if newer is None else (newer,))))
    assert [note[1] for note in noted.take()] == ([CUTLASS] if waits else [])


def test_calls_in_graphs_are_told_of_what_serves_graphs() -> None:
    raced = replace(SOLUTION, beside=text_of({"vllm_cutlass": Peer("0.32.0", 1.2)}))
    both = table(4, raced, replace(SOLUTION, mode="graph"))
    noted = Unserved()
    noted.note(called(CUTLASS), both)
    assert list(noted.take()) == []
    noted = Unserved()
    noted.note(called(CUTLASS, graph=True), both)
    assert [note[1] for note in noted.take()] == [CUTLASS]
