"""What serving engines call by their plugin entry points, in each of their processes.

Switched off it reads three environment variables and returns.  It never raises: the engine would not start.
"""

from __future__ import annotations


def vllm() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    _install("vllm")


def sglang() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    _install("sglang")


def _install(engine: str) -> None:
    try:
        from gemmtuned.configs.settings import wants_activation

        if not wants_activation():
            return
        from importlib import import_module

        import_module(f"gemmtuned.hooks.engines.{engine}").install()
    except Exception as err:
        try:
            from gemmtuned.configs.stderr_lines import say

            say(f"the plugin for {engine} is not active, the engine runs as without it: {err}")
        except Exception:  # noqa: S110  the engine is worth more than a word
            pass
