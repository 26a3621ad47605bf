"""`gemmtuned fleet`: what is done for many hosts at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gemmtuned.arguments import Command, Group
from gemmtuned.commands.fleet_export import export
from gemmtuned.commands.fleet_tables import check, init
from gemmtuned.commands.options import DryRun, Json, LogLevel, chosen, settings, start_logging
from gemmtuned.configs.errors import SettingError, TryLater
from gemmtuned.configs.human_units import duration
from gemmtuned.configs.settings import Settings
from gemmtuned.reports.progress import progress
from gemmtuned.reports.render import TIMES, Column, Report, Table, complain, several, show

if TYPE_CHECKING:
    from gemmtuned.fleet.demand import Wanted
    from gemmtuned.fleet.objects import Objects
    from gemmtuned.fleet.on_ray import How
    from gemmtuned.fleet.pool_client import PoolClient
    from gemmtuned.fleet.ran import Ran
    from gemmtuned.fleet.ray_task import Node

app = typer.Typer(
    cls=Group,
    name="fleet",
    help="Tune for many hosts, export what they report.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
_WHAT: Final = (
    Column("problem", "problem", right=False),
    Column("covers", "covers", right=False),
    Column("worth", "worth a day", duration),
    Column("hosts", "hosts"),
)
_PLAN: Final = (*_WHAT, Column("where", "runs on", right=False))
_DONE: Final = (
    Column("problem", "problem", right=False),
    Column("node", "node", right=False),
    Column("route", "runs", right=False),
    *TIMES,
    Column("why", "", lambda why: why or "", right=False),
)


app.command(name="export", cls=Command)(export)
app.command(name="init", cls=Command)(init)
app.command(name="check", cls=Command)(check)


@app.command(cls=Command)
def tune(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Where hosts share results; without it that of GEMMTUNED_SYNC.")
    ] = "",
    ray_address: Annotated[
        str, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster: auto, HOST:6379 or ray://HOST:10001.")
    ] = "",
    on: Annotated[
        str,
        chosen(("any", "gpu", "cpu"), metavar="gpu|cpu", help="GPUs where there are any."),
    ] = "any",
    tasks: Annotated[int, typer.Option(min=0, help="Devices at once on Ray, at most; 0: all.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Problems at most, worth most first; 0: all.")] = 0,
    dry_run: DryRun = False,
    log_level: LogLevel = "warning",
    as_json: Json = False,
) -> None:
    """Tune what the hosts of a fleet wait for, here or on a Ray cluster.

    Takes the counts that hosts share at URL, and those of this home, worth most over the whole fleet first. Each result
    is at URL as soon as it is found, and is checked and raced on each host before it is used there. Safe to interrupt:
    the next run does the rest. Ends with 1 when a problem could not be tuned, with 75 when some are left.
    """
    start_logging(log_level)
    here = settings()
    url = url or here.sync
    if not url and not dry_run:
        raise SettingError("no URL to bring results to: name one, or set GEMMTUNED_SYNC (file:///folder is enough)")
    objects = _opened(url)
    wanted, refused = _wanted(here, objects)
    for reason in refused[:8]:
        complain(f"left out: {reason}")
    began_s = time.monotonic()
    wanted = wanted[:limit] if limit else wanted
    done = (
        _on_ray(here, objects, wanted, on, ray_address, tasks, dry_run=dry_run, quiet=as_json)
        if ray_address
        else _here(here, objects, wanted, on, dry_run=dry_run, quiet=as_json)
    )
    if isinstance(done, Report):
        show(done, as_json=as_json)
        return
    ran, ours, there, theirs, left_out = done
    for line in ran.lost:
        complain(f"lost {line}")
    took_s = time.monotonic() - began_s
    show(_report(url, ours, ran, left_out, there, theirs, took_s=took_s), as_json=as_json)
    states = Counter(answer.state for _, answer, _ in ran.done)
    if ran.unpublished:
        complain(f"{several(ran.unpublished, 'result')} could not be brought to {url}, and are lost")
    if ran.code or ran.unpublished or states["failed"]:
        raise typer.Exit(ran.code or 1)
    if ran.left or states["put off"]:
        raise typer.Exit(TryLater.exit_code)


def _opened(url: str) -> Objects | None:
    if not url:
        return None
    from gemmtuned.fleet.opening import open_objects

    return open_objects(url)


def _wanted(here: Settings, objects: Objects | None) -> tuple[list[Wanted], list[str]]:
    """(what all hosts wait for, ours included; why the counts of some are left out)."""
    from gemmtuned.fleet import demand, seen
    from gemmtuned.fleet.host import host_name, trust

    reports, refused = seen.read_all(objects, trust(here)) if objects is not None else ([], [])
    if here.db.exists():
        from gemmtuned.db.store import Store

        us = host_name(here)
        store = Store(here.db, locks=here.locks)
        try:
            reports = [one for one in reports if one.host != us] + demand.of_store(store, us, now_s=time.time())
        finally:
            store.close()
    return demand.wanted(reports, now_s=time.time()), refused


_Done = tuple["Ran", Sequence["Wanted"], int, int, Sequence[str]]


def _on_ray(
    here: Settings, objects: Objects | None, wanted: Sequence[Wanted], on: str, address: str, tasks: int, *,
    dry_run: bool, quiet: bool,
) -> Report | _Done:  # fmt: skip
    from gemmtuned.fleet.on_ray import Pool, cluster, look_around, tasks_for

    with cluster(address) as ray:
        how, ours, left_out = _share(ray, wanted, on, tasks)
        if dry_run:
            lent = "1 GPU" if how.gpu else several(how.cpus, "CPU slot")
            count = tasks_for(ray, how, len(ours))
            by = f"by {several(count, 'task')} of {lent} each"
            return _plan(look_around(ray), ours, [by, *left_out], tasks=count, gpu=how.gpu)
        client = _client(here, objects)
        with progress(quiet=quiet, steady=True) as tell:
            ran = Pool(ray, ours, client, how, tell).run() if ours else _nothing()
    return ran, ours, len(client.solved_elsewhere), len(client.held_elsewhere), left_out


def _here(
    here: Settings, objects: Objects | None, wanted: Sequence[Wanted], on: str, *, dry_run: bool, quiet: bool
) -> Report | _Done:
    from gemmtuned.daemon.seats.left_out import Pieces
    from gemmtuned.fleet.on_this_host import WORKER, device_here, tune_here
    from gemmtuned.fleet.ray_task import look

    if dry_run:
        return _plan([look()], wanted, ["here"], tasks=min(1, len(wanted)), gpu=on != "cpu")
    monitor, lock = device_here(here, on)
    ours = [one for one in wanted if one.environment.device.key == monitor.device.key]
    left_out = []
    if len(ours) < len(wanted):
        left_out.append(f"{several(len(wanted) - len(ours), 'problem')} for other devices than {monitor.device.key}")
    client = _client(here, objects)
    with progress(quiet=quiet, steady=True) as tell:
        make_worker = partial(WORKER, pieces=Pieces.of(here))
        ran = tune_here(ours, client, monitor, tell, lock=lock, make_worker=make_worker) if ours else _nothing()
    return ran, ours, len(client.solved_elsewhere), len(client.held_elsewhere), left_out


def _client(here: Settings, objects: Objects | None) -> PoolClient:
    from gemmtuned.fleet.host import host_name, trust
    from gemmtuned.fleet.pool_client import PoolClient

    assert objects is not None
    return PoolClient(objects, host_name(here), trust(here))


def _nothing() -> Ran:
    from gemmtuned.fleet.ran import Ran

    return Ran()


def _share(ray: Any, wanted: Sequence[Wanted], on: str, tasks: int) -> tuple[How, list[Wanted], list[str]]:
    """(how to run, what is for these devices, in words what is not)."""
    from gemmtuned.fleet.on_ray import How

    gpu = on == "gpu" or (on == "any" and ray.cluster_resources().get("GPU", 0) >= 1)
    ours = [one for one in wanted if (one.environment.device.kind != "cpu") == gpu]
    left_out = []
    if len(ours) < len(wanted):
        kind = "CPUs" if gpu else "GPUs"
        left_out.append(f"{several(len(wanted) - len(ours), 'problem')} for {kind}: --on {'cpu' if gpu else 'gpu'}")
    if gpu:
        return How(gpu=True, tasks=tasks), ours, left_out
    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    fit = [one for one in ours if one.unit.problem.threads <= most]
    if len(fit) < len(ours):
        left_out.append(f"{several(len(ours) - len(fit), 'problem')} of more threads than a node has CPUs ({most})")
    return (
        How(gpu=False, cpus=max((one.unit.problem.threads for one in fit), default=1) or 1, tasks=tasks),
        fit,
        left_out,
    )


def _plan(nodes: Sequence[Node], wanted: Sequence[Wanted], notes: Sequence[str], *, tasks: int, gpu: bool) -> Report:
    rows = [{**_row(one), "where": _where(one, nodes)} for one in wanted]
    facts = {"dry_run": True, "tasks": tasks, "gpu": gpu, "nodes": [_described(node) for node in nodes]}
    table = Table("rows", _PLAN, rows, empty="No host waits for anything.")
    return Report("fleet.tune", [table], facts, notes=[f"{several(len(rows), 'problem')} {notes[0]}", *notes[1:]])


def _where(one: Wanted, nodes: Sequence[Node]) -> str:
    """Nodes that can tune it, or what stands against it."""
    environment = one.environment
    there = [node for node in nodes if environment.device.key in node.devices.values()]
    fit = sorted({node.name for node in there if node.torch == environment.stamps.get("torch")})
    if fit:
        return ", ".join(fit[:4]) + (f" and {len(fit) - 4} more" if len(fit) > 4 else "")
    if there:
        return f"nowhere: torch there is {there[0].torch or 'missing'}, wanted {environment.stamps.get('torch')}"
    return f"nowhere: no node has {environment.device.key}"


def _described(node: Node) -> dict[str, Any]:
    return {"name": node.name, "gemmtuned": node.version, "torch": node.torch, "devices": node.devices}


def _row(one: Wanted) -> dict[str, Any]:
    return {
        "problem": str(one.unit.problem), "covers": one.unit.covers, "worth": one.worth, "hosts": len(one.hosts),
        "calls": sum(one.sizes.values()), "device": one.environment.device.key, "environment": one.environment.key,
    }  # fmt: skip


def _report(
    url: str, wanted: Sequence[Wanted], ran: Ran, left_out: Sequence[str], there: int, theirs: int, *, took_s: float
) -> Report:
    rows: list[dict[str, Any]] = []
    for one, answer, node in ran.done:
        row = {**_row(one), "node": node, "state": answer.state, "why": answer.reason, "took_s": answer.took_s}
        for solution in answer.solutions[:1]:
            best = solution.state == "default_best"
            row |= {
                "route": str(solution.candidate), "us": solution.us, "baseline_us": solution.baseline_us,
                "speedup": solution.baseline_us / solution.us, "why": "torch's own is best" if best else "",
            }  # fmt: skip
        rows.append(row)
    rows += [{**_row(one), "node": "", "state": "left", "why": why} for one, why in ran.left]
    solved = sum(row["state"] == "solved" for row in rows)
    notes = [f"{solved} of {several(len(wanted), 'problem')} solved in {duration(took_s * 1e6)}, at {url}", *left_out]
    if there or theirs:
        notes.append(f"{several(there, 'result')} there already, {theirs} tuned by other hosts now")
    facts = {
        "url": url, "dry_run": False, "solved": solved, "there": there, "theirs": theirs, "took_s": took_s,
        "left": len(ran.left), "lost": list(ran.lost), "unpublished": ran.unpublished,
    }  # fmt: skip
    return Report("fleet.tune", [Table("rows", _DONE, rows, empty="Nothing was tuned.")], facts, notes=notes)
