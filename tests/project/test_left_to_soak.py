"""tests/left_to_soak.md has a row, with the right numbers, for each test of which `make soak` has cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from left_to_soak import COUNTS, Cases, differences, name_of, rows

PAGE = Path(__file__).resolve().parents[1] / "left_to_soak.md"


def test_the_page_says_what_was_collected(pytestconfig: pytest.Config) -> None:
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("single tests were asked for")
    assert differences(PAGE.read_text(), pytestconfig.stash[COUNTS]) == []


def test_each_row_can_be_read_and_stands_once() -> None:
    page = PAGE.read_text()
    names = [name for name, _ in rows(page)]
    table = [line for line in page.splitlines() if line.startswith("| ")]

    assert len(names) == len(set(names)) == len(table) - 1


def test_a_row_that_is_missing_wrong_or_stale_is_named() -> None:
    page = "| db/a: one | 1 | 0 | 2 | why |\n| db/a: two | 1 | 0 | 3 | why |\n| db/b: x | 0 | 0 | 1 | why |\n"
    counts = {"db/a: one": Cases(1, 0, 2), "db/a: two": Cases(4, 0, 0), "db/a: three": Cases(0, 1, 1)}

    assert differences(page, counts) == [
        "it should say | db/a: three | 0 | 1 | 1 |", "the soak has no case of db/a: two",
    ]  # fmt: skip


def test_a_test_is_named_as_people_read() -> None:
    assert name_of("tests/db/test_db_locks.py::test_a_lock_is_one[x[y]]") == "db/locks: a lock is one"
    assert name_of("tests/project/test_mutations.py::test_it") == "project/mutations: it"
