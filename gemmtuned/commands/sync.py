"""`gemmtuned sync`: share what was found with other hosts, and take what they found."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gemmtuned.commands.options import DryRun, Json, seconds, settings
from gemmtuned.configs.errors import SettingError, TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.reports.render import Report, complain, several, show


def sync(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="file:///folder, s3://, gs://, az:// or hf://datasets/owner/name.")
    ] = "",
    every: Annotated[
        float | None, typer.Option(parser=seconds, metavar="SPAN", help="Again and again, until you stop it.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what is old or too much there, and nothing else.")
    ] = False,
    keep: Annotated[
        float, typer.Option(parser=seconds, metavar="SPAN", help="With --prune: results younger than this stay.")
    ] = "180d",  # type: ignore[assignment]
    verify: Annotated[
        bool, typer.Option("--verify", help="With --prune: read each result, and remove those that hosts refuse.")
    ] = False,
    propose: Annotated[
        bool, typer.Option("--propose", help="At hf://: send results as a pull request, which its owners review.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Share results with other hosts: a folder or an object store.

    What was found here goes up; what others found for problems that wait here comes down, to be checked and raced by
    the daemon before any of it is used. Without URL that of GEMMTUNED_SYNC. A daemon started with GEMMTUNED_SYNC does
    this by itself every minute, and shares out who tunes what. Ends with 75 when the URL cannot be reached.
    """
    here = settings()
    url = url or here.sync
    if not url:
        raise SettingError("no URL: name one, or set GEMMTUNED_SYNC")
    if verify and not prune:
        raise typer.BadParameter("--verify is for --prune")
    if prune:
        show(_pruned(here, url, keep_s=keep, verify=verify, dry_run=dry_run), as_json=as_json)
        return
    while True:
        began_s = time.monotonic()
        try:
            show(_once(here, url, dry_run=dry_run, propose=propose), as_json=as_json)
        except TryLater as err:
            if every is None:
                raise
            complain(str(err))
        if every is None:
            return
        time.sleep(max(every - (time.monotonic() - began_s), 0.1))


def _once(here: Settings, url: str, *, dry_run: bool, propose: bool) -> Report:
    from gemmtuned.fleet.wiring import exchange

    with exchange(here, url, dry_run=dry_run, propose=propose) as one:
        done = one.run(now_s=time.time())
        host = one.host
    would = "would be " if dry_run else ""
    lines = [
        f"{several(done.sent, 'result')} {would}sent as {host}",
        f"{several(done.fetched, 'result')} {would}fetched: the daemon checks and races each before it is used",
    ]
    if done.left:
        lines.append(f"{several(done.left, 'result')} left for the next exchange")
    lines += [f"refused: {reason}" for reason in done.refused[:8]]
    if len(done.refused) > 8:
        lines.append(f"refused: {len(done.refused) - 8} more (--json has them all)")
    facts: dict[str, Any] = {"url": url, "host": host, "dry_run": dry_run, **asdict(done)}
    return Report("sync", [], facts, lines=lines)


def _pruned(here: Settings, url: str, *, keep_s: float, verify: bool, dry_run: bool) -> Report:
    from gemmtuned.fleet.host import trust
    from gemmtuned.fleet.opening import open_objects
    from gemmtuned.fleet.prune import prune

    whom = trust(here)
    gone = prune(
        open_objects(url), now_s=time.time(), keep_s=keep_s, dry_run=dry_run, verify=whom if verify else None,
        key=whom.key,
    )  # fmt: skip
    would = "would be removed" if dry_run else "removed"
    lines = [f"{several(len(paths), what)} {would}: {why}" for what, (why, paths) in gone.items() if paths]
    facts = {"url": url, "dry_run": dry_run, "removed": {what: paths for what, (_, paths) in gone.items()}}
    return Report("sync", [], facts, lines=lines or ["Nothing to remove."])
