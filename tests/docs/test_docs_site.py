"""The docs as a site: every page is in it, every link leads somewhere, every code box is one that can be used."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from gemmtuned.cli import build
from gemmtuned.commands.aiter_flags import translate

ROOT = Path(__file__).resolve().parents[2]
_BOX = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def _site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = _site()
PAGES = sorted(site.PAGES)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


OTHERS = [ROOT / f"{one}.md" for one in ("CONTRIBUTING", "SECURITY", "RELEASING", "CHANGELOG", "benchmarks/README")]
OTHERS += sorted((ROOT / "lab").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    wrong = []
    for target, anchor in site.links(page):
        if not target.exists():
            wrong.append(f"{target}: not there")
        elif anchor and target.suffix == ".md" and anchor not in site.anchors(target):
            wrong.append(f"{target.name}#{anchor}: no such heading")
    assert not wrong


WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = {word: number for number, word in enumerate(WORDS, 2)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_heading_that_counts_what_is_below_it_counts_right(page: Path) -> None:
    headings = re.findall(r"^(#+) (\w+)", _BOX.sub("", page.read_text()), re.M)
    for place, (level, word) in enumerate(headings):
        below = [len(deeper) for deeper, _ in headings[place + 1 :]]
        own = list(itertools.takewhile(lambda depth, level=level: depth > len(level), below))
        if own and word.lower() in NUMBERS:
            assert own.count(len(level) + 1) == NUMBERS[word.lower()], f"{word} of {page.name}"


def test_a_wrong_link_and_a_wrong_heading_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`, three\n\n[a](gone.md) [b](#one-two-three) [c](https://x.y/z)\n```\n[d](no.md)\n```\n")

    assert list(site.links(page)) == [(tmp_path / "gone.md", ""), (page, "one-two-three")]
    assert site.anchors(page) == {"one-two-three"}


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.M)

    assert sorted(named) == sorted(name for name in site.PAGES.values() if not name.startswith("images/"))


def test_the_copy_has_no_link_that_leads_out_of_it(tmp_path: Path) -> None:
    site.copy(tmp_path)

    for page in tmp_path.rglob("*.md"):
        for target, _ in site.links(page):
            assert target.exists() and target.is_relative_to(tmp_path), f"{page.name}: {target}"


def test_pictures_are_small_and_shown_by_a_page() -> None:
    shown = {target for page in PAGES for target, _ in site.links(page)}

    for picture in (ROOT / "docs/images").iterdir():
        assert picture in shown | set(PAGES), f"{picture.name}: no page shows it"
        assert picture.stat().st_size < 150_000, picture.name


def boxes(*kinds: str) -> list[Any]:
    found = ((page, number, box) for page in PAGES for number, box in enumerate(_BOX.findall(page.read_text())))
    return [pytest.param(text, id=f"{name(page)}-{number}") for page, number, (kind, text) in found if kind in kinds]


@pytest.mark.parametrize("text", boxes("python", "py"))
def test_python_boxes_are_python(text: str) -> None:
    ast.parse(text)


@pytest.mark.parametrize("text", boxes("json"))
def test_json_boxes_are_json(text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize("text", boxes("sh", "bash"))
def test_shell_boxes_are_shell(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    """Lines of code boxes, and code in sentences, that call gemmtuned."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        lines = [line.strip().removeprefix("$ ") for _, box in _BOX.findall(text) for line in box.splitlines()]
        lines += [line.strip() for line in re.findall(r"^    (?!\s)(.*)$", text, re.M)]
        lines += re.findall(r"(?<!`)`(gemmtuned [^`]*)`", text)
        found |= {line for line in lines if re.match(r"gemmtuned [a-z]+( |$)", line)}
    return sorted(found)


def test_every_command_and_option_that_the_pages_name_is_there() -> None:
    group = get_command(build())
    lines = commands()

    assert len(lines) > 60
    assert [wrong for line in lines if (wrong := wrong_in(line, group))] == []


def wrong_in(line: str, group: Any) -> str:
    """What of a line that calls gemmtuned is not there, "" if all is."""
    _, name, *words = re.sub(r"['\"()\[\]]", "", re.split(r"[|&;>#<,]|\.\.\.", line)[0]).split()
    command = group.commands.get(name)
    for word in translate(words)[0] if name == "tune" else words:
        if word == "--" or command is None or name in ("run", "compare"):
            break
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
        elif word.startswith("--"):
            known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            if word.partition("=")[0] not in known | {"--help"}:
                return f"{line}: {word}"
    return "" if command is not None else line


def test_a_command_and_an_option_that_are_not_there_are_noticed() -> None:
    group = get_command(build())

    assert wrong_in("gemmtuned gain", group) and wrong_in("gemmtuned db check --jsn", group)
    assert not wrong_in("gemmtuned db check --json", group)
