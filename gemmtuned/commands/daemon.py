"""`gemmtuned daemon`: tune what was counted while the machine is idle."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmtuned.commands import native_library, spot_checking
from gemmtuned.commands.options import LogFormat, LogLevel, number, seconds, settings, start_logging, whole_number
from gemmtuned.configs.errors import SettingError, StoreError
from gemmtuned.reports.progress import Tell, progress

if TYPE_CHECKING:
    from gemmtuned.configs.settings import Settings
    from gemmtuned.daemon.device.devices import Monitor
    from gemmtuned.daemon.service.metrics import Metrics

_LOOK_S = 0.5
WaitS = Annotated[
    float | None,
    typer.Option(
        parser=number(), metavar="SECONDS", help="End with 75 when no device was idle for so long while there was work."
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(0, 65535), metavar="PORT", help="Serve Prometheus metrics on 127.0.0.1:PORT/metrics."
    ),
]


def daemon(
    once: Annotated[
        bool, typer.Option("--once", help="End when every problem and repeated race has a verdict or failed for good.")
    ] = False,
    wait_s: WaitS = None,
    idle_s: Annotated[
        float | None, typer.Option(parser=seconds, metavar="SPAN", help="Clear time before a device counts as idle.")
    ] = None,
    share_resident: Annotated[
        bool, typer.Option("--share-resident", help="Use a GPU that a loaded but quiet program holds, too.")
    ] = False,
    devices: Annotated[
        str, typer.Option(metavar="LIST", help="Use these only: cpu, cuda:0 (as nvidia-smi counts), or GPU UUIDs.")
    ] = "",
    hours: Annotated[
        str, typer.Option(metavar="SPANS", help="Tune in these local hours only: 22-6 or 12:30-13,20-24.")
    ] = "",
    budget: Annotated[
        float | None, typer.Option(parser=seconds, metavar="SPAN", help="Device time a day, all devices together.")
    ] = None,
    without: Annotated[
        str, typer.Option(metavar="LIST", help="Do without these backends, or packages with backends: vllm,deep_gemm.")
    ] = "",
    compile_ahead: Annotated[
        bool, typer.Option(help="Compile for GPUs while others use them: one niced process, no device.")
    ] = True,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
) -> None:
    """Tune on idle devices until you stop it.

    Publishes what is faster and as exact as torch's own; programs that run take it up without a restart. Gives way
    within half a second when somebody needs the device; `gemmtuned pause` stops it, `gemmtuned status` says why it
    waits. If another daemon runs for the same home this says so and ends with 0 (--once: 75). Logs to stderr.
    """
    start_logging(log_level, log_format)
    here = settings()
    if idle_s is not None:
        here = replace(here, idle_s=idle_s)
    here = replace(here, without=(*here.without, *without.replace(",", " ").split()))
    from gemmtuned.daemon.device.gpus import MEMORY_CAP_BYTES
    from gemmtuned.daemon.seats.left_out import Pieces
    from gemmtuned.daemon.seats.worker import Worker
    from gemmtuned.daemon.service.main import run_daemon
    from gemmtuned.daemon.service.rules import Hours, Rules

    rules = Rules(hours=Hours.parse(hours) if hours else None, budget_s=budget)
    monitors = _monitors(devices, share_resident=share_resident)
    # beside a loaded program a worker may not take the memory which that one will ask for next
    cap_bytes = MEMORY_CAP_BYTES if share_resident else None
    make_worker = partial(Worker, memory_cap_bytes=cap_bytes, pieces=Pieces.of(here))
    metrics = None if metrics_port is None else _metrics(metrics_port, here)
    with _beside(here), _bar(here.home, here.db) if once else nullcontext():
        code = run_daemon(
            here, once=once, wait_s=wait_s, monitors=monitors, make_worker=make_worker, rules=rules,
            metrics=metrics, compile_ahead=compile_ahead,
        )  # fmt: skip
    if code:
        raise typer.Exit(code)


def _monitors(devices: str, *, share_resident: bool) -> list[Monitor]:
    """The devices that may be used, as --devices names them."""
    from gemmtuned.daemon.device.devices import find_monitors
    from gemmtuned.daemon.service.rules import allowed

    found = find_monitors(share_resident=share_resident)
    names = [name.strip() for name in devices.split(",") if name.strip()]
    return list(allowed(found, names) if devices else found)


@contextmanager
def _beside(here: Settings) -> Iterator[None]:
    """What goes on meanwhile: the native hook is built, rows of users' tables are checked, other hosts are asked."""
    beside: list[Any] = [native_library.Beside(here), spot_checking.Beside(here)]
    from gemmtuned.fleet import beside_daemon as fleet

    if here.sync:
        beside.append(fleet.Beside(here, here.sync))
    elif here.db.exists():
        fleet.leave(here)
    try:
        yield
    finally:
        for one in beside:
            one.stop()


def _metrics(port: int, here: Settings) -> Metrics | None:
    """None where the port is taken and another daemon runs for this home: that is said when it is to begin."""
    from gemmtuned.daemon.service.metrics import Metrics
    from gemmtuned.daemon.service.only_one import AnotherRuns, OnlyDaemon

    try:
        return Metrics(port, here.db)
    except SettingError:
        with suppress(AnotherRuns):
            OnlyDaemon(here).close()
            raise
        return None


@contextmanager
def _bar(home: Path, db: Path) -> Iterator[None]:
    """Show on a terminal how far the daemon is; from a thread of its own, since signals belong to the main one."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    with progress() as tell:
        watcher = threading.Thread(target=_watch, args=(home, db, tell, done), name="gemmtuned-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join(2.0)


def _watch(home: Path, db: Path, tell: Tell, done: threading.Event) -> None:
    from gemmtuned.daemon.status_file import read_notice
    from gemmtuned.db import queries

    while not done.wait(_LOOK_S):
        notice = read_notice(home)
        if notice is None or not notice["environment"]:
            continue
        try:
            rows = [row for row in queries.environments(db) if row["environment"] == notice["environment"]]
        except StoreError:
            continue
        total = sum(row["problems"] for row in rows)
        left = sum(row["open_problems"] - row["failed"] for row in rows)
        doing = " ".join(seat["problem"] for seat in notice["seats"]) or notice["reason"]
        tell(total - left, total, f"{notice['state']} {doing}".strip())
