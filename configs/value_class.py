"""`value_class`: as dataclass(frozen=True, slots=True), which takes ten times as long to make a class.

Every program with the hook makes a dozen of these classes when it starts, and a few values of most.  `dataclass`
compiles six functions for each class, one by one (Python 3.11: 1 to 3 ms of CPU a class).  Here all classes share their
functions, `__init__` is compiled only for a class of which many values are made, and what `fields`, `replace` and
`asdict` of the standard library ask for is made when they ask.  Copies, pickles and type checkers take them as they
are.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[object], object]:
        return lambda decorator: decorator


# As configs/unpatched.py, which a program that is switched off does without
__builtins__ = dict(vars(builtins))  # type: ignore[assignment]

_Class = TypeVar("_Class")
_set = object.__setattr__
_FEW: Final = 32  # values of a class, from which on it is worth compiling its `__init__`


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
    own = {name: cls.__dict__.get(name, MISSING) for name in cls.__annotations__}
    made = _with_slots(cls, own, kw_only)
    functions = {
        "__init__": _late_init(made, own, kw_only),
        "__eq__": _eq([name for name, given in own.items() if not isinstance(given, Field) or given.compare]),
        "__hash__": _hash([name for name, given in own.items() if not isinstance(given, Field) or _is_hashed(given)]),
    }
    for name, function in (functions | _SHARED).items():
        if name not in cls.__dict__:
            setattr(made, name, function)
    return made


def names_of(cls: type[Any]) -> tuple[str, ...]:
    """The attributes of a value class in their order, as `fields` has them."""
    return tuple(cls.__own__)


def defaults_of(cls: type[Any]) -> dict[str, Any]:
    """The same with their defaults, of a class without `field(...)`; dataclasses.MISSING where there is none."""
    return dict(cls.__own__)


def _is_hashed(given: Field[Any]) -> bool:
    return given.compare if given.hash is None else given.hash


def _with_slots(cls: type[Any], own: dict[str, Any], kw_only: bool) -> Any:
    """The class once more, with a slot for each attribute, as `dataclass` does it."""
    names = tuple(own)
    left = {name: it for name, it in vars(cls).items() if name not in {*names, "__dict__", "__weakref__"}}
    late = {name: _Late(own, kw_only) for name in ("__dataclass_fields__", "__dataclass_params__")}
    more = {"__own__": own, "__slots__": names, "__match_args__": () if kw_only else names}
    kind: Any = type(cls)
    made = kind(cls.__name__, cls.__bases__, {**left, **late, **more})
    made.__qualname__ = cls.__qualname__
    return made


class _Late:
    """What `dataclass` says of a class, made when first asked for."""

    def __init__(self, own: dict[str, Any], kw_only: bool) -> None:
        self._own, self._kw_only = own, kw_only

    def __set_name__(self, made: Any, name: str) -> None:
        self._made, self._name = made, name

    def __get__(self, _: object, __: type[Any]) -> Any:
        made = self._made
        shadow = type(made.__name__, (), {name: given for name, given in self._own.items() if given is not MISSING})
        shadow.__module__, shadow.__annotations__ = made.__module__, made.__annotations__
        whole: Any = dataclass(init=False, repr=False, eq=False, kw_only=self._kw_only)(shadow)
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(made, name, getattr(whole, name))
        return getattr(made, self._name)


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


def _late_init(cls: type[Any], own: dict[str, Any], kw_only: bool) -> Any:
    """`__init__`, which is compiled once there are many values: programs make few of most classes, or none."""
    nth = count()

    def compiled() -> Any:
        cls.__init__ = init = _init(cls, own, kw_only)
        return init

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        if next(nth) >= _FEW or (args and kw_only) or not _fill(self, own, args, named):
            compiled()(self, *args, **named)  # for wrong arguments, too, which it has the words for
        elif hasattr(cls, "__post_init__"):
            self.__post_init__()

    __init__.__dict__["compiled"] = compiled
    return __init__


def _fill(value: Any, own: dict[str, Any], args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Give a new value its attributes; False where the arguments are not those of its class."""
    taken = 0
    for number, (name, default) in enumerate(own.items()):
        if name in named:
            given = named[name]
            taken += 1
            if number < len(args):
                return False
        elif number < len(args):
            given = args[number]
        else:
            given = default
            if isinstance(default, Field):
                given = default.default if default.default_factory is MISSING else default.default_factory()
            if given is MISSING:
                return False
        _set(value, name, given)
    return taken == len(named) and len(args) <= len(own)


class _Signature:
    """What inspect.signature says of a class, also before it has a value."""

    def __get__(self, _: object, cls: type[Any]) -> Any:
        import inspect

        init: Any = cls.__init__  # a class that is derived from a value class may have none of its own
        init = init.compiled() if hasattr(init, "compiled") else init
        whole = inspect.signature(init)
        return whole.replace(parameters=[*whole.parameters.values()][1:])


def _init(cls: type[Any], own: dict[str, Any], kw_only: bool) -> Any:
    """Compile `__init__(self, first, second=default, ...)`, as `dataclass` would write it for a frozen class."""
    known: dict[str, Any] = {"_set": _set, "_missing": MISSING}
    takes, sets = ["self", "*"] if kw_only and own else ["self"], []
    for name, given in own.items():
        default, value, takes_default = f"_default_{name}", name, f"{name}=_default_{name}"
        known[default] = given
        if isinstance(given, Field):
            known[default] = given.default
            if given.default_factory is not MISSING:
                known[default] = given.default_factory
                value, takes_default = f"{default}() if {name} is _missing else {name}", f"{name}=_missing"
        takes.append(name if known[default] is MISSING else takes_default)
        sets.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        sets.append("self.__post_init__()")
    made: dict[str, Any] = {}
    text = f"def __init__({', '.join(takes)}):\n " + "\n ".join(sets or ["pass"])
    # Compiled first: with text exec makes Python forget that a program ended by Ctrl-C, and it exits with 1
    exec(compile(text, "<string>", "exec"), known, made)  # noqa: S102
    init = made["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {**cls.__annotations__, "return": None}
    return init


class _Shared:
    """What all values do with the same function."""

    def __repr__(self) -> str:
        own: dict[str, Any] = self.__own__  # type: ignore[attr-defined]
        names = (name for name, given in own.items() if not isinstance(given, Field) or given.repr)
        shown = (f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __setattr__(self, name: str, _: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __replace__(self, **changed: Any) -> Any:
        return replace(self, **changed)  # type: ignore[type-var]

    def __getstate__(self) -> list[Any]:
        return [getattr(self, name) for name in names_of(type(self))]

    def __setstate__(self, state: list[Any]) -> None:
        for name, value in zip(names_of(type(self)), state, strict=True):
            _set(self, name, value)


_SHARED: Final[dict[str, Any]] = {name: function for name, function in vars(_Shared).items() if callable(function)}
_SHARED["__signature__"] = _Signature()
