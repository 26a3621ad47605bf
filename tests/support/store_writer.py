"""A program that writes sightings until it is done or killed; started as a process by the tests of the store.

python store_writer.py FOLDER RUN FLUSHES SHAPES: after every flush that returned it prints its number.
"""

import sys
import time
from pathlib import Path

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db.store import Store

HERE = Environment(Device("cpu-test", "cpu", "Test CPU", "x86_64", 4), {"torch": "2.13"})


def calls(writer: int, flush: int, shape: int) -> int:
    """Calls of a shape in a flush: any fixed numbers that differ."""
    return (writer * 7 + flush * 3 + shape) % 17 + 1


def main(folder: str, run: str, flushes: int, shapes: int) -> None:
    path = Path(folder)
    store = Store(path / "tune.db", locks=path / "locks", timeout_s=30)
    problems = [Problem(m=1 + i % 64, n=512 + 64 * (i // 64), k=256, dtype="fp32", threads=2) for i in range(shapes)]
    for flush in range(flushes):
        batch = [Sighting(p, "miss", calls(int(run), flush, i)) for i, p in enumerate(problems)]
        store.sightings.add(run, HERE, batch, now_s=time.time())
        print(flush + 1, flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
