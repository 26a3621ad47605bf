"""CHILD of the daemon: compile every candidate of the problems on standard input, for a device it never touches.

Started by ahead.Ahead and by nobody else; does without torch, as compile_main does.  Says a line for each problem that
is done.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.worker_main import die_with, make_harmless
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import moe_compile
from gemmtuned.kernels.other_packages import GUESTS


def main() -> int:
    """Until the input ends; returns the exit code."""
    device = Device(**json.loads(sys.argv[1]))
    die_with(int(sys.argv[2]))
    make_harmless(int(sys.argv[3]))
    GUESTS.without = tuple(json.loads(sys.argv[4]))
    folders = [backend for backend in catalog.FOLDERS if not GUESTS.is_unwanted(backend)]
    has_mixtures = moe_compile.runs_on(device) and not GUESTS.is_unwanted(moe_compile.NAME)
    compilers = Compilers(2 if (os.cpu_count() or 1) >= 32 else 1)  # beside somebody's program, however niced
    for line in sys.stdin:
        problem = Problem.from_row(json.loads(line))
        candidates = catalog.candidates(problem, device, folders)
        mixtures = moe_compile.candidates(problem) if has_mixtures else ()
        try:
            compilers.run([*chain.from_iterable(candidates.values()), *mixtures], problem, device)
        except TryLater:  # the search of the problem meets it again, and tells it
            return TryLater.exit_code
        sys.stdout.write("done\n")
        sys.stdout.flush()
    compilers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
