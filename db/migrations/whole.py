"""schema.sql, what all steps leave in a new file, so that a new file need not go through all of them.

python -m gemmtuned.db.migrations.whole     # writes it; run it after a new step. A test compares it with the steps
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gemmtuned.db import migrations

FILE: Final = Path(__file__).with_name("schema.sql")
_HEAD: Final = """\
-- What the steps beside this file leave in a new database: written by `python -m gemmtuned.db.migrations.whole`, never
-- by hand. Each statement is as SQLite keeps it; a line `-- next` stands between two of them.
"""


def text() -> str:
    """The whole file, from the steps."""
    conn = sqlite3.connect(":memory:", isolation_level=None)
    try:
        migrations.make_by_steps(conn)
        parts = [_HEAD + f"-- last step: {migrations.STEPS[-1].stem}\n", *_statements(conn)]
        return migrations.NEXT.join(parts) + "\n"
    finally:
        conn.close()


def _statements(conn: sqlite3.Connection) -> Iterator[str]:
    """Tables with the rows that the steps put into them, then views and indexes, each as it was made."""
    made = conn.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    ).fetchall()
    for kind, name, sql in made:
        yield sql
        if kind == "table" and name != "_sqlite_migrations":
            columns = ", ".join(f'quote("{column}")' for _, column, *_ in conn.execute(f"PRAGMA table_info({name})"))
            for row in conn.execute(f"SELECT {columns} FROM {name}").fetchall():  # noqa: S608 - our own names
                yield f"INSERT INTO {name} VALUES ({', '.join(row)})"  # noqa: S608


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
