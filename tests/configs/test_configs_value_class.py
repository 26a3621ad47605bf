"""`value_class` makes what `@dataclass(frozen=True, slots=True)` makes: each check runs on a class of either."""

from __future__ import annotations

import copy
import inspect
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from gemmtuned.configs.value_class import value_class


def point_of(decorator: Callable[[type], Any], name: str) -> Any:
    class Point:
        """A point."""

        x: int
        y: str = "y"
        seen: tuple[int, ...] = field(default=(), compare=False)
        told: dict[str, int] = field(default_factory=dict, hash=False, repr=False)

        @property
        def both(self) -> str:
            return f"{self.x}{self.y}"

    return decorator(named(Point, name))


def keys_of(decorator: Callable[[type], Any], name: str) -> Any:
    class Keys:
        """Has a function of its own that fills and refuses, and its own words."""

        b: int
        a: int = 0

        def __post_init__(self) -> None:
            if self.b < 0:
                raise ValueError("b")
            object.__setattr__(self, "a", self.a or self.b)

        def __repr__(self) -> str:
            return f"<{self.a} {self.b}>"

    return decorator(named(Keys, name))


def named(cls: type, name: str) -> type:
    """The class as one of this file, where pickle looks for it."""
    cls.__name__ = cls.__qualname__ = name
    return cls


Plain, Light = point_of(dataclass(frozen=True, slots=True), "Plain"), point_of(value_class, "Light")
PlainKeys = keys_of(dataclass(frozen=True, slots=True, kw_only=True), "PlainKeys")
LightKeys = keys_of(value_class(kw_only=True), "LightKeys")


@pytest.fixture(params=[Plain, Light])
def point(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[PlainKeys, LightKeys])
def keys(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_is_made_shown_and_taken_apart_as_a_dataclass_is(point: Any) -> None:
    made = point(3)
    assert (made.x, made.y, made.seen, made.told, made.both) == (3, "y", (), {}, "3y")
    assert point(3).told is not made.told
    assert repr(made) == f"{point.__name__}(x=3, y='y', seen=())"
    assert asdict(made) == {"x": 3, "y": "y", "seen": (), "told": {}}
    assert [each.name for each in fields(made)] == ["x", "y", "seen", "told"]
    assert list(inspect.signature(point).parameters) == ["x", "y", "seen", "told"]
    assert point.__doc__ == "A point."
    match made:
        case point(3, "y"):
            pass
        case _:
            raise AssertionError(made)


def test_a_class_derived_from_it_has_its_signature(point: Any) -> None:
    derived = type("Derived", (point,), {})
    assert list(inspect.signature(derived).parameters) == ["x", "y", "seen", "told"]
    assert derived(3).y == "y"


def test_what_does_not_count_in_a_comparison_does_not_count_and_other_classes_differ(point: Any) -> None:
    assert point(3, seen=(1,)) == point(3)
    assert point(3, told={"a": 1}) != point(3)
    assert hash(point(3, seen=(1,), told={"a": 1})) == hash(point(3))
    assert hash(point(3)) != hash(point(4))
    assert point(3) != (3, "y", (), {})
    assert Plain(3) != Light(3)
    assert len({point(1), point(1), point(2)}) == 2


def test_it_cannot_be_changed_and_takes_no_name_of_others(point: Any) -> None:
    made = point(3)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        made.x = 4
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del made.x
    with pytest.raises((AttributeError, TypeError)):
        made.other = 1
    assert not hasattr(made, "__dict__")


def test_copies_pickles_and_changed_copies_are_whole(point: Any) -> None:
    made = point(3, "z", (1, 2), {"a": 1})
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(made, protocol))
        assert again == made
        assert again.seen == made.seen
    assert copy.deepcopy(made).told is not made.told
    assert copy.copy(made) == made
    assert replace(made, x=4) == point(4, "z", (1, 2), {"a": 1})


def test_wrong_arguments_are_refused_by_name(point: Any, keys: Any) -> None:
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'x'"):
        point()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        point(3, z=1)
    with pytest.raises(TypeError, match="positional argument"):
        keys(1)


@pytest.mark.parametrize("values", [0, 100])
def test_the_first_values_and_those_after_many_are_made_alike(values: int) -> None:
    Point, Keys = point_of(value_class, "AnyPoint"), keys_of(value_class(kw_only=True), "AnyKeys")
    for number in range(values):
        assert (Point(number, seen=(number,)).x, Keys(b=number).a) == (number, number)
    made = Point(3, "z", told={"a": 1})
    assert (made.x, made.y, made.seen, made.told) == (3, "z", (), {"a": 1})
    assert Point(3).told is not Point(3).told
    for wrong in (lambda: Point(3, x=3), lambda: Point(1, "", (), {}, 5), lambda: Point(y="y"), lambda: Keys(a=1)):
        with pytest.raises(TypeError, match=r"__init__\(\)"):
            wrong()


def test_its_own_functions_are_kept(keys: Any) -> None:
    assert repr(keys(b=2)) == "<2 2>"
    assert keys(b=2) == keys(a=2, b=2)
    with pytest.raises(ValueError, match="b"):
        keys(b=-1)


def test_a_class_with_a_base_is_refused() -> None:
    class Base:
        pass

    with pytest.raises(TypeError, match=r"has the base .*Base"):

        @value_class
        class _Made(Base):
            x: int


def test_the_first_value_of_a_class_does_not_hide_that_a_program_was_interrupted() -> None:
    """Python exits by the signal unless text is compiled and run in one step after it, in whatever thread."""
    code = (
        "import atexit; from gemmtuned.configs.problem import Problem; "
        "atexit.register(lambda: Problem(m=1, n=1, k=1, dtype='fp32')); raise KeyboardInterrupt"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGINT
