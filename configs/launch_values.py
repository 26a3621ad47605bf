"""What a launch record comes to for given operands: whether it takes them, its grid, and the values of its arguments.

The worker measures and checks by these functions; running programs have their twins in hooks/native/slots.h and
cuda_launch.h, and a test compares the two.  Operands are torch tensors by slot: x [M, K], w [N, K] ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any, Final

from gemmtuned.configs.launch import PLAIN, TURNED, Axis, Condition, KernelLaunch, quantity
from gemmtuned.configs.tensor_maps import byte_matrix, tensor_map

_DENSE: Final = tuple(Condition(f"{slot}.contiguous", "==", 1) for slot in ("x", "w", "bias"))
_OF_CALLS: Final = {
    "torch_mv": (Condition("x.size0", "==", 1),),
    "onednn": _DENSE,  # others take its reference code, right and 1000 times slower
    "onednn_packed": _DENSE,
}

Operands = Mapping[str, Any]  # slot: tensor, or None where the call has none


def checker(conditions: Iterable[Condition]) -> Callable[[Operands], bool]:
    """A function that says whether all conditions hold for operands."""
    tests = tuple(_test(condition) for condition in conditions)

    def check(operands: Operands) -> bool:
        for test in tests:  # noqa: SIM110  all() of a generator takes twice as long, and the worker times this
            if not test(operands):
                return False
        return True

    return check


def holds(conditions: Iterable[Condition], operands: Operands) -> bool:
    """Whether all conditions hold for these operands."""
    return checker(conditions)(operands)


def grid_of(grid: Iterable[Axis], operands: Operands) -> tuple[int, int, int]:
    """Programs along each axis of the grid; along the first one clusters, where there are any."""
    x, y, z = (ceil(value_of(axis.of, operands) / axis.block) if axis.of else axis.block for axis in grid)
    return x, y, z


def arguments_of(
    launch: KernelLaunch, operands: Operands, *, partials: Any = 0, counters: Any = 0,
    pointer: Callable[[Any], Any] = lambda operand: operand.data_ptr(),
) -> list[Any]:  # fmt: skip
    """The values of its arguments, in their order; of a map what it is made of (a ByteMatrix).

    pointer: what stands for an operand that is not None.
    """
    plain = {"partials": partials, "counters": counters, "null": 0}
    found = []
    for argument in launch.arguments:
        if argument in PLAIN:
            found.append(plain[argument])
            continue
        if mapped := tensor_map(argument):
            found.append(byte_matrix(operands[mapped.slot], mapped.rows, pointer))
            continue
        of = quantity(argument.removesuffix("?"))
        operand = operands.get(of.slot)
        if of.what == "ptr":
            found.append(None if operand is None else pointer(operand))
        else:
            found.append(value_of(argument, operands))
    return found


def of_operands(backend: str, *, but: str = "") -> tuple[Condition, ...]:
    """What torch's own calls want of operands, by the backend that makes them; but: an operand that is made to fit."""
    return tuple(c for c in _OF_CALLS.get(backend, ()) if quantity(c.of).slot != but)


def value_of(word: str, operands: Operands) -> int:
    """A quantity of an operand that is there."""
    slot, what, dim = quantity(word)
    operand = operands[TURNED.get(slot, slot)]
    if slot in TURNED and operand.dim() >= 2:
        operand = operand.mT
    if what in ("size", "stride"):
        return int(getattr(operand, what)(dim))
    if what == "ptr":
        return int(operand.data_ptr())
    return int(operand.is_contiguous() if what == "contiguous" else getattr(operand, what)())


def _test(condition: Condition) -> Callable[[Operands], bool]:
    slot, what, _ = quantity(condition.of)
    if (what, *condition[1:]) == ("contiguous", "==", 1) and slot not in TURNED:  # the worker times this one
        return lambda operands: (t := operands.get(slot)) is None or t.is_contiguous()
    return lambda operands: _holds(condition, operands)


def _holds(condition: Condition, operands: Operands) -> bool:
    slot, what, dim = quantity(condition.of)
    operand, wanted = operands.get(TURNED.get(slot, slot)), condition.value
    if operand is None:
        return True
    if what in ("size", "stride") and dim >= operand.dim():
        return False
    if what == "stride" and value_of(condition.of.replace("stride", "size"), operands) == 1:
        return True
    if isinstance(wanted, str):
        other = quantity(wanted)
        if operands.get(other.slot) is None:
            return True
        if other.dim >= operands[other.slot].dim():
            return False
        wanted = value_of(wanted, operands)
    value = value_of(condition.of, operands)
    if condition.op == "%":
        return value % wanted == 0
    return value == wanted if condition.op == "==" else value <= wanted if condition.op == "<=" else value >= wanted
