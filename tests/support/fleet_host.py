"""A host of a fleet as a process: HOME URL, a real daemon on a planted device with the real exchange beside it.

Its environment names it (GEMMTUNED_SYNC_NAME).  --search: another planted search, or "" for the real one; --once: it
ends when all is done.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fakes import FakeMonitor  # noqa: E402

from gemmtuned.configs.errors import GemmtunedError  # noqa: E402
from gemmtuned.configs.settings import Settings  # noqa: E402
from gemmtuned.configs.solution import cpu_device  # noqa: E402
from gemmtuned.daemon.seats.worker import Worker  # noqa: E402
from gemmtuned.daemon.service.main import run_daemon  # noqa: E402
from gemmtuned.fleet.beside_daemon import Beside  # noqa: E402
from gemmtuned.fleet.times import Pace  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("url")
    parser.add_argument("--search", default="planted_search.py")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--real-device", action="store_true", help="this CPU, for a search that measures on it")
    parser.add_argument("--lease-s", type=float, default=600.0)
    parser.add_argument("--alone-s", type=float, default=6.0, help="as ALONE_S is to EVERY_S")
    parser.add_argument("--most-s", type=float, default=60.0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings.from_env({**os.environ, "GEMMTUNED_HOME": args.home, "GEMMTUNED_IDLE_S": "0"})
    monitor = FakeMonitor(lambda now_s: 0.0)
    if args.real_device:
        monitor.device = cpu_device()
    monitor.read(time.time())
    search = f"{HERE / args.search}:tune" if args.search else ""
    make_worker = partial(Worker, nice=0, search=search)
    pace = Pace(
        every_s=2.0, soonest_s=0.2, retry_s=0.5, look_s=0.1, lease_s=args.lease_s, work_s=args.most_s / 2,
        most_s=args.most_s, alone_s=args.alone_s,
    )  # fmt: skip
    beside = Beside(settings, args.url, pace)
    try:
        code = run_daemon(settings, once=args.once, monitors=[monitor], make_worker=make_worker)
    except GemmtunedError as err:
        print(err, file=sys.stderr)
        code = err.exit_code
    finally:
        beside.stop()
    print("imported in the parent:", sorted({"torch", "obstore", "huggingface_hub"} & set(sys.modules)))
    return code


if __name__ == "__main__":
    sys.exit(main())
