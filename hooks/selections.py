"""AITER_LOG_TUNED_CONFIG=1: each selection once, in AITER's wording, which other tools look for in a server's log.

The flush thread logs it from what was counted, so a call pays nothing for it.  Source of the wording: AITER's
tuned_gemm.py at e4048607.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from gemmtuned.configs.aiter_columns import torch_name
from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Solution
from gemmtuned.configs.stderr_lines import say_line
from gemmtuned.hooks.dispatch import Table

MAX_TOLD: Final = 65_536  # selections remembered; beyond it nothing more is logged


class Selections:
    """Says what runs for a problem when it is first called, and again when that changes.

    file_of: the table that a solution came in; folder: the published ones.  waits: tables will be loaded, and `loaded`
    be called then.  An earlier miss is no news where the tables have the problem: it is held back until they are
    there, and logged at the end if it was never called again.
    """

    def __init__(self, folder: Path, file_of: Callable[[Solution], Path | None], *, waits: bool = False) -> None:
        self._folder, self._file_of = folder, file_of
        self._told: dict[_Key, Solution | None] = {}
        self._held: dict[_Key, tuple[Sighting, Device]] = {}
        self._waits, self._loaded = waits, not waits

    def note(self, sighting: Sighting, table: Table, device: Device) -> None:
        """Log this sighting's selection, once; a hit that is gone since the call is not logged."""
        if self._waits and self._loaded:
            self._waits = False
            self._tell_held(lambda held: _find(table, held)[1] is None)
        outcome, solution = _find(table, sighting)
        if sighting.outcome == "miss" and (self._waits or solution is not None):
            if len(self._held) < MAX_TOLD:
                self._held.setdefault(_key(sighting), (sighting, device))
        elif outcome == sighting.outcome:
            self._held.pop(_key(sighting), None)
            self._tell(sighting, solution, device)

    def loaded(self) -> None:
        """The tables that were there at the start are in use now. Called by another thread than `note`."""
        self._loaded = True

    def finish(self) -> None:
        """The process ends: log what ran by default and was not called again since."""
        self._tell_held(lambda held: True)

    def _tell_held(self, wanted: Callable[[Sighting], bool]) -> None:
        for key, (sighting, device) in list(self._held.items()):
            if wanted(sighting):
                del self._held[key]
                self._tell(sighting, None, device)

    def _tell(self, sighting: Sighting, solution: Solution | None, device: Device) -> None:
        key = _key(sighting)
        if key in self._told and self._told[key] == solution:
            return
        if len(self._told) < MAX_TOLD or key in self._told:
            self._told[key] = solution
            say_line(f"[gemmtuned] {self._line(sighting, solution, device)}")  # whatever the program does with logging

    def _line(self, sighting: Sighting, solution: Solution | None, device: Device) -> str:
        p = sighting.problem
        shape = (
            f"shape is M:{p.m}, N:{p.n}, K:{p.k} dtype={torch_name(p.dtype)!r} otype={torch_name(p.out_dtype)!r} "
            f"bias={p.bias}, scaleAB={p.scale == 'tensor'}, bpreshuffle={p.weight_state == 'shuffled'}"
        )
        if solution is None:
            return f"{shape} not found tuned config in {self._folder}, will use default config! using torch solution:0"
        m = padded_m(p.m, p.n, solution.covers)
        file = self._file_of(solution) or self._folder
        return (
            f"{shape} found padded_M: {m}, N:{p.n}, K:{p.k} is tuned on cu_num = {device.units} in {file}, "
            f"libtype is {solution.backend}, kernel name is {'' if solution.config == '{}' else solution.config}"
        )


_Key = tuple[object, ...]


def _key(sighting: Sighting) -> _Key:
    return sighting.problem, sighting.graph, sighting.place


def _find(table: Table, sighting: Sighting) -> tuple[str, Solution | None]:
    return table.find(sighting.problem, "graph" if sighting.graph else "eager", sighting.place)
