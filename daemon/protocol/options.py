"""What somebody may ask of one search. Both halves of a worker import this.

The defaults are the daemon's: all backends, times as noise demands, our own numeric gate.  Nothing here can loosen that
gate: a tolerance that is asked for comes on top of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.solution import DEFAULT_BACKEND, NAME, Candidate

MIN_ITERS: Final = 6  # fewer pairs have no 95 % interval (measure.py)
MAX_ITERS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """One search's knobs. Raises SettingError for a value that is out of range.

    backends: try only these beside torch's default; None is all.  space: values that parameters of a config may take,
    by our names; a config without the parameter is not restricted by it.  only: try just these candidates.
    seeds: what was found best at sizes nearby, or is named by imported tables: tried before our own candidates.
    first: at most this many candidates, in the order in which they would be tried; None is all.
    iters: timed pairs of a deciding race, None is as many as fit its time.  warmup: untimed calls before.
    min_gain: what the lower end of the gain must exceed.
    err_ratio: largest share of elements with |exact - y| > atol + rtol * |y|; None: no such limit beside the gate.
    atol, rtol: None is AITER's 5e-2 for bf16 results and 1e-2 for others.
    torchs_alone: candidates race with torch's own kernel alone, and never with one that is far ahead of it.
    """

    backends: tuple[str, ...] | None = None
    space: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    only: tuple[Candidate, ...] | None = None
    seeds: tuple[Candidate, ...] = ()
    first: int | None = None
    iters: int | None = None
    warmup: int = 2
    min_gain: float = 1.02  # a smaller gain is not worth another kernel's rounding
    err_ratio: float | None = None
    atol: float | None = None
    rtol: float | None = None
    torchs_alone: bool = False

    def __post_init__(self) -> None:
        _within("first", self.first, 1, 1 << 20)
        _within("iters", self.iters, MIN_ITERS, MAX_ITERS)
        _within("warmup", self.warmup, 0, MAX_ITERS)
        _within("min_gain", self.min_gain, 1.0, 100.0)
        _within("err_ratio", self.err_ratio, 0.0, 1.0)
        _within("atol", self.atol, 0.0, 1e9)
        _within("rtol", self.rtol, 0.0, 1e9)
        for backend in self.backends or ():
            if not NAME.fullmatch(backend):
                raise SettingError(f"backend is {backend!r}, expected a plain name")

    @property
    def is_restricted(self) -> bool:
        """True when the search leaves out what might have won: that torch is best is then no verdict for others.

        A tolerance leaves something out only where it rejects something, which its trials tell.
        """
        left_out = self.backends is not None or self.only is not None or bool(self.space) or self.first is not None
        return left_out or self.min_gain > DEFAULTS.min_gain

    def asks_for(self, backend: str) -> bool:
        """Whether any candidate of this backend may be tried."""
        named = self.only is None or any(candidate.backend == backend for candidate in self.only)
        return named and (self.backends is None or backend in self.backends)

    def allows(self, candidate: Candidate) -> bool:
        """Whether this candidate may be tried; the default always is."""
        if candidate.backend == DEFAULT_BACKEND:
            return True
        if self.only is not None and candidate not in self.only:
            return False
        if self.backends is not None and candidate.backend not in self.backends:
            return False
        if not self.space:
            return True
        try:
            config = json.loads(candidate.config)
        except ValueError:  # a seed out of somebody's table
            return False
        return isinstance(config, dict) and all(
            name not in config or config[name] in values for name, values in self.space.items()
        )

    def to_row(self) -> dict[str, Any]:
        """As it goes over the wire: only what differs from the defaults."""
        plain = asdict(DEFAULTS)
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> SearchOptions:
        """Read what to_row wrote. Raises SettingError, or TypeError for names that are none of ours."""
        values = dict(row)
        if values.get("backends") is not None:
            values["backends"] = tuple(map(str, values["backends"]))
        if values.get("only") is not None:
            values["only"] = tuple(Candidate(**one) for one in values["only"])
        values["seeds"] = tuple(Candidate(**one) for one in values.get("seeds", ()))
        values["space"] = {str(name): tuple(allowed) for name, allowed in values.get("space", {}).items()}
        return cls(**values)


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise SettingError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}")


DEFAULTS: Final = SearchOptions()
