"""The packed key of a problem: what the native hook looks calls up by, from one table for C++ and for Python.

`python -m gemmtuned.configs.key` writes the C++ half, hooks/native/problem.gen.h; hooks/native/records.py makes the
Python half of the same table.  A test fails where the file is not what this writes.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import CHAIN_M, DTYPES, FAMILIES, LAYOUTS, MATH_MODES, SCALE_LAYOUTS, SCALES, Problem
from gemmtuned.configs.tunable import MOE_ACTS
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

MAX_BYTES: Final = 48
DEVICE_TYPES: Final = ("cpu", "cuda")  # at the number that the key has for each
FLAGS: Final = {"BIAS": 1, "DETERMINISTIC": 2, "GRAPH": 4, "PACKED": 8, "SHUFFLED": 16, "BATCH_INVARIANT": 32}
ACTS: Final = (
    "", *(f"{name}{gated}{weighted}" for name in ("silu", "gelu", "relu", "swiglu") for gated in ("", "_gated")
          for weighted in ("", "_weighted")),
    *(act for act in MOE_ACTS if "_interleaved" in act),
)  # fmt: skip
PACKINGS: Final = ("", "16x16", "marlin", "humming", "opaque")  # opaque: known to an engine's operator alone
OTHERS_FROM: Final = 128  # codes of other packages' families, in the order in which a process meets them
_others: Final[list[str]] = []
_new_family = FrameLock()
_NAMES: Final = {number: name for name, number in DTYPES.items()}


class Field:
    """A member of the key. size: bytes of an unsigned integer; times: how many, for room that is not used yet."""

    __slots__ = ("name", "size", "times")

    def __init__(self, name: str, size: int, times: int = 1) -> None:
        self.name, self.size, self.times = name, size, times


FIELDS: Final = (  # widest first, so that there are no gaps
    Field("m", 4), Field("n", 4), Field("k", 4), Field("batch", 4), Field("inter", 4),
    Field("experts", 2), Field("threads", 2),
    Field("family", 1), Field("dtype", 1), Field("wdtype", 1), Field("out_dtype", 1),
    Field("layout", 1), Field("math", 1), Field("flags", 1), Field("covers", 1),
    Field("device_type", 1), Field("device_index", 1),
    Field("scale", 1), Field("wscale", 1), Field("scale_dtype", 1), Field("wscale_dtype", 1),
    Field("scale_layout", 1), Field("wscale_layout", 1),
    Field("topk", 1), Field("act", 1), Field("packing", 1), Field("spare", 1, 5),
)  # fmt: skip
_ENUMS: Final[dict[str, tuple[str, ...]]] = {  # C++ names, in the order of the lists of configs/problem.py
    "Family": ("DENSE", "BATCHED", "DENSE_ADD", "BATCHED_ADD", "SCALED", "GROUPED", "MOE", "WEIGHT_ONLY"),
    "Math": ("IEEE", "TF32", "BF16_INSIDE", "REDUCED"),
    "Covers": ("EXACT", "FINE", "COARSE"),
    "Scale": (
        "UNSCALED", "PER_TENSOR", "PER_ROW", "BY_1X32", "BY_1X128", "BY_128X128", "BY_1X16", "BY_1X16_TWICE",
        "BY_1X64", "PER_TENSOR_WITH_ZERO", "PER_ROW_WITH_ZERO",
    ),
    "ScaleLayout": (
        "SCALES_BY_ROW", "SCALES_BY_COL", "SCALES_BY_ROW_PADDED", "SCALES_BY_COL_PADDED", "SCALES_SWIZZLED",
        "SCALES_OTHERWISE",
    ),
}  # fmt: skip
_LISTS: Final = {
    "Family": FAMILIES, "Math": MATH_MODES, "Covers": COVERS, "Scale": SCALES, "ScaleLayout": SCALE_LAYOUTS,
}  # fmt: skip


def family_code(family: str) -> int:
    """The code of a family in the keys of this process. Raises ProblemError where there is no room for one more."""
    if family in FAMILIES:
        return FAMILIES.index(family)
    if family not in _others:
        with _new_family:
            if family not in _others:
                if OTHERS_FROM + len(_others) > 255:
                    raise ProblemError(f"family {family}: a process knows {len(_others)} of other packages at most")
                _others.append(family)
    return OTHERS_FROM + _others.index(family)


def after_fork() -> None:
    """In a forked child: whoever held the lock is not here."""
    global _new_family
    _new_family = FrameLock()


def _family_of(code: int) -> str:
    return FAMILIES[code] if code < OTHERS_FROM else _others[code - OTHERS_FROM]


def values_of(problem: Problem, *, covers: str = "exact", graph: bool = False, place: str = "cpu") -> dict[str, int]:
    """The members of a problem's key by name. Raises ProblemError for what it cannot hold."""
    kind, _, index = place.partition(":")
    flags = {
        "BIAS": problem.bias, "DETERMINISTIC": problem.deterministic, "GRAPH": graph,
        "PACKED": problem.weight_state == "packed", "SHUFFLED": problem.weight_state == "shuffled",
        "BATCH_INVARIANT": problem.batch_invariant,
    }  # fmt: skip
    try:
        values = {
            "m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch, "inter": problem.inter or 0,
            "experts": problem.experts or 0, "threads": problem.threads, "family": family_code(problem.family),
            "dtype": DTYPES[problem.dtype], "wdtype": DTYPES[problem.wdtype], "out_dtype": DTYPES[problem.out_dtype],
            "layout": LAYOUTS.index(problem.layout), "math": MATH_MODES.index(problem.math_mode),
            "flags": sum(FLAGS[name] for name, on in flags.items() if on), "covers": COVERS.index(covers),
            "device_type": DEVICE_TYPES.index(kind), "device_index": int(index or 0),
            "scale": SCALES.index(problem.scale), "wscale": SCALES.index(problem.wscale),
            "scale_dtype": DTYPES[problem.scale_dtype], "wscale_dtype": DTYPES[problem.wscale_dtype],
            "scale_layout": SCALE_LAYOUTS.index(problem.scale_layout),
            "wscale_layout": SCALE_LAYOUTS.index(problem.wscale_layout),
            "topk": problem.topk or 0, "act": ACTS.index(problem.act or ""), "packing": PACKINGS.index(problem.packing),
        }  # fmt: skip
    except ValueError as err:
        raise ProblemError(f"{problem}: {err}, the native table cannot hold it") from err
    for side in ("", "w"):  # an operand without scales has no dtype of them
        if not values[f"{side}scale"]:
            values[f"{side}scale_dtype"] = 0
    for field in FIELDS:
        if values.get(field.name, 0) >= 1 << 8 * field.size:
            raise ProblemError(f"{problem}: {field.name} is {values[field.name]}, too large for the native table")
    return values


