"""The operators that the hook stands in front of, as the docs' generator reads them from operator_list.h."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, Final

OPERATORS: Final[Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs/operator_list.py"))["operators"]()
