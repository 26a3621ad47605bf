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
    commands = {command.__name__ for command in COMMANDS} | {"db"}

    assert {c for c in commands if not re.search(rf"\b{c}\b", README)} == set()


def test_every_public_function_exists_and_says_what_it_does() -> None:
    for name in gemmtuned.__all__:
        assert (getattr(gemmtuned, name).__doc__ or "").strip(), name


def test_figures_in_the_readme_have_a_result_file() -> None:
    named = re.findall(r"benchmarks/results/([A-Za-z0-9._-]+\.json)", README)

    assert named
    assert [n for n in named if not (ROOT / "benchmarks/results" / n).is_file()] == []