def problem_of(values: dict[str, int]) -> Problem:
    """The problem of a key's members. Raises ProblemError for a code that we have no name for."""
    flags = values["flags"]
    try:
        return Problem(
            family=_family_of(values["family"]), batch=values["batch"], m=values["m"], n=values["n"], k=values["k"],
            bias=bool(flags & FLAGS["BIAS"]), dtype=_NAMES[values["dtype"]], wdtype=_NAMES[values["wdtype"]],
            out_dtype=_NAMES[values["out_dtype"]], scale=SCALES[values["scale"]], wscale=SCALES[values["wscale"]],
            scale_dtype=_NAMES[values["scale_dtype"]] if values["scale"] else "",
            wscale_dtype=_NAMES[values["wscale_dtype"]] if values["wscale"] else "",
            scale_layout=SCALE_LAYOUTS[values["scale_layout"]], wscale_layout=SCALE_LAYOUTS[values["wscale_layout"]],
            layout=LAYOUTS[values["layout"]],
            weight_state="packed" if flags & FLAGS["PACKED"] else "shuffled" if flags & FLAGS["SHUFFLED"] else "plain",
            packing=PACKINGS[values["packing"]], math_mode=MATH_MODES[values["math"]],
            deterministic=bool(flags & FLAGS["DETERMINISTIC"]),
            batch_invariant=bool(flags & FLAGS["BATCH_INVARIANT"]), threads=values["threads"],
            experts=values["experts"] or None, topk=values["topk"] or None, inter=values["inter"] or None,
            act=ACTS[values["act"]] or None,
        )  # fmt: skip
    except (KeyError, IndexError) as err:
        raise ProblemError(f"a key of the native hook has the code {err}, which has no name here") from err


def header() -> str:
    """The C++ half: enumerations, and the members of struct Problem."""
    lines = [
        "// Written by `python -m gemmtuned.configs.key`; the table is there. Do not edit.",
        "#pragma once",
        "#include <cstdint>",
        "",
        "namespace gemmtuned {",
        "",
    ]
    for name, constants in _ENUMS.items():
        assert len(constants) == len(_LISTS[name]), f"{name} has other members than its list in configs/problem.py"
        lines.append(f"enum {name} : uint8_t {{ {', '.join(constants)} }};")
    lines.append(f"constexpr uint32_t kChainM = {CHAIN_M};  // m of a batch-invariant problem, whatever was called")
    lines.append(f"constexpr uint8_t kOpaque = {PACKINGS.index('opaque')};  // packing")
    lines.append(f"enum Flag : uint8_t {{ {', '.join(f'{name} = {bit}' for name, bit in FLAGS.items())} }};")
    lines += ["", "struct ProblemFields {"]
    for field in FIELDS:
        room = f"[{field.times}]" if field.times > 1 else ""
        lines.append(f"  uint{8 * field.size}_t {field.name}{room};")
    size = sum(field.size * field.times for field in FIELDS)
    assert size <= MAX_BYTES and size % 8 == 0, "the key is hashed by words of 8 bytes"
    lines += ["};", f'static_assert(sizeof(ProblemFields) == {size}, "the key has no hidden padding");', ""]
    names = ", ".join(f"GEMMTUNED_FIELD(ProblemFields, {field.name})" for field in FIELDS)
    lines += [f"#define GEMMTUNED_PROBLEM_FIELDS {names}", "", "}  // namespace gemmtuned"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    there = Path(__file__).resolve().parents[1] / "hooks/native/problem.gen.h"
    there.write_text(header(), encoding="utf-8")
    sys.stdout.write(f"{there}\n")
