"""What goes from the store of a fleet: old results, more of one unit or host than anybody needs, lapsed claims.

Anybody may do it at any time: results are immutable, so one that is needed again is found again and sent again.
Names tell age and unit; whose a result is, and whether it is one, only its content does: `verify` reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from gemmtuned.configs.errors import SettingError, TableError
from gemmtuned.fleet import record
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import CLAIMS, HOSTS, RESULTS, claim_parts, result_parts
from gemmtuned.fleet.objects import Entry, Objects, get_many, store_now_s
from gemmtuned.fleet.times import LEASE_S

OF_A_HOST: Final = 50_000  # results of one host in one environment, where they are verified
OF_A_UNIT: Final = 3  # the newest results that stay for one unit
MOST: Final = 200_000  # results of one environment: what is over goes, oldest first
HOSTS_S: Final = 30 * 86_400.0  # a host that wrote nothing for so long is gone


def prune(
    objects: Objects, *, now_s: float, keep_s: float, dry_run: bool, most: int = MOST, lease_s: float = LEASE_S,
    verify: Trust | None = None, key: bytes | None = None,
) -> dict[str, tuple[str, list[str]]]:  # fmt: skip
    """Remove what is old; by kind, why and the names. dry_run: remove nothing. Raises TryLater.

    verify: also remove results that a host of this trust would refuse, before the newest of a unit are counted, so that
    forged ones push no good one out; and what is over OF_A_HOST of one host, oldest first.  Raises SettingError where
    that would be all there are: the key is then rather another one.  key: of the fleet; only claims
    signed by it count as the newest of their unit.
    """
    clock_s = store_now_s(objects, f"{HOSTS}/prune") if objects.can_claim and not dry_run else now_s
    entries = [entry for entry in objects.list(RESULTS) if result_parts(entry.path) is not None]
    refused = _refused(objects, entries, verify) if verify is not None else []
    left = {entry.path for entry in entries} - {*refused}
    if refused and not left and not dry_run:
        raise SettingError(
            f"all {len(refused)} results there would be refused, so none is removed: is this the key, and the list of "
            "hosts, that they are looked at with? (GEMMTUNED_SYNC_KEY, GEMMTUNED_SYNC_HOSTS)"
        )
    gone = {
        "refused result": ("not one, not signed by the key, of a host that is not allowed, or over its quota", refused),
        "result": (
            f"older than {keep_s / 86400:.3g} days, or more than are needed",
            _results([entry for entry in entries if entry.path in left], clock_s, keep_s, most),
        ),
        "claim": ("lapsed", _claims(objects, clock_s, lease_s, key)),
        "host": (f"silent for {HOSTS_S / 86400:.0f} days", _hosts(objects, clock_s)),
    }
    if not dry_run:
        for _, paths in gone.values():
            objects.delete(paths)
    return gone


def _refused(objects: Objects, entries: Sequence[Entry], trust: Trust) -> list[str]:
    """Names of results that this trust does not take, and of those beyond what one host may have."""
    gone = []
    of_host: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    by_path = {entry.path: entry for entry in entries}
    for path, data in get_many(objects, sorted(by_path), limit=record.MAX_BYTES):
        host = _host_of(path, data, trust)
        if host is not None:
            of_host[path.split("/")[1], host].append(by_path[path])
        elif data is not None:
            gone.append(path)
    for found in of_host.values():
        gone += [entry.path for entry in sorted(found, key=_age)[: max(len(found) - OF_A_HOST, 0)]]
    return sorted(gone)


def _host_of(path: str, data: bytes | TableError | None, trust: Trust) -> str | None:
    """Whose result it is; None for one that is refused."""
    if not isinstance(data, bytes):
        return None
    try:
        host = record.read(path, data, key=trust.key).host
    except TableError:
        return None
    return host if trust.allows(host) else None


def _results(entries: Iterable[Entry], clock_s: float, keep_s: float, most: int) -> list[str]:
    by_unit: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    by_environment: dict[str, list[Entry]] = defaultdict(list)
    gone = set()
    for entry in entries:
        parts = result_parts(entry.path)
        assert parts is not None, entry.path
        by_unit[parts[:2]].append(entry)
        by_environment[parts[0]].append(entry)
        if clock_s - entry.modified_s > keep_s:
            gone.add(entry.path)
    for found in by_unit.values():
        gone.update(entry.path for entry in sorted(found, key=_age)[:-OF_A_UNIT])
    for found in by_environment.values():
        left = sorted((entry for entry in found if entry.path not in gone), key=_age)
        gone.update(entry.path for entry in left[: max(len(left) - most, 0)])
    return sorted(gone)


def _claims(objects: Objects, clock_s: float, lease_s: float, key: bytes | None) -> list[str]:
    """All but the newest of each unit, and that one, too, when it lapsed twice over: nobody waits for it any more.

    One that the key did not sign holds for none of its members, and goes when it is as old.  So does, where the key is
    not here, one that is signed.
    """
    newest: dict[tuple[str, str], tuple[int, Entry]] = {}
    gone = []
    for entry in objects.list(CLAIMS):
        parts = claim_parts(entry.path, key)
        if parts is None:
            if claim_parts(entry.path) is not None and _is_past(entry, clock_s, lease_s):
                gone.append(entry.path)
            continue
        if (
            not entry.path.endswith(f"{parts[0]}.{parts[1]}") and key is None
        ):  # signed: only who has the key can tell more
            gone += [entry.path] if _is_past(entry, clock_s, lease_s) else []
            continue
        unit = (entry.path.rpartition("/")[0], parts[0])
        before = newest.get(unit)
        if before is not None and before[0] > parts[1]:
            gone.append(entry.path)
            continue
        if before is not None:
            gone.append(before[1].path)
        newest[unit] = (parts[1], entry)
    gone += [entry.path for _, entry in newest.values() if _is_past(entry, clock_s, lease_s)]
    return sorted(gone)


def _is_past(entry: Entry, clock_s: float, lease_s: float) -> bool:
    """Whether a claim lapsed twice over, or is from so far ahead that nobody takes it for one."""
    return not -2 * lease_s <= clock_s - entry.modified_s <= 2 * lease_s


def _hosts(objects: Objects, clock_s: float) -> list[str]:
    return [entry.path for entry in objects.list(HOSTS) if clock_s - entry.modified_s > HOSTS_S]


def _age(entry: Entry) -> tuple[float, str]:
    return entry.modified_s, entry.path
