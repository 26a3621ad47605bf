"""Calls of engines' operators that no solution may serve yet: it was not raced beside the engine's own kernel.

A program notes the operator with the problem (Sightings.add_wanted).  A daemon whose worker has that engine's kernel
races the solution again, like one whose conditions have changed; it stays in use for torch's own product meanwhile.

So does a daemon that has a newer version of an engine than a solution was raced beside.  Programs with that version are
served by the solution meanwhile, and note nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, Final

from gemmtuned.configs.engine_races import BACKENDS, ENGINES, is_outdated
from gemmtuned.configs.solution import Environment
from gemmtuned.db.recheck import HERE
from gemmtuned.db.row_ids import HOLDS_HERE, Part, stamps_here, us

# s: a live solution whose problem is called by an operator of :engines, [operator, backend, version], and that was not
# raced beside that backend in that version
_LACKS: Final = """
EXISTS (
    SELECT 1 FROM demand d JOIN json_each(:engines) k
    WHERE d.wanted <> '' AND d.wanted_of = s.id AND d.solution_id = s.id
        AND instr(' ' || d.wanted || ' ', ' ' || json_extract(k.value, '$[0]') || ' ')
        AND NOT instr(s.beside, json_extract(k.value, '$[2]')))
"""
_MARK: Final = f"UPDATE solution AS s SET recheck = 'conditions' WHERE s.recheck IS NULL AND {HERE} AND {_LACKS}"  # noqa: S608
_ASK: Final = f"UPDATE solution AS s SET recheck = 'asked' WHERE s.recheck IS NOT 'asked' AND {HERE} AND {_LACKS}"  # noqa: S608
_ANY: Final = f"""
SELECT 1 FROM solution s JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL AND s.state != 'pinned' AND h.key = :device AND {_LACKS} LIMIT 1
"""  # noqa: S608
# Live solutions that were raced beside one of :engines, and not in its version
_OTHERWISE: Final = """
SELECT s.id, s.beside FROM solution s JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL AND s.state != 'pinned' AND h.key = :device AND s.recheck IS NULL AND s.beside != ''
    AND EXISTS (SELECT 1 FROM json_each(:engines) k
        WHERE instr(s.beside, json_quote(json_extract(k.value, '$[1]')) || ':[')
            AND instr(s.beside, json_extract(k.value, '$[2]')) = 0)
"""
_MARK_THESE: Final = f"""
UPDATE solution AS s SET recheck = 'conditions'
WHERE s.id IN (SELECT value FROM json_each(:ids)) AND s.recheck IS NULL AND {HERE}
"""  # noqa: S608
_UNASKED: Final = _ANY.replace("LIMIT 1", f"AND s.recheck IS NOT 'asked' AND (:stamps = '[]' OR {HOLDS_HERE}) LIMIT 1")
_NONE: Final = "[]"


class Wanted(Part):
    """The part of the store that knows which solutions an engine's operator waits for."""

    def mark(self, environment: Environment, *, now_s: float) -> int:
        """Have those raced again whose engine's kernel this environment has; how many.

        A search names every engine's kernel that is there, also those that do not run the problem: none is asked twice.
        """
        engines, device = _engines(environment.stamps), environment.device.key

        def work(conn: sqlite3.Connection) -> int:
            values: dict[str, Any] = {
                "environment": self._rows.environment_id(conn, environment, us(now_s)), "engines": engines,
                "stamps": stamps_here(environment), "ids": json.dumps(_outdated(conn, device, environment.stamps)),
            }  # fmt: skip
            return sum(conn.execute(sql, values).rowcount for sql in (_MARK, _MARK_THESE))

        return self._rows.write(work) if self.is_any(device, environment.stamps) else 0

    def ask(self, environment: Environment, *, now_s: float) -> int:
        """Have those that programs wait for raced again by `daemon --once`, too, as if somebody asked; how many."""

        def work(conn: sqlite3.Connection) -> int:
            here = self._rows.environment_id(conn, environment, us(now_s))
            values = {
                "environment": here, "engines": _engines(environment.stamps), "stamps": stamps_here(environment),
            }  # fmt: skip
            return conn.execute(_ASK, values).rowcount

        return self._rows.write(work) if self.is_unasked(environment.device.key, environment.stamps, environment) else 0

    def is_unasked(self, device: str, versions: Mapping[str, str], environment: Environment | None = None) -> bool:
        """Whether programs wait for any that nobody has asked for yet. As is_any.

        environment: only those that a worker of it can race; None: of whatever versions.
        """
        stamps = "[]" if environment is None else stamps_here(environment)
        values = {"device": device, "engines": _engines(versions), "stamps": stamps}
        return values["engines"] != _NONE and self._db.read(
            lambda conn: conn.execute(_UNASKED, values).fetchone() is not None
        )

    def is_any(self, device: str, versions: Mapping[str, str]) -> bool:
        """Whether any solution for such a device waits for one of these backends. versions: by the backend's name."""
        values = {"device": device, "engines": _engines(versions)}
        if values["engines"] == _NONE:
            return False
        return self._db.read(
            lambda conn: conn.execute(_ANY, values).fetchone() is not None or bool(_outdated(conn, device, versions))
        )


def _outdated(conn: sqlite3.Connection, device: str, versions: Mapping[str, str]) -> list[int]:
    """Ids of solutions for this device that were raced beside an older version of one of these backends."""
    engines = {name: version for name, version in versions.items() if name in BACKENDS}
    found = conn.execute(_OTHERWISE, {"device": device, "engines": _engines(engines)}).fetchall()
    return [int(number) for number, beside in found if is_outdated(str(beside), engines)]


def _engines(versions: Mapping[str, str]) -> str:
    """JSON of [operator, backend, how `beside` begins to tell of it] for those of these backends that engines have."""
    return json.dumps(
        [
            [operator, backend, f"{json.dumps(backend)}:[{json.dumps(versions[backend])},"]
            for operator, engine in ENGINES.items()
            for backend in engine.backends
            if backend in versions
        ]
    )
