"""What serving engines load of us by their own plugin entry points: labels, tables before graphs, warm-ups kept apart.

An engine changes under us with every release.  So every patch first looks whether what it wraps is there, wraps
instances rather than classes where it can, and on any doubt does nothing: then the engine runs as one that only has
GEMMTUNED=1.  What is wrapped returns and raises what it would without us.
"""

from __future__ import annotations

import sys
from typing import Final

from gemmtuned.configs.settings import allows_plugin

_ENGINES: Final = (("vllm", "VLLM_PLUGINS"), ("sglang", "SGLANG_PLUGINS"))  # and what restricts their plugins


def speak() -> bool:
    """Whether this is a process of an engine that loads our plugin: then our line stands in the engine's log."""
    return any(engine in sys.modules and allows_plugin(variable, "gemmtuned") for engine, variable in _ENGINES)
