"""Rules of a quantised checkpoint: how each of its weights is kept, and which are left as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UNKNOWN: Final = ("?", "")
Kept = tuple[str, str]  # dtype and scale, ("", "") for the model's own dtype
PLAIN: Final[Kept] = ("", "")


@dataclass(slots=True)
class Rules:
    """What a checkpoint says of its weights.

    kept: of all linear layers that nothing else is said of.  plain: patterns of those that stay as they are, in the
    method's own way (`way`).  some: patterns of layers kept in another way; plain_first: what both name is plain.
    experts_only: the method is for mixtures alone.  head, routers: what the vocabulary's product and the routers are
    where nothing is said of them.  within: parts of names, one of which a quantised layer has; () for all.  text_only:
    the rules stand inside the language model's config and speak of it alone.
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
    way: str = ""  # "": names and shell patterns; "expression": transformers'; "part": AutoAWQ's, any part of a name
    within: tuple[str, ...] = ()
    text_only: bool = False
    notes: list[str] = field(default_factory=list)


def head_of(rules: Rules) -> Kept:
    """Without a list transformers leaves the vocabulary's product alone; with one it is as the list says, or not."""
    return UNKNOWN if rules.plain and not any("head" in one for one in rules.plain) else PLAIN
