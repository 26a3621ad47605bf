"""A kernel of our own, as its file describes it: one object KERNEL in one file of kernels/triton or kernels/cuda.

The object says all that the rest of the code asks of a kernel, so that a new kernel is one new file: catalog.py finds
it, budget.py deals out what it offers, its parameters are what `gemmtuned tune --space` takes.  Its stamp covers its
own source and what that names, so adding or editing it leaves the solutions by every other kernel in use.

Standard library only: the processes that compile do without torch, and the command line without Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.arch import is_among

Config = Mapping[str, int]
Scored = list[tuple[float, dict[str, int]]]  # (estimated us, config) of candidates, the fastest first

OUR_TYPES: Final = ("bf16", "fp16")
POINTER_ALIGN: Final = 16  # bytes; the widest load that a thread has
COUNTERS_BYTES: Final = 1 << 16  # at the front of each workspace: counters, which are zero from launch to launch
LARGEST: Final = 1 << 20
# What parameters of our kernels are of the operands: words of configs/launch.py. In the order that Triton's have
PARAMETERS: Final = {
    "x": "x.ptr", "w": "w.ptr", "bias": "bias.ptr", "y": "y.ptr", "partials": "partials", "counters": "counters",
    "m": "x.size0", "ldx": "x.stride0", "ldw": "w.stride0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel's configs, and the values that it may have: integers from `least` to `most`.

    multiple: they are multiples of it.  power: they are powers of two.  default: what a config without it means, for
    parameters that came later than the first configs; None where every config names it.
    """

    name: str
    least: int = 1
    most: int = LARGEST
    multiple: int = 1
    power: bool = False
    default: int | None = None

    def allows(self, value: object) -> bool:
        """Whether a config may have this value."""
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            return False
        return value % self.multiple == 0 and not (self.power and value & (value - 1))

    def __str__(self) -> str:
        kind = "a power of two" if self.power else "a multiple of" if self.multiple > 1 else "an integer"
        return f"{kind}{f' {self.multiple}' if kind.endswith('of') else ''} from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate, and what its kernel expects of it.

    us: estimated time, comparable among the kernels of one backend; None where the order of the offers is all there is.
    alike: offers of one kernel with equal `alike` are likely to be as good as each other; None where none are.
    """

    candidate: Candidate
    kernel: str = ""  # its name, with its backend's in front: triton.gemv
    us: float | None = None
    alike: object = None


def _rows_and_split(config: Config) -> object:
    return config.get("rows"), config.get("split")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKernel:
    """What TritonKernel and CudaKernel have in common.

    name: in configs and stamps.  families: of problems that it runs.  archs: where it runs (arch.is_among).
    parameters: of its configs.
    scored: (problem, device) -> (estimated us, config) of what is worth trying there, the fastest first; it is asked
    only for its own families and architectures.
    record: (config, problem) -> how the config runs the problem; it raises CandidateFailed where it cannot.
    alike: of a config: candidates for which it is equal are tried a few at a time (budget.py).
    tokens: rows of X of its tile, where its configs do not say: for the kernel's name in profilers.

    name, families, archs and parameters are written out where the object is made, without names of other values: for
    Triton's kernels they are read from the file, without importing it.
    """

    name: str
    families: tuple[str, ...]
    archs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    scored: Callable[[Problem, Device], Scored]
    record: Callable[[Config, Problem], Any]
    alike: Callable[[Config], object] = _rows_and_split
    tokens: int = 0

    def offers(self, problem: Problem, device: Device, backend: str) -> list[Offer]:
        """All that is worth trying for this problem on this device, the fastest by estimate first."""
        if problem.family not in self.families or not is_among(device.arch, self.archs) or problem.threads:
            return []
        kernel = f"{backend}.{self.name}"
        return [
            Offer(Candidate.of(backend, kernel=self.name, **config), kernel, us, self.alike(config))
            for us, config in self.scored(problem, device)
        ]

    def checked(self, config: Config) -> dict[str, int]:
        """The config with a value for every parameter.

        Raises CandidateFailed for one that is none of this kernel's: parameters missing or unknown, or a value that
        they cannot have.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        full = {name: p.default for name, p in known.items() if p.default is not None} | dict(config)
        if set(full) != set(known):
            expected = ", ".join(sorted(known))
            raise CandidateFailed(f"{self.name}: config has {', '.join(sorted(config))}, expected {expected}")
        for name, value in full.items():
            if not known[name].allows(value):
                raise CandidateFailed(f"{self.name}: {name} is {value!r}, expected {known[name]}")
        return full


def symbol(kernel: str, n: int, k: int, tokens: int) -> str:
    """What a compiled kernel is called, as torch.profiler and Nsight show it: gemmtuned_gemv_4096x7168_m1.

    tokens: rows of X of its tile.  All of it decides what is compiled, so that a compiler's cache holds it as well.
    """
    return f"gemmtuned_{kernel}_{n}x{k}_m{tokens}"


def by_size(scored: Callable[..., Scored]) -> Callable[[Problem, Device], Scored]:
    """`OwnKernel.scored` of a kernel for dense problems, from scored(m, n, k, units, arch=)."""

    def of(problem: Problem, device: Device) -> Scored:
        if not is_plain_dense(problem):
            return []
        return scored(problem.m, problem.n, problem.k, device.units, arch=device.arch)

    return of


def check_plain_dense(problem: Problem) -> None:
    """Raise CandidateFailed unless it is a dense problem of one 16-bit type, layout nt, with plain weights."""
    if problem.family != "dense" or problem.layout != "nt" or problem.weight_state != "plain":
        raise CandidateFailed(f"{problem}: kernels of ours run dense problems of layout nt with plain weights")
    if problem.dtype not in OUR_TYPES or not problem.dtype == problem.wdtype == problem.out_dtype:
        raise CandidateFailed(f"{problem}: kernels of ours run {' and '.join(OUR_TYPES)}, all operands alike")


def is_plain_dense(problem: Problem) -> bool:
    """Whether it is what `check_plain_dense` lets through, on a GPU and without scales."""
    try:
        check_plain_dense(problem)
    except CandidateFailed:
        return False
    return not problem.threads and problem.scale == "none"


def rows_apart(parameters: Iterable[str], ld_multiple: int, max_m: int) -> tuple[Condition, ...]:
    """What a kernel with these parameters takes: rows of X and W without gaps, `ld_multiple` elements apart, aligned.

    max_m: rows of X at most.
    """
    found = [Condition("x.size0", "<=", max_m), Condition("x.stride1", "==", 1), Condition("w.stride1", "==", 1)]
    found += [Condition(PARAMETERS[ld], "%", ld_multiple) for ld in ("ldx", "ldw")]
    found += [Condition(PARAMETERS[name], "%", POINTER_ALIGN) for name in ("x", "w", "bias") if name in parameters]
    return (*found, Condition("bias.stride0", "==", 1)) if "bias" in parameters else tuple(found)
