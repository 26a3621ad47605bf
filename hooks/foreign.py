"""Operators of engines that are products at heart: which they are, and that their calls are seen.

vLLM, SGLang and others call operators of their own for 8-bit and packed weights, which aten never sees.  Each is
listed in engine_operators.py with the schema that it had when that was written, which of its arguments is what, and the
form of its weight.  The hook's thread looks for those that are not there yet: an engine loads its extension long after
torch, and whoever registers last is called.  One whose schema has changed is left alone and named.  Where the kernel
beneath ours is destroyed, ours is taken back with the next call, and the next look stands before what is there then.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.hooks.declared import Declaration, Declared
from gemmtuned.hooks.engine_operators import FORMS, UNSEEN, Operator
from gemmtuned.hooks.engine_operators import operators as all_operators
from gemmtuned.hooks.native.library import Native, NativeError
from gemmtuned.hooks.overrides import is_there, schema_of

log = logging.getLogger("gemmtuned.hooks")
LOOK_EVERY: Final = 5  # turns
_REASON: Final = 200  # characters of one
_MOST_TEXT: Final = 8000  # of all of it; the database takes a little more


class ForeignOperators:
    """The operators of others that are seen in this process."""

    def __init__(self, operators: tuple[Operator, ...] | None = None) -> None:
        self._operators = operators  # None: all
        self._asked: dict[str, tuple[str, tuple[int, ...], int] | Operator] = {}  # by name; see `_ask_for`
        self._looking = FrameLock()
        self._came: tuple[int, ...] = ()  # `_what_came` at the last look
        self._passed_over = 0  # looks that nothing had come for
        self._declared = Declared()
        self._announced: list[Declaration] = []
        self._looked_at: set[str] = set()
        self.seen: list[str] = []
        self.changed: dict[str, str] = {}  # name -> why it is left alone

    def look_if_new(self, library: Native) -> None:
        """As `look`, where an operator may have come; else one time in LOOK_EVERY: C++ tells nobody what it has."""
        self._passed_over += 1
        if _what_came() != self._came or self._passed_over >= LOOK_EVERY:
            self.look(library)

    def look(self, library: Native) -> None:
        """Stand in front of what has come since the last look, or has come again; some 50 us."""
        if not self._looking.enter(0.0):  # another thread looks, and before a capture nobody waits for long
            return
        try:
            self._came, self._passed_over = _what_came(), 0  # first: what comes meanwhile is for the next look
            if not self._asked:
                known = all_operators() if self._operators is None else self._operators
                self._asked = {one.name: _ask_for(one) for one in known}
            stands = {name: self._stand(library, name) for name in self._asked if name not in self.changed}
            self._announced += self._declared.new()
            for declared in self._announced:
                if declared.is_registered:
                    try:
                        if declared.name not in self.changed:
                            stands[declared.name] = self._listen(library, declared)
                    finally:  # not before ours stands there: `ready` asks from another thread
                        self._looked_at.add(declared.name)
            self.seen = [name for name, where in stands.items() if where]
            library.watch(operator for where in stands.values() for operator in where)
        finally:
            self._looking.leave()

    def known(self, overridden: Mapping[str, str]) -> str:
        """The engine's paths to products that this process has, as JSON; "" where it has none.

        counted: names of operators.  left: those left alone, each with why.  unseen: what no dispatcher sees of the
        modules that are there.  overridden: "CPU namespace::name" -> where the kernel on top of ours was registered.
        """
        over = {name.partition(" ")[2]: f"served by {where}" for name, where in overridden.items()}
        left = {**self.changed, **{name: over[name] for name in self.seen if name in over}}
        found: dict[str, Any] = {
            "counted": [name for name in self.seen if name not in left],
            "left": {name: why[:_REASON] for name, why in left.items()},
            "unseen": [what for module, what in UNSEEN.items() if module in sys.modules],
        }
        text = json.dumps(found)
        if len(text) > _MOST_TEXT:  # better without reasons than cut in the middle
            text = json.dumps({**found, "left": dict.fromkeys(left, "")})
        return text if any(found.values()) else ""

    def after_fork(self) -> None:
        """In a forked child, whose parent may have been looking."""
        self._looking = FrameLock()

    def is_behind(self) -> bool:
        """Whether an operator that a package declares has come since the last look."""
        return self._declared.has_new() or any(
            declared.is_registered for declared in self._announced if declared.name not in self._looked_at
        )

    def _stand(self, library: Native, name: str) -> list[str]:
        try:
            if not is_there(name):  # most are not, in most programs
                return []
            asked = self._asked[name]
            if isinstance(asked, tuple):
                return library.stand_before(name, *asked)
            schema = schema_of(name)
            return library.stand_before(name, "", _numbers(asked, schema), asked.code) if schema is not None else []
        except (NativeError, ValueError) as err:
            return self._leave(name, err)

    def _listen(self, library: Native, one: Declaration) -> list[str]:
        try:
            return library.stand_before(one.name, "", one.arguments(), FORMS.index(one.form), one.code)
        except (NativeError, ValueError) as err:
            return self._leave(one.name, err)

    def _leave(self, name: str, why: Exception) -> list[str]:
        self.changed[name] = str(why)
        tell(log, logging.WARNING, "calls of %s are not counted: %s", name, why)
        return []


def _what_came() -> tuple[int, ...]:
    """Numbers of which one changes where Python registers an operator, or loads what may register one."""
    import torch

    registered = (getattr(torch.library, name, ()) for name in ("_defs", "_impls"))
    return (len(sys.modules), len(torch.ops.loaded_libraries), *map(len, registered))


def _ask_for(one: Operator) -> tuple[str, tuple[int, ...], int] | Operator:
    """What stand_before is told of it after its name, worked out once; the operator itself where it has to be asked."""
    return (one.schema, one.arguments, one.code) if one.is_exact else one


def _numbers(one: Operator, schema: Any) -> tuple[int, ...]:
    """Positions of the arguments of an operator whose schemas differ. Raises ValueError where x or y is no tensor."""
    tensors = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
    for name in filter(None, (one.x, one.y)):
        if name not in tensors:
            raise ValueError(f"it is {schema}, and {name} no tensor of it")
    return one.among([a.name for a in schema.arguments])
