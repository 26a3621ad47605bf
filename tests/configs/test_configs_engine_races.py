"""What a solution says of engines' kernels that it was raced beside, and whose place it may take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.configs import engine_races
from gemmtuned.configs.engine_races import (
    ENGINES,
    MAX_TEXT,
    MOST_ENGINES,
    Peer,
    checked,
    installed,
    is_outdated,
    peers_of,
    shown,
    standing,
    text_of,
)
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.torch_op import OperatorBackend

CUTLASS = "_C::cutlass_scaled_mm"
SOLUTION = Solution(
    problem=Problem(m=4, n=64, k=64, dtype="bf16"), device="cuda-x", mode="eager", covers="exact", backend="cublaslt",
    config="{}", stamp="1", us=1.0, baseline_us=2.0, gain_low=1.9, err=0.0, baseline_err=0.0, state="published",
)  # fmt: skip


def raced(version: str = "0.32.0", low: float | None = 1.1) -> str:
    return text_of({"vllm_cutlass": Peer(version, low)})


def test_engines_name_the_backends_that_call_their_operators() -> None:
    for operator, engine in ENGINES.items():
        for name in engine.backends:
            backend = BACKENDS[name]
            assert isinstance(backend, OperatorBackend)
            packages = (backend.package,) if isinstance(backend.package, str) else backend.package
            assert (backend.operator, packages) == (operator, engine.packages)
    assert len(ENGINES) <= MOST_ENGINES
    assert len(engine_races.BACKENDS) == sum(len(engine.backends) for engine in ENGINES.values())


def test_a_text_is_read_as_it_was_written() -> None:
    peers = {"vllm_cutlass": Peer("0.32.0", 1.125), "sglang_fp8": Peer("0.4.4", None)}
    text = text_of(peers)
    assert text == '{"sglang_fp8":["0.4.4",null],"vllm_cutlass":["0.32.0",1.125]}'
    assert peers_of(text) == peers and checked(text) == text
    assert shown(text) == "sglang_fp8 0.4.4 (does not run it), vllm_cutlass 0.32.0 (1.12x)"
    assert text_of({}) == shown("") == ""


@pytest.mark.parametrize(
    "text", ["no", "[]", "1", '{"a": 1}', '{"a": ["1"]}', '{"a": [1, 1.1]}', '{"a": ["1", "2"]}', '{"a": ["1", true]}',
             '{"a": ["1", -1]}', '{"a": ["1", NaN]}', '{"a": ["1", 1e999]}', "[" * 99_999, None, 1,
             " " * MAX_TEXT + "{}", '{"a": ["1", 1' + "0" * 400 + "]}", '{"a": ["1", -1' + "0" * 400 + "]}",
             '{"' + "e" * 201 + '": ["1", 2]}', '{"a": ["' + "1" * 201 + '", 2]}', '{"a\\u001b[2J": ["1", 2]}',
             '{"a": ["1\\n", 2]}', '{"a": ["\\ud800", 2]}'],
)  # fmt: skip
def test_what_cannot_be_read_was_not_raced(text: Any) -> None:
    assert checked(text) == ""
    row = {**SOLUTION.to_row(), "beside": text}
    assert Solution.from_row(row) == SOLUTION


def test_no_text_is_longer_than_the_store_takes() -> None:
    """Letters beyond ASCII are written as six."""
    many = json.dumps({f"a{i}": ["é" * 180, 2] for i in range(9)}, ensure_ascii=False)
    assert len(many) <= MAX_TEXT < len(text_of(peers_of(many)))
    assert checked(many) == ""
    few = text_of({"a": Peer("é" * 180, 2.0)})
    assert checked(few) == few and peers_of(few)


def test_what_takes_almost_nothing_is_written_as_a_number_that_can_be_read() -> None:
    assert peers_of(text_of({"a": Peer("1", 1e-9)})) == {"a": Peer("1", 0.001)}


def test_a_row_has_it_only_where_there_is_something_to_say() -> None:
    assert "beside" not in SOLUTION.to_row()
    solution = replace(SOLUTION, beside=raced())
    assert Solution.from_row(json.loads(json.dumps(solution.to_row()))) == solution


@pytest.mark.parametrize(
    ("text", "here", "expected"),
    [
        ("", "0.32.0", (False, False)),
        (raced(low=None), "0.32.0", (False, False)),
        (text_of({"sglang_fp8": Peer("0.4.4", 2.0)}), "0.32.0", (False, False)),
        (raced(), None, (False, False)),  # another package registers an operator of this name
        (raced(), "0.31.9", (False, False)),
        (raced(), "0.32", (True, True)),
        (raced(), "0.32.1+cu129", (True, True)),
        (raced("0.9.2"), "0.10.0", (True, True)),
        (raced("0.32.0.dev3+g12"), "0.32.0", (True, True)),
        (raced(), "unknown", (False, False)),
        (raced("unknown"), "0.32.0", (True, True)),
        (raced(), "9" * 5000, (True, True)),
        (raced(low=1.019), "0.32.0", (True, False)),
        (raced(low=0.7), "0.32.0", (True, False)),
        (
            text_of({"vllm_cutlass": Peer("0.32.0", 1.3), "vllm_cutlass_blocks": Peer("0.32.0", 1.0)}),
            "0.32.0",
            (True, False),
        ),
    ],
)
def test_whose_place_a_solution_takes(text: str, here: str | None, expected: tuple[bool, bool]) -> None:
    found = standing(CUTLASS, "cublaslt", text, here)
    assert (found.raced, found.won) == expected
    assert bool(found.why) != found.won


def test_an_engines_own_kernel_that_has_won_is_run_as_the_engine_runs_it() -> None:
    for text in ("", raced(low=1.0)):
        found = standing(CUTLASS, "vllm_cutlass", text, None)
        assert (found.raced, found.won) == (True, False)
    assert not standing("sgl_kernel::fp8_scaled_mm", "vllm_cutlass", "", None).raced


def test_engines_here_are_known_by_backend_also_one_whose_metadata_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, facts in (("vllm", "Version: 0.32.0\n"), ("sgl_kernel", "")):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\n{facts}")
    monkeypatch.syspath_prepend(tmp_path)
    found = installed()
    assert found["vllm_cutlass"] == found["vllm_deep_gemm"] == "0.32.0"
    assert set(found) <= engine_races.BACKENDS and all(isinstance(version, str) for version in found.values())
    assert not is_outdated(text_of({"sglang_fp8": Peer("0.4", 1.1)}), found)
    assert is_outdated(text_of({"vllm_cutlass": Peer("0.31", 1.1)}), found)
