"""The planted search of a worker at whose start pieces of other packages run: [[package, code] ...] in $PIECES as JSON.

With "+tune" behind a package its piece runs in the search instead; $REST_S: seconds that the rest of the start takes.
Loaded by path in the child.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.kernels.other_packages import GUESTS

sys.path.insert(0, str(Path(__file__).parent))
import planted_search

PIECES = json.loads(os.environ["PIECES"])


def _run(in_search: bool) -> None:
    for package, code in PIECES:
        name, _, when = package.partition("+")
        if bool(when) is in_search and not GUESTS.is_unwanted(name):
            GUESTS.ask(name, f"import of {name}", name, lambda code=code: exec(code), None)


def environment(device: object) -> Environment:
    _run(in_search=False)
    GUESTS.say_unused()
    time.sleep(float(os.environ.get("REST_S", "0")))
    return planted_search.ENVIRONMENT


def tune(members: Sequence[Problem], *args: Any, **options: Any) -> Any:
    _run(in_search=True)
    return planted_search.tune(members, *args, **options)
