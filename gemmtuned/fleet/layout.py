"""The names of objects below a URL; docs/fleet.md shows the tree.

    hosts/<host>/seen.json                                  a host's counts and figures, written by that host alone
    results/<environment>/<minute>/<unit>-<sha256>.json     a result, immutable, named by its content
    claims/<environment>/<unit>.<number>[.<mac>]            who tunes a unit; created once, never replaced
    fleet.json                                              in a public repository of tables alone (tables.py)

environment: of Environment.key, which is a device and a torch.  minute: by the clock of the store, so that a reader
lists what is new and no host's clock matters.  unit: hash of a problem and whether it stands for a bucket.
mac: where there is a key, a claim's name is signed with it.  All members make the same name of the same claim, so the
store still lets one of them win, and a listing alone tells which claims a stranger made up.
"""

from __future__ import annotations

import hmac
import re
from datetime import datetime, timezone
from hashlib import sha256
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, slug

HOSTS: Final = "hosts"
RESULTS: Final = "results"
CLAIMS: Final = "claims"
HOST: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}-[0-9a-f]{8}")
_ENVIRONMENT: Final = r"[a-z0-9][a-z0-9.-]{0,79}-[0-9a-f]{12}"
_RESULT: Final = re.compile(
    rf"{RESULTS}/(?P<environment>{_ENVIRONMENT})/[0-9]{{12}}/(?P<unit>[0-9a-f]{{32}})-(?P<digest>[0-9a-f]{{64}})[.]json"
)
_CLAIM: Final = re.compile(
    rf"{CLAIMS}/(?P<environment>{_ENVIRONMENT})/(?P<unit>[0-9a-f]{{32}})[.](?P<number>[0-9]{{1,6}})(?:[.][0-9a-f]{{32}})?"
)
_SEEN: Final = re.compile(rf"{HOSTS}/(?P<host>{HOST.pattern})/seen\.json")


def environment_name(environment: Environment) -> str:
    """The folder of an environment."""
    return f"{slug(environment.device.key, 60)}-{sha256(environment.key.encode()).hexdigest()[:12]}"


def unit_name(problem: Problem, covers: str) -> str:
    """What a unit of tuning is called."""
    return sha256(f"{covers} {problem}".encode()).hexdigest()[:32]


def seen_path(host: str) -> str:
    """Where a host's counts lie."""
    return f"{HOSTS}/{host}/seen.json"


def beat_path(host: str) -> str:
    """What a host writes to learn the time by the store's clock."""
    return f"{HOSTS}/{host}/beat"


def host_of(path: str) -> str | None:
    """Whose counts lie there; None for another name."""
    match = _SEEN.fullmatch(path)
    return match["host"] if match else None


def result_path(environment: str, unit: str, digest: str, now_s: float) -> str:
    """Where a result lies that is put there now."""
    return f"{RESULTS}/{environment}/{minute(now_s)}/{unit}-{digest}.json"


def result_floor(environment: str, now_s: float) -> str:
    """Before the names of all results that are put there from now on."""
    return f"{RESULTS}/{environment}/{minute(now_s)}"


def minute(now_s: float) -> str:
    """202611251034: sorts as time does."""
    return datetime.fromtimestamp(now_s, timezone.utc).strftime("%Y%m%d%H%M")


def result_parts(path: str) -> tuple[str, str, str] | None:
    """(environment, unit, sha256) of a result's name; None for another name."""
    match = _RESULT.fullmatch(path)
    return (match["environment"], match["unit"], match["digest"]) if match else None


def claim_path(environment: str, unit: str, number: int, key: bytes | None = None) -> str:
    """The name of a unit's claim; each later one has the next number. key: of the fleet, by which it is signed."""
    path = f"{CLAIMS}/{environment}/{unit}.{number}"
    return f"{path}.{mac(key, path)}" if key else path


def claim_parts(path: str, key: bytes | None = None) -> tuple[str, int] | None:
    """(unit, number) of a claim's name; None for another name, and with a key for one that is not signed by it."""
    match = _CLAIM.fullmatch(path)
    if match is None:
        return None
    unit, number = match["unit"], int(match["number"])
    if key and not hmac.compare_digest(path, claim_path(match["environment"], unit, number, key)):
        return None
    return unit, number


def mac(key: bytes, text: str) -> str:
    """What signs a name: 128 bits of HMAC-SHA256."""
    return hmac.new(key, text.encode(), sha256).hexdigest()[:32]
