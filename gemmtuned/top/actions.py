"""What the keys of `gemmtuned top` do: the same commands that a person would type, run beside the screen."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from gemmtuned.reports.render import clean

LONGEST_S: Final = 60.0


def run(*words: str) -> tuple[bool, str]:
    """(whether it ended with 0, what it printed) of `gemmtuned WORDS`."""
    command = [sys.executable, "-m", "gemmtuned", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"gemmtuned {words[0]} did not end within {LONGEST_S:g} s"
    except OSError as err:
        return False, f"gemmtuned {words[0]} cannot be started: {err.strerror or err}"
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode == 0, "\n".join(clean(line) for line in lines).strip()
