"""Keep the checkout's folders from shadowing PyPI's `daemon` and `kernels`: only gemmtuned.* is ever imported."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
