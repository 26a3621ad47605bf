"""AITER's CSV tables and Triton tile files: read as hints, and written from our solutions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gemmtuned.configs import aiter_csv, aiter_rows, triton_json
from gemmtuned.configs.aiter_headers import AiterFamily
from gemmtuned.configs.aiter_names import canonical_name
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.numbers import rows_are
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.configs.triton_json import Config, TileFile


def read_csv(path: Path, *, family: str | None = None, ignore: Sequence[str] = ()) -> Imported:
    """A table of any family; ignore: columns that somebody says do not matter. Raises TableError."""
    reader = aiter_csv.Reader(aiter_csv.lines_of(path), name=str(path), family=family, ignore=ignore)
    header = reader.header
    found = Imported(path=str(path), format="aiter-csv", family=header.family.name, kind=header.kind)
    problems = aiter_rows.Problems(header)
    kernels = aiter_rows.Kernels(header) if header.kind == "tuned" else None
    archs: dict[str, str] = {}  # a few architectures, each kept once
    for row in reader:
        solution = aiter_rows.solution_of(row)
        problem = solution.problem if solution else problems.of(row)
        candidate = solution.candidate if solution else kernels.of(row) if kernels else None
        arch = aiter_rows.gfx_of(row)
        found.add(
            row.line,
            row.text,
            problem=None if isinstance(problem, str) else problem,
            why=problem if isinstance(problem, str) else "",
            candidate=candidate,
            arch=archs.setdefault(arch, arch),
            units=aiter_rows.units_of(row),
            us=aiter_rows.time_of(row),
            solution=solution,
        )
    for complaint in reader.complaints:
        found.reject(complaint)
    found.rejected += reader.rejected - len(reader.complaints)
    found.notes += reader.notes
    if header.family.name == "fmoe":
        unreached = sum(1 for hint in found.hints if hint.problem is not None and _unreached(hint.problem.m))
        if unreached:
            found.notes.append(f"{path}: {rows_are(unreached)} for token counts that AITER's look-up never asks for")
    return found


def _unreached(tokens: int) -> bool:
    """AITER looks mixtures up by the next power of two, and by 32768 and 131072 beyond that."""
    return tokens & (tokens - 1) != 0


def read_tiles(path: Path) -> Imported:
    """A Triton tile file, one hint a bucket. Raises TableError."""
    file = triton_json.read_file(path)
    found = Imported(path=str(path), format="triton-json", family=file.name, kind="tuned")
    found.rejected, found.reasons, found.notes = len(file.complaints), list(file.complaints), list(file.notes)
    for number, (key, config) in enumerate(file.buckets.items(), 1):
        problem = triton_json.problem_or_reason(file, key)
        candidate = triton_json.candidate_of(config) if "-A16W16" in file.name else None
        found.add(
            number,
            {"bucket": key, **{name: str(size) for name, size in file.sizes.items()}, "config": config},
            problem=problem if isinstance(problem, Problem) else None,
            why=problem if isinstance(problem, str) else "",
            candidate=candidate or _theirs(config),
            arch=file.arch,
        )
    return found


def _theirs(config: triton_json.Config) -> Candidate | None:
    """A tile of a kernel that we have none like."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return Candidate("aiter_triton", text) if len(text) <= 4096 else None


@dataclass(slots=True)
class Left:
    """Solutions that a format cannot hold, each with the reason."""

    out: list[tuple[Solution, str]] = field(default_factory=list)

    def add(self, solution: Solution, reason: str) -> None:
        """Leave one out."""
        self.out.append((solution, reason))


