"""CHILD of the daemon: compile every candidate of the problems on standard input, for a device it never touches.

Started by ahead.Ahead and by nobody else.  Says a line for each problem that is done.
"""

from __future__ import annotations

import json
import os
import sys

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.daemon.compile_ahead import Compilers
from gemmtuned.daemon.worker_main import die_with, make_harmless


def main() -> int:
    """Until the input ends; returns the exit code."""
    device = Device(**json.loads(sys.argv[1]))
    die_with(int(sys.argv[2]))
    make_harmless(int(sys.argv[3]))
    from gemmtuned.kernels.backends import BACKENDS
    from gemmtuned.kernels.backends.base import CompiledBackend

    compilers = Compilers(2 if (os.cpu_count() or 1) >= 32 else 1)  # beside somebody's program, however niced
    for line in sys.stdin:
        problem = Problem.from_row(json.loads(line))
        for backend in BACKENDS.values():
            if isinstance(backend, CompiledBackend) and backend.stamp(device) is not None:
                compilers.run(list(backend.on(device).candidates(problem)), problem, device)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    compilers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
