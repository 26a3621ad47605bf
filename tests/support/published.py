"""Where published tables and model configurations lie: beside a checkout, or where PUBLISHED_DATA says; never in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

BESIDE: Final = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA: Final = Path(os.environ.get("PUBLISHED_DATA") or BESIDE).resolve()
MODELS: Final = DATA / "model_configs"
FOLDERS: Final = sorted(path.parent for path in MODELS.glob("*/config.json")) if MODELS.is_dir() else []
