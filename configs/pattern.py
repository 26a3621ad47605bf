"""Regular expressions that are compiled when they are first used: a program that starts needs few of ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


class Pattern:
    """As re.compile(text), as far as these functions."""

    fullmatch: Callable[[str], re.Match[str] | None]
    findall: Callable[[str], list[str]]

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        function = getattr(re.compile(self._text), name)
        setattr(self, name, function)  # from now on it is the compiled one's itself
        return function
