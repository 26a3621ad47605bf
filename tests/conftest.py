"""Let tests import the plain modules beside them (cases.py, noise.py ...): pytest's importlib mode adds no folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.native.build import build

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.append(HERE)

from hooked import Home  # noqa: E402


@pytest.fixture(scope="session")
def native_cache() -> Path:
    """A cache folder with the native hook in it: the user's own, so that only the first run of all builds."""
    cache = Settings.from_env().cache
    build(cache)
    return cache


@pytest.fixture
def home(tmp_path: Path, native_cache: Path) -> Home:
    """A home of its own for hooked programs."""
    return Home(tmp_path / "home", native_cache)
