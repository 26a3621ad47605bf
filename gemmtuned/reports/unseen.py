"""What is not recorded: programs without a call, and an engine's ways to products past what is counted.

Silence is not to be taken for success.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gemmtuned.reports.render import Row, count, several

_NAMED: Final = 3


@dataclass(slots=True)
class Paths:
    """A program's ways to products beside torch's own operators, in all its processes.

    counted: names of operators that are counted.  left: names of those that are not, each with the reason.  unseen:
    ways that go past torch's dispatcher.
    """

    run: str
    counted: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)

    @property
    def known(self) -> int:
        """How many there are."""
        return len(self.counted) + len(self.left) + len(self.unseen)

    @property
    def facts(self) -> dict[str, Any]:
        """For --json."""
        return {
            "run": self.run,
            "counted": sorted(self.counted),
            "left": self.left,
            "unseen": sorted(self.unseen),
            "share": len(self.counted) / self.known,
        }

    def __str__(self) -> str:
        text = f"{self.run}: calls of {count(len(self.counted))} of its {several(self.known, 'known way')} to products "
        text += "beside torch's are recorded"
        if self.left:
            text += "; left alone: " + ", ".join(f"{name} ({why})" for name, why in sorted(self.left.items()))
        if self.unseen:
            text += f"; past the dispatcher, and not counted where it is called: {', '.join(sorted(self.unseen))}"
        return text


def engine_paths(sessions: Sequence[Row], *, since_us: float = 0) -> list[Paths]:
    """The ways to products beside torch's, for each program that has some.

    sessions: rows of the view.  since_us: sessions that were last seen before this time do not count.
    """
    found: dict[str, Paths] = {}
    for row in sessions:
        known = _read(row["operators"]) if row["last_seen"] >= since_us else {}
        if known:
            paths = found.setdefault(row["run"], Paths(row["run"]))
            paths.counted |= {str(name) for name in known.get("counted", ())}
            paths.left |= {str(name): str(why) for name, why in known.get("left", {}).items()}
            paths.unseen |= {str(what) for what in known.get("unseen", ())}
    for paths in found.values():  # counted in one process, and not in another
        paths.counted -= set(paths.left)
    return [paths for _, paths in sorted(found.items()) if paths.known]


def _read(text: str) -> dict[str, Any]:
    try:
        known = json.loads(text) if text else {}
    except (ValueError, RecursionError):  # cut short, or a member wrote it
        return {}
    fits = isinstance(known, dict) and isinstance(known.get("left", {}), dict)
    return known if fits and all(isinstance(known.get(name, []), list) for name in ("counted", "unseen")) else {}


def dropped_calls(sessions: Iterable[Row], *, since_us: float = 0) -> dict[str, int]:
    """Calls that were not counted, by program, also of those that have ended. Arguments as for unseen_notes."""
    found: Counter[str] = Counter()
    for row in sessions:
        if row["dropped"] and row["last_seen"] >= since_us:
            found[row["run"]] += row["dropped"]
    return dict(found)


def dropped_notes(dropped: Mapping[str, int]) -> list[str]:
    """One line for each program that made calls which were not counted; calls as of dropped_calls."""
    return [
        f"{run}: {several(calls, 'call')} not counted: too many problems (65,536 in one thread), or the database was "
        "locked or full meanwhile"
        for run, calls in sorted(dropped.items())
    ]


def unseen_notes(sessions: Sequence[Row], *, since_us: float = 0) -> list[str]:
    """What is to be said beside a report of no calls. sessions: of the view; since_us: only those heard of since."""
    silent = [row for row in sessions if not row["calls"] and row["last_seen"] >= since_us]
    return list(_silent(silent))


def _silent(silent: Sequence[Row]) -> Iterator[str]:
    for path, what in (
        ("native", "ran with the hook and no product of theirs was recorded: they made none, or made them by operators "
         "that are not counted (gemmtuned doctor lists them)"),
        ("off", "ran with the hook off, so that nothing could be recorded"),
    ):  # fmt: skip
        rows = [row for row in silent if row["path"] == path]
        if rows:
            yield f"{several(len(rows), 'process', 'processes')} {what}: {_names(rows)}.{_why(rows)}"


def _names(rows: Sequence[Row]) -> str:
    names = sorted({row["run"] for row in rows})
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _why(rows: Sequence[Row]) -> str:
    notes = sorted({row["note"] for row in rows if row["note"]})
    return f" Why: {notes[0]}." if notes else ""
