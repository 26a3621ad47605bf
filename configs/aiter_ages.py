"""Where a table of some age or fork has what its family calls M, N and us: other columns, and other units.

vLLM's gradlib, which AITER's tuner comes from, names things as BLAS does: M is the rows of the weight and N the number
of tokens.  Its tuned tables are known by their columns (`libtype`, `solidx`, `soltimes`, without `outdtype`), its lists
of shapes by their name alone.  Times of either, and of AITER's of 2024, are milliseconds until `kernelName` came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gemmtuned.configs.aiter_headers import ALIASES
from gemmtuned.configs.aiter_remarks import is_index, words_of

_GRADLIB: Final = frozenset({"M", "N", "K", "libtype", "solidx", "soltimes"})
_AITERS: Final = frozenset({"outdtype", "cu_num", "kernelName", "scaleAB"})
_GRADLIBS_LIST: Final = (frozenset({"M", "N", "K", "bias", "dtype"}), frozenset({"M", "N", "K"}))
_GRADLIBS_NAME: Final = re.compile(r"vllm_(un)?tuned\d*\.csv")
_UNITS: Final = {
    **dict.fromkeys(("us", "usec", "usecs", "micros", "microsec", "microseconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisec", "milliseconds"), 1e3),
    **dict.fromkeys(("ns", "nsec", "nanos", "nanosec", "nanoseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "seconds"), 1e6),
}
_OF_A_TIME: Final = frozenset({
    "time", "times", "latency", "duration", "elapsed", "runtime", "kernel", "gpu", "best", "avg", "average", "mean",
    "median", "min", "per", "call", "iter", "exec", "execution",
})  # fmt: skip
_TIMES: Final = frozenset({"time", "times", "latency", "elapsed", "runtime"})


@dataclass(frozen=True, slots=True)
class Positions:
    """at: column, and the usual name of one with another -> position in a row.  micro: microseconds in a unit of `us`.

    turned: M and N mean each other, as gradlib has them.
    """

    at: dict[str, int]
    micro: float = 1.0
    turned: bool = False
    notes: list[str] = field(default_factory=list)


def positions(columns: Sequence[str], *, name: str) -> Positions:
    """Where the columns of this table stand. name: the file's; what a reader should know is noted under it."""
    at = {column: i for i, column in reversed([*enumerate(columns)])}
    at |= {ALIASES[column]: i for column, i in at.items() if ALIASES.get(column, column) not in at}
    micro, notes = 1.0, list[str]()
    timed = [column for column in columns if ALIASES.get(column, column) == "us"]
    if len(timed) > 1:
        notes.append(f"{name}: columns {', '.join(timed)} all tell times: {columns[at['us']]} is read")
    has = frozenset(columns[1:] if columns and is_index(columns[0]) else columns)
    listed = has in _GRADLIBS_LIST and _GRADLIBS_NAME.fullmatch(name.rsplit("/", 1)[-1])
    turned = bool(listed) or (has >= _GRADLIB and not has & _AITERS)
    if turned:
        at["M"], at["N"] = at["N"], at["M"]
        notes.append(
            f"{name}: of vLLM's gradlib, whose M is the weight's rows and N the tokens: read the other way round"
        )
    elif has == _GRADLIBS_LIST[0] and "untuned_gemm" not in name:
        notes.append(
            f"{name}: M is read as the tokens, as AITER writes it. A list of vLLM's gradlib has them under N: name it "
            "vllm_untuned.csv"
        )
    if "soltimes" in has and at.get("us") == at["soltimes"] and "kernelName" not in has:
        micro = 1e3
    elif "us" not in at and not {"us1", "us2"} <= has:
        found = [(column, unit) for column in columns if (unit := _unit(column))]
        if len(found) == 1:
            (column, micro), at = found[0], {**at, "us": at[found[0][0]]}
            notes.append(f"{name}: times are read from column {column}")
        elif found:
            names = ", ".join(column for column, _ in found)
            notes.append(f"{name}: columns {names} all tell times, and none is called us: none is read")
        elif unitless := [column for column in columns if _words(column) & _TIMES and _words(column) <= _OF_A_TIME]:
            notes.append(f"{name}: column {unitless[0]} tells no unit, so no time is read: call it us, ms or the like")
    return Positions(at, micro, turned, notes)


def _words(column: str) -> set[str]:
    return {*words_of(column.replace("µ", "u").replace("μ", "u"))}  # the sign and the letter


def _unit(column: str) -> float:
    """Microseconds in a unit of the time that this column holds; 0 where it is none, or tells no unit."""
    words = _words(column)
    units = words & _UNITS.keys()
    plain = len(units) == 1 and words - units <= _OF_A_TIME and words != {"s"}
    return _UNITS[units.pop()] if plain else 0.0
