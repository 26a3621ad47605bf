"""Where and with what a figure was taken: every result file starts with this."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with --out for the results, whose help is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    """`576x7168,4096x4096` as (N, K)."""
    return tuple((int(n), int(k)) for n, k in (size.split("x") for size in text.split(",")))


def facts() -> dict[str, Any]:
    """Date, device, versions and source revision of this run."""
    import torch

    from gemmtuned import __version__
    from gemmtuned.configs.solution import cpu_device

    cpu = cpu_device()
    out: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": f"{cpu.name} ({cpu.key}), {os.cpu_count()} cores",
        "versions": {"gemmtuned": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "revision": _revision(),
        "command": " ".join([Path(sys.argv[0]).name, *(a for a in sys.argv[1:] if "/" not in a)]),
    }
    if torch.cuda.is_available():
        out["device"] = torch.cuda.get_device_name()
        out["versions"]["cuda"] = torch.version.cuda
    return out


def save(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `result` with the facts of this run to <folder>/<name>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**facts(), **result}, indent=1) + "\n")
    return path


def _revision() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
