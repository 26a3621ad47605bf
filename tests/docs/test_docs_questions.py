"""docs/questions.md: each question's command gives, for a program of this test, what the page shows, figures aside.

The program is the page's own, hooked for real, as are its eight workers of one thread; the verdicts are the page's.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hooked import Home
from typer.testing import CliRunner

from gemmtuned.cli import build

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLASSIFIER = (DOCS / "examples/classifier.py").read_text()


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = load(DOCS / "questions.py")
SHOWN = dict(re.findall(r"```console\n\$ (.*)\n((?:(?!```).*\n)*)```", (DOCS / "questions.md").read_text()))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, native_cache: Path, fork_server: Any) -> dict[str, Any]:
    """Of each command, after the classifier ran, was tuned for two threads, ran again, and so did its workers."""
    home = Home(tmp_path_factory.mktemp("questions") / "home", native_cache, fork_server)

    def serve(label: str, threads: int, seconds: float) -> None:
        code = f"import torch\ntorch.set_num_threads({threads})\n{CLASSIFIER}"
        assert home.run(code, str(seconds), GEMMTUNED_RUN=label).code == 0

    serve("classifier", 2, 0.1)
    page.give(home.path)
    serve("classifier", 2, 0.1)
    for _ in range(page.WORKERS):
        serve("workers", 1, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.environment().items():
            patch.setenv(name, value)
        return {one.command: CliRunner().invoke(build(), one.command.split()[1:]) for one in page.QUESTIONS}


def shape(text: str) -> set[str]:
    """The lines of an answer, figures aside; without the rows of its table and what is said of a busy machine."""
    text = re.sub(r"(cpu|cuda)(-[a-z0-9]+)+", r"\1-device", text)  # each machine's own
    lines = (re.sub(r"[0-9][0-9.,e-]*( (us|ms|s|h|min|KiB|MiB|%))?", "#", line) for line in text.splitlines())
    lines = (" ".join(line.split()).replace("problems", "problem").replace(" others used", "") for line in lines)
    program = "(classifier|workers)( cpu|: # of the time that it ran|: the estimated GEMM time is more than)"
    rows = rf"(estimated: |home: |fp#|#|dense|{program}|exact|multiple of|# (of them|problem))"
    return {line for line in lines if line and not re.match(rows, line)}


@pytest.mark.parametrize("question", page.QUESTIONS, ids=lambda one: one.title)
def test_the_page_shows_what_the_command_says(answers: dict[str, Any], question: Any) -> None:
    answer = answers[question.command]

    assert answer.exit_code == 0, answer.output
    if question.command.endswith("--json"):
        assert set(json.loads(answer.stdout)) == set(json.loads(SHOWN[question.command]))
    else:
        assert shape(SHOWN[question.command]) == shape(answer.stdout)


def test_the_page_is_what_its_program_writes() -> None:
    text = page.PAGE.read_text()

    assert text == page.page(SHOWN)


def test_eight_workers_of_one_thread_are_explained_by_coverage_itself(answers: dict[str, Any]) -> None:
    said = answers["gemmtuned coverage"].stdout

    assert "workers with 1 thread: stock torch runs for 6 problems whose shape is tuned at 2 threads" in said
    assert "OMP_NUM_THREADS=2" in said and "gemmtuned tune --threads 1" in said
    assert "OMP_NUM_THREADS" not in answers["gemmtuned coverage --run classifier"].stdout, "it ran with two"
    assert "workers" in answers["gemmtuned coverage --by run"].stdout
    assert answers["gemmtuned untuned --run workers"].stdout.count("threads=1") == 6
