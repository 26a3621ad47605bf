"""AITER installed beside us: one variable of its name switches both on, and its own capture is dear."""

from __future__ import annotations

from importlib.util import find_spec

from gemmtuned.configs.settings import child_env


def aiter_captures() -> str:
    """What AITER_TUNE_GEMM=1 does beyond what it does for us, where AITER is installed; "" where it does nothing."""
    if child_env().get("AITER_TUNE_GEMM") != "1" or find_spec("aiter") is None:
        return ""
    return (
        "AITER is installed, and by that name rewrites its CSV at each call, 1 ms and more (GEMMTUNED=1 switches us on "
        "alone)"
    )
