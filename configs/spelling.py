"""How problems are spelled: on the command line and in reports, and which of their columns are no text in a key."""

from __future__ import annotations

from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.nearest_word import did_you_mean
from gemmtuned.configs.numbers import whole
from gemmtuned.configs.pattern import Pattern

SWITCHES: Final = ("bias", "deterministic", "batch_invariant")
NUMBERS: Final = frozenset(
    ("batch", "n", "k", *SWITCHES, "threads", "experts", "topk", "inter")
)  # beside m: what is no text in a key
REST_OF_0_1_0: Final = (
    "family", "batch", "n", "k", "bias", "dtype", "wdtype", "out_dtype", "scale", "layout", "weight_state", "math_mode",
    "deterministic", "threads", "experts", "topk", "inter", "act",
)  # fmt: skip
SPELLED: Final = {  # a column, and what str() calls it
    "scale": "scale",
    "wscale": "wscale",
    "scale_dtype": "scaledtype",
    "wscale_dtype": "wscaledtype",
    "scale_layout": "scalelayout",
    "wscale_layout": "wscalelayout",
    "layout": "layout",
    "weight_state": "weight",
    "packing": "packing",
    "math_mode": "math",
    "deterministic": "deterministic",
    "batch_invariant": "invariant",
    "threads": "threads",
    "experts": "experts",
    "topk": "topk",
    "inter": "inter",
    "act": "act",
}
_LONG: Final = {short: name for name, short in SPELLED.items()}
_SPELLING: Final = Pattern(
    r"(?:(?P<family>[a-z_]+|[a-z][a-z0-9_]*\.[a-z0-9_]+):)?(?P<dtype>[a-z][a-z0-9_]*)(?:/(?P<wdtype>[a-z0-9_]+))?(?:>(?P<out>[a-z0-9_]+))?"
    r":(?P<dims>[0-9]{1,10}(?:x[0-9]{1,10}){2,3})(?P<bias>\+bias)?(?P<rest>(?:,[a-z]+=[A-Za-z0-9_+]{1,40})*)"
)


def written(value: object) -> str:
    """A column's value as it is spelled."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def values_of(text: str) -> dict[str, Any]:
    """The columns of a problem that is spelled so. Raises ProblemError with the form expected."""
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        meant = "".join(text[:400].lower().replace("torch.", "").replace("*", "x").split())
        near = f". Did you mean {meant}?" if _SPELLING.fullmatch(meant) else ""
        raise ProblemError(
            f"{text!r} is not a problem. Write [family:]dtype:[Bx]MxNxK[+bias][,name=value...], "
            f"for example bf16:8x2048x1024+bias,threads=2{near}"
        )
    dims = [int(d) for d in match["dims"].split("x")]
    values: dict[str, Any] = {
        "family": match["family"] or "dense",
        "dtype": match["dtype"],
        "wdtype": match["wdtype"] or "",
        "out_dtype": match["out"] or "",
        "batch": dims[0] if len(dims) == 4 else 1,
        "bias": match["bias"] is not None,
    }
    values["m"], values["n"], values["k"] = dims[-3:]
    for item in filter(None, (match["rest"] or "").split(",")):
        short, _, value = item.partition("=")
        name = _LONG.get(short)
        if name is None:
            near = did_you_mean(short, _LONG)
            raise ProblemError(f"{text!r}: unknown part {short!r}, expected one of {', '.join(_LONG)}{near}")
        if name in NUMBERS:
            number = whole(value)
            if number is None:
                raise ProblemError(f"{text!r}: {short} is {value!r}, expected a number")
            values[name] = bool(number) if name in SWITCHES else number
        else:
            values[name] = value
    return values
