"""What parent and worker say to each other: JSON with its length before it, over a socket of their own.

Not over stdout, which compilers write to, and not pickled: the worker runs foreign kernels, so the parent checks every
field that it receives.  Both halves import this file, hence no torch.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from gemmtuned.configs.errors import GemmtunedError, WorkerFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import NAME, Candidate, Device, Environment, Solution
from gemmtuned.daemon.protocol.options import SearchOptions

MAX_BYTES: Final = 16 << 20
PHASES: Final = ("start", "screen", "verify", "confirm")
OUTCOMES: Final = ("ok", "slower", "rejected", "wrong", "refused", "oom", "hindered", "crash", "killed", "hang")
PASSING: Final = ("oom", "hindered")  # outcomes that are nobody's fault: the candidate may be tried again
RACING: Final = "racing"  # note of a start: it races with another candidate, and either may be what fails
COMPILING: Final = "compiling"  # note of a start that only compiles: the device is not in use
MAY_COMPILE: Final = "may compile"  # note of a start: its library compiles at a first call, which takes minutes
_HEAD: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Order:
    """Parent to worker: find the solution for `target`, raced at `members`, without the candidates in `skip`."""

    members: tuple[Problem, ...]
    covers: str
    target: Problem
    mode: str
    skip: tuple[Candidate, ...] = ()
    options: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker's first message: the environment its solutions hold in, and what it can tune there."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of a search, reported as it happens.

    phase: start (it begins now: what follows, should nothing more be heard, is its doing; note COMPILING, RACING
    or MAY_COMPILE), screen, verify, confirm.
    outcome: ok, slower, rejected (right, yet outside the tolerance that was asked for), wrong, refused,
    oom (short of memory) and hindered (no room on a disk, no compiler, its compiler was killed), which are nobody's
    fault; crash, killed (by SIGKILL) and hang are for the parent to say.
    err_ratio: share of elements outside AITER's tolerance.  started_us: UTC microseconds.
    """

    problem: Problem
    candidate: Candidate
    phase: str
    us: float | None
    err: float | None
    outcome: str
    note: str
    started_us: int
    err_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The order is done. others: the same problem's solutions in other modes, measured on the way."""

    solution: Solution
    others: tuple[Solution, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The order cannot be done; the worker is well. later: nobody's fault, it can be done another time."""

    reason: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Worker to parent, whenever it changes: bytes of the device that its tensors hold, its context not counted."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Worker to parent, before a piece of another package runs, which may end it; two empty texts: none does now."""

    piece: str
    package: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Worker to parent: it does without this backend, family or entry point. wanted: since somebody said so."""

    name: str
    why: str
    wanted: bool = False


Message = Order | Hello | Trial | Found | Failed | Memory | Runs | LeftOut


def encode(message: Message) -> bytes:
    """The bytes that go over the socket."""
    body: dict[str, Any]
    if isinstance(message, Order):
        skip = [[c.backend, c.config] for c in message.skip]
        members = [p.row() for p in message.members]
        body = {
            "tune": members, "covers": message.covers, "target": message.target.row(),
            "mode": message.mode, "skip": skip, "options": message.options.to_row(),
        }  # fmt: skip
    elif isinstance(message, Hello):
        environment = message.environment
        body = {"hello": asdict(environment.device), "stamps": environment.stamps, "tunable": environment.tunable}
    elif isinstance(message, Trial):
        body = {
            "trial": message.problem.row(), "backend": message.candidate.backend, "config": message.candidate.config,
            "phase": message.phase, "us": message.us, "err": message.err, "outcome": message.outcome,
            "note": message.note, "started_us": message.started_us, "err_ratio": message.err_ratio,
        }  # fmt: skip
    elif isinstance(message, Found):
        body = {"found": message.solution.to_row(), "others": [s.to_row() for s in message.others]}
    elif isinstance(message, Memory):
        body = {"memory": message.bytes}
    elif isinstance(message, Runs):
        body = {"runs": message.piece, "package": message.package}
    elif isinstance(message, LeftOut):
        body = {"left_out": message.name, "why": message.why, "wanted": message.wanted}
    else:
        body = {"failed": message.reason, "later": message.later}
    data = json.dumps(body, separators=(",", ":")).encode()
    return _HEAD.pack(len(data)) + data


class Inbox:
    """Bytes come in as they arrive, whole messages go out."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages these bytes complete. Raises WorkerFailed when they are not messages of ours."""
        self._data += data
        messages = []
        while len(self._data) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data)
            if size > MAX_BYTES:
                raise WorkerFailed(f"worker announced a message of {size} bytes, at most {MAX_BYTES} are read")
            if len(self._data) < _HEAD.size + size:
                break
            body = bytes(self._data[_HEAD.size : _HEAD.size + size])
            del self._data[: _HEAD.size + size]
            messages.append(decode(body))
        return messages


