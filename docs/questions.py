"""Write docs/questions.md: the questions that people ask of a program of theirs, each with its command and its answer.

    python docs/questions.py                   # half a minute

It runs docs/examples/classifier.py with gemmtuned on, gives it verdicts, runs it again, then eight workers of one
thread, and asks.  The verdicts are given (`give`), so that the page can be made on any machine, a busy one, too;
nothing else of the answers is made up.  tests/docs/test_docs_questions.py does so, too, and compares all but figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gemmtuned.configs.problem import known_problems
from gemmtuned.configs.solution import Solution, cpu_device
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.kernels.backends import environment

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE / "questions.md"
WORKERS: Final = 8
LAST: Final = 10  # N of the last layer


@dataclass(frozen=True, slots=True)
class Question:
    """before: what is said ahead of the answer; after: behind it."""

    title: str
    command: str
    before: str
    after: str = ""


QUESTIONS: Final = (
    Question(
        "How much of it is tuned?",
        "gemmtuned coverage --run classifier",
        "Three shares, never mixed: what runs *faster*, where the search found that torch's own kernel *is best*, "
        "and what has *no verdict* yet. Covered is the sum of the first two.",
        "*Covered now* joins today's table to the calls of the last 24 hours; *observed* is what the look-ups gave "
        "when the calls were made. Half of these calls were made before anything was tuned.",
    ),
    Question(
        "Which of my layers got faster?",
        "gemmtuned coverage --by layer --run classifier",
        "A layer is a weight's N x K, with all M that it was called with.",
        "In a program, `gemmtuned.layers(model)` gives the same table with the names of the modules.",
    ),
    Question(
        "What share of my program's time is it, and what did tuning give?",
        "gemmtuned coverage --by run",
        "GEMM time over the program's own time, and what follows for the whole: 1 / (1 - s + s/g) for a share s that "
        "got g times as fast.",
        "`gemmtuned compare -- python classifier.py` measures it instead of reckoning: the program with gemmtuned and "
        "without it by turns.",
    ),
    Question(
        "Why are my eight workers not covered?",
        "gemmtuned coverage",
        "They ran with one thread each (`OMP_NUM_THREADS=1`), and the number of threads is part of what is looked up. "
        "[workers.md](workers.md) has more.",
    ),
    Question(
        "Is it on?",
        "gemmtuned status",
        "What runs now, what is published, and where problems were seen. A line in capitals at the top (SWITCHED OFF, "
        "PAUSED) says that somebody has switched it off, and how to go on.",
        "A program says it at its start: `gemmtuned 0.2.0: native, generation 3, 3 rows, home ...`, or that it only "
        "counts, or by what it is switched off. Inside it: `gemmtuned.status()`.",
    ),
    Question(
        "What was gained, problem by problem?",
        "gemmtuned gains --run classifier",
        "Times of the race that decided, and what the calls since have saved.",
    ),
    Question(
        "Why does this product run what it runs?",
        "gemmtuned explain 8 2048 512 --threads 2",
        "M, N and K; the look-up step by step.",
    ),
    Question(
        "What waits to be tuned, and why?",
        "gemmtuned untuned --run workers",
        "Worth most first. How long it takes: the daemon's log says so each minute (`left problems=6 solved=14 "
        "eta_s=18`), `gemmtuned tune` and `gemmtuned daemon --once` beside their bars.",
    ),
    Question(
        "What was published, and when?",
        "gemmtuned rollback",
        "The newest generations. `gemmtuned rollback --generation N` goes back to one, `gemmtuned withdraw PROBLEM` "
        "takes one solution out of use; programs follow within a second.",
    ),
    Question(
        "Can CI watch over it?",
        "gemmtuned coverage --run classifier --fail-under 95 --json",
        "Ends with 1 where less than 95 % is covered. With `--json` every answer is one line of JSON.",
    ),
)
HEAD: Final = f"""# Questions about a program

