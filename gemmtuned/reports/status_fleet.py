"""What `gemmtuned status` says of the fleet that this home shares with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemmtuned.reports.render import Report, count, several


def with_fleet(report: Report, state: Mapping[str, Any] | None) -> Report:
    """The report with a line about it. state: of db.fleet_state; None: nothing is shared."""
    facts = {**report.facts, "fleet": None if state is None else dict(state)}
    if state is None:
        return replace(report, facts=facts)
    notes = list(report.notes)
    if state["refused"]:
        notes.append(f"{several(state['refused'], 'result')} of other hosts refused; the last: {state['last_refusal']}")
    return replace(report, facts=facts, lines=[*report.lines, _line(state)], notes=notes)


def _line(state: Mapping[str, Any]) -> str:
    results = f"{count(state['waiting'])} results wait for a check here, {count(state['used'])} in use"
    if not state["live_until_us"]:
        return f"fleet: {state['url']}, by hand or a repository of tables (nothing is claimed); {results}"
    if not state["reached"]:
        return f"fleet: {state['url']} is not reached: this host tunes alone what nobody had claimed; {results}"
    return (
        f"fleet: {state['url']}; {several(state['claimed'], 'problem')} claimed here, "
        f"{count(state['claimed_elsewhere'])} elsewhere; {results}"
    )