def decode(body: bytes) -> Message:
    """One message. Raises WorkerFailed when a field is missing or not of the kind it should be."""
    try:
        raw = json.loads(body)
        if "tune" in raw:
            members = tuple(Problem.from_row(row) for row in raw["tune"])
            skip = tuple(_candidate(backend, config) for backend, config in raw["skip"])
            options = SearchOptions.from_row(raw["options"])
            target = Problem.from_row(raw["target"])
            return Order(members, str(raw["covers"]), target, str(raw["mode"]), skip, options)
        if "hello" in raw:
            stamps = {str(name): str(stamp) for name, stamp in raw["stamps"].items()}
            return Hello(Environment(Device(**raw["hello"]), stamps, tuple(str(kind)[:200] for kind in raw["tunable"])))
        if "trial" in raw:
            return _trial(raw)
        if "found" in raw:
            return Found(Solution.from_row(raw["found"]), tuple(Solution.from_row(row) for row in raw["others"]))
        if "memory" in raw:
            return Memory(int(raw["memory"]))
        if "runs" in raw:
            return Runs(_text(raw["runs"]), _text(raw["package"]))
        if "left_out" in raw:
            return LeftOut(_text(raw["left_out"]), _text(raw["why"]), raw["wanted"] is True)
        if "failed" in raw:
            return Failed(str(raw["failed"])[:2000], raw["later"] is True)
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError, GemmtunedError) as err:
        raise WorkerFailed(f"message between daemon and worker is not valid: {err}") from err
    raise WorkerFailed("message between daemon and worker is of an unknown kind")


class Source(Protocol):
    """A socket, as far as `receive` needs one."""

    def recv(self, size: int, /) -> bytes: ...


def receive(sock: Source, inbox: Inbox) -> list[Message] | None:
    """Wait for the next whole messages; None when the other side is gone."""
    while True:
        data = sock.recv(1 << 16)
        if not data:
            return None
        messages = inbox.feed(data)
        if messages:
            return messages


def _trial(raw: dict[str, Any]) -> Trial:
    phase, outcome = raw["phase"], raw["outcome"]
    if phase not in PHASES or (outcome not in OUTCOMES and phase != "start"):
        raise ValueError(f"phase {phase!r} with outcome {outcome!r}")
    return Trial(
        problem=Problem.from_row(raw["trial"]),
        candidate=_candidate(raw["backend"], raw["config"]),
        phase=phase,
        us=_finite(raw["us"]),
        err=_finite(raw["err"]),
        outcome=outcome,
        note=str(raw["note"])[:2000],
        started_us=int(raw["started_us"]),
        err_ratio=_finite(raw["err_ratio"]),
    )


def _candidate(backend: object, config: object) -> Candidate:
    if not isinstance(backend, str) or not NAME.fullmatch(backend):
        raise ValueError(f"backend is {backend!r}")
    if not isinstance(config, str) or len(config) > 4096:
        raise ValueError(f"config is {config!r}")
    return Candidate(backend, config)


def _text(value: object) -> str:
    """As it is shown to people and kept in a file: other packages chose it."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:300])


def _finite(value: object) -> float | None:
    """NaN and infinity mean "no figure": they would spoil the average of a column."""
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return float(value) if math.isfinite(value) else None
