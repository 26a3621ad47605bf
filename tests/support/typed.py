"""The commands of this checkout under the names that a page shows and a user types."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gemmtuned.configs.variables import VARIABLES


def environment(place: Path, cache: Path) -> dict[str, str]:
    """Commands of this checkout under the names that a user types."""
    commands = place / "bin"
    commands.mkdir()
    for name, arguments in (("python", ""), ("gemmtuned", "-m gemmtuned ")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        (commands / name).chmod(0o755)
    ours = {variable.name for variable in VARIABLES}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    path = f"{commands}{os.pathsep}{env.get('PATH', '')}"
    return {
        **env, "PATH": path, "GEMMTUNED_HOME": str(place / "home"), "GEMMTUNED_DEVICE_LOCKS": str(place / "locks"),
        "GEMMTUNED_CACHE": str(cache),
        "GEMMTUNED_FLUSH_S": "0.1",
    }  # fmt: skip
