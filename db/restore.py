"""The published tables as a second copy of the store: compared with it, and restored into it.

A store can be lost (deleted, salvaged with loss) or older than what is published (a restored backup).  In both cases
the published rows are proven and in use, so they are put back into the store before anything else is published.  A row
is removed only if the store itself says why: withdrawn, forgotten, rolled back, superseded, quarantined.

A store *knows* what is published if it has the publication of that generation with the same time.  A store that does
not is behind, whatever its own generation is; then rows of it that were retired after its time are retired again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from gemmtuned.configs.manifest import Manifest, line
from gemmtuned.configs.published import Published, solutions_in
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import connect_read_only
from gemmtuned.db.leases import current_generation
from gemmtuned.db.row_ids import SOLUTION_SELECT, Part, current_stamps, rows, us
from gemmtuned.db.solutions import INSERT, LIVE, RETIRE, raise_generation, solutions_of

T = TypeVar("T")

_KNOWN: Final = "SELECT published_us FROM publication WHERE generation = ?"
# The row of a published line, live or not, whose state says why it is not in use
_ACCOUNTED: Final = """
SELECT 1 FROM problem p JOIN solution s ON s.problem_id = p.id JOIN device h ON h.id = s.device_id
WHERE p.rest = ? AND p.m = ? AND h.key = ? AND s.mode = ? AND s.covers = ? AND s.backend = ? AND s.config = ?
    AND s.stamp = ? AND s.generation = ? LIMIT 1
"""
_ALL_LIVE: Final = "FROM solution WHERE retired_generation IS NULL"
_LIVED: Final = """
SELECT count(*) FROM solution
WHERE generation <= :at AND (retired_generation IS NULL OR retired_generation > :at)
"""
_OLDER: Final = f"{SOLUTION_SELECT} WHERE s.retired_generation IS NULL AND s.published_us <= ? ORDER BY s.id"
# Rows from after the tables were written that replace a published one
_NEWER: Final = """
SELECT 1 FROM solution s
JOIN environment_stamp a ON a.environment_id = s.environment_id AND a.backend = :backend AND a.stamp = :stamp
WHERE s.problem_id = :problem AND s.device_id = :device AND s.mode = :mode AND s.covers = :covers
    AND s.retired_generation IS NULL AND s.published_us > :created LIMIT 1
"""
_REPLACED: Final = """
UPDATE solution SET state = 'stale', retired_generation = :at, retired_us = :now, reason = :reason
WHERE problem_id = :problem AND device_id = :device AND mode = :mode AND covers = :covers AND backend = :backend
    AND stamp = :stamp AND retired_generation IS NULL
"""
_AS_PUBLISHED: Final = """
UPDATE solution SET state = ? WHERE retired_generation IS NULL AND state != ? AND generation = ? AND backend = ?
    AND config = ? AND stamp = ? AND mode = ? AND covers = ?
    AND problem_id = (SELECT id FROM problem WHERE rest = ? AND m = ?)
    AND device_id = (SELECT id FROM device WHERE key = ?)
