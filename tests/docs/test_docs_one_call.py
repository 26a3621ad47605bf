"""docs/one-call.md names at most thirty functions: each exists where it says and is called from the one before it."""

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


# How each step comes about: (file, function, what it calls there), from a step before it where nothing else begins it.
# A call through C++ or by name over a socket, and a function that is handed on, stand here as they are written.
CALLS: dict[str, list[tuple[str, str, str]]] = {
    "autoload": [],  # torch calls it: the entry point of pyproject.toml
    "activate": [("gemmtuned/_autoload.py", "autoload", "activate")],
    "gt_install": [
        ("hooks/activate.py", "activate", "_activate"),
        ("hooks/activate.py", "_activate", "_replace"),
        ("hooks/activate.py", "_replace", "hook.install"),
        ("hooks/hook.py", "Hook.install", "patches.install"),
        ("hooks/patches.py", "Patches.install", "_take_library"),
        ("hooks/patches.py", "Patches._take_library", "_put_in"),
        ("hooks/patches.py", "Patches._put_in", "_install"),
        ("hooks/patches.py", "Patches._install", "library.install"),
        ("hooks/native/library.py", "Native.install", "gt_install"),
    ],
    "addmm": [
        ("hooks/native/c_api.cpp", "gt_install", "installables"),
        ("hooks/native/install.h", "installables", "list_operators"),
        ("hooks/native/install.h", "list_operators", "GEMMTUNED_OPERATORS"),
        ("hooks/native/operator_list.h", "", 'X("addmm", addmm, addmm)'),
    ],
    "describe": [("hooks/native/operators.h", "addmm", "sum"), ("hooks/native/operators.h", "sum", "describe")],
    "call": [("hooks/native/operators.h", "sum", "call")],
    "cell": [("hooks/native/call.h", "call", "g_counters.cell")],
    "look_up": [("hooks/native/call.h", "call", "look_up")],
    "Flusher._flush": [
        ("hooks/background.py", "Background._turn", "part.turn"),
        ("hooks/flush.py", "Flusher.turn", "flush"),
        ("hooks/flush.py", "Flusher.flush", "_flush"),
    ],
    "Sightings.add": [
        ("hooks/flush.py", "Flusher._flush", "_write"),
        ("hooks/flush.py", "Flusher._write", "_give"),
        ("hooks/flush.py", "_give", "store.sightings.add"),
    ],
    "Daemon.turn": [],
    "Seat.act": [("daemon/service/service.py", "Daemon.turn", "seat.act")],
    "Leases._claim": [
        ("daemon/seats/seat.py", "Seat.act", "_prepare"),
        ("daemon/seats/seat.py", "Seat._prepare", "_asking.lease"),
        ("daemon/seats/asking.py", "Asking.lease", "_queue.lease"),
        ("daemon/seats/work_queue.py", "WorkQueue.lease", "leases.lease_next"),
        ("db/leases.py", "Leases.lease_next", "_claim"),
    ],
    "Job.begin": [
        ("daemon/seats/seat.py", "Seat.act", "_begin"),
        ("daemon/seats/seat.py", "Seat._begin", "_job.begin"),
    ],
    "Worker.tune": [("daemon/seats/job.py", "Job.begin", "worker.tune")],
    "serve": [
        ("daemon/seats/worker.py", "Worker.__init__", "gemmtuned.daemon.child.worker_main"),
        ("daemon/child/worker_main.py", "main", "_work"),
        ("daemon/child/worker_main.py", "_work", "serve"),
    ],
    "tune_modes": [
        ("daemon/child/worker_main.py", "serve", "_carry_out"),
        ("daemon/child/worker_main.py", "_carry_out", "tune"),
        ("daemon/child/worker_main.py", "load", "tune_modes"),
    ],
    "verify": [
        ("daemon/child/search.py", "tune_modes", "contest.run"),
        ("daemon/child/search.py", "_Contest.run", "_verify"),
        ("daemon/child/search.py", "_Contest._verify", "verify"),
    ],
    "race": [
        ("daemon/child/search.py", "_Contest.run", "_race"),
        ("daemon/child/search.py", "_Contest._race", "_races.in_earnest"),
        ("daemon/child/races.py", "Races.in_earnest", "_at_full_speed"),
        ("daemon/child/races.py", "Races._at_full_speed", "_one"),
        ("daemon/child/races.py", "Races._one", "race"),
    ],
    "last_check": [
        ("daemon/child/search.py", "_Contest.run", "_is_right_still"),
        ("daemon/child/search.py", "_Contest._is_right_still", "last_check"),
    ],
    "keep_binary": [
        ("daemon/child/search.py", "_Contest.run", "_keep_binary"),
        ("daemon/child/search.py", "_Contest._keep_binary", "keep_binary"),
    ],
    "solution_of": [
        ("daemon/child/search.py", "tune_modes", "contest.solution"),
        ("daemon/child/search.py", "_Contest.solution", "solution_of"),
    ],
    "Outbox.write": [
        ("daemon/seats/job.py", "Job.hear", "_install"),
        ("daemon/seats/job.py", "Job._end", "_outbox.append"),
        ("daemon/seats/seat.py", "Seat.act", "_write"),
        ("daemon/seats/seat.py", "Seat._write", "_to_write.write"),
    ],
    "Solutions.install": [
        ("daemon/seats/job.py", "Job._install", "_queue.install"),
        ("daemon/seats/work_queue.py", "WorkQueue.install", "solutions.install"),
    ],
    "publish": [
        ("daemon/service/service.py", "Daemon.turn", "upkeep.look"),
        ("daemon/service/upkeep.py", "Upkeep.look", "_publish"),
        ("daemon/service/upkeep.py", "Upkeep._publish", "publishing.begin"),
        ("daemon/publishing/beside_the_loop.py", "Publishing.begin", "_publish"),
        ("daemon/publishing/beside_the_loop.py", "Publishing._publish", "publish"),
    ],
    "write_contents": [("daemon/publishing/publish.py", "publish", "write_contents")],
    "Watcher._once": [
        ("hooks/background.py", "Background._turn", "part.turn"),
        ("hooks/hook.py", "Hook._make_parts", "Watcher"),
        ("hooks/watch.py", "Watcher.turn", "_once"),
    ],
    "Tables.use": [
        ("hooks/watch.py", "Watcher._once", "_reload"),
        ("hooks/hook.py", "Hook.reload", "tables.reload"),
        ("hooks/tables.py", "Tables.reload", "_reload"),
        ("hooks/tables.py", "Tables._reload", "use"),
    ],
    "load_table": [
        ("hooks/tables.py", "Tables.use", "_load"),
        ("hooks/tables.py", "Tables._load", "native.load"),
        ("hooks/native/library.py", "Native.load", "gt_load"),
        ("hooks/native/c_api.cpp", "gt_load", "load_table"),
    ],
    "accepts": [("hooks/native/call.h", "call", "accepts")],
}


