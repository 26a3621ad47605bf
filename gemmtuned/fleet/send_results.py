"""Sending: what was found on this host becomes one object at the URL for each unit of tuning, named by its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gemmtuned import __version__
from gemmtuned.db.fleet_sync import Unshared
from gemmtuned.fleet import record
from gemmtuned.fleet.layout import result_parts, result_path, unit_name
from gemmtuned.fleet.objects import put_many
from gemmtuned.fleet.record import Result

if TYPE_CHECKING:
    from gemmtuned.fleet.sync import Here

BATCH: Final = 128  # results that are put, and noted as sent, together; one commit where the store has commits


def unsent(here: Here, listed: Mapping[str, str]) -> list[Unshared]:
    """Results of this host that are not at the URL yet; listed: the names that are there.

    The store knows what was sent to the home's own URL. At another one (a visit) the names decide.
    """
    found = here.exchange.store.fleet_sync.unshared(here.environment, every=here.turn.is_visit)
    if not here.turn.is_visit:
        return found
    there = {parts[2] for parts in map(result_parts, listed) if parts is not None}
    return [one for one in found if _written(here, one)[1] not in there]


def send(here: Here, listed: Mapping[str, str]) -> None:
    """Send all of `unsent`, and note after each batch that it is there."""
    turn, objects = here.turn, here.exchange.objects
    todo = unsent(here, listed)
    sent = 0
    while sent < len(todo) and not turn.is_over:
        batch = todo[sent : sent + BATCH]
        named = []
        for one in batch:
            data, digest = _written(here, one)
            named.append((result_path(here.name, _unit(one), digest, turn.store_clock_s()), data))
        put_many(objects, named)
        objects.flush()
        if not turn.is_visit:
            here.exchange.store.fleet_sync.shared([number for one in batch for number in one.ids])
        sent += len(batch)
        turn.done.sent += len(batch)
    turn.done.left += len(todo) - sent


def _written(here: Here, one: Unshared) -> tuple[bytes, str]:
    """(the object as bytes, its hash)."""
    result = Result(
        here.exchange.host, __version__, here.environment, one.solutions[0].covers, one.solutions, one.measured,
        tuple(one.trials),
    )  # fmt: skip
    return record.write(result, here.exchange.trust.key)


def _unit(one: Unshared) -> str:
    return unit_name(one.solutions[0].problem, one.solutions[0].covers)
