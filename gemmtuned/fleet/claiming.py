"""Which units this host tunes next: it gives back its claims of finished units, and makes a few new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from gemmtuned.fleet import claims, fetch_results
from gemmtuned.fleet.claims import Claim
from gemmtuned.fleet.layout import claim_path, unit_name

if TYPE_CHECKING:
    from gemmtuned.db.fleet import Unit
    from gemmtuned.db.fleet_sync import Ours
    from gemmtuned.fleet.sync import Here

BATCH: Final = (4, 64)  # the least and the most units to claim at once; between them what two minutes of tuning take
RATE_S: Final = 60.0  # how far back verdicts count for that rate
SPREAD: Final = 4  # to claim n units, a host picks among the SPREAD * n worth most: else all hosts want the same few
TRIES: Final = 4  # where others were first it picks among SPREAD times as many, until it has tried this often


def update_claims(here: Here, known: dict[str, Claim], *, unread: Collection[str]) -> None:
    """Bring the claims in our store and at the URL up to date, and claim more units if the daemon has asked for some.

    known: the newest claim of each unit, as read before results were listed.  unread: units with a result that we have
    not fetched yet.
    """
    exchange, turn, environment = here.exchange, here.turn, here.environment
    ours = _still_ours(here, known)
    held_by_us = {unit for unit, _ in ours}
    theirs = [u for u in here.open if u not in held_by_us and u in known and known[u].left_s > 0]
    won: dict[str, str] = {}
    if environment.key in exchange.store.fleet_sync.asked() and not turn.is_over:
        least, most = BATCH
        lately = exchange.store.fleet_sync.solved(environment, since_s=turn.now_s - RATE_S)
        wanted = max(min(2 * lately, most), least) - sum(one.is_open for _, one in ours)
        waiting = {unit_name(u.problem, u.covers) for u in exchange.store.fleet_sync.waiting(environment)}
        taken = {*held_by_us, *theirs, *waiting, *unread}
        won = _claim(here, known, [u for u in here.open if u not in taken], wanted)
    until_s = turn.now_s + exchange.lease_s
    rows = [(here.open[u], False, "", turn.now_s + known[u].left_s) for u in theirs]
    rows += [(here.open[u], True, path, until_s) for u, path in won.items()]
    rows += [(one.unit, True, one.path, turn.now_s + known[unit].left_s) for unit, one in ours]
    exchange.store.fleet_sync.claims(environment, rows, now_s=turn.now_s)
    turn.done.claimed += len(won)
    turn.done.theirs += len(theirs)


def _claim(here: Here, known: dict[str, Claim], free: list[str], wanted: int) -> dict[str, str]:
    """Claim `wanted` of the free units, roughly by worth, in an order of this host's own.

    Returns the names of the claims that we won, by unit.
    """
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
    solved = set(fetch_results.listed(here).values())
    claims.done(exchange.objects, [path for u, path in won.items() if u in solved])
    return {u: path for u, path in won.items() if u not in solved}


def tries(free: Sequence[str], wanted: int, host: str) -> Iterator[list[str]]:
    """Units to claim, one list per try: first from those worth most, then from more and more. host: its own order."""
    tried: set[str] = set()
    for number in range(1, TRIES + 1):
        among = [unit for unit in free[: SPREAD**number * wanted] if unit not in tried]
        near = sorted(among, key=lambda unit: sha256(f"{host} {unit}".encode()).digest())[: 2 * wanted]
        if not near:
            return
        tried.update(near)
        yield near


def _still_ours(here: Here, known: dict[str, Claim]) -> list[tuple[str, Ours]]:
    """(unit, claim) of the claims that we still hold; those of finished units are given back.

    Where this host was killed while it claimed, its store does not know whether it won: the URL is asked.
    """
    exchange, key = here.exchange, here.exchange.trust.key
    keep: list[tuple[str, Ours]] = []
    to_delete: list[str] = []
    finished: list[Unit] = []
    for one in exchange.store.fleet_sync.ours(here.environment):
        unit = unit_name(one.unit.problem, one.unit.covers)
        newest = known.get(unit, claims.NONE)
        holds = newest.left_s > 0 and one.path == claim_path(here.name, unit, newest.number, key)
        if holds and not one.is_won:
            holds = claims.is_held_by(exchange.objects, one.path, exchange.host, key)
        if holds and not one.is_shared:  # not yet for results that the daemon found since we sent ours
            keep.append((unit, one))
            continue
        finished.append(one.unit)
        if holds:
            to_delete.append(one.path)
    claims.done(exchange.objects, to_delete)
    exchange.store.fleet_sync.drop(here.environment, finished)
    return keep
