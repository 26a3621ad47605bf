"""Rules of a quantised checkpoint: in which type and with which scales each weight is stored, and which are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UNKNOWN: Final = ("?", "")
Kept = tuple[str, str]  # (dtype, scale) as a weight is stored; ("", "") for the model's own dtype
PLAIN: Final[Kept] = ("", "")


@dataclass(slots=True)
class Rules:
    """What a checkpoint's quantisation config says of its weights.

    kept: how linear layers are stored that no other rule names.  plain: patterns of layers that are not quantised.
    some: (pattern, Kept) of layers that are stored differently; plain_first: a layer that both name is not quantised.
    way: how these patterns are read.  "" as names and shell patterns, "expression" as transformers does, "part" as any
    part of a name (AutoAWQ).  experts: how experts are stored; None as `kept` says.  experts_only: nothing but experts
    is quantised.  head, routers: how the output head and the routers are stored where no rule names them.  within:
    parts of names, one of which every quantised layer has; () for no such rule.  text_only: the rules stand inside the
    language model's config and are about that alone.  notes: what to tell the reader.
    """

    method: str
    kept: Kept = UNKNOWN
    plain: tuple[str, ...] = ()
    some: tuple[tuple[str, Kept], ...] = ()
    plain_first: bool = False
    experts: Kept | None = None
    experts_only: bool = False
    head: Kept = PLAIN
    routers: Kept = PLAIN
    way: str = ""
    within: tuple[str, ...] = ()
    text_only: bool = False
    notes: list[str] = field(default_factory=list)


def head_of(rules: Rules) -> Kept:
    """How transformers stores the output head: not quantised; UNKNOWN where its list of plain layers lacks it."""
    return UNKNOWN if rules.plain and not any("head" in one for one in rules.plain) else PLAIN
