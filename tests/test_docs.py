"""The README and the public surface say the same: variables, commands, functions."""

from __future__ import annotations

import re
from pathlib import Path

import gemmtuned
from gemmtuned.cli import COMMANDS
from gemmtuned.configs.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_lists_every_variable_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \|", README, re.MULTILINE))

    assert rows == {v.name: v.default for v in VARIABLES}


def test_the_readme_names_every_command() -> None:
    assert {c for c in COMMANDS if not re.search(rf"\b{c}\b", README)} == set()


def test_every_public_function_exists_and_says_what_it_does() -> None:
    for name in gemmtuned.__all__:
        assert (getattr(gemmtuned, name).__doc__ or "").strip(), name


def test_figures_have_a_result_file() -> None:
    pages = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    # not those that say only how they differ from the one before: `-b8-h200-2026-11-23.json`
    named = {n for page in pages for n in re.findall(r"(?<![\w.-])[\w.][\w.-]*-20\d\d-\d\d-\d\d\.json", page)}

    assert len(named) > 50
    assert {n for n in named if not (ROOT / "benchmarks/results" / n).is_file()} == set()


def test_pages_are_where_others_send_their_readers() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]

    assert links
    assert [link for page, link in links if not (page.parent / link).exists()] == []
