"""docs/one-call.md and docs/architecture.md name functions that exist, where they say, in at most thirty steps."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"^\| (\d+) \| `([\w.]+)` \| `([\w/.]+)` \| (.+) \|$", re.MULTILINE)
STEPS = STEP.findall((ROOT / "docs/one-call.md").read_text())
BESIDE = re.findall(
    r"^\| ([a-z]) \| `([\w.]+)` \| `([\w/.]+)` \| (.+) \|$", (ROOT / "docs/one-call.md").read_text(), re.MULTILINE
)


def exists(name: str, file: Path) -> bool:
    """Whether the file defines the function, or the method as Class.method; in C++ a function of that name."""
    text = file.read_text()
    if file.suffix != ".py":  # a definition: the name, its parameters, and a body or the base of one
        return re.search(rf"^(?!\s*(//|return|if|#)).*[\w>&*] \*?{re.escape(name)}\(", text, re.MULTILINE) is not None
    *owner, function = name.split(".")
    body = ast.parse(text).body
    for part in owner:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


def test_the_steps_are_numbered_and_at_most_thirty() -> None:
    assert [int(number) for number, *_ in STEPS] == list(range(1, len(STEPS) + 1))
    assert 20 <= len(STEPS) <= 30
    assert [letter for letter, *_ in BESIDE] == list("abcdefgh")


@pytest.mark.parametrize("step", [*STEPS, *BESIDE], ids=[f"{number}-{name}" for number, name, *_ in [*STEPS, *BESIDE]])
def test_each_step_is_a_function_of_its_file(step: tuple[str, str, str, str]) -> None:
    _, name, file, _ = step
    assert (ROOT / file).is_file(), f"{file} is gone: say in docs/one-call.md where {name} is now"
    assert exists(name, ROOT / file), f"{file} has no {name}: docs/one-call.md must name what does this step now"


QUESTIONS = json.loads((ROOT / "tests/data/where_does.json").read_text())


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked["answers"][0]["function"])
def test_the_answers_to_the_readers_questions_are_right_still(asked: dict[str, Any]) -> None:
    """What somebody new is asked about the code; where several functions share the work, each of them is right."""
    for answer in asked["answers"]:
        assert exists(answer["function"], ROOT / answer["file"]), answer


def test_the_questions_do_not_copy_the_page() -> None:
    told = [set(re.findall(r"[a-z]{5,}", text.lower())) for *_, text in STEPS]
    for asked in QUESTIONS:
        words = set(re.findall(r"[a-z]{5,}", asked["question"].lower()))
        assert max(len(words & row) for row in told) <= len(words) / 2, asked["question"]


def test_a_name_that_is_not_there_is_noticed() -> None:
    for name, file in (
        ("Flusher._flsh", "hooks/flush.py"),
        ("Flush._flush", "hooks/flush.py"),
        ("addm", "hooks/native/operators.h"),
    ):
        assert not exists(name, ROOT / file)


def test_files_and_functions_that_the_docs_name_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {
        (page.name, file)
        for page in pages
        for file in re.findall(
            r"`((?:configs|db|kernels|hooks|daemon|gemmtuned|benchmarks|lab|docs|tests)/[\w/.]+\.\w+)`",
            page.read_text(),
        )
    }
    assert len(named) > 15
    assert {(page, file) for page, file in named if not (ROOT / file).is_file()} == set()
