"""`gemmtuned fleet init` and `check`: a public repository of tables."""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from gemmtuned.commands.options import DryRun, Json
from gemmtuned.configs.errors import SettingError
from gemmtuned.reports.render import Column, Report, Table, several, show

_FILES: Final = (Column("path", "file", right=False), Column("bytes", "bytes"))
_WRONG: Final = (Column("problem", "problem", right=False),)


def init(
    where: Annotated[str, typer.Argument(metavar="FOLDER|URL", help="A folder, or hf://datasets/owner/name.")],
    title: Annotated[str, typer.Option(metavar="TEXT", help="What the data card is called.")] = "Tuned matrix products",
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="Whose licence it is (MIT); without it your user's name.")
    ] = "",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Open a public repository of tables: data card, licence, and the check for its pull requests.

    Hosts then share results with it by `gemmtuned sync`: results alone, no counts and no claims. At hf:// the
    repository is made when there is none, for you alone until you publish it. Nothing that lies there is replaced.
    """
    from gemmtuned.fleet import tables
    from gemmtuned.fleet.hugging_face import HubObjects
    from gemmtuned.fleet.opening import open_objects

    for text, name in ((title, "--title"), (holder, "--holder")):
        if "\n" in text or "@" in text:
            raise typer.BadParameter(f"{name}: expected one line without @")
    url = where if "://" in where else Path(where).absolute().as_uri()
    found = tables.files(title, holder or getpass.getuser(), time.gmtime().tm_year)
    objects = open_objects(url) if not dry_run else None
    if isinstance(objects, HubObjects):
        objects.make()
    if objects is not None:
        there = [name for name in found if objects.get(name, limit=1 << 24) is not None]
        if isinstance(objects, HubObjects):  # the hub makes a file of its own for a new repository
            there = [name for name in there if name != ".gitattributes"]
        if there:
            raise SettingError(f"{url}: {there[0]} is there already, and nothing is replaced. Name another URL")
        for name, data in found.items():
            objects.put(name, data)
        objects.flush()
    rows = [{"path": name, "bytes": len(data)} for name, data in found.items()]
    lines = [f"{url}: would hold" if dry_run else f"{url} is open: gemmtuned sync {url} sends results there"]
    report = Report("fleet.init", [Table("files", _FILES, rows)], {"url": url, "dry_run": dry_run}, lines=lines)
    show(report, as_json=as_json)


def check(
    folder: Annotated[Path, typer.Argument(help="A clone of a repository of tables.")],
    base: Annotated[
        str, typer.Option(metavar="REVISION", help="Results of this git revision may not have been changed or removed.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a repository of tables: every file is a result as it should be, or its own. Ends with 1 if not.

    It is what `sh .ci/check` runs for a pull request, there without torch or anything else installed.
    """
    from gemmtuned.fleet import tables
    from gemmtuned.fleet.layout import RESULTS

    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder")
    wrong = [{"problem": line} for line in tables.check(folder, base=base)]
    results = sum(1 for _ in (folder / RESULTS).rglob("*.json"))
    sound = f"{folder}: {several(results, 'result')}, all as they should be"
    table = Table("problems", _WRONG, wrong, empty=sound)
    show(Report("fleet.check", [table], {"folder": str(folder), "results": results, "ok": not wrong}), as_json=as_json)
    if wrong:
        raise typer.Exit(1)
