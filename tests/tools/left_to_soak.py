"""Which cases `make test` leaves to `make long` and `make soak`, counted as pytest collects them.

tests/left_to_soak.md has a row for each test of which the soak has cases; test_left_to_soak.py compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import pytest

# Their cases are the published models that lie beside a checkout, or are none
_OF_WHAT_LIES_BESIDE: Final = {"configs/models: a published model has the linear layers that transformers builds"}
_ROW: Final = re.compile(r"^\| ([a-z0-9_/]+): ([a-z0-9_ ]+) \| (\d+) \| (\d+) \| (\d+) \| .+ \|$")


class Cases(NamedTuple):
    """How many cases of a test there are for each of the three."""

    test: int = 0
    long: int = 0
    soak: int = 0


COUNTS: Final = pytest.StashKey[dict[str, Cases]]()


def name_of(nodeid: str) -> str:
    """`db/locks: a lock is one` for tests/db/test_db_locks.py::test_a_lock_is_one[x], as the page has it."""
    path, _, test = nodeid.partition("[")[0].partition("::")
    folder, _, file = path.removeprefix("tests/").rpartition("/")
    stem = file.removesuffix(".py").removeprefix("test_").removeprefix(f"{folder}_")
    return f"{folder}/{stem}: {test.removeprefix('test_').replace('_', ' ')}"


def counted(items: Iterable[pytest.Item]) -> dict[str, Cases]:
    """The cases of each test, those for a GPU, and those of what lies beside a checkout, aside."""
    counts: dict[str, list[int]] = {}
    for item in items:
        if not item.get_closest_marker("gpu") and name_of(item.nodeid) not in _OF_WHAT_LIES_BESIDE:
            which = 2 if item.get_closest_marker("soak") else 1 if item.get_closest_marker("long") else 0
            counts.setdefault(name_of(item.nodeid), [0, 0, 0])[which] += 1
    return {name: Cases(*numbers) for name, numbers in counts.items()}


def rows(page: str) -> Iterator[tuple[str, Cases]]:
    """(test, cases) of each row of the page."""
    for line in page.splitlines():
        if found := _ROW.match(line):
            yield f"{found[1]}: {found[2]}", Cases(*map(int, found.groups()[2:]))


def differences(page: str, counts: dict[str, Cases]) -> list[str]:
    """What is to be changed in the page, for the tests of the files that were collected."""
    said = dict(rows(page))
    files = {name.partition(":")[0] for name in counts}
    wrong = [
        f"it should say | {name} | {cases.test} | {cases.long} | {cases.soak} |"
        for name, cases in counts.items()
        if cases.soak and said.get(name) != cases
    ]
    gone = [name for name in said if name.partition(":")[0] in files and not counts.get(name, Cases()).soak]
    return wrong + [f"the soak has no case of {name}" for name in gone]
