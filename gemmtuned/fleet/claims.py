"""Who tunes what, without a coordinator: a claim is an object that can be created once.

The first to create `<unit>.0` has the unit for LEASE_S.  After that anybody may create `<unit>.1`, and so on: of any
number of hosts that try at once the store lets one win, so no claim is ever taken by replacing or deleting another's.
How old a claim is, the store says (when it was written, against when a host's own object was just written): no clock
of a host is asked, so a host whose clock is an hour wrong claims like any other.  A claim that is lost or ignored
costs only work: whatever is found is checked where it is used.  Where the fleet has a key (`key` here), names and what
claims hold are signed with it, and what is not signed is no claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gemmtuned.configs.errors import TableError
from gemmtuned.fleet.layout import CLAIMS, claim_parts, claim_path, mac
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.times import LEASE_S

MAX_NUMBER: Final = 999_999


class Claim(NamedTuple):
    """The newest claim of a unit: its number, and for how many seconds it still holds (0 or less: it lapsed)."""

    number: int
    left_s: float


NONE: Final = Claim(0, 0.0)


def read(
    objects: Objects, environment: str, *, clock_s: float, lease_s: float = LEASE_S, key: bytes | None = None
) -> dict[str, Claim]:
    """The newest claim of each unit. clock_s: the store's own time."""
    newest: dict[str, Claim] = {}
    for entry in objects.list(f"{CLAIMS}/{environment}"):
        parts = claim_parts(entry.path, key)
        if parts is None:
            continue
        unit, number = parts
        if unit not in newest or number > newest[unit].number:
            newest[unit] = Claim(number, left_s(entry.modified_s, clock_s, lease_s))
    return newest


def left_s(modified_s: float, clock_s: float, lease_s: float) -> float:
    """For how long a claim of this time still holds. One from a time to come holds for a lease at most, and one from
    more than a lease ahead lapsed: the store's clock was set back, or somebody wrote that time (a folder lets them)."""
    found_s = modified_s + lease_s - clock_s
    return min(found_s, lease_s) if found_s <= 2 * lease_s else 0.0


def take(
    objects: Objects, environment: str, units: Iterable[str], known: Mapping[str, Claim], *, host: str, most: int,
    key: bytes | None = None,
) -> dict[str, str]:  # fmt: skip
    """Claim the first `most` of these units that nobody holds; the name of each claim that is ours now.

    A unit that somebody else has claimed meanwhile is passed over.
    """
    won: dict[str, str] = {}
    for unit in units:
        if len(won) >= most:
            break
        path = next_path(environment, unit, known, key)
        if path is not None and objects.create(path, content(path, host, key)):
            won[unit] = path
    return won


def next_path(environment: str, unit: str, known: Mapping[str, Claim], key: bytes | None = None) -> str | None:
    """The claim that would be made of this unit now; None while somebody holds it."""
    held = known.get(unit)
    if held is not None and (held.left_s > 0 or held.number >= MAX_NUMBER):
        return None
    return claim_path(environment, unit, 0 if held is None else held.number + 1, key)


def content(path: str, host: str, key: bytes | None) -> bytes:
    """What the claim of this name holds: whose it is."""
    return (f"{host} {mac(key, f'{path} {host}')}" if key else host).encode()


def is_held_by(objects: Objects, path: str, host: str, key: bytes | None = None) -> bool:
    """Whether this claim is there and by this host, which may have been cut off before it heard that it won."""
    try:
        return objects.get(path, limit=256) == content(path, host, key)
    except TableError:  # so large a claim is none of ours
        return False


def done(objects: Objects, paths: Iterable[str]) -> None:
    """These claims are not needed any more: their results are there, or the work is left to others."""
    objects.delete(paths)
