"""Run one of docs/examples under torch's profiler, hooked.

    python tests/support/example_program.py NAME ARGUMENT...

Printed last: {"said": what the example printed, "counted": calls, "profiled": calls, "problems": [...]}.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

from programs_counted import counted, profiled

from gemmtuned.hooks import activate

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def main() -> None:
    import torch

    hook = activate.current()
    assert hook is not None and hook.path == "native", hook and hook.note
    hook.stop()  # this process drains by itself
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    out = io.StringIO()
    with profiled("cuda" if torch.cuda.is_available() else "cpu") as profile, contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    seen = counted(hook)
    problems = sorted(str(p).partition(",threads")[0] for p in seen)
    said = {"said": out.getvalue(), "counted": seen.total(), "profiled": profile.gemms, "problems": problems}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
