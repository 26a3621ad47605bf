"""The picture on the README: a terminal with `gemmtuned demo`, then `gemmtuned coverage` and `gains`.

    python docs/picture.py                           # a minute on a quiet machine: runs, writes the result file, draws
    python docs/picture.py --home DIR --said FILE    # of a demo that has run in DIR and whose output is in FILE
    python docs/picture.py --draw                    # draws the newest result file again

What the picture shows is what the commands printed.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PICTURE: Final = ROOT / "docs/images/demo.svg"
RESULTS: Final = ROOT / "benchmarks/results"
COLUMNS: Final = 116
ENDS: Final = "Look at what it found:"  # the demo's advice is left out: the next commands follow it


def shown(command: str, home: str) -> str:
    """What `gemmtuned ...` writes to a terminal of COLUMNS columns, colours included; ends this program if it fails."""
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
    env |= {"GEMMTUNED_HOME": home, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()], env=env, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    read = b""
    try:
        while chunk := os.read(ours, 65536):
            read += chunk
    except OSError:  # Linux says EIO when the other end is closed
        pass
    finally:
        os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{command} ended with {process.returncode}: {read.decode()}")
    return read.decode().replace("\r\n", "\n")


def run(home: str, said: str) -> dict[str, Any]:
    """The screens of one demo; said: what it printed, where it has run already."""
    said = said or shown(f"gemmtuned demo --home {home}", home)
    screens = [("gemmtuned demo", said.split(ENDS)[0])]
    screens += [(name, shown(name, home)) for name in ("gemmtuned coverage", "gemmtuned gains")]
    return {"date": json.loads((Path(home) / "configs/manifest.json").read_text())["created"], "screens": screens}


def draw(result: dict[str, Any]) -> str:
    """The picture as SVG."""
    from rich.console import Console
    from rich.text import Text

    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for command, screen in result["screens"]:
            console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            console.print(Text.from_ansi(screen.strip("\n")))
            console.print()
        return console.export_svg(title="gemmtuned", unique_id="demo")


def newest() -> dict[str, Any]:
    """The newest result file of this program."""
    found: dict[str, Any] = json.loads(max(RESULTS.glob("picture-*.json")).read_text())
    return found


def main() -> None:
    """Run and draw, or draw alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the newest result file and run nothing")
    parser.add_argument("--home", metavar="DIR", help="home of a demo that has run")
    parser.add_argument("--said", type=Path, metavar="FILE", help="what that demo printed")
    given = parser.parse_args()
    if not given.draw:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import record

        with tempfile.TemporaryDirectory() as new:
            result = run(given.home or f"{new}/home", given.said.read_text() if given.said else "")
        record.save(f"picture-{time.strftime('%Y-%m-%d', time.gmtime())}", result)
    PICTURE.write_text(draw(newest()))


if __name__ == "__main__":
    main()
