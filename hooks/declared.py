"""Operators that other packages declare for families of their own, so that their calls are counted and routed.

    OPERATORS = ({"operator": "fast::scores", "family": "fast.scores", "x": "q", "w": "k", "form": "nk"},)

is plain data in a module of the package, and its pyproject.toml names it:

    [project.entry-points."gemmtuned.operators"]
    fast = "fast_gemm:OPERATORS"

The hook imports nothing for this: it reads the names of entry points once, and a declaration once the program itself
has imported the module.  docs/extending.md walks through it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.key import family_code
from gemmtuned.configs.pattern import Pattern
from gemmtuned.configs.problem import OTHERS_FAMILY
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.hooks.overrides import schema_of

log = logging.getLogger("gemmtuned.hooks")
GROUP: Final = "gemmtuned.operators"
NEEDED: Final = ("operator", "family", "x", "w")
OPERANDS: Final = ("x", "w", "bias", "y", "out")  # fields that name an argument
_FIELDS: Final = (*dict.fromkeys((*NEEDED, *OPERANDS)), "form")
_OPERATOR: Final = Pattern(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)?")


class Declaration:
    """The declaration of one operator. Raises a ValueError that names what is wrong."""

    def __init__(self, given: object) -> None:
        if not isinstance(given, Mapping):
            raise ValueError(f"an operator is declared by {type(given).__name__}, expected a dict")
        self.facts = dict(given)
        strange = [name for name in self.facts if name not in _FIELDS]
        if strange:
            raise ValueError(f"it says {str(strange[0])[:40]!r}, expected {', '.join(_FIELDS)}")
        for name in NEEDED:
            if name not in self.facts:
                raise ValueError(f"it does not say {name!r}")
        for name, value in self.facts.items():
            if not isinstance(value, str):
                raise ValueError(f"{name} is {str(value)[:40]}, expected text")
        self.name, self.family = self.facts["operator"], self.facts["family"]
        if not _OPERATOR.fullmatch(self.name):
            raise ValueError(f"operator is {self.name[:80]!r}, expected namespace::name or namespace::name.overload")
        if not OTHERS_FAMILY.fullmatch(self.family):
            raise ValueError(f"family is {self.family[:80]!r}, expected package.family")
        self.form = self.facts.get("form", "nk")
        if self.form not in ("kn", "nk"):
            raise ValueError(f"form is {self.form[:40]!r}, expected nk for W [N, K] or kn for W [K, N]")
        self.code = family_code(self.family)

    @property
    def is_registered(self) -> bool:
        """Whether the program has the operator."""
        return schema_of(self.name) is not None

    def arguments(self) -> tuple[int, ...]:
        """Numbers of y, x, w, both scales, bias and the result's type, as Native.stand_before takes them; -1: none.

        Raises ValueError where the operator has not what is declared of it.
        """
        schema = schema_of(self.name)
        names = [a.name for a in schema.arguments]
        said = {name: self.facts[name] for name in OPERANDS if name in self.facts}
        for name, argument in said.items():
            if argument not in names:
                raise ValueError(f"{name} is its argument {argument[:40]!r}, which it has not: {schema}")
        undeclared = [name for name in names if name not in said.values()]
        if undeclared:
            raise ValueError(
                f"nothing is said of its argument {undeclared[0]!r}: calls that differ in it would be alike"
            )
        tensors = [n for n in ("x", "w", "bias", "y") if n in said]
        if any(str(schema.arguments[names.index(said[n])].type) not in ("Tensor", "Optional[Tensor]") for n in tensors):
            raise ValueError(f"one of its operands is no tensor: {schema}")
        results = [str(r.type) for r in schema.returns]
        if results != ["Tensor"] and (results or "y" not in said):
            raise ValueError(f"it does not return one tensor: {schema}")
        numbers = {name: names.index(argument) for name, argument in said.items()}
        return tuple(numbers.get(n, -1) for n in ("y", "x", "w", "scale_x", "scale_w", "bias", "out"))


class Declared:
    """The declarations of this process's packages, read as the program imports their modules."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str]] | None = None  # (module, attribute) that no program has imported yet

    def new(self) -> Iterator[Declaration]:
        """Declarations that have come since the last look; what is wrong with one is said once, and it is left out."""
        if self._waiting is None:
            try:
                named = [point.value.partition(":") for point in entry_points(group=GROUP)]
            except Exception:
                self._waiting = []  # packages with broken metadata are asked once
                raise
            self._waiting = [(module.strip(), attribute.strip()) for module, _, attribute in named]
        for awaited in [*self._waiting]:
            there = _there(*awaited)
            if there is not None:
                try:
                    yield from _declarations(":".join(awaited), there)
                finally:  # last of all: until then has_new is true for another thread, too
                    self._waiting.remove(awaited)

    def has_new(self) -> bool:
        """Whether there are some, or nobody has looked yet; reads no entry points."""
        return self._waiting is None or any(_there(*named) is not None for named in self._waiting)


def _there(module: str, attribute: str) -> object:
    """A module's declaration; None while the program has not imported the module, which we never import."""
    there = sys.modules.get(module)
    return None if there is None else vars(there).get(attribute)


def _declarations(name: str, given: object) -> Iterator[Declaration]:
    if not isinstance(given, list | tuple):
        given = [given]
    for one in given:
        try:
            yield Declaration(one)
        except (GemmtunedError, ValueError) as err:  # noqa: PERF203  one is left out, the others are not
            tell(log, logging.WARNING, "an operator that %s declares is not counted: %s", name, err)
