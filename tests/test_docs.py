"""The docs and the public surface say the same: variables, commands, functions, figures, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gemmtuned
from gemmtuned.cli import COMMANDS
from gemmtuned.configs.settings import AITER_CONFIGS, VARIABLES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_reference_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_reference_has_every_variable_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \|", reference("variables"), re.MULTILINE))

    assert {name: rows.get(name) for name in (v.name for v in VARIABLES if v.name not in AITER_CONFIGS)} == {
        v.name: v.default for v in VARIABLES if v.name not in AITER_CONFIGS
    }
    assert {name: rows.get(name) for name in AITER_CONFIGS} == AITER_CONFIGS


def test_the_reference_has_every_command_with_its_options() -> None:
    headings = re.findall(r"^## gemmtuned (\S+)$", reference("commands"), re.MULTILINE)

    assert headings == list(COMMANDS)
    assert {
        o for o in ("`--since`", "`--share-resident`", "`--nsets`", "`--generation`") if o not in reference("commands")
    } == set()


def test_the_reference_notices_a_page_that_is_stale(tmp_path: Path) -> None:
    for name in ("variables", "commands", "views", "messages"):
        (tmp_path / f"{name}.md").write_text(reference(name))
    (tmp_path / "views.md").write_text(reference("views").replace("| `calls` |", "| `cals` |", 1))
    command = [sys.executable, str(ROOT / "docs/generate.py"), "--check", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1 and "views.md" in done.stdout and "commands.md" not in done.stdout, done.stderr


def reference(page: str) -> str:
    return (ROOT / "docs/reference" / f"{page}.md").read_text()


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
