"""`gemmtuned db`: look after the database file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from gemmtuned.arguments import Command, Group
from gemmtuned.commands.named_file import target_of
from gemmtuned.commands.options import Json, settings
from gemmtuned.reports.questions import of_views
from gemmtuned.reports.render import Column, Report, Table, show, size
from gemmtuned.reports.source import curator, no_database, put_in_use, refuse_none, writer

app = typer.Typer(
    cls=Group,
    name="db",
    help="Look after the database: check, backup, vacuum, publish.\n\nOpen it elsewhere: path, datasette.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command(cls=Command)
def check(as_json: Json = False) -> None:
    """Look for damage: SQLite's own check, references, and counts that must agree. Ends with 1 if there is any."""
    here = settings()
    if not here.db.exists():
        show(no_database("db.check", here, "problems", ok=True), as_json=as_json)
        return
    from gemmtuned.db.store import check as look

    found = look(here.db)  # opens it for reading only: what is damaged stays as it lies
    rows = [{"problem": line} for line in found]
    columns = (Column("problem", "problem", right=False),)
    table = Table("problems", columns, rows, empty=f"{here.db}: sound")
    show(Report("db.check", [table], facts={"database": str(here.db), "ok": not found}), as_json=as_json)
    if found:
        raise typer.Exit(1)


@app.command(cls=Command)
def path() -> None:
    """Print where the database lies, for other programs: sqlite-utils tables --views "$(gemmtuned db path)"."""
    print(settings().db)


@app.command(cls=Command)
def datasette() -> None:
    """Print metadata for datasette: what views and columns mean, units, and ten canned queries.

    gemmtuned db datasette > gemmtuned.json && datasette "$(gemmtuned db path)" -m gemmtuned.json
    """
    here = settings()
    refuse_none(here)
    print(json.dumps(of_views(here.db), indent=1))


@app.command(cls=Command)
def backup(
    to: Annotated[
        Path | None, typer.Argument(help="File to write; default: beside the database, with the time.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy the database, as of one moment, while programs go on writing to it.

    It is copied as it is, also one of another version: an older one is not brought up to date for it.
    """
    from gemmtuned.db import upkeep

    here = settings()
    refuse_none(here)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = (to or here.db.with_name(f"{here.db.stem}-{stamp}.db")).absolute()
    if target.is_dir():
        target = target / f"{here.db.stem}-{stamp}.db"
    written = upkeep.backup(here.db, target_of(target, here), timeout_s=30.0)
    size_bytes = written.stat().st_size
    line = f"{written}: {size(size_bytes)}"
    show(Report("db.backup", facts={"file": str(written), "bytes": size_bytes}, lines=[line]), as_json=as_json)


@app.command(cls=Command)
def vacuum(as_json: Json = False) -> None:
    """Give free space in the database file back to the disk.

    Programs that count meanwhile write a moment later. Needs as much free space as the new file takes.
    """
    here = settings()
    with writer(here) as store:
        before = here.db.stat().st_size
        store.vacuum()
    after = here.db.stat().st_size
    line = f"{here.db}: {size(before)} before, {size(after)} now"
    facts = {"database": str(here.db), "bytes_before": before, "bytes": after}
    show(Report("db.vacuum", facts=facts, lines=[line]), as_json=as_json)


@app.command(cls=Command)
def publish(
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Also where published solutions that cannot be read are lost by it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the published tables as the database says, after it has taken back what it lost of them.

    The daemon does it by itself; this is for when none runs, or when a command could not publish what it changed.
    """
    here = settings()
    with curator(here, give_up=give_up) as store:
        generation, changed = put_in_use(store, here, give_up=give_up)
        solutions = len(store.solutions.published()[1])
    line = f"generation {generation} is published: {solutions} solutions" + ("" if changed else ", as it was")
    facts = {"generation": generation, "changed": changed, "solutions": solutions}
    show(Report("db.publish", facts=facts, lines=[line]), as_json=as_json)
