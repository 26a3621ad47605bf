"""One exchange with the other hosts of a fleet: it sends our results, fetches theirs, and claims what to tune next.

The order matters.  Claims are read before results are listed, and a host puts its result before it drops its claim: so
a host that sees no claim sees the result.  Fetched results wait in the store: they become solutions only after the
daemon's own worker has checked and raced them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.solution import Environment
from gemmtuned.fleet import claims, fetch_results, seen, send_results
from gemmtuned.fleet.claiming import update_claims
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import beat_path, environment_name, unit_name
from gemmtuned.fleet.objects import Objects, store_now_s
from gemmtuned.fleet.tables import is_repository
from gemmtuned.fleet.times import LEASE_S

if TYPE_CHECKING:
    from gemmtuned.db.fleet import Unit
    from gemmtuned.db.store import Store

OPEN: Final = 4096  # units looked at, worth most first
SEEN_S: Final = 600.0  # how often a daemon writes its counts


@dataclass(slots=True)
class Synced:
    """What one exchange did: results sent, fetched and refused (with reasons), units claimed and held by others.

    left: results that wait for the next exchange, because time was over.  claims: whether units can be claimed there.
    """

    sent: int = 0
    fetched: int = 0
    claimed: int = 0
    theirs: int = 0
    left: int = 0
    claims: bool = True
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How to exchange. claim: claim units, for a daemon that tunes.  dry_run: write nothing, there or here.

    lease_s: how long a claim holds.  work_s: begin nothing more after so many seconds; the next exchange does the rest.
    is_left: whether nobody waits for this exchange any more; then it begins nothing more, either.
    """

    store: Store
    objects: Objects
    url: str
    host: str
    trust: Trust
    claim: bool = False
    dry_run: bool = False
    lease_s: float = LEASE_S
    work_s: float = float("inf")
    is_left: Callable[[], bool] = lambda: False

    def run(self, *, now_s: float) -> Synced:
        """Do it once. Raises TryLater when the store of objects cannot be reached, StoreError, SettingError.

        A repository of tables takes only results, no counts and no claims.
        The home shares at one URL at a time, the daemon's.  Of an exchange by hand at another one, only the results are
        stored, so that it does not disturb the daemon's.
        """
        claims_hold = self.objects.can_claim and not is_repository(self.objects)
        done = Synced(claims=claims_hold)
        is_visit = not self.claim and self.store.fleet_sync.url() not in ("", self.url)
        if not self.dry_run and not is_visit:
            self.store.fleet_sync.begin(self.url)
        turn = Turn(self, done, now_s, self._clock(now_s) if claims_hold else now_s, is_visit, claims_hold)
        for environment in self.store.hints.known_environments():
            self._environment(turn, environment)
        if not self.dry_run and claims_hold:
            self._tell(turn)
        return done

    def _clock(self, now_s: float) -> float:
        """The time by the clock of the store, which dates its objects."""
        if self.dry_run:
            return now_s
        return store_now_s(self.objects, beat_path(self.host))

    def _environment(self, turn: Turn, environment: Environment) -> None:
        here = Here(turn, environment, environment_name(environment))
        claiming = self.claim and turn.claims_hold and self._needs_claims(environment, turn.now_s)
        known = {}
        if claiming:
            known = claims.read(self.objects, here.name, clock_s=turn.clock_s, lease_s=self.lease_s, key=self.trust.key)
        listed = fetch_results.listed(here)
        units = self.store.fleet_sync.open(environment, now_s=turn.now_s, limit=OPEN)
        here.open = {unit_name(unit.problem, unit.covers): unit for unit in units}
        if self.dry_run:
            turn.done.fetched += len(fetch_results.wanted(here, listed))
            turn.done.sent += len(send_results.unsent(here, listed))
            return
        unread = fetch_results.fetch(here, listed)
        send_results.send(here, listed)
        if claiming:
            update_claims(here, known, unread=unread)

    def _needs_claims(self, environment: Environment, now_s: float) -> bool:
        """Whether there is anything to claim or to give back; if not, claims need not be read."""
        return bool(
            self.store.fleet_sync.open(environment, now_s=now_s, limit=1) or self.store.fleet_sync.ours(environment)
        )

    def _tell(self, turn: Turn) -> None:
        """Write our own counts: at each exchange by hand, now and then in a daemon's."""
        due = turn.is_visit or not 0 <= turn.now_s - self.store.fleet_sync.seen() < SEEN_S
        if due or not self.claim:
            seen.put(self.store, self.objects, self.host, self.trust, now_s=turn.now_s)
            self.objects.flush()
            if not turn.is_visit:
                self.store.fleet_sync.seen(now_s=turn.now_s)


@dataclass(slots=True)
class Turn:
    """One exchange under way. clock_s: the time of the store of objects when it began; began_s: by the monotonic clock.

    is_visit: it is made by hand at another URL than the one that this home shares at, of which the store notes what was
    sent and listed: so a visit notes nothing and stores only results.
    claims_hold: False in a repository of tables, where names have the times of the hosts' own clocks.
    """

    exchange: Exchange
    done: Synced
    now_s: float
    clock_s: float
    is_visit: bool
    claims_hold: bool
    began_s: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether this exchange must begin nothing more."""
        return time.monotonic() - self.began_s > self.exchange.work_s or self.exchange.is_left()

    def store_clock_s(self) -> float:
        """The time by the store's clock now."""
        return self.clock_s + time.monotonic() - self.began_s


@dataclass(slots=True)
class Here:
    """One environment in an exchange.

    name: what its folders at the URL are called.  open: units without a verdict here, by name, worth most first.
    """

    turn: Turn
    environment: Environment
    name: str
    open: dict[str, Unit] = field(default_factory=dict)

    @property
    def exchange(self) -> Exchange:
        """How to exchange."""
        return self.turn.exchange
