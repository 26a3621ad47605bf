"""CHILD side: the winner of a search raced with the kernels of serving engines that are installed here.

A program that calls an engine's operator runs the engine's kernel, not torch's product.  So the winner is raced with
each such kernel that ran in the screening, at every member and in earnest; the verdict says what came of it, by which
programs decide whose calls it serves (configs/engine_races.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from gemmtuned.configs.engine_races import BACKENDS as ENGINES
from gemmtuned.configs.engine_races import FAMILY, Peer, text_of
from gemmtuned.configs.errors import CandidateFailed, TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.child.outcome import Entrant
from gemmtuned.daemon.child.races import AS_IT_IS, Races
from gemmtuned.daemon.child.screening import Screening
from gemmtuned.daemon.child.trials import Trials
from gemmtuned.daemon.child.verify import REFUSALS, first_line
from gemmtuned.daemon.protocol.options import SearchOptions

_ITSELF: Final = 1.0  # what an engine's kernel that has won takes, compared with itself


class _WinnerWrong(Exception):
    """A result of the winner differs from its others, or from torch's by too much."""


class Beside:
    """The engines' kernels of one contest, as its screening has left them."""

    def __init__(
        self,
        members: Sequence[Problem],
        environment: Environment,
        screening: Screening,
        races: Races,
        trials: Trials,
        options: SearchOptions,
    ) -> None:
        self._members, self._races, self._trials = members, races, trials
        self._timed = {entrant.candidate.backend: entrant for entrant in screening.timed}
        self._versions = {name: stamp for name, stamp in environment.stamps.items() if name in ENGINES}
        # Of other families nothing is asked, and rows that say nothing of engines are read by older versions, too
        asked = members[0].family == FAMILY
        self._unable = {n for n in self._versions if asked and options.asks_for(n) and n not in self._timed}

    def race(self, winner: Entrant) -> bool:
        """Have it say what it has raced with, and by how much it won at the least.

        What the device is too slow for by now is left out: the verdict does not wait for it.  False where a result of
        the winner itself was wrong meanwhile.
        """
        lows: dict[str, float | None] = {}
        for name, rival in self._timed.items():
            with suppress(TryLater):
                try:
                    lows[name] = self._race(winner, rival)
                except _WinnerWrong:
                    return False
        winner.beside = self._text(lows)
        return True

    def of_torchs(self) -> str:
        """The same where torch's own is the best: how much longer the others took in the screening."""
        return self._text({name: 1 / rival.gain for name, rival in self._timed.items()})

    def _text(self, lows: Mapping[str, float | None]) -> str:
        known = {**dict.fromkeys(self._unable - set(lows)), **lows}
        return text_of({name: Peer(self._versions[name], low) for name, low in known.items()})

    def _race(self, winner: Entrant, rival: Entrant) -> float | None:
        """The smallest lower bound over the members; None where the rival fails by now. Raises _WinnerWrong."""
        if winner.candidate == rival.candidate:
            return _ITSELF
        lows = []
        for member in self._members:
            started = self._trials.start(rival.candidate)
            try:
                run, clocks = self._races.in_earnest(winner, member, AS_IT_IS, rival)
            except REFUSALS as err:
                if isinstance(err, CandidateFailed) and str(err).startswith(f"{winner.candidate}: "):
                    self._trials.report(winner.candidate, "confirm", "wrong", started, note=first_line(err))
                    raise _WinnerWrong from err
                self._trials.report(rival.candidate, "confirm", "refused", started, note=first_line(err))
                return None
            lows.append(run.gain_low)
            note = f"race with {winner.candidate.backend} m={member.m} its_gain_low={run.gain_low:.3f}{clocks}"
            self._trials.report(rival.candidate, "confirm", "ok", started, us=run.baseline_us, note=note)
        return min(lows)
