"""PTX written inline, with names for its operands instead of the numbers that LLVM has for them.

    _SUM, _SUM_OPERANDS = inline_ptx("=f sum, f value<2>", "add.f32 $sum, $value0, $value1;")
    ...
    tl.inline_asm_elementwise(_SUM, _SUM_OPERANDS, [values], dtype=tl.float32, is_pure=True, pack=2)

Operands stand in the order of LLVM's numbers: results first, then the arguments' registers, as many of each as `pack`
says (values of 16 bits share a register in pairs).  `value<2>` is $value0 and $value1, as PTX itself writes it.  Before
a name stands what LLVM calls its constraint: `f` a register of fp32, `r` and `l` of 32 and 64 bits; with `=` a result,
with `=&` one that is written before all arguments have been read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import triton.language as tl

_OPERAND = re.compile(r"(=&|=|)([frl]) ([a-z]\w*?)(?:<(\d+)>)?")


def inline_ptx(operands: str, *ptx: str | Mapping[int, str]) -> tuple[Any, ...]:
    """Constants of Triton's: each PTX with LLVM's numbers, or several by a key, and last the constraints.

    Raises ValueError for operands that are not written as above, and for PTX that has a number, or names none of them.
    """
    names: list[str] = []
    constraints: list[str] = []
    for operand in operands.split(", "):
        found = _OPERAND.fullmatch(operand)
        if found is None:
            raise ValueError(f"{operand!r} is no operand of PTX: expected such as '=&f sum<8>' or 'r address'")
        kind, letter, name, count = found.groups()
        names += [name] if count is None else [f"{name}{i}" for i in range(int(count))]
        constraints += [kind + letter] * (len(names) - len(constraints))
    if len({*names}) < len(names):
        raise ValueError(f"{operands}: two operands have the same name")
    numbered: list[Any] = [
        _numbered(one, names) if isinstance(one, str) else {key: _numbered(text, names) for key, text in one.items()}
        for one in ptx
    ]
    return (*map(tl.constexpr, numbered), tl.constexpr(",".join(constraints)))


def _numbered(text: str, names: list[str]) -> str:
    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            raise ValueError(f"PTX has ${found[1]}, expected one of its operands: {', '.join(names)}")
        return f"${names.index(found[1])}"

    return re.sub(r"\$(\w*)", number, text)


def moves(name: str, numbers: Iterable[int], value: str, kind: str = "u32") -> str:
    """PTX that puts a value into some of the registers `name`: an instruction must give all of its results."""
    return " ".join(f"mov.{kind} ${name}{i}, {value};" for i in numbers)
