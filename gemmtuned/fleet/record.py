"""A result as it is stored for a fleet: data that is validated in every part, never code.

    {"record": {...}, "signature": "..."}      canonical JSON, at most MAX_BYTES; the name holds its SHA-256

A reader refuses an object whose name is not its hash, that is not canonical, that has other fields than these, a value
out of range, another environment than its folder says, or a false signature if a key is set.  Solutions are read by
Solution.from_row, like rows of published tables; they contain no compiled kernels.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.solution import DEFAULT_BACKEND, Device, Environment, Solution
from gemmtuned.fleet.layout import HOST, RESULTS, environment_name, result_parts, unit_name

if TYPE_CHECKING:
    from gemmtuned.fleet.objects import Objects

SCHEMA: Final = 1
MAX_BYTES: Final = 65_536
MAX_STAMPS: Final = 256
MAX_TRIALS: Final = 32
_RECORD: Final = {"schema", "host", "gemmtuned", "environment", "covers", "solutions", "measured", "trials"}
_MEASURED: Final = {"conditions", "others", "published_us"}
_TRIAL: Final = {"backend", "config", "phase", "mode", "us", "err", "outcome"}
_DEVICE: Final = {"key", "kind", "name", "arch", "units"}


@dataclass(frozen=True, slots=True)
class Result:
    """One host's result for one unit.

    measured: conditions (soft facts such as the driver), others (share of the device that others used, None: not
    known), published_us (UTC, by the host's clock).  trials: results of single runs, fastest first.
    """

    host: str
    version: str
    environment: Environment
    covers: str
    solutions: tuple[Solution, ...]
    measured: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...] = ()

    @property
    def unit(self) -> str:
        """The hash of the unit that it is for."""
        return unit_name(self.solutions[0].problem, self.covers)


def canonical(value: object) -> bytes:
    """The one spelling of a value as JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def as_utf8(value: object) -> None:
    """The text in UTF-8. Raises TableError for a lone surrogate, which neither files nor SQLite can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as err:
        raise TableError("it holds text that is not Unicode") from err


def sign(record: object, key: bytes | None) -> str:
    """HMAC-SHA256 over the canonical record; "" without a key."""
    return hmac.new(key, canonical(record), sha256).hexdigest() if key else ""


def seal(record: object, key: bytes | None) -> bytes:
    """The object with this record and its signature."""
    return canonical({"record": record, "signature": sign(record, key)})


def unseal(whole: Any, key: bytes | None) -> Any:
    """The record of an object. Raises TableError if it was not signed with this key."""
    as_utf8(whole)
    has(whole, {"record", "signature"}, "the object")
    if key and not hmac.compare_digest(sign(whole["record"], key), str(whole["signature"])):
        raise TableError("its signature is not by the key of this fleet (GEMMTUNED_SYNC_KEY)")
    return whole["record"]


@contextmanager
def naming(path: str, what: str) -> Iterator[None]:
    """For `with`: errors while an object is read become a TableError that names it. what: what it should be."""
    try:
        yield
    except TableError as err:
        raise TableError(f"{path}: {err}") from err
    except (GemmtunedError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as err:
        raise TableError(f"{path}: not {what} ({type(err).__name__}: {str(err)[:200]})") from err


def described(environment: Environment) -> dict[str, Any]:
    """An environment as a record has it; check_environment reads it."""
    return {"device": asdict(environment.device), "stamps": dict(environment.stamps)}


def write(result: Result, key: bytes | None) -> tuple[bytes, str]:
    """(content, its SHA-256) of a result, with as many of its trials as fit."""
    record: dict[str, Any] = {
        "schema": SCHEMA, "host": result.host, "gemmtuned": result.version,
        "environment": described(result.environment), "covers": result.covers,
        "solutions": [_row(solution) for solution in result.solutions],
        "measured": dict(result.measured), "trials": [dict(one) for one in result.trials[:MAX_TRIALS]],
    }  # fmt: skip
    most = MAX_TRIALS
    while True:
        data = seal(record, key)
        if len(data) <= MAX_BYTES or not most:
            return data, sha256(data).hexdigest()
        most //= 2
        record["trials"] = record["trials"][:most]


def read(path: str, data: bytes, *, key: bytes | None) -> Result:
    """The result of this name. Raises TableError that names the object and what is wrong with it."""
    with naming(path, "a result"):
        return _read(path, data, key)


def _read(path: str, data: bytes, key: bytes | None) -> Result:
    parts = result_parts(path)
    if parts is None:
        raise TableError("its name is not that of a result")
    if len(data) > MAX_BYTES:
        raise TableError(f"{len(data)} bytes, at most {MAX_BYTES} are read")
    if sha256(data).hexdigest() != parts[2]:
        raise TableError("its content is not what its name says: cut short, or changed")
    whole = json.loads(data)
    record = unseal(whole, key)
    if canonical(whole) != data:
        raise TableError("it is not canonical JSON")
    has(record, _RECORD, "the record")
    if record["schema"] != SCHEMA:
        raise TableError(f"schema is {str(record['schema'])[:40]}, this version reads {SCHEMA}")
    host = check_text(record["host"], "host", 72)
    if not HOST.fullmatch(host):
        raise TableError(f"host is {host[:80]!r}, expected NAME-XXXXXXXX")
    environment = check_environment(record["environment"])
    if environment_name(environment) != parts[0]:
        raise TableError("it lies in the folder of another environment")
    result = Result(
        host, check_text(record["gemmtuned"], "gemmtuned", 64), environment, check_text(record["covers"], "covers", 16),
        _solutions(record["solutions"], environment, record["covers"]), _measured(record["measured"]),
        _trials(record["trials"]),
    )  # fmt: skip
    if result.unit != parts[1]:
        raise TableError("it is for another problem than its name says")
    return result


def _solutions(found: object, environment: Environment, covers: str) -> tuple[Solution, ...]:
    if not isinstance(found, list) or not 1 <= len(found) <= 2:
        raise TableError("solutions: expected one, or one for each of two modes")
    solutions = tuple(Solution.from_row(row) for row in found)
    for one in solutions:
        if one.launch:
            raise TableError("a solution brings a compiled kernel: kernels are compiled where they run")
        if one.problem != solutions[0].problem or one.covers != covers or one.device != environment.device.key:
            raise TableError("its solutions are not of one unit and device")
        if one.state != ("default_best" if one.backend == DEFAULT_BACKEND else "published"):
            raise TableError(f"a solution by {one.backend} is {one.state}")
    if len({one.mode for one in solutions}) != len(solutions):
        raise TableError("two solutions for one mode")
    return solutions


def check_environment(found: Any) -> Environment:
    """The environment that a record describes. Raises TableError."""
    has(found, {"device", "stamps"}, "environment")
    has(found["device"], _DEVICE, "device")
    texts = {name: check_text(found["device"][name], name, 512) for name in ("key", "kind", "name", "arch")}
    units, stamps = found["device"]["units"], found["stamps"]
    if isinstance(units, bool) or not isinstance(units, int) or not 0 <= units <= 1 << 20:
        raise TableError(f"units is {str(units)[:40]}, expected a number of cores")
    if not isinstance(stamps, dict) or not 1 <= len(stamps) <= MAX_STAMPS:
        raise TableError(f"stamps: expected 1 to {MAX_STAMPS}")
    return Environment(
        Device(**texts, units=units),
        {check_text(k, "a stamp's name", 400): check_text(v, f"stamp {k}", 4096) for k, v in stamps.items()},
    )


def _measured(found: Any) -> dict[str, Any]:
    has(found, _MEASURED, "measured")
    check_text(found["conditions"], "conditions", 512)
    check_number(found["others"], "others")
    if check_number(found["published_us"], "published_us") is None:
        raise TableError("published_us is missing")
    return dict(found)


def _trials(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or len(found) > MAX_TRIALS:
        raise TableError(f"trials: expected at most {MAX_TRIALS}")
    for one in found:
        has(one, _TRIAL, "a trial")
        for name in ("backend", "config", "phase", "mode", "outcome"):
            check_text(one[name], name, 4096)
        for name in ("us", "err"):
            check_number(one[name], name)
    return tuple(dict(one) for one in found)


def listed(objects: Objects, environment: str, *, after: str = "") -> Iterator[tuple[str, str]]:
    """(name, unit) of all possible results of an environment after a name. Raises TryLater."""
    for entry in objects.list(f"{RESULTS}/{environment}", after=after):
        parts = result_parts(entry.path)
        if parts is not None and parts[0] == environment and entry.size <= MAX_BYTES:
            yield entry.path, parts[1]


def has(found: Any, names: set[str], what: str) -> None:
    """Raise TableError unless it is an object with exactly these fields."""
    if not isinstance(found, dict) or set(found) != names:
        more = sorted(map(str, set(found) ^ names))[:3] if isinstance(found, dict) else [type(found).__name__]
        raise TableError(f"{what}: expected {', '.join(sorted(names))}; wrong: {', '.join(more)}")


def check_text(found: Any, name: str, most: int) -> str:
    """The text of a field. Raises TableError."""
    if not isinstance(found, str) or len(found) > most:
        raise TableError(f"{name} is {str(found)[:80]!r}, expected text of at most {most} characters")
    return found


def check_number(found: Any, name: str) -> float | None:
    """The number of a field, None where there is none. Raises TableError."""
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found) or found < 0:
        raise TableError(f"{name} is {str(found)[:40]!r}, expected a number of at least 0")
    return float(found)


def _row(solution: Solution) -> dict[str, Any]:
    return {name: value for name, value in solution.to_row().items() if name != "launch"}