"""
_STAMPED: Final = """
SELECT e.id FROM environment e JOIN device h ON h.id = e.device_id
JOIN environment_stamp a ON a.environment_id = e.id AND a.backend = ? AND a.stamp = ?
WHERE h.key = ? ORDER BY e.id DESC LIMIT 1
"""
_ENVIRONMENTS: Final = """
SELECT e.id, h.key, h.kind, h.name, h.arch, h.units FROM environment e JOIN device h ON h.id = e.device_id
WHERE e.id IN (SELECT DISTINCT environment_id FROM solution WHERE retired_generation IS NULL) ORDER BY e.id
"""
_CHUNK: Final = 500  # problems that are stored in one go


@dataclass(frozen=True)
class Standing:
    """The store compared with what is published, at one moment.

    generation, store_us: of the store's newest publication.  lines: of its live solutions.  environments: theirs.
    behind: it does not know what is published.  lost: published solutions of which it has no row.  invalid: lines that
    no version of ours can restore.  short: how many of the published solutions it had, if an unreadable table leaves
    open which are missing; 0 when none is missing.
    """

    generation: int
    store_us: int
    lines: dict[str, Solution]
    environments: list[Environment]
    behind: bool = False
    lost: tuple[Solution, ...] = ()
    invalid: int = 0
    short: int = 0


@dataclass(frozen=True)
class TakenBack:
    """What was restored: back (in use again), superseded (the store had newer ones), gone (retired since)."""

    back: int
    superseded: int
    gone: int


class Restore(Part):
    """The part of the store that is compared with the published tables."""

    def standing(self, published: Published | None) -> Standing:
        """The store compared with what is published."""
        return self._db.read(lambda conn: standing(conn, published))

    def launches_at(self, generation: int, store_us: int, *, solutions: int) -> list[str] | None:
        """The launch records of live solutions, if this is the newest publication and this many are live; else None.

        In that case nothing was lost or changed since.
        """

        def once(conn: sqlite3.Connection) -> list[str] | None:
            if not _is_newest(conn, generation, store_us, solutions):
                return None
            return [text for (text,) in conn.execute(f"SELECT DISTINCT launch {_ALL_LIVE} AND launch != ''")]

        return self._db.read(once)

    def take_back(self, published: Published, *, now_s: float) -> TakenBack:
        """Restore what the store has lost, in one transaction that survives a power cut.

        Times and generations of the rows are those in the tables.
        """

        def once(conn: sqlite3.Connection) -> TakenBack:
            state = standing(conn, published)
            if not state.behind and not state.lost:
                return TakenBack(0, 0, 0)
            before = current_generation(conn)
            gone = _gone(conn, published) if state.behind else []
            note = f"taken back from the published tables of generation {published.generation}"
            _note_publications(conn, published, state.lost, note)
            if state.behind and before >= published.generation and (gone or state.lost):
                raise_generation(conn, us(now_s), installed=len(state.lost), retired=len(gone), note=note)
            at = current_generation(conn)
            if gone:
                reason = f"not in use in generation {published.generation} of the published tables"
                ids = json.dumps([row["id"] for row in gone])
                conn.execute(RETIRE, ("withdrawn", at, us(now_s), reason, ids))
            if state.behind:
                _set_states(conn, published, state)
            back = 0
            for start in range(0, len(state.lost), _CHUNK):
                chunk = state.lost[start : start + _CHUNK]
                numbers = self._rows.problem_ids(conn, [s.problem for s in chunk])
                for s, problem_id in zip(chunk, numbers, strict=True):
                    back += self._bring_back(conn, s, problem_id, published, at, us(now_s))
            return TakenBack(back, len(state.lost) - back, len(gone))

        return self._rows.write(once, durable=True)

    def _bring_back(
        self, conn: sqlite3.Connection, s: Solution, problem_id: int, published: Published, at: int, now_us: int
    ) -> bool:
        """Insert one published solution; False when the store has one that came later, which stays."""
        environment_id = self._measured_in(conn, s, published)
        device_id = conn.execute("SELECT device_id FROM environment WHERE id = ?", (environment_id,)).fetchone()[0]
        key: dict[str, Any] = {
            "problem": problem_id, "device": device_id, "mode": s.mode, "covers": s.covers, "backend": s.backend,
            "stamp": s.stamp, "created": published.created_us, "at": at, "now": now_us,
            "reason": f"superseded by generation {s.generation}",
        }  # fmt: skip
        stays = conn.execute(_NEWER, key).fetchone() is not None
        if not stays:
            conn.execute(_REPLACED, key)
        end = (at, now_us, "the store had one that came later") if stays else (None, None, "")
        conn.execute(
            INSERT,
            (
                problem_id, device_id, environment_id, s.mode, s.covers, s.backend, s.config, s.stamp, s.us,
                s.baseline_us, s.gain_low, s.err, s.baseline_err, s.launch, s.beside, "", None, None,
                "stale" if stays else s.state, s.generation, published.created_us, *end,
            ),
        )  # fmt: skip
        return not stays

    def _measured_in(self, conn: sqlite3.Connection, s: Solution, published: Published) -> int:
        """The id of an environment in which this solution is valid: the one published with it, if there is one."""
        found = conn.execute(_STAMPED, (s.backend, s.stamp, s.device)).fetchone()
        if found is not None:
            return int(found[0])
        for environment in published.environments:
            if environment.device.key == s.device and environment.accepts(s.backend, s.stamp):
                return self._rows.environment_id(conn, environment, published.created_us)
        kind = s.device.partition("-")[0]
        device = Device(s.device, kind if kind in ("cuda", "rocm") else "cpu", s.device, "unknown", 0)
        return self._rows.environment_id(conn, Environment(device, {s.backend: s.stamp}), published.created_us)


def standing(conn: sqlite3.Connection, published: Published | None) -> Standing:
    """Within a transaction: see Restore.standing."""
    generation = current_generation(conn)
    (store_us,) = conn.execute(_KNOWN, (generation,)).fetchone() or (0,)
    lines = {line(s): s for s in solutions_of(rows(conn, LIVE, {"only": None}))}
    environments = [
        Environment(
            Device(*row[1:]),
            current_stamps(conn, row[0]),
        )
        for row in conn.execute(_ENVIRONMENTS).fetchall()
    ]
    state = Standing(generation, store_us, lines, environments)
    return state if published is None else _beside(conn, published, state)


def _is_newest(conn: sqlite3.Connection, generation: int, store_us: int, solutions: int) -> bool:
    """Whether this is the newest publication, and this many solutions are live."""
    if current_generation(conn) != generation or conn.execute(_KNOWN, (generation,)).fetchone() != (store_us,):
        return False
    return bool(conn.execute(f"SELECT count(*) {_ALL_LIVE}").fetchone()[0] == solutions)


def is_behind(conn: sqlite3.Connection, published: Published) -> bool:
    """Within a transaction: whether the store does not know what is published."""
    if published.manifest is None or not published.store_us:
        return current_generation(conn) < published.generation
    return bool(conn.execute(_KNOWN, (published.generation,)).fetchone() != (published.store_us,))


def _beside(conn: sqlite3.Connection, published: Published, state: Standing) -> Standing:
    other, invalid = solutions_in(published.lines - state.lines.keys())
    lost = tuple(sorted((s for s in other if not _is_accounted_for(conn, s)), key=lambda s: s.generation))
    behind = is_behind(conn, published)
    short = published.unread
    if short and not behind:
        held = conn.execute(_LIVED, {"at": published.generation}).fetchone()[0]
        short = max(published.unread + len(published.lines) - held - len(lost) - invalid, 0)
    return replace(state, behind=behind, lost=lost, invalid=invalid, short=short)


def _note_publications(conn: sqlite3.Connection, published: Published, lost: Sequence[Solution], note: str) -> None:
    """Add the published generation to the store, and the generations of its rows."""
    insert = "INSERT OR IGNORE INTO publication VALUES (?, ?, ?, ?, ?)"
    for generation in sorted({s.generation for s in lost} - {published.generation}):
        conn.execute(insert, (generation, published.created_us, 0, 0, note))
    known = (
        "INSERT INTO publication VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET published_us = excluded.published_us"
    )
    conn.execute(known, (published.generation, published.store_us or published.created_us, len(lost), 0, note))


def _set_states(conn: sqlite3.Connection, published: Published, state: Standing) -> None:
    """Set the states of rows that an older store has and that were pinned or unpinned since."""
    for s in solutions_in(published.lines - state.lines.keys())[0]:
        what = (s.backend, s.config, s.stamp, s.mode, s.covers, s.problem.rest, s.problem.m, s.device)
        conn.execute(_AS_PUBLISHED, (s.state, s.state, s.generation, *what))


def _is_accounted_for(conn: sqlite3.Connection, s: Solution) -> bool:
    key = (s.problem.rest, s.problem.m, s.device, s.mode, s.covers, s.backend, s.config, s.stamp, s.generation)
    return conn.execute(_ACCOUNTED, key).fetchone() is not None


def _gone(conn: sqlite3.Connection, published: Published) -> list[dict[str, Any]]:
    """Live rows from before the tables were written that are not in them, so they had been retired."""
    if published.manifest is None or published.unread:
        return []  # tables that cannot be read may have them
    there = {_identity(s) for s in solutions_in(published.lines)[0]}
    gone = []
    for row in rows(conn, _OLDER, (published.created_us,)):
        found = solutions_of([row])
        if not found or _identity(found[0]) not in there:
            gone.append(row)
    return gone


def _identity(s: Solution) -> tuple[object, ...]:
    return s.problem, s.device, s.mode, s.covers, s.backend, s.config, s.stamp


def look(path: Path, published: Published | None) -> Standing | None:
    """The store at path compared with what is published, for reports; None for a database without content.

    Raises StoreError.
    """
    return _looked(path, lambda conn: standing(conn, published), None)


def shows(path: Path, manifest: Manifest) -> bool:
    """Whether the newest publication is this one, with as many solutions: a quick look. Raises StoreError."""
    solutions = sum(file.rows for file in manifest.files)
    return _looked(path, lambda conn: _is_newest(conn, manifest.generation, manifest.store_us, solutions), False)


def _looked(path: Path, ask: Callable[[sqlite3.Connection], T], nothing: T) -> T:
    conn = connect_read_only(path)
    try:
        if migrations.is_empty(conn, path):
            return nothing
        conn.execute("BEGIN")
        return ask(conn)
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    finally:
        conn.close()
