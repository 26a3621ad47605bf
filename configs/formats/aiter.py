"""AITER's CSV tables and Triton tile files as hints."""

from __future__ import annotations

import json
from pathlib import Path

from gemmtuned.configs import aiter_csv, aiter_rows, triton_json
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.solution import Candidate


def read_csv(path: Path, *, family: str | None = None) -> Imported:
    """A table of any family. Raises TableError."""
    table = aiter_csv.read_file(path, family=family)
    found = Imported(path=str(path), format="aiter-csv", family=table.family.name, kind=table.kind)
    found.rejected, found.reasons = table.rejected, list(table.complaints)
    for row in table.rows:
        solution = aiter_rows.solution_of(row)
        found.add(
            row.line,
            row.values,
            problem=solution.problem if solution else aiter_rows.problem_of(row),
            candidate=aiter_rows.candidate_of(row) if table.kind == "tuned" else None,
            arch=aiter_rows.gfx_of(row),
            units=aiter_rows.units_of(row),
            us=aiter_rows.time_of(row),
            solution=solution,
        )
    return found


def read_tiles(path: Path) -> Imported:
    """A Triton tile file, one hint a bucket. Raises TableError."""
    file = triton_json.read_file(path)
    found = Imported(path=str(path), format="triton-json", family=file.name, kind="tuned")
    found.rejected, found.reasons = len(file.complaints), list(file.complaints)
    for number, (key, config) in enumerate(file.buckets.items(), 1):
        problem = triton_json.problem_of(file, key)
        candidate = triton_json.candidate_of(config) if "-A16W16" in file.name else None
        found.add(
            number,
            {"bucket": key, **{name: str(size) for name, size in file.sizes.items()}, "config": config},
            problem=problem,
            candidate=candidate or _theirs(config),
            arch=file.arch,
        )
    return found


def _theirs(config: triton_json.Config) -> Candidate | None:
    """A tile of a kernel that we have none like."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return Candidate("aiter_triton", text) if len(text) <= 4096 else None
