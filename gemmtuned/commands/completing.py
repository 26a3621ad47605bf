"""What the shell is offered for an argument that names a problem: those of this home, in both spellings.

Bash takes a colon for the end of a word, so a shape, which has none, comes first: `gemmtuned explain 8x<TAB>`.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 200  # of each


def problems(incomplete: str) -> list[str]:
    """Those that begin so, most expensive first; none where the home has no database that can be read."""
    from gemmtuned.configs.errors import GemmtunedError
    from gemmtuned.configs.settings import Settings
    from gemmtuned.db import queries

    try:
        here = Settings.from_env()
        rows = queries.called(here.db) if here.db.exists() else []
    except (GemmtunedError, OSError):  # a shell that waits for a word is no place for a message
        return []
    shapes = dict.fromkeys(f"{row['m']}x{row['n']}x{row['k']}" for row in rows)
    names = dict.fromkeys(str(row["problem"]) for row in rows)
    return [*_beginning(shapes, incomplete), *_beginning(names, incomplete)]


def _beginning(words: dict[str, None], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)][:MOST]