def csv_tables(
    solutions: Sequence[Solution], devices: Mapping[str, Device], left: Left
) -> dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """(header, rows) by AITER's file name. Of solutions with one key of AITER's the one for graphs, then the faster."""
    chosen: dict[tuple[str, ...], tuple[AiterFamily, Solution, dict[str, str]]] = {}
    doubles: list[tuple[tuple[str, ...], Solution]] = []
    for solution in solutions:
        family = aiter_rows.family_of(solution.problem)
        device = devices.get(solution.device)
        if family is None or device is None:
            left.add(solution, "AITER has no table that says all of it" if device else "its device is not known")
            continue
        if device.arch.startswith("gfx") and not _aiter_runs(family, solution):
            left.add(solution, f"AITER has no library {solution.backend} in that table, and would stop at the row")
            continue
        texts = aiter_rows.tuned_texts(solution, family, device)
        if not aiter_rows.reads_as(solution.problem, family, texts):
            left.add(solution, "AITER's columns would tell another problem")
            continue
        key = (family.name, *(texts[column] for column in (*family.device, *family.key)))
        other = chosen.get(key)
        if other is None or _rank(solution) < _rank(other[1]):
            chosen[key] = family, solution, texts
            solution = other[1] if other else solution
        if other is not None:
            doubles.append((key, solution))
    for key, solution in doubles:
        left.add(solution, _instead(chosen[key][1], solution))
    tables: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]] = {}
    for family, _, texts in chosen.values():
        name = canonical_name(family.name, "tuned")
        columns = aiter_rows.columns_for(family, kind="tuned")
        tables.setdefault(name, (columns, []))[1].append(tuple(texts.values()))
    return tables


def _aiter_runs(family: AiterFamily, solution: Solution) -> bool:
    return "libtype" in family.result and solution.backend in aiter_rows.AITER_LIBRARIES


def _instead(kept: Solution, left: Solution) -> str:
    """Why this one was left, of two that AITER's columns do not tell apart."""
    for what, of_kept, of_left in (
        ("thread count", kept.problem.threads, left.problem.threads),
        ("math mode", kept.problem.math_mode, left.problem.math_mode),
        ("mode", kept.mode, left.mode),
        ("device", kept.device, left.device),
    ):
        if of_kept != of_left:
            return f"AITER's table does not tell the {what}: the row of {what} {of_kept} is written"
    return "a faster one of the same shape is written"


def _rank(solution: Solution) -> tuple[bool, float]:
    return solution.mode != "graph", solution.us


DEFAULTS: Final = ("least-regret", "most-common")


def tile_files(
    solutions: Sequence[Solution],
    devices: Mapping[str, Device],
    times: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]],
    left: Left,
    *,
    default: str,
) -> dict[str, dict[str, Config]]:
    """Buckets by file name, with a default file for each architecture.

    times: by architecture, bucket, shape and config (sorted JSON) what a tile took; default: how the default file is
    derived, by these times or as AITER does it.  Of solutions in one bucket the one of the largest M is taken.
    """
    special: dict[tuple[str, int, int], dict[str, tuple[Solution, Config]]] = {}
    for solution in solutions:
        p, device = solution.problem, devices.get(solution.device)
        config = triton_json.config_of(solution.candidate)
        plain = p.family == "dense" and p.layout == "nt" and p.dtype in ("bf16", "fp16") and p.weight_state == "plain"
        if config is None or not plain or device is None:
            left.add(solution, "no tile of a plain 16-bit product")
            continue
        filled = special.setdefault((device.arch, p.n, p.k), {})
        other = filled.get(triton_json.bucket_of(p.m))
        if other is None or (p.m, -solution.us) > (other[0].problem.m, -other[0].us):
            filled[triton_json.bucket_of(p.m)] = solution, config
            solution = other[0] if other else solution
        if other is not None:
            left.add(solution, "another M of the same bucket is written")
    files: dict[str, dict[str, Config]] = {}
    by_arch: dict[str, list[TileFile]] = {}
    for (arch, n, k), chosen in special.items():
        buckets = {key: config for key, (_, config) in chosen.items()}
        largest = max(chosen.values(), key=lambda one: one[0].problem.m)
        name = f"{arch}-GEMM-A16W16-N={n}-K={k}.json"
        files[name] = {**buckets, "any": largest[1]}  # AITER raises where a file has nothing for an M
        by_arch.setdefault(arch, []).append(TileFile(Path(name), arch, "GEMM-A16W16", {"N": n, "K": k}, files[name]))
    for arch, group in by_arch.items():
        common = triton_json.most_common(group)
        regret = triton_json.least_regret(times.get(arch, {})) if default == "least-regret" else {}
        files[f"{arch}-GEMM-A16W16.json"] = {**common, **{key: regret[key] for key in regret if key in common}}
    return files
