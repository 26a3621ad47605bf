"""What was found for a problem and where it is valid: candidates, solutions, devices, environments.

A *candidate* is a backend and config not yet measured; a *solution* is the candidate that was chosen, for a
problem, a device, an environment and a mode.  "The default is best" is a solution too (backend `torch`, state
`default_best`), so that it is a hit and not asked again.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.old_stamps import of_kernel
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.pattern import Pattern
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.settings import child_env
from gemmtuned.configs.value_class import value_class

MODES: Final = ("eager", "graph")
DEFAULT_BACKEND: Final = "torch"  # what runs wherever nothing is published
NAME: Final = Pattern(r"[A-Za-z0-9_.:+-]{1,200}")  # backend and kernel names: keys of a closed registry, never paths
MAX_CONFIG: Final = 4096  # characters of a config
STATES: Final = ("published", "default_best", "withdrawn", "pinned", "stale")
LIVE_STATES: Final = ("published", "default_best", "pinned")  # states that count as a verdict
CROWDED: Final = 0.15  # if others used more of the device, ratios of measured times are valid, but not the times


@value_class
class Candidate:
    """A backend and its config, as canonical JSON text ("{}" when the backend has nothing to choose)."""

    backend: str
    config: str = "{}"

    def __str__(self) -> str:
        return self.backend if self.config == "{}" else f"{self.backend} {self.config}"

    @property
    def kernel(self) -> str:
        """The kernel that its config names; "" where it names none."""
        try:
            named = json.loads(self.config)["kernel"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        return named if isinstance(named, str) else ""

    @classmethod
    def of(cls, backend: str, /, **config: int | str | bool) -> Candidate:
        """Candidate with its config in canonical form; its names may be any, `backend` too."""
        return cls(backend, json.dumps(config, sort_keys=True, separators=(",", ":")))


@value_class
class Device:
    """A device kind as problems are keyed by it: all devices with equal key share solutions.

    key: `cpu-<model>-<hash of ISA flags>`, then variables by which libraries use the CPU otherwise, or
    `cuda-<name>-<sm count>`; arch: `x86_64`, `sm_90`, `gfx942`; units: physical cores, SMs or CUs (AITER's cu_num).
    """

    key: str
    kind: str  # cpu, cuda, rocm
    name: str
    arch: str
    units: int


@value_class
class Environment:
    """A device and a torch version, which share demand, and the versions that decide which solutions are valid there.

    stamps: by the backend's name, or by `backend.kernel` (kernel_stamps) if a backend's configs name a kernel.  A
    solution carries the stamp of what made it, and is used only where the same backend or kernel has an equal stamp.
    tunable: what a worker here can tune, as texts of Problem.operands; empty before a worker has said so.
    """

    device: Device
    stamps: dict[str, str] = field(hash=False)
    tunable: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """Canonical text of device and torch; environments with equal keys share their demand."""
        return f"{self.device.key} {DEFAULT_BACKEND}={self.stamps.get(DEFAULT_BACKEND, '')}"

    @property
    def backends(self) -> frozenset[str]:
        """Names of the backends that are here."""
        return frozenset(name.partition(".")[0] for name in self.stamps)

    def stamp_of(self, candidate: Candidate) -> str | None:
        """The stamp of a solution by this candidate; None if its backend or kernel is not here."""
        whole = self.stamps.get(candidate.backend)
        return whole if whole is not None else self.stamps.get(f"{candidate.backend}.{candidate.kernel}")

    def accepts(self, backend: str, stamp: str) -> bool:
        """True when a solution of this backend, made under this stamp, may run here."""
        return stamp in (self.stamps.get(backend), self.stamps.get(f"{backend}.{stamp.partition('/')[0]}"))


def kernel_stamps(backend: str, versions: Mapping[str, str]) -> dict[str, str]:
    """Stamps of a backend's kernels, for Environment: by `backend.kernel`, each beginning with the kernel's name.

    versions: what else must be equal (source, compiler, architecture), by the kernel's name.
    """
    return {f"{backend}.{kernel}": f"{kernel}/{version}" for kernel, version in versions.items()}


@value_class(kw_only=True)
class Solution:
    """The candidate chosen for a problem.

    covers: `exact` (this M only) or `fine`/`coarse` (proven over the bucket; problem.m is the padded M).
    us and baseline_us: median device time of the solution and of torch's own choice in the same interleaved run;
    gain_low: lower bound of the 95 % interval of baseline/solution.  err and baseline_err: relative RMS error
    against the reference.  generation: the publication that brought it.  launch: for backends whose kernels are
    published as binaries, the launch record as JSON (configs/launch.py), else empty.  beside: which engines' kernels
    were in the race (configs/engine_races.py), empty for none.
    """

    problem: Problem
    device: str
    mode: str
    covers: str
    backend: str
    config: str
    stamp: str
    us: float
    baseline_us: float
    gain_low: float
    err: float
    baseline_err: float
    state: str
    generation: int = 0
    launch: str = ""
    beside: str = ""

    @property
    def candidate(self) -> Candidate:
        """What runs the problem."""
        return Candidate(self.backend, self.config)

    def to_row(self) -> dict[str, Any]:
        """One line of a published table: problem columns, then ours."""
        row = {**self.problem.row(), **{name: getattr(self, name) for name in _OWN}}
        if not self.problem.batch_invariant:  # so that versions without that column can still read these rows
            del row["batch_invariant"]
        more = {"launch": self.launch, "beside": self.beside}
        return {**row, **{name: text for name, text in more.items() if text}}

    @classmethod
    def from_row(cls, row: object) -> Solution:
        """Validate a table row. Raises TableError (or ProblemError) that names the column."""
        if not isinstance(row, dict):
            raise TableError(f"row is {type(row).__name__}, expected an object")
        problem = Problem.from_row({name: value for name, value in row.items() if name not in _NOT_THE_PROBLEMS})
        missing = [name for name in _OWN if name not in row]
        if missing:
            raise TableError(f"column {missing[0]} is missing")
        own = {name: row[name] for name in _OWN}
        for name, allowed in (("mode", MODES), ("covers", COVERS), ("state", STATES)):
            if own[name] not in allowed:
                raise TableError(f"{name} is {own[name]!r}, expected one of {', '.join(allowed)}")
        for name in ("device", "backend", "config", "stamp"):
            if not isinstance(own[name], str) or len(own[name]) > 4096:
                raise TableError(f"{name} is {own[name]!r}, expected text")
        if not NAME.fullmatch(own["backend"]):
            raise TableError(f"backend is {own['backend']!r}, expected a plain name (letters, digits, _ . : + -)")
        for name in ("us", "baseline_us", "gain_low", "err", "baseline_err"):
            value = own[name]
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
                raise TableError(f"{name} is {value!r}, expected a number of at least 0")
        if own["us"] <= 0 or own["baseline_us"] <= 0:
            raise TableError(f"us is {own['us']!r} against {own['baseline_us']!r}: a time of 0 never wins")
        if not isinstance(own["generation"], int) or isinstance(own["generation"], bool) or own["generation"] < 0:
            raise TableError(f"generation is {own['generation']!r}, expected an integer of at least 0")
        launch = row.get("launch", "")
        if not isinstance(launch, str):
            raise TableError(f"launch is {str(launch)[:80]!r}, expected text")
        if launch:
            from gemmtuned.configs.launch import read_launch  # large, and most programs have no such row

            read_launch(launch)
        own["stamp"] = of_kernel(own["backend"], Candidate(own["backend"], own["config"]).kernel, own["stamp"])
        beside = row.get("beside", "")
        if beside:
            from gemmtuned.configs.engine_races import checked  # few rows have it

            beside = checked(beside)
        return cls(problem=problem, **own, launch=launch, beside=beside or "")


_OWN: Final = (
    "device", "mode", "covers", "backend", "config", "stamp",
    "us", "baseline_us", "gain_low", "err", "baseline_err", "state", "generation",
)  # fmt: skip
_NOT_THE_PROBLEMS: Final = frozenset((*_OWN, "launch", "beside"))


_OF_SLUGS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.")


def slug(text: str, limit: int = 60) -> str:
    """Text as part of a file name or key: lower case letters, digits, `.` and `-`."""
    words = "".join(c if c in _OF_SLUGS else " " for c in text.lower()).split()
    return "-".join(words).strip("-.")[:limit] or "x"


# Variables by which torch's libraries take other instructions than the CPU has, or fewer bits; values without effect.
# What is raced without them may be slower with them than torch's own product: oneDNN 2.6 times, held to SSE4.1
_LIMITS: Final = {
    "ATEN_CPU_CAPABILITY": (),
    "MKL_CBWR": ("off", "branch_off"),
    "MKL_ENABLE_INSTRUCTIONS": (),
    "ONEDNN_MAX_CPU_ISA": ("all", "default"),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("strict",),
    "OPENBLAS_CORETYPE": (),
}
_OLD_NAMES: Final = {name: name.replace("ONEDNN", "DNNL") for name in _LIMITS}  # they count where the new are not set


def _limits() -> str:
    """Variables with effect, such as "onednn_max_cpu_isa=avx2"; "" for none."""
    ours = child_env()  # what a program that we start has, this one has
    given = ((name, ours.get(name) or ours.get(_OLD_NAMES[name], "")) for name in _LIMITS)
    said = ((name, value.strip().lower()) for name, value in given)
    return " ".join(f"{name.lower()}={value}" for name, value in said if value and value not in _LIMITS[name])


_CPUINFO: Final = Path("/proc/cpuinfo")
_CPUINFO_BYTES: Final = 16 << 20  # enough for thousands of CPUs


def cpu_device() -> Device:
    """This machine's CPU, from /proc/cpuinfo where there is one.

    Two CPUs share a key when vendor, family, model and instruction set flags agree; the number of cores is not
    in it: threads are in the problem.  A CPU of which libraries are to use only some instructions is another one.
    """
    try:
        cpuinfo = read_small(_CPUINFO, _CPUINFO_BYTES)
    except OSError:
        cpuinfo = ""
    facts: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    # Arm has no name there. platform.processor() would ask a process of its own, a child of the program we are in
    name = facts.get("model name") or platform.machine()
    flags = " ".join(sorted((facts.get("flags") or facts.get("Features") or "").split()))
    ident = "|".join(facts.get(f, "") for f in ("vendor_id", "cpu family", "model")) + "|" + flags
    limits = _limits()
    ident += "|" + limits if limits else ""
    return Device(
        key=f"cpu-{slug(name, 40)}-{sha256(ident.encode()).hexdigest()[:8]}" + ("-" + slug(limits) if limits else ""),
        kind="cpu",
        name=name,
        arch=platform.machine() or "unknown",
        units=max(cpuinfo.count("\nprocessor") + cpuinfo.startswith("processor"), 1),
    )
