"""What the shell is offered for words that name a problem or a program: those of this home; problems in both spellings.

Bash takes a colon for the end of a word, so a shape, which has none, comes first: `gemmtuned explain 8x<TAB>`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MOST: Final = 200  # words of each kind


def problems(incomplete: str) -> list[str]:
    """Problems that begin so, most expensive first; none where the home has no database that can be read."""
    from gemmtuned.db import queries

    rows = _asked(queries.called)
    shapes = dict.fromkeys(f"{row['m']}x{row['n']}x{row['k']}" for row in rows)
    names = dict.fromkeys(str(row["problem"]) for row in rows)
    return [*_beginning(shapes, incomplete), *_beginning(names, incomplete)]


def runs(incomplete: str) -> list[str]:
    """Labels of programs that begin so; names that a terminal or a shell would take for more than text are left out."""
    from gemmtuned.db.of_runs import labels

    return _beginning({name: None for name in _asked(labels) if name.isprintable()}, incomplete)


def _asked(query: Callable[[Path], list[Any]]) -> list[Any]:
    """What the database of this home says; nothing where there is none that can be read."""
    from gemmtuned.configs.errors import GemmtunedError
    from gemmtuned.configs.settings import Settings

    try:
        here = Settings.from_env()
        return query(here.db) if here.db.exists() else []
    except (GemmtunedError, OSError):  # a shell that waits for a word must see no message
        return []


def _beginning(words: dict[str, None], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)][:MOST]
