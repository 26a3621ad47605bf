"""Which units this host tunes next: it gives back claims of finished units, and makes a few new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from gemmtuned.fleet import claims, down
from gemmtuned.fleet.claims import Claim
from gemmtuned.fleet.layout import claim_path, unit_name

if TYPE_CHECKING:
    from gemmtuned.db.fleet import Unit
    from gemmtuned.db.fleet_sync import Ours
    from gemmtuned.fleet.sync import Here

BATCH: Final = (4, 64)  # the least and the most units to claim at once: as many as were tuned in two minutes lately
RATE_S: Final = 60.0
SPREAD: Final = 4  # a host picks among so many times what it wants, so that hosts do not all ask for the same few
TRIES: Final = 4  # if others were first it tries again among SPREAD times as many, so often in all


def share_out(here: Here, known: dict[str, Claim], *, unread: Collection[str]) -> None:
    """Update the claims in our store and at the URL; claim more if the daemon has asked for it.

    known: the newest claims before results were listed.  unread: units with a result that we have not fetched yet.
    """
    exchange, turn, environment = here.exchange, here.turn, here.environment
    held = _ours(here, known)
    mine = {unit for unit, _ in held}
    theirs = [u for u in here.open if u not in mine and u in known and known[u].left_s > 0]
    won: dict[str, str] = {}
    if environment.key in exchange.store.fleet_sync.asked() and not turn.is_over:
        least, most = BATCH
        lately = exchange.store.fleet_sync.solved(environment, since_s=turn.now_s - RATE_S)
        wanted = max(min(2 * lately, most), least) - sum(one.is_open for _, one in held)
        waiting = {unit_name(u.problem, u.covers) for u in exchange.store.fleet_sync.waiting(environment)}
        taken = {*mine, *theirs, *waiting, *unread}
        won = _claim(here, known, [u for u in here.open if u not in taken], wanted)
    until_s = turn.now_s + exchange.lease_s
    rows = [(here.open[u], False, "", turn.now_s + known[u].left_s) for u in theirs]
    rows += [(here.open[u], True, path, until_s) for u, path in won.items()]
    rows += [(one.unit, True, one.path, turn.now_s + known[unit].left_s) for unit, one in held]
    exchange.store.fleet_sync.claims(environment, rows, now_s=turn.now_s)
    turn.done.claimed += len(won)
    turn.done.theirs += len(theirs)


def _claim(here: Here, known: dict[str, Claim], free: list[str], wanted: int) -> dict[str, str]:
    """Claim so many of these, roughly by worth, shuffled per host; the names of the claims that we won."""
    exchange, environment, key = here.exchange, here.environment, here.exchange.trust.key
    if wanted <= 0:
        return {}
    won: dict[str, str] = {}
    for near in tries(free, wanted, exchange.host):
        paths = ((u, claims.next_path(here.name, u, known, key)) for u in near)
        intended = [(here.open[u], path) for u, path in paths if path is not None]
        exchange.store.fleet_sync.intend(environment, intended, now_s=here.turn.now_s)
        won |= claims.take(
            exchange.objects, here.name, near, known, host=exchange.host, most=wanted - len(won), key=key
        )
        if len(won) >= wanted or here.turn.is_over:
            break
    if not won:
        return {}
    # A result may have come since results were listed: its host has dropped its own claim, and we won the next one.
    come = set(down.listed(here).values())
    claims.done(exchange.objects, [path for u, path in won.items() if u in come])
    return {u: path for u, path in won.items() if u not in come}


def tries(free: Sequence[str], wanted: int, host: str) -> Iterator[list[str]]:
    """Units to claim, try by try: first among those worth most, then among more and more."""
    tried: set[str] = set()
    for number in range(1, TRIES + 1):
        among = [unit for unit in free[: SPREAD**number * wanted] if unit not in tried]
        near = sorted(among, key=lambda unit: sha256(f"{host} {unit}".encode()).digest())[: 2 * wanted]
        if not near:
            return
        tried.update(near)
        yield near


def _ours(here: Here, known: dict[str, Claim]) -> list[tuple[str, Ours]]:
    """The claims that we still hold, by unit. Finished ones are given back; after a kill we look up what we won."""
    exchange, key = here.exchange, here.exchange.trust.key
    keep: list[tuple[str, Ours]] = []
    gone: list[str] = []
    over: list[Unit] = []
    for one in exchange.store.fleet_sync.ours(here.environment):
        unit = unit_name(one.unit.problem, one.unit.covers)
        newest = known.get(unit, claims.NONE)
        holds = newest.left_s > 0 and one.path == claim_path(here.name, unit, newest.number, key)
        if holds and not one.is_won:
            holds = claims.is_held_by(exchange.objects, one.path, exchange.host, key)
        if holds and not one.is_shared:  # not yet for results that the daemon found since we sent ours
            keep.append((unit, one))
            continue
        over.append(one.unit)
        if holds:
            gone.append(one.path)
    claims.done(exchange.objects, gone)
    exchange.store.fleet_sync.drop(here.environment, over)
    return keep
