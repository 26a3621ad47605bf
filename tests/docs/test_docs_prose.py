"""The word list of docs/prose.py: what stands in a text is noticed (tests/docs/test_docs.py reads what users read)."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = spec_from_file_location("prose", ROOT / "docs/prose.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Sorted dearest first.", ["dearest"]),
        ("The call is\nserved by torch; the user is told.", ["served by torch", "told"]),
        ("200 KB a unit, 16 registers of a thread", ["a unit", "of a thread"]),
        ("A unit of time; so many that it overflows; retold", []),
        ("It is in the same place. The grid has a place for it, at 19 places", ["place", "place", "places"]),
        ("Sorted in place, in place of it, in torch's place; what takes its place; a place such as cuda:0", []),
    ],
)
def test_words_of_the_list_are_found(prose: ModuleType, text: str, words: list[str]) -> None:
    assert [found for _, found, _ in prose.found_in(text)] == words


def test_messages_and_help_are_read_and_docstrings_of_others_are_not(prose: ModuleType, tmp_path: Path) -> None:
    source = 'def f():\n    """Told of it."""\n    raise ValueError(f"{f}: was told so")\n'
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/a.py").write_text(source)
    (tmp_path / "b.py").write_text(source)

    assert [text for _, text in prose.messages(tmp_path / "b.py")] == [": was told so"]
    assert {text for _, text in prose.messages(tmp_path / "commands/a.py")} == {"Told of it.", ": was told so"}


def test_a_docstring_that_begins_as_a_fragment_is_noticed(prose: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'def f():\n    """Of it."""\n\n\nclass A:\n    """Offers it. By it."""\n\n\nx = 1  # of it\n# of it\n'
    )

    assert [found[:2] for found in prose.fragments(tmp_path / "a.py")] == [(9, "# of it"), (1, "Of it.")]


def test_comments_and_docstrings_of_code_are_read(prose: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""What it is."""\n\nx = "the state of before"  # as of before\n')
    (tmp_path / "a.h").write_text("// of before\nint before;\n")

    read = [text for name in ("a.py", "a.h") for _, text in prose.remarks(tmp_path / name)]
    assert [found for text in read for _, found, _ in prose.found_in(text, prose._IN_CODE)] == ["of before"] * 2
