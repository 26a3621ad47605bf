"""The names of objects below a URL; docs/fleet.md shows the tree.

    hosts/<host>/seen.json                                  a host's counts and figures, written by that host alone
    results/<environment>/<minute>/<unit>-<sha256>.json     a result, immutable, named by its content
    claims/<environment>/<unit>.<number>                    who tunes a unit; created once, never replaced
    fleet.json                                              in a public repository of tables alone (tables.py)

environment: of Environment.key, which is a device and a torch.  minute: by the clock of the store, so that a reader
lists what is new and no host's clock matters.  unit: hash of a problem and whether it stands for a bucket.
"""

from __future__ import annotations

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
_CLAIM: Final = re.compile(rf"{CLAIMS}/{_ENVIRONMENT}/(?P<unit>[0-9a-f]{{32}})[.](?P<number>[0-9]{{1,6}})")
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


def claim_path(environment: str, unit: str, number: int) -> str:
    """The name of a unit's claim; each later one has the next number."""
    return f"{CLAIMS}/{environment}/{unit}.{number}"


def claim_parts(path: str) -> tuple[str, int] | None:
    """(unit, number) of a claim's name; None for another name."""
    match = _CLAIM.fullmatch(path)
    return (match["unit"], int(match["number"])) if match else None
