"""AITER_LOG_TUNED_CONFIG=1: a log line for each problem and what runs it, worded as AITER does for tools that read it.

The flush thread makes the lines from what was counted, so a call pays nothing for them.  Source of the wording: AITER's
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

MAX_LOGGED: Final = 65_536  # problems that are remembered as logged; of further ones nothing is logged


class Selections:
    """Logs what runs for a problem when it is first called, and again when that changes.

    file_of: the table that a solution came from.  folder: that of the published tables.  waits: tables are still to be
    loaded; `loaded` is called when they are.  Until then a miss may only mean that they are not there yet.  So its line
    is held back: it is dropped where the tables have the problem, and logged where they do not, or when the process
    ends.
    """

    def __init__(self, folder: Path, file_of: Callable[[Solution], Path | None], *, waits: bool = False) -> None:
        self._folder, self._file_of = folder, file_of
        self._logged: dict[_Key, Solution | None] = {}
        self._held: dict[_Key, tuple[Sighting, Device]] = {}
        self._waits, self._loaded = waits, not waits

    def note(self, sighting: Sighting, table: Table, device: Device) -> None:
        """Log what ran this sighting, once. A hit whose solution has left the table since the call is not logged."""
        if self._waits and self._loaded:
            self._waits = False
            self._log_held(lambda held: _find(table, held)[1] is None)
        outcome, solution = _find(table, sighting)
        if sighting.outcome == "miss" and (self._waits or solution is not None):
            if len(self._held) < MAX_LOGGED:
                self._held.setdefault(_key(sighting), (sighting, device))
        elif outcome == sighting.outcome:
            self._held.pop(_key(sighting), None)
            self._log(sighting, solution, device)

    def loaded(self) -> None:
        """The tables that were there at the start are in use now. Called by another thread than `note`."""
        self._loaded = True

    def finish(self) -> None:
        """The process ends: log the misses that are still held back."""
        self._log_held(lambda held: True)

    def _log_held(self, wanted: Callable[[Sighting], bool]) -> None:
        for key, (sighting, device) in list(self._held.items()):
            if wanted(sighting):
                del self._held[key]
                self._log(sighting, None, device)

    def _log(self, sighting: Sighting, solution: Solution | None, device: Device) -> None:
        key = _key(sighting)
        if key in self._logged and self._logged[key] == solution:
            return
        if len(self._logged) < MAX_LOGGED or key in self._logged:
            self._logged[key] = solution
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
