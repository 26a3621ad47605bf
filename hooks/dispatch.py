"""The look-up table of one generation: which implementation serves a problem. It is replaced whole, never changed.

Look-up order: exact M, AITER's fine bucket, the coarse one, else a miss, which runs on stock torch.  A row is taken
only if its backend's stamp equals ours; refused rows are counted by reason, for `explain` and `status`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import count
from typing import Final

from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.packed import pack, unpack
from gemmtuned.configs.padding import COVERS, padded_m
from gemmtuned.configs.problem import FAMILIES, Problem
from gemmtuned.configs.rows_config import ROWS
from gemmtuned.configs.solution import DEFAULT_BACKEND, LIVE_STATES, Environment, Solution
from gemmtuned.configs.tunable import is_scaled_grouped
from gemmtuned.hooks.imports import importing

# Backends that the native hook can run, with its codes (routes.h). 0 is stock torch.
NATIVE_CODES: Final = {
    DEFAULT_BACKEND: 0, "torch_swap": 1, "torch_mv": 2, "onednn": 3, "onednn_packed": 4, "triton": 5, "cublaslt": 6,
    "cuda": 5,  # a published binary, launched like Triton's
    ROWS: 8,
}  # fmt: skip

# Backends that gemmtuned.ops.fused_moe runs by itself, without the native hook
BY_OPS: Final = ("moe_grouped", "moe_decode", "moe_tiles", "moe_fp8_tiles")
OPERATOR_CODE: Final = 7  # any backend whose launch record names an operator that some package registered with torch

INVARIANT: Final = (ROWS, "triton", "cuda")  # backends whose batch invariance is proven
# Families that the hook routes; of other families it only counts calls
SERVED: Final = ("dense", "batched", "dense_add", "batched_add", "scaled", "grouped", "weight_only")

_idents: dict[bytes, int] = {}
_ANY_ORDER: Final = (DEFAULT_BACKEND, "cuda")  # whose solutions of a shuffled weight read it as it lies
_solutions: dict[int, bytes] = {}  # by ident, packed
_next_ident = count()
_new_ident = FrameLock()


Key = tuple[Problem, str, str]  # problem with padded m, covers, mode


class Table:
    """Solutions by place (`cpu`, `cuda:0`), then by (problem with padded m, covers, mode).

    Keys are texts and solutions are bytes, which the garbage collector does not track: see configs/packed.py.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.refused: Counter[str] = Counter()  # reason -> rows of the published tables that are not used here
        self._rows: dict[str, dict[str, bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def find(self, problem: Problem, mode: str = "eager", place: str = "cpu") -> tuple[str, Solution | None]:
        """(outcome, solution) for a call with this problem; ("miss", None) when nothing proven is there."""
        rows = self._rows.get(place, {})
        for covers in COVERS:
            row = rows.get(_text_of(padded(problem, covers), covers, mode)) if rows else None
            if row is not None:
                return ("exact" if covers == "exact" else "padded"), unpack(row)
        return "miss", None

    def put(self, place: str, solution: Solution, packed: bytes) -> None:
        """Add a row, unless its key has one that is no slower. Raises ProblemError if its padded m is too large."""
        rows = self._rows.setdefault(place, {})
        text = _text_of(padded(solution.problem, solution.covers), solution.covers, solution.mode)
        best = rows.setdefault(text, packed)
        if best is not packed and solution.us < unpack(best).us:
            rows[text] = packed

    def rows(self) -> Iterator[tuple[str, str, bytes]]:
        """Every row: place, its key as text, the packed solution."""
        for place, rows in self._rows.items():
            for text, packed in rows.items():
                yield place, text, packed

    def packed(self) -> list[bytes]:
        """The packed solutions of all rows, so that a caller can free them slice by slice."""
        return [packed for rows in self._rows.values() for packed in rows.values()]

    def has(self, place: str, text: str, packed: bytes) -> bool:
        """Whether this is one of its `rows`."""
        return self._rows.get(place, {}).get(text) == packed

    def items(self) -> Iterator[tuple[str, Key, Solution]]:
        """Every row: place, key, solution."""
        for place, _, packed in self.rows():
            solution = unpack(packed)
            yield place, (padded(solution.problem, solution.covers), solution.covers, solution.mode), solution


def padded(problem: Problem, covers: str) -> Problem:
    """The problem that a row with these `covers` is filed under. Raises ProblemError where its m is too large."""
    m = padded_m(problem.m, problem.n, covers)
    return problem if m == problem.m else problem.with_shape(m, problem.n, problem.k)


def _text_of(problem: Problem, covers: str, mode: str) -> str:
    return f"{problem} {covers} {mode}"


def ident_of(solution: Solution, packed: bytes | None = None) -> int:
    """A number for this solution, the same in every generation, so that what failed stays off in this process.

    packed: the solution as bytes, if the caller has them already.
    """
    text = f"{_text_of(solution.problem, solution.covers, solution.mode)}\0{solution.backend}\0{solution.config}"
    key = sha256(f"{text}\0{solution.stamp}\0{solution.launch}".encode(errors="surrogatepass")).digest()
    ident = _idents.get(key)
    if ident is None:
        with _new_ident:
            ident = _idents.get(key)
            if ident is None:
                ident = next(_next_ident)  # a signal's handler may come here in the middle of this
                _solutions[ident] = packed if packed is not None else pack(solution)  # before the id: a fork may come
                _idents[key] = ident
    return ident


def after_fork() -> None:
    """In a forked child: replace the lock, since a thread that held it does not exist here."""
    global _new_ident
    _new_ident = FrameLock()


def solution_of(ident: int) -> Solution:
    """The solution that ident_of gave this number."""
    return unpack(_solutions[ident])


def build_table(
    solutions: Iterable[Solution | bytes],
    environments: Mapping[str, Environment],
    *,
    generation: int,
    failed: frozenset[int],
) -> Table:
    """The table of the solutions, packed or not, that may run here.

    environments: this process's environment by place.  failed: idents of solutions that failed in this process.
    Of duplicate rows the one with the lower time wins, of equals the first.
    """
    table = Table(generation)
    places: dict[str, list[str]] = {}
    for place, environment in environments.items():
        places.setdefault(environment.device.key, []).append(place)
    refused = table.refused
    for one in solutions:
        packed = one if isinstance(one, bytes) else pack(one)
        solution = unpack(packed)
        here = places.get(solution.device)
        reason = _refusal(solution, environments[here[0]] if here else None, failed)
        if reason or not here:
            refused[reason] += 1
            continue
        try:
            for place in here:
                table.put(place, solution, packed)
        except ProblemError:
            refused["its padded size is out of range"] += 1
    return table


def _operator_refusal(solution: Solution) -> str:
    """Why a solution by a backend of another package is not used here; its record must name an operator of one."""
    with importing():
        from gemmtuned.configs.launch import OperatorLaunch, read_launch

    try:
        launch = read_launch(solution.launch)
    except GemmtunedError:
        launch = None
    if not isinstance(launch, OperatorLaunch):
        return f"backend {solution.backend} is not known to this version"
    package, made_with, here = launch.package, launch.version, installed_version(launch.package)
    if here != made_with:
        return f"backend {solution.backend} was made with {package} {made_with}, here it is {here or 'not installed'}"
    return ""


@cache
def installed_version(package: str) -> str | None:
    """The version of a distribution in this process; None when it is not installed. Imports nothing of it."""
    try:
        return version(package)
    except Exception:  # not there, or its metadata cannot be read
        return None


def _known_scales(problem: Problem) -> bool:
    """Whether the problem has scales of X exactly when its family has them; `grouped` may have them per row or not."""
    if problem.family == "grouped":
        return problem.scale == "none" or is_scaled_grouped(problem)
    return (problem.scale != "none") == (problem.family == "scaled")


def _refusal(solution: Solution, environment: Environment | None, failed: frozenset[int]) -> str:
    if solution.state not in LIVE_STATES:
        return f"state is {solution.state}"
    p = solution.problem
    if p.family == "moe":
        if solution.backend not in (*BY_OPS, DEFAULT_BACKEND):
            return f"backend {solution.backend} is not known to this version"
    elif p.family not in FAMILIES:
        if solution.backend in NATIVE_CODES and solution.backend != DEFAULT_BACKEND:
            return f"family {p.family} is of another package: only registered operators run it"
    elif solution.backend != DEFAULT_BACKEND and (p.family not in SERVED or not _known_scales(p)):
        return f"{p.family} products (scale {p.scale}) run on stock torch in this version"
    plain_alone = p.family != "scaled" or (solution.backend in NATIVE_CODES and solution.backend not in _ANY_ORDER)
    if (p.weight_state == "shuffled" and plain_alone) or (
        p.weight_state == "plain" and solution.backend == "onednn_packed"
    ):
        return f"backend {solution.backend} does not take a weight that is {p.weight_state}"
    if p.batch_invariant and solution.backend not in INVARIANT:
        return f"backend {solution.backend} is not proven batch-invariant"
    if solution.backend == ROWS and not p.batch_invariant:
        return f"backend {solution.backend} is for batch-invariant problems"
    if environment is None:
        return f"made for another device ({solution.device})"
    if solution.backend not in NATIVE_CODES and solution.backend not in BY_OPS:
        reason = _operator_refusal(solution)
        if reason:
            return reason
    elif not environment.accepts(solution.backend, solution.stamp):
        return f"backend {solution.backend} is of another version ({solution.stamp})"
    if failed and ident_of(solution) in failed:
        return "it failed in this process"
    return ""
