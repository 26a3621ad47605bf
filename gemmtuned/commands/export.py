"""`gemmtuned export`: write what was found in the form that another tool reads, or a folder to run from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gemmtuned.commands.named_file import behind_links, refuse_own
from gemmtuned.commands.options import DryRun, Json, chosen, one_of, settings
from gemmtuned.configs import triton_json
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import aiter, bundle, inductor, tunableop, vllm_moe
from gemmtuned.configs.formats.aiter import Left
from gemmtuned.configs.manifest import MANIFEST
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.reports.export_folder import ExportFolder
from gemmtuned.reports.render import Column, Report, Table, complain, count, several, show
from gemmtuned.reports.source import refuse_none

_COLUMNS: Final = (Column("path", "file", right=False), Column("rows", "rows", count))


@dataclass(frozen=True, slots=True)
class _Source:
    """What there is to write. trials: rows of the view, for defaults by least regret."""

    solutions: Sequence[Solution]
    devices: Mapping[str, Device]
    generation: int
    trials: Sequence[Mapping[str, Any]]
    settings: Settings


_Files = dict[str, tuple[int, Callable[[Path], object]]]  # name in the folder -> (rows, how it is written)


def _aiter_csv(source: _Source, left: Left, default: str) -> _Files:
    tables = aiter.csv_tables(source.solutions, source.devices, left)
    return {
        name: (len(rows), partial(write_file, columns=columns, rows=rows)) for name, (columns, rows) in tables.items()
    }


def _triton_json(source: _Source, left: Left, default: str) -> _Files:
    files = aiter.tile_files(source.solutions, source.devices, _times(source), left, default=default)
    return {name: (len(buckets), partial(triton_json.write_file, buckets=buckets)) for name, buckets in files.items()}


def _tunableop(source: _Source, left: Left, default: str) -> _Files:
    found: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {}
    versions: dict[str, str] = {}
    for solution in source.solutions:
        device = source.devices.get(solution.device)
        if device is not None and device.arch.startswith("gfx"):
            left.add(solution, "TunableOp on AMD devices asks for versions of libraries that are not known here")
            continue
        line = tunableop.line_of(solution) if device is not None and device.kind != "cpu" else None
        if line is None:
            left.add(solution, "TunableOp runs on GPUs, and knows libraries' kernels and torch's default alone")
            continue
        lines = found.setdefault(solution.device, {})
        if line[:2] in lines:  # its reader takes the first
            left.add(solution, "another of the same product is written")
        lines.setdefault(line[:2], line)
        versions[solution.device] = tunableop.version_of(solution.stamp)
    return {
        f"tunableop_results-{key}.csv": (
            len(lines),
            partial(tunableop.write, lines=[*lines.values()], validators={"PT_VERSION": versions[key]}),
        )
        for key, lines in found.items()
    }


def _vllm_moe(source: _Source, left: Left, default: str) -> _Files:
    files: _Files = {}
    for key, device in source.devices.items():
        there = [s for s in source.solutions if s.device == key]
        tables, others = vllm_moe.tables(there, device)
        for solution in others:
            left.add(solution, "no tile of a mixture of experts")
        for name, entries in tables.items():
            files[name] = len(entries), partial(vllm_moe.write, entries=entries)
    return files


def _inductor(source: _Source, left: Left, default: str) -> _Files:
    entries: dict[str, list[dict[str, Any]]] = {}
    for solution in source.solutions:
        entry = inductor.entry_of(solution) if solution.covers == "exact" else None
        if entry is None:
            left.add(solution, "Inductor has no template for it")
        elif entry[1] not in entries.setdefault(entry[0], []):
            entries[entry[0]].append(entry[1])
    return {"lookup_table.json": (len(entries), partial(inductor.write, entries=entries))} if entries else {}


_FORMATS: Final[dict[str, Callable[[_Source, Left, str], _Files]]] = {
    "aiter-csv": _aiter_csv,
    "triton-json": _triton_json,
    "tunableop": _tunableop,
    "vllm-moe": _vllm_moe,
    "inductor": _inductor,
}
FORMATS: Final = (*_FORMATS, bundle.FORMAT)
# What people ask for, and why there is no such format
_TILES_OF_OTHERS: Final = (
    "vLLM's and SGLang's files for dense block-scaled products name tiles of their own Triton kernel. gemmtuned runs "
    "cuBLASLt's kernels and its own CUDA ones there, so none of its results can stand in such a file: vLLM's "
    "benchmark_w8a8_block_fp8.py makes them, and gemmtuned import reads them. --format gemmtuned is a folder that "
    "programs with the hook run from; tiles of mixtures of experts: --format vllm-moe"
)
_NO_FORMATS: Final = ("vllm", "sglang", "vllm-blockscale", "vllm-dense", "sglang-moe", "blockscale")


def _whose(text: str) -> str:
    """A format's name. Raises BadParameter, for one that cannot be with the reason and what to use instead."""
    if text.lower() in _NO_FORMATS:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(FORMATS)}: {_TILES_OF_OTHERS}")
    return one_of(text, FORMATS)


