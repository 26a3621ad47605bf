"""Programs on the fake CUDA driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_cuda_build import PRELUDE, build_fakes
from hooked import Home


@pytest.fixture(scope="module")
def fakes(built_for_tests: Path) -> Path:
    """The folder of the fakes."""
    return build_fakes(built_for_tests)


@pytest.fixture
def run(home: Home, fakes: Path) -> Any:
    """Runs a program of these parts behind PRELUDE, and gives what it printed. driver: its folder among the fakes."""

    def program(*code: str, driver: str = ".") -> Any:
        return home.run(PRELUDE + "".join(code), str(fakes), driver, GEMMTUNED="0", AITER_TUNE_GEMM="0").said

    return program
