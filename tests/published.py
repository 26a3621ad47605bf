"""Where the published tables and model configurations lie: beside a checkout, not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).resolve().parents[2] / "shared" / "data"
MODELS: Final = DATA / "model_configs"
FOLDERS: Final = sorted(path.parent for path in MODELS.glob("*/config.json")) if MODELS.is_dir() else []
