"""The fixture of the tests on a GPU that hook their own process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_program import Program, hooked


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, native_cache: Path) -> Iterator[Program]:
    """This process, hooked for one file of tests, with a home of its own."""
    yield from hooked(tmp_path_factory.mktemp("home"), native_cache)
