"""A real daemon process on an idle device with the planted search, by path: HOME [--once] [--wait-s S] [--busy]
[--busy-file PATH] [--cpus N,N --locks FOLDER] [--own-search] [--hello-s S].
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from functools import partial
from pathlib import Path

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.left_out import Pieces
from gemmtuned.daemon.seats.worker import Deadlines, Worker
from gemmtuned.daemon.service.main import run_daemon

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeMonitor

SEARCH = f"{Path(__file__).parent / 'planted_search.py'}:tune"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--wait-s", type=float)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--busy-file", help="others use the device while this file is there")
    parser.add_argument("--cpus", default="", help="what its monitor says that the device is; none are locked")
    parser.add_argument("--locks", default="/nonexistent")
    parser.add_argument("--own-search", action="store_true", help="the real one, with all backends there are")
    parser.add_argument("--hello-s", type=float, default=60.0, help="how long a piece of a worker's start may take")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = Settings.from_env(
        {"GEMMTUNED_HOME": args.home, "GEMMTUNED_IDLE_S": "0", "GEMMTUNED_DEVICE_LOCKS": args.locks}
    )
    in_use = Path(args.busy_file) if args.busy_file else None
    monitor = FakeMonitor(lambda now_s: float(args.busy or (in_use is not None and in_use.exists())))
    monitor.cpus = tuple(map(int, filter(None, args.cpus.split(","))))
    monitor.read(time.time())  # so that the first turn knows the device
    deadlines, search = Deadlines(hello_s=args.hello_s), "" if args.own_search else SEARCH
    pieces = Pieces.of(settings)
    # nice: a loaded machine must not starve a test
    make_worker = partial(Worker, nice=0, search=search, deadlines=deadlines, pieces=pieces)
    try:
        code = run_daemon(settings, once=args.once, wait_s=args.wait_s, monitors=[monitor], make_worker=make_worker)
    except GemmtunedError as err:
        print(err, file=sys.stderr)
        code = err.exit_code
    strays = sorted({"torch", "triton"} & set(sys.modules))
    print(f"imported in the parent: {strays}")
    return code


if __name__ == "__main__":
    sys.exit(main())
