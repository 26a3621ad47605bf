"""The faults of mutations_list.py fit the code, and name tests that are there; `make check` and `make soak` look."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import Mutation
from mutations_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_fault_fits_the_code(mutation: Mutation) -> None:
    assert mutation.misfit(ROOT) == ""
    assert mutation.old != mutation.new


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_x() -> None: ...\n")
    (tmp_path / "a.py").write_text("x = 1\nx = 1\ny = 2\n")

    def misfit(file: str, old: str, test: str = "test_a.py::test_x") -> str:
        return Mutation("a fault", file, old, "z", (test,)).misfit(tmp_path)

    assert misfit("a.py", "y = 2") == ""
    assert misfit("a.py", "x = 1") == "a.py has its text 2 times"
    assert misfit("b.py", "y = 2") == "b.py is not there"
    assert misfit("a.py", "y = 2", "test_b.py") == "test_b.py is not there"
    assert misfit("a.py", "y = 2", "test_a.py::test_x[1]") == ""
    assert misfit("a.py", "y = 2", "test_a.py::test_y") == "test_a.py::test_y is not there"