<!-- Written by docs/questions.py: edit that, then run it again. -->

The program is [examples/classifier.py](examples/classifier.py), a small text classifier that knows nothing of
gemmtuned. It ran for some seconds, was tuned, and ran again; then {WORKERS} workers of it ran with one thread each:

```sh
gemmtuned run --run-label classifier -- python classifier.py 10
gemmtuned tune --threads 2
gemmtuned run --run-label classifier -- python classifier.py 10
for i in $(seq {WORKERS}); do OMP_NUM_THREADS=1 gemmtuned run --run-label workers -- python classifier.py 2 & done; wait
```

So that this page can be made and checked on any machine, the verdicts in it are given, not measured: oneDNN's kernel
takes half of torch's time for the two wide layers, for the last layer torch's own is best. All else is what the
commands said.

"""
HOME: Final = "/home/you/.local/state/gemmtuned"  # as it is called on the page
TAIL: Final = """## And how do I get rid of it?

Stop the daemon (`kill` the pid that `gemmtuned status` names) and the programs, then `gemmtuned purge` (`--dry-run`
shows which files) and `pip uninstall gemmtuned`. What `gemmtuned --install-completion` has written into your shell's
start file stays: delete its lines there. To only switch it off: start programs without `GEMMTUNED=1`, or `touch` the
file `disabled` in the home, which running programs notice within a second.
"""


def give(home: Path) -> None:
    """Write a verdict for all that was called, as a search would, and publish."""
    here = environment(cpu_device())
    store = Store(home / "tune.db", locks=home / "locks")
    for problem in known_problems(queries.seen(store.path)):
        best = problem.n == LAST
        backend = "torch" if best else "onednn"
        us = 10.0 + problem.n * problem.k / 40_000  # torch's kernel
        solution = Solution(
            problem=problem, device=here.device.key, mode="eager", covers="exact", backend=backend, config="{}",
            stamp=here.stamps[backend], us=us if best else us / 2, baseline_us=us, gain_low=1.0 if best else 1.9,
            err=1e-6, baseline_err=1e-6, state="default_best" if best else "published",
        )  # fmt: skip
        store.solutions.install(None, [solution], environment=here, now_s=time.time())
    publish(store, home / "configs", home / "locks", now_s=time.time())
    store.close()


def page(answers: dict[str, str]) -> str:
    """The page, with the answer of each command."""
    parts = [HEAD]
    for question in QUESTIONS:
        answer = "\n".join(line.rstrip() for line in answers[question.command].strip().splitlines())
        parts.append(f"## {question.title}\n\n{question.before}\n\n")
        parts.append(f"```console\n$ {question.command}\n{answer}\n```\n\n")
        if question.after:
            parts.append(f"{question.after}\n\n")
    return "".join(parts) + TAIL


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gemmtuned-questions-") as scratch:
        env = {**os.environ, "GEMMTUNED_HOME": str(Path(scratch) / "home"), "OMP_NUM_THREADS": "2"}

        def run(*words: str, **more: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "gemmtuned", *words]
            return subprocess.Popen(command, env={**env, **more}, stdout=subprocess.PIPE, text=True)

        def serve(label: str, seconds: float, **more: str) -> subprocess.Popen[str]:
            program = (sys.executable, str(HERE / "examples/classifier.py"), str(seconds))
            return run("run", "--run-label", label, "--", *program, **more)

        serve("classifier", 10).communicate()
        give(Path(scratch) / "home")
        serve("classifier", 10).communicate()
        workers = [serve("workers", 2, OMP_NUM_THREADS="1") for _ in range(WORKERS)]
        for worker in workers:
            worker.communicate()
        answers = {one.command: run(*one.command.split()[1:]).communicate()[0] for one in QUESTIONS}
    shown = {command: said.replace(f"{scratch}/home", HOME) for command, said in answers.items()}
    PAGE.write_text(page(shown))


if __name__ == "__main__":
    main()