def export(
    to: Annotated[str, typer.Option("--format", parser=_whose, metavar="|".join(FORMATS), help="Whose form.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; made when it is not there.")],
    device: Annotated[str | None, typer.Option(metavar="KEY", help="Only solutions of this device.")] = None,
    default: Annotated[
        str,
        chosen(aiter.DEFAULTS, metavar="|".join(aiter.DEFAULTS), help="triton-json: default file."),
    ] = "least-regret",
    force: Annotated[
        bool, typer.Option("--force", help="Also replace files that gemmtuned export did not write.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write what was found in the form that another tool reads.

    `gemmtuned` is a folder that a host runs from without a database: GEMMTUNED_DISPATCH=1 GEMMTUNED_CONFIG_DIR=DIR.
    Solutions that a format cannot hold are left out and counted with the reason. Ends with 1 when there is nothing to
    write, or when a file of that name is there that it did not write itself. --default says how the file for all other
    sizes is derived: by what was measured, or as AITER does.
    """
    here = settings()
    refuse_own(out, here)
    source = _read(here, device)
    left = Left()
    is_bundle = to == bundle.FORMAT
    written = {} if is_bundle else _FORMATS[to](source, left, default)
    names = [*written] if not is_bundle else [MANIFEST] if source.solutions else []
    folder = ExportFolder(out)
    taken, foreign = folder.taken(names), [] if force else folder.not_ours(names)
    if foreign and not dry_run:
        raise TableError(_not_ours(out, foreign))
    files = _bundle(source, left, out, dry_run=dry_run) if is_bundle else _write(folder, written, dry_run=dry_run)
    why: dict[str, int] = {}
    for _, reason in left.out:
        why[reason] = why.get(reason, 0) + 1
    verb = "would be written" if dry_run else "written"
    rows = sum(file["rows"] for file in files)
    notes = [f"{several(rows, 'row')} of {several(len(source.solutions), 'solution')} {verb}"] if files else []
    notes += [f"{'would replace' if dry_run else 'replaced'} {out / name}" for name in taken]
    notes += [f"{number} left out: {reason}" for reason, number in why.items()]
    facts = {
        "dry_run": dry_run, "format": to, "replaces": [str(out / name) for name in taken],
        "left_out": [{**s.problem.row(), "backend": s.backend, "reason": reason} for s, reason in left.out],
    }  # fmt: skip
    empty = "Nothing to write: gemmtuned gains shows what there is."
    show(Report("export", [Table("files", _COLUMNS, files, empty=empty)], facts, notes=notes), as_json=as_json)
    if foreign:
        complain(_not_ours(out, foreign))
    if not files or foreign:
        raise typer.Exit(1)


def _read(here: Settings, device: str | None) -> _Source:
    from gemmtuned.db import queries

    refuse_none(here)
    generation, solutions = queries.published(here.db, None if device is None else [device])
    devices = queries.devices(here.db)
    if device is not None and device not in devices:
        raise typer.BadParameter(f"device {device!r} was never seen, expected one of {', '.join(devices)}")
    return _Source(solutions, devices, generation, queries.trials(here.db), here)


def _bundle(source: _Source, left: Left, out: Path, *, dry_run: bool) -> list[dict[str, Any]]:
    if dry_run or not source.solutions:
        return [{"path": str(out), "rows": len(source.solutions)}] if source.solutions else []
    manifest, gone = bundle.write(
        out, source.solutions, generation=source.generation, binaries=source.settings.config_dir
    )
    for solution, reason in gone:
        left.add(solution, reason)
    return [{"path": str(out / file.name), "rows": file.rows} for file in manifest.files]


def _write(folder: ExportFolder, written: _Files, *, dry_run: bool) -> list[dict[str, Any]]:
    if written and not dry_run:
        folder.make()
        for name, (_, write) in written.items():
            write(behind_links(folder.path / name))
            folder.note(name)
    return [{"path": str(folder.path / name), "rows": rows} for name, (rows, _) in written.items()]


def _not_ours(out: Path, foreign: Sequence[str]) -> str:
    more = f" and {len(foreign) - 1} others here" if len(foreign) > 1 else ""
    return (
        f"{out / foreign[0]}{more}: not as gemmtuned export wrote it, and would be lost. Name another folder with "
        "--out, or replace it with --force"
    )


def _times(source: _Source) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """What every tile took that was tried: by architecture, bucket, shape and entry."""
    times: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for trial in source.trials:
        device = source.devices.get(trial["device"])
        entry = triton_json.config_of(Candidate(trial["backend"], trial["config"])) if trial["us"] else None
        if device is not None and entry is not None and trial["outcome"] in ("ok", "slower"):
            shape = f"{trial['m']}x{trial['n']}x{trial['k']}"
            bucket = times.setdefault(device.arch, {}).setdefault(triton_json.bucket_of(trial["m"]), {})
            run = bucket.setdefault(shape, {})
            key = json.dumps(entry, sort_keys=True)
            run[key] = min(run.get(key, trial["us"]), trial["us"])
    return times
