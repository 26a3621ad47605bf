"""Run a program of the laboratory by its name, or list them: `python -m lab [NAME [OPTION]...]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from benchmarks.__main__ import main

    raise SystemExit(main(ROOT / "lab", sys.argv[1:]))
