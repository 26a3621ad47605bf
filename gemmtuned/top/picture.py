"""What `gemmtuned top` shows, as text: one answer of the daemon's socket in, lines and rows of tables out.

Nothing here knows of Textual.  Names come from other programs, so every text is cleaned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gemmtuned.configs.human_units import duration
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.device.advice import RESTS, advice
from gemmtuned.reports.render import age, clean, count, factor, percent, several

BAR: Final = 30  # characters, where there is room
_SHORTEST_BAR: Final = 5
PARTS: Final = (("faster", "green"), ("torch is best", "blue"), ("no verdict", "yellow"))
DEVICES: Final = ("device", "state", "what and why", "others use", "who uses it (pid)")
PROGRAMS: Final = ("program", "pid", "calls/s", "calls", "table", "state", "note")
VERDICTS: Final = ("published", "problem", "runs", "gain", "generation")
_LONGEST: Final = 70  # characters of a cell


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table. problem: what the keys act on while the cursor is here, "" for nothing."""

    key: str
    cells: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment. tone: `good`, `still` or `bad`, of the first line. share: of GEMM time, for the bar.

    advice: what a person can do about the devices that are not tuned on, a line each, whole.
    """

    first: str
    tone: str
    second: str
    shares: tuple[float, float, float] | None
    devices: tuple[Line, ...] = ()
    advice: tuple[str, ...] = ()
    programs: tuple[Line, ...] = ()
    verdicts: tuple[Line, ...] = ()
    paused: bool = False
    notes: tuple[str, ...] = field(default=())


def without(trouble: str) -> Picture:
    """While no daemon answers; trouble: why."""
    return Picture(clean(trouble), "bad", "What is published stays in use in programs: gemmtuned status", None)


def of(said: Mapping[str, Any], *, switched_off: str = "") -> Picture:
    """The picture of one answer. switched_off: the file that makes every program run stock torch, if it exists."""
    notice, now_s = said["notice"], said["now_s"]
    if notice is None:
        return without("the daemon is starting")
    programs, covered = said["programs"], said["covered"]
    total_us = sum(covered.values()) if covered else 0.0
    shares = (
        (covered["faster"] / total_us, covered["best"] / total_us, covered["none"] / total_us) if total_us else None
    )
    notes = [f"{switched_off} exists: every program runs stock torch. Remove it to go on."] if switched_off else []
    if said["trouble"]:
        notes.append(clean(said["trouble"]))
    if programs["more"]:
        notes.append(f"{several(programs['more'], 'program')} more: gemmtuned status")
    return Picture(
        _first(notice, now_s),
        _tone(notice["state"], bad=bool(switched_off)),
        _second(said),
        shares,
        tuple(_device(seat, said["users"].get(seat["id"], ())) for seat in notice["seats"]),
        tuple(filter(None, map(_advice, notice["seats"]))),
        tuple(_program(row, notice["generation"]) for row in programs["rows"]),
        tuple(_verdict(row, now_s) for row in said["verdicts"]),
        paused=notice["state"] == "paused",
        notes=tuple(notes),
    )


def bar(shares: tuple[float, float, float], long: int = BAR) -> tuple[int, int, int]:
    """Characters of `long` for each share; what is there at all has one at least."""
    wide = [max(round(share * long), 1) if share > 0 else 0 for share in shares]
    wide[wide.index(max(wide))] += long - sum(wide)
    return wide[0], wide[1], wide[2]


def share_line(
    shares: tuple[float, float, float], width: int
) -> tuple[str, tuple[int, int, int], tuple[str, str, str]]:
    """(head, the bar's parts, the shares as text) of one line of at most `width` characters, from 62 on.

    The bar is shorter on a narrow screen, then the head; the figures are never cut.
    """
    named = (percent(shares[0]), percent(shares[1]), percent(shares[2]))
    words = sum(len(f"  {share} {name}") for share, (name, _) in zip(named, PARTS, strict=True))
    for head in ("GEMM time of the last 24 h: ", "GEMM time, 24 h: ", "24 h: "):
        left = width - words - len(head)
        if left >= _SHORTEST_BAR:
            return head, bar(shares, min(left, BAR)), named
    return head, (0, 0, 0), named


def _first(notice: Mapping[str, Any], now_s: float) -> str:
    state = notice["reason"] if notice["state"] == "paused" and notice["reason"] else notice["state"]
    why = f" ({notice['reason']})" if notice["state"] == "stuck" and notice["reason"] else ""
    up = duration(max(now_s - notice["started_s"], 0.0) * 1e6)
    return clean(f"daemon {state}{why}, pid {notice['pid']}, up {up}, generation {notice['generation']}")


def _second(said: Mapping[str, Any]) -> str:
    waiting = said["waiting"]
    parts = [
        _rate(said["programs"]),
        f"{several(said['notice']['solved'], 'problem')} solved since its start",
        *(() if waiting is None else (f"{count(waiting)} to be tuned",)),
        f"device time today {duration(said['used_today_s'] * 1e6)}",
    ]
    return ", ".join(parts)


def _rate(programs: Mapping[str, Any]) -> str:
    if not programs["rows"]:
        return "no hooked program runs"
    rate = programs["calls_per_s"]
    return "calls/s not known yet" if rate is None else f"{count(rate)} calls/s"


def _tone(state: str, *, bad: bool) -> str:
    if bad or state in ("stuck", "stopped"):
        return "bad"
    return "good" if state in ("tuning", "ready") else "still"


def _device(seat: Mapping[str, Any], users: Any) -> Line:
    tuning = " ".join(filter(None, (seat["problem"], seat["candidate"])))
    doing = tuning if seat["state"] == "tuning" else _why(seat)
    names = _users(users) or "-"
    others = "-" if seat["others"] is None else percent(seat["others"])
    cells = (seat["name"], seat["state"], doing or "-", others, names)
    return Line(f"device {seat['id']}", _cells(cells), seat["problem"])


def _advice(seat: Mapping[str, Any]) -> str:
    """`cpu: end or kill -STOP them, ...`, whole: of the cell above, too, where that was cut; "" for nothing to say."""
    if seat["state"] == "tuning":
        return ""
    hint = advice(seat["reason"])
    if hint.startswith("nothing:") or hint in seat["reason"]:
        hint = ""
    why = seat["reason"] if len(_why(seat)) > _LONGEST else ""
    return clean(": ".join((seat["name"], *filter(None, (why, hint))))) if why or hint else ""


def _why(seat: Mapping[str, Any]) -> str:
    """Why nothing is tuned there; who uses it stands beside it."""
    reason: str = seat["reason"]
    return reason.split(" (")[0] if advice(reason) == RESTS else reason


def _users(users: Any) -> str:
    """As many by name as a cell holds."""
    named = [clean(_user(one)) for one in users]
    for shown in range(len(named), 0, -1):
        more = f" and {len(named) - shown} more" if shown < len(named) else ""
        text = ", ".join(named[:shown]) + more
        if len(text) <= _LONGEST:
            break
    return text if named else ""


def _user(one: Mapping[str, Any]) -> str:
    cores = "" if one["cores"] is None else f" {one['cores']:.1f} cores"
    return f"{one['name'] or 'process'} ({one['pid']}){cores}"


def _program(row: Mapping[str, Any], generation: int) -> Line:
    old = f"{row['generation']}" if row["generation"] == generation else f"{row['generation']} (of {generation})"
    rank = "" if row["rank"] is None else f" rank {row['rank']}"
    rate = "-" if row["calls_per_s"] is None else count(row["calls_per_s"])
    state = row["state"] if row["path"] != "off" else f"{row['state']}, off"
    cells = (f"{row['run']}{rank}", str(row["pid"]), rate, count(row["calls"]), old, state, row["note"] or "")
    return Line(f"program {row['host']} {row['pid']}", _cells(cells))


def _verdict(row: Mapping[str, Any], now_s: float) -> Line:
    best = row["state"] == "default_best"
    gain = "torch is best" if best else factor(row["baseline_us"] / row["us"] if row["us"] else 1.0)
    runs = "torch" if best else str(Candidate(row["backend"], row["config"]))
    cells = (age(now_s - row["published_us"] / 1e6), row["problem"], runs, gain, str(row["generation"]))
    return Line(f"verdict {row['problem']} {row['covers']} {row['device']}", _cells(cells), row["problem"])


def _cells(cells: tuple[str, ...]) -> tuple[str, ...]:
    cleaned = (clean(str(cell)) for cell in cells)
    return tuple(cell if len(cell) <= _LONGEST else cell[: _LONGEST - 3] + "..." for cell in cleaned)
