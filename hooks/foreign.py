"""Operators of serving engines that compute a matrix product: a kernel of ours is put before theirs, and counts.

vLLM, SGLang and others call operators of their own for 8-bit and packed weights, which aten never sees.  Each of them
is listed in engine_operators.py: its schema at the time of writing, which of its arguments is what, and the form of its
weight.  An engine loads its extension long after torch, and of two kernels for one operator the dispatcher calls the
one that was registered last.  So the hook's thread looks again and again for operators that have come, and registers
ours then.  An operator with another schema is left alone, and named.  Where the kernel beneath ours is destroyed, the
next call takes ours back, and the next look puts one before what is there then.
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
LOOK_EVERY: Final = 5  # turns of the hook's thread, where nothing shows that an operator has come
_REASON: Final = 200  # characters of a reason
_MOST_TEXT: Final = 8000  # characters of what `known` gives; the database takes a little more


class ForeignOperators:
    """The operators of engines, and of packages that declare theirs, before which a kernel of ours stands.

    seen: their names, of those that are registered in this process.  changed: names of those left alone, with why.
    """

    def __init__(self, operators: tuple[Operator, ...] | None = None) -> None:
        self._operators = operators  # None: all of engine_operators.py
        self._to_register: dict[str, tuple[str, tuple[int, ...], int] | Operator] = {}  # by name; see `_arguments_for`
        self._looking = FrameLock()
        self._fingerprint: tuple[int, ...] = ()  # `_fingerprint_of_process` at the last look
        self._skipped = 0  # looks that were skipped since
        self._declared = Declared()
        self._announced: list[Declaration] = []
        self._looked_at: set[str] = set()
        self.seen: list[str] = []
        self.changed: dict[str, str] = {}

    def look_if_new(self, library: Native) -> None:
        """As `look`, where an operator may have come, and each LOOK_EVERY-th time: what C++ registers does not show."""
        self._skipped += 1
        if _fingerprint_of_process() != self._fingerprint or self._skipped >= LOOK_EVERY:
            self.look(library)

    def look(self, library: Native) -> None:
        """Put a kernel of ours before operators that have come since the last look, or have come again; some 50 us."""
        if not self._looking.enter(0.0):  # another thread looks, and before a capture nobody waits for long
            return
        try:
            # first of all: what comes meanwhile is for the next look
            self._fingerprint, self._skipped = _fingerprint_of_process(), 0
            if not self._to_register:
                known = all_operators() if self._operators is None else self._operators
                self._to_register = {one.name: _arguments_for(one) for one in known}
            stands = {name: self._register(library, name) for name in self._to_register if name not in self.changed}
            self._announced += self._declared.new()
            for declared in self._announced:
                if declared.is_registered:
                    try:
                        if declared.name not in self.changed:
                            stands[declared.name] = self._register_declared(library, declared)
                    finally:  # not before ours stands there: `ready` asks from another thread
                        self._looked_at.add(declared.name)
            self.seen = [name for name, where in stands.items() if where]
            library.watch(operator for where in stands.values() for operator in where)
        finally:
            self._looking.leave()

    def known(self, overridden: Mapping[str, str]) -> str:
        """The ways to products, beside torch's, that this process has, as JSON; "" where it has none.

        Its keys: counted, names of operators whose calls are recorded; left, those left alone, each with why; unseen,
        what of the imported modules calls no operator, so that no dispatcher sees it.

        overridden: "CPU namespace::name" -> where the kernel on top of ours was registered.
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

    def _register(self, library: Native, name: str) -> list[str]:
        """The kernels of this operator before which ours stands now; none where it is not there or is left alone."""
        try:
            if not is_there(name):  # most are not, in most programs
                return []
            known = self._to_register[name]
            if isinstance(known, tuple):
                return library.stand_before(name, *known)
            schema = schema_of(name)
            return library.stand_before(name, "", _positions(known, schema), known.code) if schema is not None else []
        except (NativeError, ValueError) as err:
            return self._leave_alone(name, err)

    def _register_declared(self, library: Native, one: Declaration) -> list[str]:
        try:
            return library.stand_before(one.name, "", one.arguments(), FORMS.index(one.form), one.code)
        except (NativeError, ValueError) as err:
            return self._leave_alone(one.name, err)

    def _leave_alone(self, name: str, why: Exception) -> list[str]:
        self.changed[name] = str(why)
        tell(log, logging.WARNING, "calls of %s are not counted: %s", name, why)
        return []


def _fingerprint_of_process() -> tuple[int, ...]:
    """Numbers of which one changes where Python registers an operator, or loads something that may register one."""
    import torch

    registered = (getattr(torch.library, name, ()) for name in ("_defs", "_impls"))
    return (len(sys.modules), len(torch.ops.loaded_libraries), *map(len, registered))


def _arguments_for(one: Operator) -> tuple[str, tuple[int, ...], int] | Operator:
    """The arguments of `stand_before` after the name; the operator itself where they depend on the schema found."""
    return (one.schema, one.arguments, one.code) if one.is_exact else one


def _positions(one: Operator, schema: Any) -> tuple[int, ...]:
    """Positions of the arguments in the schema that was found. Raises ValueError where x or y is no tensor."""
    tensors = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
    for name in filter(None, (one.x, one.y)):
        if name not in tensors:
            raise ValueError(f"it is {schema}, and {name} no tensor of it")
    return one.among([a.name for a in schema.arguments])