def body_of(name: str, file: Path) -> ast.AST | str:
    """The function's tree; in C++ the text from its name to the brace that closes it; the whole file for no name."""
    text = file.read_text()
    if file.suffix == ".py":
        tree: ast.AST = ast.parse(text)
        for part in name.split("."):
            tree = next(
                node
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part
            )
        return tree
    if not name:
        return text
    found = re.search(rf"^(?!\s*(//|return|if|#)).*[\w>&*] \*?{re.escape(name)}\(", text, re.MULTILINE)
    assert found is not None, name
    start = text.index("{", found.end())
    depth = 0
    for at, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[start:at]
    raise AssertionError(f"{file}: {name} has no end")


def is_called(what: str, body: ast.AST | str) -> bool:
    """Whether the body calls this, or hands it on to be called: as a name of its own, or the end of a dotted one."""
    if isinstance(body, str):
        return re.search(rf"(?<!\w){re.escape(what)}(?!\w)", re.sub(r"//.*", "", body)) is not None
    texts = {ast.unparse(node) for node in ast.walk(body) if isinstance(node, (ast.Name, ast.Attribute))}
    texts |= {node.value for node in ast.walk(body) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return any(text == what or text.endswith(f".{what}") for text in texts)


def test_every_step_has_its_calls() -> None:
    assert list(CALLS) == [name for _, name, *_ in STEPS]
    assert "gemmtuned._autoload:autoload" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("step", CALLS)
def test_each_step_is_called_from_the_one_before_it(step: str) -> None:
    calls = CALLS[step]
    for file, function, called in calls:
        assert is_called(called, body_of(function, ROOT / file)), f"{function} of {file} no longer calls {called}"
    assert not calls or step.split(".")[-1] in calls[-1][2]


def test_a_call_that_is_gone_is_noticed() -> None:
    for file, function, called in (
        ("hooks/flush.py", "Flusher._flush", "_giv"),
        ("hooks/flush.py", "Flusher._flush", "_give"),  # _write does
        ("hooks/native/call.h", "accepts", "look_up"),
        ("hooks/native/call.h", "call", "look"),
    ):
        assert not is_called(called, body_of(function, ROOT / file))


def test_the_steps_are_numbered_and_at_most_thirty() -> None:
    assert [int(number) for number, *_ in STEPS] == list(range(1, len(STEPS) + 1))
    assert 20 <= len(STEPS) <= 30
    assert [letter for letter, *_ in BESIDE] == list("abcdefghijk")


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
