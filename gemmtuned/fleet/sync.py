"""One exchange with the others of a fleet: up what was found here, down what others found, and who tunes what next.

The order matters.  Claims are read before results are listed, and a host puts its result before it drops its claim: so
who sees no claim sees the result.  What comes down is kept in the store as data that waits: the daemon has its own
worker check and race it, and only that makes a solution of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gemmtuned import __version__
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.hint import Hint, plain_case
from gemmtuned.configs.solution import Environment
from gemmtuned.db.fleet import ForeignResult, Unit
from gemmtuned.fleet import claims, record, seen
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import (
    HOSTS,
    RESULTS,
    claim_path,
    environment_name,
    minute,
    result_parts,
    result_path,
    unit_name,
)
from gemmtuned.fleet.objects import Objects, get_many
from gemmtuned.fleet.record import Result

if TYPE_CHECKING:
    from gemmtuned.db.store import Store

OPEN: Final = 4096  # units looked at, worth most first
FETCH: Final = 2000  # results in one exchange
BATCH: Final = (4, 64)  # units claimed at once, at least and at most: as many as two minutes took lately
RATE_S: Final = 60.0
SLACK_S: Final = 300.0  # names older than this by the store's clock are complete: an exchange takes less
FULL_S: Final = 86_400.0  # and yet all names are listed once a day
SEEN_S: Final = 600.0  # how often a daemon writes its counts
LIVE_S: Final = 180.0  # so long after an exchange the others count as reached
FORMAT: Final = "fleet"


@dataclass(slots=True)
class Synced:
    """What one exchange did: results sent, fetched and refused (with the reason), units claimed, held by others."""

    sent: int = 0
    fetched: int = 0
    claimed: int = 0
    theirs: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How to exchange. claim: for a daemon; it may tune.  dry_run: write nothing, there or here.

    lease_s: how long a claim holds.  live_s: how long after this a daemon leases only what it has claimed.
    """

    store: Store
    objects: Objects
    url: str
    host: str
    trust: Trust
    claim: bool = False
    dry_run: bool = False
    lease_s: float = claims.LEASE_S
    live_s: float = LIVE_S

    def run(self, *, now_s: float) -> Synced:
        """Do it once. Raises TryLater when the store of objects cannot be reached, StoreError, SettingError."""
        done = Synced()
        if not self.dry_run:
            self.store.fleet_begin(self.url, live_until_s=None)
        clock_s = self._clock(now_s)
        sent: list[int] = []  # numbers of solutions
        for environment in self.store.known_environments():
            sent += self._environment(environment, done, now_s=now_s, clock_s=clock_s)
        if self.dry_run:
            return done
        due = not 0 <= now_s - self.store.fleet_seen() < SEEN_S
        if due or not self.claim:
            seen.put(self.store, self.objects, self.host, self.trust, now_s=now_s)
        self.objects.flush()  # what is only queued until then is sent again if this fails
        self.store.fleet_shared(sent)
        if due or not self.claim:
            self.store.fleet_seen(now_s=now_s)
        if self.claim and self.objects.can_claim:
            self.store.fleet_begin(self.url, live_until_s=now_s + self.live_s)
        return done

    def _clock(self, now_s: float) -> float:
        """The time by the clock of the store, which writes down when an object came."""
        if self.dry_run or not self.objects.can_claim:
            return now_s
        path = f"{HOSTS}/{self.host}/beat"
        self.objects.put(path, __version__.encode())
        return self.objects.clock_s(path)

    def _environment(self, environment: Environment, done: Synced, *, now_s: float, clock_s: float) -> Sequence[int]:
        """Numbers of the solutions that were sent."""
        name = environment_name(environment)
        known: dict[str, claims.Claim] = {}
        if self.claim and self.objects.can_claim:
            known = claims.read(self.objects, name, clock_s=clock_s, lease_s=self.lease_s)
        listed = self._list(environment, name, now_s=now_s, clock_s=clock_s)
        units = self.store.fleet_open(environment, now_s=now_s, limit=OPEN)
        open_units = {unit_name(unit.problem, unit.covers): unit for unit in units}
        if self.dry_run:
            done.fetched += sum(unit in open_units for unit in listed.values())
            done.sent += len(self.store.fleet_unshared(environment))
            return ()
        self._fetch(environment, open_units, done, now_s=now_s)
        ids, sent = self._send(environment, name, done, clock_s=clock_s)
        if self.claim and self.objects.can_claim:
            self._claim(environment, name, open_units, known, sent, done, now_s=now_s, clock_s=clock_s)
        return ids

    # --- down

    def _list(self, environment: Environment, name: str, *, now_s: float, clock_s: float) -> dict[str, str]:
        """Names of results that are new to us, each with its unit; they are known from now on."""
        after, full_s = self.store.fleet_position(environment)
        if not 0 <= now_s - full_s < FULL_S:
            after, full_s = "", now_s
        listed = self._names(name, after)
        if self.dry_run:
            return listed
        position = f"{RESULTS}/{name}/{minute(clock_s - SLACK_S)}"
        new = self.store.fleet_move(environment, position, listed, full_s=full_s)
        return {path: listed[path] for path in new}

    def _names(self, name: str, after: str) -> dict[str, str]:
        found = {}
        for entry in self.objects.list(f"{RESULTS}/{name}", after=after):
            parts = result_parts(entry.path)
            if parts is not None and parts[0] == name and entry.size <= record.MAX_BYTES:
                found[entry.path] = parts[1]
        return found

    def _fetch(self, environment: Environment, units: dict[str, Unit], done: Synced, *, now_s: float) -> None:
        """Results for what waits to be tuned here."""
        wanted = self.store.fleet_new(environment, units)[:FETCH]
        found: list[ForeignResult] = []
        hints: list[Hint] = []
        for path, data in get_many(self.objects, wanted, limit=record.MAX_BYTES):
            if data is None:  # pruned meanwhile
                continue
            one, result = self._read(path, data, environment, units)
            found.append(one)
            if result is not None:
                hints += hints_of(result)
            if one.reason:
                done.refused.append(f"{path}: {one.reason}" if path not in one.reason else one.reason)
        if found:
            self.store.fleet_take(environment, found, now_s=now_s)
            for hint in hints:
                self.store.add_hints([hint], source=hint.source, now_s=now_s)
        done.fetched += sum(not one.reason for one in found)

    def _read(
        self, path: str, data: bytes | TableError, environment: Environment, units: dict[str, Unit]
    ) -> tuple[ForeignResult, Result | None]:
        """What is kept of an object: the result, or why it is none for us."""
        try:
            if isinstance(data, TableError):
                raise data
            result = record.read(path, data, key=self.trust.key)
        except TableError as err:
            return ForeignResult(path, reason=str(err)), None
        if not self.trust.allows(result.host):
            return ForeignResult(path, result.host, reason=f"host {result.host} is not in GEMMTUNED_SYNC_HOSTS"), None
        reason = ""
        for one in result.solutions:
            if not environment.accepts(one.backend, one.stamp):
                reason = f"{one.backend} is of another version ({one.stamp}): a seed and no more"
        return ForeignResult(path, result.host, units[result.unit], result.solutions, reason), result

    # --- up

    def _send(self, environment: Environment, name: str, done: Synced, *, clock_s: float) -> tuple[list[int], set[str]]:
        """What was found here and nobody has from us: its numbers, and the units of it."""
        ids: list[int] = []
        sent = set()
        for one in self.store.fleet_unshared(environment):
            result = Result(
                self.host, __version__, environment, one.solutions[0].covers, one.solutions, one.measured,
                tuple(one.trials),
            )  # fmt: skip
            data, digest = record.write(result, self.trust.key)
            if len(data) <= record.MAX_BYTES:
                self.objects.put(result_path(name, result.unit, digest, clock_s), data)
                done.sent += 1
                sent.add(result.unit)
            ids += one.ids
        return ids, sent

    # --- who tunes what

    def _claim(
        self, environment: Environment, name: str, units: dict[str, Unit], known: dict[str, claims.Claim],
        sent: set[str], done: Synced, *, now_s: float, clock_s: float,
    ) -> None:  # fmt: skip
        ours = self._ours(environment, known, sent, now_s=now_s)
        held = [(unit_name(u.problem, u.covers), u, path) for u, path in ours]
        mine = {unit for unit, _, _ in held}
        theirs = [u for u in units if u not in mine and u in known and known[u].left_s > 0]
        waiting = {unit_name(u.problem, u.covers) for u in self.store.fleet_waiting(environment)}
        free = [u for u in units if u not in mine and u not in theirs and u not in waiting]
        won: dict[str, str] = {}
        if environment.key in self.store.fleet_asked():
            least, most = BATCH
            lately = self.store.fleet_solved(environment, since_s=now_s - RATE_S)
            wanted = max(min(2 * lately, most), least) - len(ours)
            free = free[: 2 * max(wanted, 0)]
            intended = [(units[u], claim_path(name, u, known[u].number + 1 if u in known else 0)) for u in free]
            self.store.fleet_intend(environment, intended, now_s=now_s)
            won = claims.take(self.objects, name, free, known, host=self.host, most=max(wanted, 0))
            won = self._still_wanted(environment, name, won, now_s=now_s, clock_s=clock_s)
        until_s = now_s + self.lease_s
        rows = [(units[u], False, "", now_s + known[u].left_s) for u in theirs]
        rows += [(units[u], True, path, until_s) for u, path in won.items()]
        rows += [(u, True, path, now_s + known[key].left_s) for key, u, path in held if key in known]
        self.store.fleet_claims(environment, rows, now_s=now_s)
        done.claimed += len(won)
        done.theirs += len(theirs)

    def _ours(
        self, environment: Environment, known: dict[str, claims.Claim], sent: set[str], *, now_s: float
    ) -> list[tuple[Unit, str]]:
        """What we hold still; what is done with is given back, what we were killed at is looked up."""
        keep, gone, over = [], [], []
        for unit, path, until_s in self.store.fleet_ours(environment):
            key = unit_name(unit.problem, unit.covers)
            is_newest = key in known and path.endswith(f".{known[key].number}") and known[key].left_s > 0
            if key in sent:
                gone.append(path)
                over.append(unit)
            elif not is_newest or (until_s == 0 and self.objects.get(path, limit=256) != self.host.encode()):
                over.append(unit)
            else:
                keep.append((unit, path))
        claims.done(self.objects, gone)
        self.store.fleet_drop(environment, over)
        return keep

    def _still_wanted(
        self, environment: Environment, name: str, won: dict[str, str], *, now_s: float, clock_s: float
    ) -> dict[str, str]:
        """Those of our new claims for which no result came while we looked: its host had dropped its own claim."""
        if not won:
            return {}
        come = set(self._list(environment, name, now_s=now_s, clock_s=clock_s).values())
        claims.done(self.objects, [path for u, path in won.items() if u in come])
        return {u: path for u, path in won.items() if u not in come}


def hints_of(result: Result) -> Iterable[Hint]:
    """The result as seeds for searches at sizes nearby."""
    for line, one in enumerate(result.solutions, 1):
        yield Hint(
            format=FORMAT, family=one.problem.family, kind="tuned", line=line,
            source=f"fleet: {result.host} {result.unit}", row=_text(result, line - 1), problem=plain_case(one.problem),
            candidate=one.candidate, arch=result.environment.device.arch, units=result.environment.device.units,
            us=one.us,
        )  # fmt: skip


def _text(result: Result, number: int) -> str:
    return record.canonical({"device": result.environment.device.key, **result.solutions[number].to_row()}).decode()
