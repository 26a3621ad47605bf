"""Keep the checkout's folders from shadowing PyPI's `daemon` and `kernels`: only gemmtuned.* is ever imported.

And let threads of OpenMP sleep while they wait for each other, in tests and in what they start: the others of a small
product wait for one that has no CPU, and on a machine in use they took 2 s of CPU time for what needs 0.07.

And let no garbage collection walk through what is imported while tests are collected, again and again: nearly all of it
stays.  tests/conftest.py lets them begin once that is done.
"""

import gc
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
gc.disable()
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported, which is later
