"""SGLang's plugin (entry point `sglang.srt.plugins`)."""

from __future__ import annotations


def install() -> None:
    """Nothing yet."""
