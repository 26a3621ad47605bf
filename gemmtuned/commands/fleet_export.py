"""`gemmtuned fleet export`: what all hosts tell, as files for other tools."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gemmtuned.commands import of_fleet
from gemmtuned.commands.named_file import behind_links, refuse_own
from gemmtuned.commands.options import DryRun, Json, chosen, settings
from gemmtuned.configs.errors import SettingError, TableError
from gemmtuned.configs.problem import COLUMNS
from gemmtuned.configs.temporary import put
from gemmtuned.reports.export_folder import ExportFolder
from gemmtuned.reports.render import Column, Report, Table, complain, count, show

FORMATS: Final = ("csv", "parquet")
_OF: Final = ("host", "device", "environment", "updated_us", "problem", *COLUMNS)
COUNTS: Final = (*_OF, "calls", "us", "hits", "covered", "worth", "last_seen_us")
FIGURES: Final = (*_OF, "mode", "covers", "backend", "config", "state", "us", "baseline_us", "found_by")
HOSTS: Final = (
    "host", "device", "environment", "updated_us", "verdicts", "found", "taken", "compared", "slower", "worst",
    "worst_problem",
)  # fmt: skip
_FILES: Final = (Column("path", "file", right=False), Column("rows", "rows", count))
_PANDAS: Final = "--format parquet needs pandas and pyarrow. Run: pip install pandas pyarrow"


def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; made when it is not there.")],
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Where hosts share; without it that of GEMMTUNED_SYNC.")
    ] = "",
    to: Annotated[str, chosen(FORMATS, "--format", metavar="|".join(FORMATS), help="Form of the files.")] = "csv",
    force: Annotated[bool, typer.Option("--force", help="Also replace files that this did not write.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write a snapshot of what all hosts tell: counts, figures and hosts, a file each, for pandas, SQL or a sheet.

    Counts are what programs called, figures what each verdict in use takes; times are microseconds, worth is
    microseconds a day. Parquet needs pandas and pyarrow.
    """
    from gemmtuned.fleet import views

    refuse_own(out, settings())
    found = of_fleet.read_reports(url)
    tables = {
        f"counts.{to}": (COUNTS, views.counts_rows(found.seen)),
        f"figures.{to}": (FIGURES, views.figures_rows(found.seen)),
        f"hosts.{to}": (HOSTS, views.hosts(found.seen)),
    }
    folder = ExportFolder(out)
    foreign = [] if force else folder.not_ours(tables)
    if foreign and not dry_run:
        raise TableError(f"{out / foreign[0]}: not as gemmtuned wrote it. Name another folder, or use --force")
    if not dry_run:
        folder.make()
        for name, (columns, rows) in tables.items():
            put(behind_links(out / name), _content(columns, rows, to))
            folder.note(name)
    files = [{"path": str(out / name), "rows": len(rows)} for name, (_, rows) in tables.items()]
    notes = ["nothing is written: --dry-run"] if dry_run else []
    report = Report("fleet.export", [Table("files", _FILES, files)], {"format": to, "dry_run": dry_run}, notes=notes)
    show(found.report(report), as_json=as_json)
    if foreign:
        complain(f"{out / foreign[0]}: not as gemmtuned wrote it: it would be refused without --force")
        raise typer.Exit(1)


def _content(columns: Sequence[str], rows: Sequence[dict[str, Any]], form: str) -> bytes:
    if form == "parquet":
        binary = io.BytesIO()
        try:
            pandas: Any = importlib.import_module("pandas")
            pandas.DataFrame(rows, columns=list(columns)).to_parquet(binary, index=False)
        except ImportError as err:
            raise SettingError(_PANDAS) from err
        return binary.getvalue()
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
