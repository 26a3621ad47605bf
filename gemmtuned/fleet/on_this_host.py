"""A run for a fleet on one device of this host: for a batch system or a pool of pods, which start many of these.

The claims at the URL share the work out among all that run, wherever they were started.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.cpu_locks import lock_of
from gemmtuned.daemon.device.device_lock import Lock
from gemmtuned.daemon.device.devices import Monitor, find_monitors
from gemmtuned.daemon.seats.worker import Tuner, Worker
from gemmtuned.fleet.bench import Bench
from gemmtuned.fleet.demand import Wanted
from gemmtuned.fleet.outbox import Outbox, patiently
from gemmtuned.fleet.pool_client import PoolClient
from gemmtuned.fleet.ran import Ran, Tell

AWAY_S: Final = 600.0  # a claim holds for longer
WORKER: Final = partial(Worker, nice=0)


def device_here(settings: Settings, on: str) -> tuple[Monitor, Lock]:
    """The first device that nobody of ours uses, a GPU where there is one, and its lock, which we hold then.

    on: any, gpu, cpu; the CPUs are those that this process may run on.  Raises TryLater where others hold all.
    """
    monitors, who = find_monitors(), f"pid {os.getpid()}, gemmtuned fleet tune"
    gpus = [monitor for monitor in monitors if monitor.device.kind != "cpu"]
    if on == "cpu" or (on == "any" and not gpus):
        cpus = lock_of(monitors[0], settings, who, at_once=False)
        why = cpus.take()
        if not why:
            return monitors[0], cpus
        raise TryLater(f"the CPUs are not free for us: {why}. Give each run CPUs of its own (taskset, a cpuset)")
    why = "this host has no GPU that is seen here. Install the extra [gpu]"
    for monitor in gpus:
        lock = lock_of(monitor, settings, who, at_once=False)
        why = lock.take()
        if not why:
            return monitor, lock
    raise TryLater(f"no GPU is free for us: {why}")


def tune_here(
    wanted: Sequence[Wanted], client: PoolClient, monitor: Monitor, tell: Tell, *, lock: Lock | None = None,
    make_worker: Callable[[str], Tuner] = WORKER,
) -> Ran:  # fmt: skip
    """Search one unit after another, and bring each result to the URL before the next is begun.

    A URL that cannot be reached is waited for; after AWAY_S of that the run ends with what it has.  Raises WorkerFailed
    when no worker can be started.
    """
    ran, why = Ran(), "its result could not be brought to the URL"
    outbox = Outbox(client, ran)
    with tempfile.TemporaryDirectory(prefix="gemmtuned-fleet-") as folder:
        bench = Bench(monitor, Path(folder), make_worker, lock=lock)
        key = bench.environment.key
        rest = ours = [one for one in wanted if one.environment.key == key]
        others = [one for one in wanted if one.environment.key != key]
        ran.left = [(one, f"not for this device: {one.environment.key}") for one in others]
        try:
            while rest:
                won, rest = patiently(partial(client.claim, rest, 1), AWAY_S)
                for one in won:
                    tell(len(ran.done) + len(client.passed_over), len(ours), str(one.unit.problem))
                    outbox.add(one, bench.tune(one), monitor.name)
                    patiently(outbox.bring, AWAY_S)
        except TryLater as err:
            why = str(err)
        except (KeyboardInterrupt, SystemExit) as err:
            why = "interrupted"
            ran.code = err.code if isinstance(err, SystemExit) and isinstance(err.code, int) else 130
        finally:
            bench.close()
            outbox.end()
    known = {one.key for one, _, _ in ran.done} | client.passed_over
    ran.left += [(one, why) for one in ours if one.key not in known]
    return ran
