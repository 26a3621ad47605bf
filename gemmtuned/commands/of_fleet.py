"""--fleet of the commands that read: what all hosts that share have reported, instead of this host's database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from gemmtuned.commands.options import settings
from gemmtuned.configs.errors import SettingError
from gemmtuned.reports.render import Report

if TYPE_CHECKING:
    from gemmtuned.fleet.host import Trust
    from gemmtuned.fleet.objects import Objects
    from gemmtuned.fleet.seen import Seen

Fleet = Annotated[bool, typer.Option("--fleet", help="Show all hosts that share at --url, as each of them reports.")]
Url = Annotated[
    str, typer.Option("--url", metavar="URL", help="With --fleet: where they share; without it that of GEMMTUNED_SYNC.")
]


@dataclass(frozen=True)
class FleetReports:
    """What hosts have reported at a URL, and why some are left out."""

    url: str
    objects: Objects
    trust: Trust
    seen: list[Seen]
    refused: list[str]

    def report(self, report: Report) -> Report:
        """The report, naming where it is from and who is left out."""
        notes = [*report.notes, *(f"left out: {reason}" for reason in self.refused[:8])]
        if len(self.refused) > 8:
            notes.append(f"left out: {len(self.refused) - 8} more (--json has them all)")
        facts = {**report.facts, "url": self.url, "refused": self.refused, "now_us": round(time.time() * 1e6)}
        return replace(report, facts=facts, notes=notes)


def read_reports(url: str) -> FleetReports:
    """Read all hosts' reports. Raises SettingError without a URL or for one that cannot be used, TryLater."""
    from gemmtuned.fleet.host import trust
    from gemmtuned.fleet.opening import open_objects
    from gemmtuned.fleet.seen import read_all

    here = settings()
    url = url or here.sync
    if not url:
        raise SettingError("no URL: name one with --url, or set GEMMTUNED_SYNC")
    objects = open_objects(url)
    whom = trust(here)
    return FleetReports(url, objects, whom, *read_all(objects, whom))


def refuse(options: Mapping[str, bool]) -> None:
    """A usage error for an option that was given and is not for --fleet."""
    for name, given in options.items():
        if given:
            raise typer.BadParameter(f"{name} is not for --fleet: hosts do not report it")


def refuse_url(url: str) -> None:
    """A usage error for --url without --fleet."""
    if url:
        raise typer.BadParameter("--url is for --fleet")
