"""What gemmtuned.freeze leaves for the hook, which does not import it: its functions, from when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

when_native: Final[list[Callable[[], object]]] = []  # called once the native hook is in place
notes: Final[list[Callable[[], str]]] = []  # what `status` says of frozen layers, "" when all is well
