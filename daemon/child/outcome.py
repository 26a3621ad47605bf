"""CHILD side: what a search found, as the solutions that are published.

On CUDA what is raced is device time, inside graphs, and there is a solution for each mode.  In graphs nothing else
counts.  An eager call also takes the host's time: what has a launch record is launched by the hook in less of it than
torch needs (0.5 of it, measured for kernels of ours), so it is judged by device time alone; any other candidate must
win with the host time added that it takes more than torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gemmtuned.configs.manifest import write_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Environment, Solution
from gemmtuned.daemon.child.measure import Race
from gemmtuned.daemon.child.verify import Checked
from gemmtuned.daemon.protocol.options import DEFAULTS
from gemmtuned.kernels.backends import complexity
from gemmtuned.kernels.backends.base import Backend, Kernel, LaunchedBackend

DEFAULT: Final = Candidate(DEFAULT_BACKEND)
MIN_GAIN: Final = DEFAULTS.min_gain


@dataclass(slots=True)
class Entrant:
    """A candidate that may win: its kernels and races by member.

    gain: as screened.  launch: where the backend has records, once its binary is where the daemon publishes from.
    beside: engines' kernels that it has raced with, once it has (configs/engine_races.py).
    """

    candidate: Candidate
    kernels: dict[Problem, Kernel]
    gain: float
    verdict: Checked = field(default_factory=lambda: Checked("ok", None, 0.0))
    races: dict[Problem, Race] = field(default_factory=dict)
    launch: str = ""
    beside: str = ""

    @property
    def worst_gain(self) -> float:
        """The smallest gain over the members, as estimated: the lower bounds are for proof, not for ranking."""
        return min(r.gain for r in self.races.values())

    @property
    def gain_low(self) -> float:
        """The smallest lower bound over the members."""
        return min(r.gain_low for r in self.races.values())


def preferred(winners: Sequence[Entrant]) -> Entrant:
    """The fastest; what is within 2 % of it is a tie, and goes to the simplest backend's fastest."""
    best = max(each.worst_gain for each in winners)
    tied = [each for each in winners if each.worst_gain * MIN_GAIN >= best]
    return min(tied, key=lambda each: (complexity(each.candidate.backend), -each.worst_gain))


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked: a solution for `target`; `main` is the member whose times stand for it."""

    target: Problem
    covers: str
    main: Problem
    environment: Environment


@dataclass(frozen=True, slots=True)
class Default:
    """Torch's own time and error at the main member. beside: as of an Entrant."""

    us: float
    err: float
    beside: str = ""


def solution_of(asked: Question, winner: Entrant | None, default: Default, mode: str) -> Solution:
    """The verdict in one mode; without a winner the default is best."""
    environment = asked.environment
    if winner is None:
        return Solution(
            problem=asked.target, device=asked.environment.device.key, mode=mode, covers=asked.covers,
            backend=DEFAULT.backend, config=DEFAULT.config, stamp=environment.stamp_of(DEFAULT) or "", us=default.us,
            baseline_us=default.us, gain_low=1.0, err=default.err, baseline_err=default.err, state="default_best",
            beside=default.beside,
        )  # fmt: skip
    run, chosen = winner.races[asked.main], winner.candidate
    return Solution(
        problem=asked.target, device=asked.environment.device.key, mode=mode, covers=asked.covers,
        backend=chosen.backend, config=chosen.config, stamp=environment.stamp_of(chosen) or "", us=run.us,
        baseline_us=run.baseline_us, gain_low=winner.gain_low, err=winner.verdict.err or 0.0,
        baseline_err=winner.verdict.baseline_err, state="published", launch=winner.launch,
        beside=winner.beside,
    )  # fmt: skip


def keep_binary(winner: Entrant, backend: Backend, target: Problem) -> None:
    """Note the launch record of a winner that has one, and leave its binary for the publisher.

    Raises CandidateFailed when it does not compile for the target, TableError when the disk refuses.
    """
    if isinstance(backend, LaunchedBackend):
        launch, binary = backend.launch_of(winner.candidate, target)
        if binary is not None:
            write_binary(Settings.from_env().home, binary)
        winner.launch = launch


def eager_gain_low(run: Race, more_us: float) -> float:
    """Lower bound of the gain when each call also costs more_us of the host's time beyond torch's."""
    return run.baseline_us / (run.baseline_us / run.gain_low + max(more_us, 0.0))
