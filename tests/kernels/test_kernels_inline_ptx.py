"""Operands of inline PTX have names where we write it, and numbers where LLVM reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from gemmtuned.kernels.triton import inline_ptx, source
from gemmtuned.kernels.triton.inline_ptx import moves

FOLDER = Path(source.__file__).parent
ROOT = Path(__file__).parents[2]
NUMBERED = r"""\$ \{? \d  |  ["',] =?&? [frl] ,"""  # $8, ${8 + i}; "=r,r", "f,f"


def test_names_become_numbers_in_the_order_of_the_operands() -> None:
    text, texts, constraints = inline_ptx.inline_ptx(
        "=&f new<2>, r w_even<3>, l pointer", "a $new1, $w_even0, [$pointer + 4];", {4: "b $w_even2;", 8: "c;"}
    )

    assert text.value == "a $1, $2, [$5 + 4];"
    assert texts.value == {4: "b $4;", 8: "c;"}
    assert constraints.value == "=&f,=&f,r,r,r,l"


def test_registers_that_hold_nothing_are_given_a_value() -> None:
    assert moves("none", range(1, 3), "0") == "mov.u32 $none1, 0; mov.u32 $none2, 0;"
    assert moves("sum", [0], "$sum1", "f32") == "mov.f32 $sum0, $sum1;"


@pytest.mark.parametrize(
    ("operands", "text", "reason"),
    [
        ("=r to, r from", "mov $to, $form;", r"PTX has \$form, expected one of its operands: to, from"),
        ("=r to<2>", "mov $to, 0;", r"PTX has \$to, expected one of its operands: to0, to1"),
        ("=r to", "mov $0, 0;", r"PTX has \$0, expected"),
        ("=r to", "mov ${to}, 0;", r"PTX has \$, expected"),
        ("=r,r", "", "'=r,r' is no operand of PTX"),
        ("=x to", "", "'=x to' is no operand of PTX: expected such as"),
        ("=r to, r to", "", "two operands have the same name"),
        ("=r to1, r to<2>", "", "two operands have the same name"),
    ],
)
def test_what_is_no_operand_is_refused(operands: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        inline_ptx.inline_ptx(operands, text)


def with_inline_ptx() -> list[Path]:
    """All our kernels, and what has PTX of its own elsewhere."""
    others = (
        path for folder in ("benchmarks", "lab", "docs", "tests/support") for path in (ROOT / folder).rglob("*.py")
    )
    return [*sorted(FOLDER.glob("*.py")), *sorted(path for path in others if "inline_asm_" in path.read_text())]


@pytest.mark.parametrize("path", with_inline_ptx(), ids=lambda path: path.stem)
def test_no_operand_is_a_number_where_we_write_ptx(path: Path) -> None:
    found = re.search(NUMBERED, path.read_text(), re.VERBOSE)

    assert not found, f"{path.name}: {found and found[0]} is a number, or constraints without names: see inline_ptx.py"
