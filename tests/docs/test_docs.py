"""The docs and the public surface say the same: variables, commands, functions, figures."""

from __future__ import annotations

import ast
import fnmatch
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemmtuned
from gemmtuned.cli import COMMANDS
from gemmtuned.configs.variables import AITER_CONFIGS, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.long  # `make check` looks as well
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


def test_every_option_says_what_it_means() -> None:
    assert re.findall(r"^\| `[^|]+\|\s*\|$", reference("commands"), re.MULTILINE) == []


def test_nothing_points_to_a_page_that_a_wheel_has_not_got() -> None:
    """Who installed the wheel has no docs/: what a command prints names a command, or says it itself."""
    pointing = []
    for folder in ("configs", "daemon", "db", "gemmtuned", "hooks", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            if "docs/" not in text:
                continue
            tree = ast.parse(text)
            defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            said = {ast.get_docstring(one, clean=False) for one in ast.walk(tree) if isinstance(one, defined)}
            pointing += [
                f"{file}:{one.lineno}"
                for one in ast.walk(tree)
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value not in said
                and re.search(r"docs/\S+\.md", one.value)
            ]  # fmt: skip
    assert pointing == []
    assert not re.search(r"docs/\S+\.md", "".join(map(reference, ("commands", "variables", "messages"))))


def test_the_reference_notices_a_page_that_is_stale(tmp_path: Path) -> None:
    for name in ("variables", "commands", "views", "messages"):
        (tmp_path / f"{name}.md").write_text(reference(name))
    (tmp_path / "views.md").write_text(reference("views").replace("| `calls` |", "| `cals` |", 1))
    command = [sys.executable, str(ROOT / "docs/generate.py"), "--check", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1 and "views.md" in done.stdout and "commands.md" not in done.stdout, done.stderr


def reference(page: str) -> str:
    return (ROOT / "docs/reference" / f"{page}.md").read_text()


@pytest.mark.long  # `make check` looks as well
def test_users_read_plain_english() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs/prose.py")], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_picture_shows_what_the_commands_printed() -> None:
    picture = html.unescape((ROOT / "docs/images/demo.svg").read_text()).replace("\xa0", " ")
    result = json.loads(max((ROOT / "benchmarks/results").glob("picture-*.json")).read_text())
    said = [re.sub(r"\x1b\[[0-9;]*m", "", f"{command}\n{screen}") for command, screen in result["screens"]]
    words = {word for text in said for word in re.findall(r"[\w.,:=%-]*\w[\w.,:=%-]*", text)}

    assert len(words) > 60
    assert {word for word in words if word not in picture} == set(), "run: python docs/picture.py --draw"


def test_the_version_is_said_once_and_the_changelog_has_it() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - 20\d\d-\d\d-\d\d$", changelog, re.MULTILINE)
    kinds = re.findall(r"^### (.+)$", changelog, re.MULTILINE)

    assert changelog.index("## [Unreleased]") < changelog.index(f"## [{released[0]}]")
    each = [re.findall(r"^### (.+)$", part, re.MULTILINE) for part in changelog.split("\n## ")[1:]]
    assert each and all(found == sorted(set(found)) for found in each), "Added, Changed, Fixed, Removed, Security"
    assert released[0] == gemmtuned.__version__ and set(kinds) <= {"Added", "Changed", "Fixed", "Removed", "Security"}
    assert not re.search(r"^version *= *\"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_every_public_function_exists_and_says_what_it_does() -> None:
    for name in gemmtuned.__all__:
        assert (getattr(gemmtuned, name).__doc__ or "").strip(), name


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "lab").glob("*.md"))]
PAGES += [ROOT / "benchmarks/README.md"]
RESULTS = [path for folder in ("benchmarks", "lab") for path in (ROOT / folder / "results").glob("*.json")]


def spelled_out(text: str) -> list[str]:
    """`dense-{m1,m2}.json` as both names."""
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    return [
        name for part in found[1].split(",") for name in spelled_out(text[: found.start()] + part + text[found.end() :])
    ]


def cited() -> dict[str, set[str]]:
    """Result files that pages name, patterns included, with the pages; braces stand for each of what is in them."""
    names: dict[str, set[str]] = {}
    for page in PAGES:
        for word in re.findall(r"(?<![\w.-])[\w.{},*-]+\.json", page.read_text()):
            for name in spelled_out(word):
                if re.search(r"20\d\d-\d\d-\d\d\.json$|\*\.json$", name) and not name.startswith("*"):
                    names.setdefault(name, set()).add(str(page.relative_to(ROOT)))
    return names


def test_figures_have_a_result_file() -> None:
    there = {path.name for path in RESULTS}
    named = cited()

    assert len(named) > 50
    assert {name: pages for name, pages in named.items() if not fnmatch.filter(there, name)} == {}


def test_every_result_file_is_cited_by_a_page() -> None:
    named = [name for name in cited() if len(name) > len("x-*.json")]
    left = sorted(path.name for path in RESULTS if not any(fnmatch.fnmatch(path.name, name) for name in named))

    assert left == [], "cite each in docs/, benchmarks/README.md or lab/, or delete it"
    assert len({path.name for path in RESULTS}) == len(RESULTS), "a name stands for one file"


@pytest.mark.parametrize("folder", ["benchmarks", "lab"])
def test_every_program_that_measures_is_in_the_table_of_its_folder(folder: str) -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / folder / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w*]+)`", row)}
    programs = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__main__"}

    assert {p for p in programs if not any(fnmatch.fnmatch(p, name) for name in named)} == set(), "add a row for each"
    assert {name for name in named if not fnmatch.filter(programs, name)} == set(), "no program of that name"


@pytest.mark.parametrize("folder", ["benchmarks", "lab"])
def test_the_entry_runs_a_program_by_its_name_and_lists_them(folder: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", folder, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    name = {"benchmarks": "hook_overhead", "lab": "shares"}[folder]
    listed = run()
    assert listed.returncode == 0 and re.search(rf"^{name} ", listed.stdout, re.MULTILINE)
    shown = run(name, "--help")
    assert shown.returncode == 0 and f"python -m {folder} {name}" in shown.stdout, shown.stderr
    assert run("nothing_like_it").returncode == 2
