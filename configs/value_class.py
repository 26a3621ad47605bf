"""`value_class`: as dataclass(frozen=True, slots=True), which takes four times as long to make a class.

Every program with the hook makes a dozen of these classes when it starts.  `dataclass` compiles six functions for each,
one by one (Python 3.11: 1 to 3 ms of CPU a class); here only `__init__` is compiled, with the first value, and all
classes share the others.
`fields`, `replace` and `asdict` of the standard library, copies, pickles and type checkers take them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[object], object]:
        return lambda decorator: decorator


_Class = TypeVar("_Class")


@overload
def value_class(cls: type[_Class], /) -> type[_Class]: ...
@overload
def value_class(*, kw_only: bool) -> Callable[[type[_Class]], type[_Class]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(cls: type[Any] | None = None, /, *, kw_only: bool = False) -> Any:
    """As `@dataclass(frozen=True, slots=True, kw_only=kw_only)`, without `InitVar` and without base classes.

    What the class defines itself, `__repr__` for example, is kept.  Raises TypeError for a class with a base.
    """
    if cls is None:
        return partial(value_class, kw_only=kw_only)
    if cls.__bases__ != (object,):
        raise TypeError(f"{cls.__qualname__} has the base {cls.__bases__[0].__qualname__}: make it a dataclass")
    made: Any = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    own = fields(made)
    functions = {
        "__init__": _late_init(made, own),
        "__eq__": _eq([each.name for each in own if each.compare]),
        "__hash__": _hash([each.name for each in own if (each.compare if each.hash is None else each.hash)]),
    }
    for name, function in (functions | _SHARED).items():
        if name not in cls.__dict__:
            setattr(made, name, function)
    return made


def _eq(names: list[str]) -> Callable[[Any, object], bool]:
    compared = attrgetter(*names)

    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(compared(self) == compared(other))

    return __eq__


def _hash(names: list[str]) -> Callable[[Any], int]:
    hashed = attrgetter(*names)

    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    return __hash__


def _late_init(cls: type[Any], own: tuple[Field[Any], ...]) -> Any:
    """`__init__`, which is compiled with the first value: many programs make none of most classes."""

    def compiled() -> Any:
        cls.__init__ = init = _init(cls, own)
        return init

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        compiled()(self, *args, **named)

    __init__.__dict__["compiled"] = compiled
    return __init__


class _Signature:
    """What inspect.signature says of a class, also before it has a value."""

    def __get__(self, _: object, cls: type[Any]) -> Any:
        import inspect

        init: Any = cls.__init__  # a class that is derived from a value class may have none of its own
        init = init.compiled() if hasattr(init, "compiled") else init
        whole = inspect.signature(init)
        return whole.replace(parameters=[*whole.parameters.values()][1:])


def _init(cls: type[Any], own: tuple[Field[Any], ...]) -> Any:
    """Compile `__init__(self, first, second=default, ...)`, as `dataclass` would write it for a frozen class."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    takes, sets = ["self"], []
    for kw_only in (False, True):
        of_kind = [each for each in own if each.kw_only is kw_only]
        takes += ["*"] if kw_only and of_kind else []
        for each in of_kind:
            name, default = each.name, f"_default_{each.name}"
            given = name
            if each.default is not MISSING:
                known[default] = each.default
                takes.append(f"{name}={default}")
            elif each.default_factory is not MISSING:
                known[default] = each.default_factory
                takes.append(f"{name}=_missing")
                given = f"{default}() if {name} is _missing else {name}"
            else:
                takes.append(name)
            sets.append(f"_set(self, {name!r}, {given})")
    if hasattr(cls, "__post_init__"):
        sets.append("self.__post_init__()")
    made: dict[str, Any] = {}
    exec(f"def __init__({', '.join(takes)}):\n " + "\n ".join(sets or ["pass"]), known, made)  # noqa: S102
    init = made["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {each.name: each.type for each in own} | {"return": None}
    return init


class _Shared:
    """What all values do with the same function."""

    def __repr__(self) -> str:
        shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __setattr__(self, name: str, _: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        for each, value in zip(fields(self), state, strict=True):  # type: ignore[arg-type]
            object.__setattr__(self, each.name, value)


_SHARED: Final[dict[str, Any]] = {name: function for name, function in vars(_Shared).items() if callable(function)}
_SHARED["__signature__"] = _Signature()
