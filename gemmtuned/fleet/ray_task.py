"""What runs on the nodes of a Ray cluster: a task that tunes on the one device Ray gave it, and a look around.

Ray starts these; the worker that measures is a child of the task's process and dies with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gemmtuned import __version__
from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.device.devices import Monitor, find_monitors
from gemmtuned.daemon.seats.left_out import Pieces
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.fleet.bench import Bench
from gemmtuned.fleet.board import TaskDevice
from gemmtuned.fleet.demand import Wanted

ASK_S: Final = 0.5  # how often a task without a unit asks again


@dataclass(frozen=True)
class Node:
    """What a node has. device: keys of its devices, by what people call them; torch: "" where there is none."""

    name: str
    version: str
    torch: str
    devices: dict[str, str]


def serve(board: Any, task: str, gpu: bool, search: str) -> str:
    """Tune unit after unit until the board has none; why it ended. search: for tests, as Worker takes it.

    Raises WorkerFailed when no worker can be started here; what it held is then put up again by the driver.
    """
    ray: Any = importlib.import_module("ray")
    monitor = _lent(ray) if gpu else find_monitors()[0]
    make_worker = partial(Worker, nice=0, search=search, pieces=Pieces.of(Settings.from_env()))
    who = f"pid {os.getpid()}, a task of gemmtuned fleet tune"
    lock = None if monitor.id == "cpu" else DeviceLock(Settings.from_env().device_locks, monitor.id, who)
    with tempfile.TemporaryDirectory(prefix="gemmtuned-fleet-") as folder:
        bench = Bench(monitor, Path(folder), make_worker, lock=lock)
        try:
            device = TaskDevice(_node(ray), monitor.name, bench.environment.key)
            while True:
                said = ray.get(board.next.remote(task, device, __version__))
                if isinstance(said, Wanted):
                    ray.get(board.answer.remote(task, bench.tune(said)))
                elif said is None:
                    time.sleep(ASK_S)
                else:
                    return str(said)
        finally:
            bench.close()


def look() -> Node:
    """What is on this node; starts no worker and touches no device."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return Node(os.uname().nodename, __version__, torch, {m.name: m.device.key for m in find_monitors()})


def _lent(ray: Any) -> Monitor:
    """The GPU that Ray gave to this task, which names it by its number in the driver's order or by its UUID."""
    ids = [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]
    for monitor in find_monitors():
        kind, _, number = monitor.name.partition(":")
        if kind != "cpu" and ids and (number == ids[0] or monitor.id.rpartition(":")[2].startswith(ids[0])):
            return monitor
    raise WorkerFailed(
        f"{os.uname().nodename}: Ray gave GPU {', '.join(ids) or 'none'}, and none of that name is seen there. "
        "Install the extra [gpu] on the nodes"
    )


def _node(ray: Any) -> str:
    return f"{os.uname().nodename} {ray.get_runtime_context().get_node_id()[:8]}"
