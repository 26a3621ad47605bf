"""A member's file as programs write it, and what the store has taken of it."""

from __future__ import annotations

import contextlib
import sqlite3

from other_users import Two


def edit(two: Two, *statements: str) -> None:
    """What a member with a sqlite3 shell does to the file."""
    two.theirs.close()
    with contextlib.closing(sqlite3.connect(two.path, isolation_level=None)) as conn:
        conn.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            conn.execute(statement)
