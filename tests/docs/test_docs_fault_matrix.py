"""docs/fault-matrix.md names tests that exist: a file, and part of the name of a test or of a case in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (\d+a?) \|.*$", (ROOT / "docs/fault-matrix.md").read_text(), re.MULTILINE)
NAMED = re.findall(
    r"`(?:gpu/)?(test_\w+\.py)`((?:,? `(?!test_)\w+`)*)", (ROOT / "docs/fault-matrix.md").read_text()
)  # a file, and parts of names for pytest's -k
CASES = re.compile(r"def (test_\w+)|^    \"(\w+)\": ", re.MULTILINE)  # of tests, and of the cases that they are given
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def test_every_row_is_there_and_names_what_exists() -> None:
    assert [row for row in ROWS if row.isdigit()] == [str(number) for number in range(1, 39)]
    missing = []
    for file, parts in NAMED:
        text = FILES[file].read_text() if file in FILES else ""
        names = " ".join(map("".join, CASES.findall(text)))
        missing += [f"{file} {part}" for part in re.findall(r"\w+", parts) if part not in names]
        missing += [file] if not text else []
    assert len(NAMED) > 40
    assert missing == []
