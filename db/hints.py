"""Rows of other people's tables: kept, handed to the search as seeds, and asked for where they name problems alone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.hint import Hint, plain_case
from gemmtuned.configs.solution import Candidate, Device, Environment
from gemmtuned.db.leases import Work
from gemmtuned.db.row_ids import Part, current_stamps, plain, us

MAX_SEEDS: Final = 8  # tried beside our own candidates, which are 5 to 30
MAX_NEIGHBOURS: Final = 3
ROWS_AT_ONCE: Final = 5000  # read together, so that memory stays small beside the file's own
MAX_SOURCE: Final = 4096  # characters of a file's name
_INSERT: Final = """
INSERT INTO hint (problem_id, format, family, kind, backend, config, arch, units, us, source, line, text, imported_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET problem_id = excluded.problem_id, backend = excluded.backend, config = excluded.config,
    us = excluded.us, text = excluded.text, imported_us = excluded.imported_us
"""
# The sizes nearest in ratio first, none further than 4: a tile that is good at M = 64 says nothing about 4000.  Of one
# size what was found on a device like this before what was found on others
_SEEDS: Final = """
SELECT h.backend, h.config FROM hint h JOIN problem q ON q.id = h.problem_id
WHERE q.rest = :rest AND h.kind = 'tuned' AND h.backend IN (SELECT value FROM json_each(:backends))
    AND max(q.m, :m) <= 4 * min(q.m, :m)
GROUP BY h.backend, h.config
ORDER BY min(1.0 * max(q.m, :m) / min(q.m, :m)),
    max(CASE WHEN json_valid(h.text) THEN json_extract(h.text, '$.device') IS :device END) DESC,
    min(coalesce(h.us, 1e300)), min(h.id) LIMIT :limit
"""
# What we found best ourselves at other sizes of the same weight, or for other versions of a library
_NEIGHBOURS: Final = """
SELECT s.backend, s.config FROM solution s
JOIN problem q ON q.id = s.problem_id
JOIN device h ON h.id = s.device_id
WHERE q.rest = :own_rest AND h.key = :device AND s.state IN ('published', 'pinned')
    AND s.backend IN (SELECT value FROM json_each(:backends)) AND max(q.m, :m) <= 4 * min(q.m, :m)
GROUP BY s.backend, s.config
ORDER BY min(1.0 * max(q.m, :m) / min(q.m, :m)), max(s.generation) DESC LIMIT :neighbours
"""
_KNOWN: Final = """
SELECT e.id, h.key, h.kind, h.name, h.arch, h.units FROM environment e JOIN device h ON h.id = e.device_id ORDER BY e.id
"""


class Hints(Part):
    """The part of the store that holds imported rows."""

    def add(self, hints: Sequence[Hint], *, source: str, now_s: float) -> int:
        """Keep the rows of one file in place of those it had when it was imported before. Returns how many."""
        now_us = us(now_s)
        source = source.encode(errors="backslashreplace").decode()[-MAX_SOURCE:]  # a file's name need not be UTF-8

        def work(conn: sqlite3.Connection) -> int:
            conn.execute("DELETE FROM hint WHERE source = ?", (source,))
            for start in range(0, len(hints), ROWS_AT_ONCE):
                some = hints[start : start + ROWS_AT_ONCE]
                known = [h for h in some if h.problem is not None]
                ids = self._rows.problem_ids(conn, [plain_case(h.problem) for h in known if h.problem is not None])
                numbers = dict(zip(map(id, known), ids, strict=True))
                conn.executemany(_INSERT, (_values(h, numbers.get(id(h)), source, now_us) for h in some))
            return len(hints)

        return self._rows.write(work)

    def seeds(self, work: Work) -> tuple[Candidate, ...]:
        """What we, and then what others found best for this problem or for sizes near it.

        Of backends this environment has; the nearest sizes first.
        """
        values = {
            "rest": plain_case(work.problem).rest, "own_rest": work.problem.rest, "m": work.problem.m,
            "device": work.environment.device.key, "backends": json.dumps(sorted(work.environment.backends)),
            "limit": MAX_SEEDS, "neighbours": MAX_NEIGHBOURS,
        }  # fmt: skip

        def ask(conn: sqlite3.Connection) -> tuple[Candidate, ...]:
            found = [Candidate(*row) for sql in (_NEIGHBOURS, _SEEDS) for row in conn.execute(sql, values).fetchall()]
            return tuple(dict.fromkeys(found))[:MAX_SEEDS]

        return self._db.read(ask)

    def known_environments(self) -> list[Environment]:
        """Every environment that a program or a daemon was seen in."""

        def ask(conn: sqlite3.Connection) -> list[Environment]:
            found = []
            for number, *facts in conn.execute(_KNOWN).fetchall():
                found.append(Environment(Device(*facts), current_stamps(conn, number)))
            return found

        return self._db.read(ask)


def _values(hint: Hint, problem_id: int | None, source: str, now_us: int) -> tuple[object, ...]:
    candidate = hint.candidate or Candidate("", "")
    return (
        problem_id, hint.format, plain(hint.family, 200), hint.kind, candidate.backend, candidate.config,
        plain(hint.arch, 200), hint.units, hint.us, source, hint.line, hint.row, now_us,
    )  # fmt: skip
