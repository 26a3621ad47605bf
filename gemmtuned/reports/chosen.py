"""What is chosen for problems: by a tuned table, or by what is published here. Nothing chosen means torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_rows import candidate_of, problem_of, time_of
from gemmtuned.configs.hint import plain_case
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate
from gemmtuned.reports.source import writer

_DEFAULT = Candidate(DEFAULT_BACKEND)


def of_table(path: Path, wanted: Sequence[Problem], *, dtype: str) -> list[tuple[Problem, Candidate]]:
    """Each problem with what AITER's look-up finds for it in a tuned table: exact M, then its two padded levels.

    dtype: of rows that name none.  Of several rows the fastest counts.  Rows of other devices are taken too: the
    caller checks whether they run here.
    Raises TableError for a file that is no table.
    """
    best: dict[Problem, tuple[float, Candidate]] = {}
    for row in read_file(path).rows:
        us, candidate = time_of(row), candidate_of(row)
        problem = problem_of(row, dtype=dtype)
        if us is None or candidate is None or problem is None:
            continue
        if problem not in best or us < best[problem][0]:
            best[problem] = us, candidate
    found = []
    for problem in wanted:
        levels = (problem.filed(covers) for covers in COVERS)
        keys = map(plain_case, levels)  # AITER's rows know no threads and no math mode
        found.append((problem, next((best[key][1] for key in keys if key in best), _DEFAULT)))
    return found


def published(settings: Settings, wanted: Sequence[Problem]) -> list[tuple[Problem, Candidate]]:
    """Each problem with the newest live solution that serves it, on whatever device it was found."""
    with writer(settings) as store:
        live = {
            (solution.problem, solution.covers): solution.candidate
            for solution in store.solutions.published()[1]
            if solution.mode == "eager"
        }
    found = []
    for problem in wanted:
        keys = ((problem.filed(covers), covers) for covers in COVERS)
        found.append((problem, next((live[key] for key in keys if key in live), _DEFAULT)))
    return found
