"""Our store and the file that others write, for every test of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from other_users import Two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    both = Two(tmp_path)
    yield both
    both.ours.close()
    both.theirs.close()
