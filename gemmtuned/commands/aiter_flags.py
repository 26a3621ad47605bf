"""AITER's flags on our command line: its spellings, and what becomes of those that have no meaning here.

gradlib and the CK tuners spell long flags with underscores and capitals; ours have dashes and small letters.  Both are
taken.  A flag whose work is always done here, or is no matter of ours, is taken too and answered with a line.
"""

from __future__ import annotations

import re
from typing import Any, Final

import typer

from gemmtuned.commands.options import ShapeCommand

# After underscores have become dashes. Sources: AITER's base_tuner, gradlib, the tuners under csrc, the Triton scripts
_OURS: Final = {
    "--untune-file": "--input", "--input-file": "--input",
    "--tune-file": "--output", "--tuned-file": "--output",
    "--errRatio": "--err-ratio",
    "--input-type": "--dtype", "--indtype": "--dtype", "--outdtype": "--out-dtype",
    "--num-iters": "--iters",
}  # fmt: skip
_ONE_DEVICE: Final = "all candidates of a shape are timed on one device, side by side"
_NOT_OURS: Final = "it belongs to AITER's own kernels"
# flag -> (how many values follow, why it has no effect)
NO_EFFECT: Final[dict[str, tuple[int, str]]] = {
    "--batch": (1, "every shape is stored and published as soon as it is done"),
    "--shape-grouped": (0, _ONE_DEVICE),
    "--splitK": (0, "split-K kernels are always among the candidates"),
    "-k": (0, "split-K kernels are always among the candidates"),
    "--compare": (0, "torch's own is always raced in the same run; the table shows both"),
    "--update-improved": (0, "what does not win is never published"),
    "--last": (0, "what has a verdict already is never tuned twice; --all does"),
    "--with-hipblaslt": (0, _NOT_OURS),
    "--preshuffle": (0, _NOT_OURS),
    "--blockPerCu": (1, _NOT_OURS),
    "--grouped-gemm": (0, _NOT_OURS),
    "--mxfp4-flydsl": (0, _NOT_OURS),
}
_LONG: Final = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*")
META: Final = "gemmtuned.aiter_flags"


def translate(args: list[str]) -> tuple[list[str], list[str]]:
    """(arguments in our spelling, a line for each flag that has no effect). A usage error where a value is missing."""
    found: list[str] = []
    said: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            found += [arg, *rest]
            break
        flag, equals, value = arg.partition("=")
        given = flag
        if _LONG.fullmatch(flag):
            flag = flag.replace("_", "-")
            flag = _OURS.get(flag, flag)
        elif flag not in NO_EFFECT:
            found.append(arg)
            continue
        if flag in NO_EFFECT:
            values, why = NO_EFFECT[flag]
            if values and not equals:
                if not rest or not rest[0].isdigit():  # else it would take the next flag for its value
                    raise typer.BadParameter(f"{given} needs a number")
                rest.pop(0)
            said.append(f"{given} has no effect: {why}")
        elif flag == "--run-config" and not equals:  # argparse takes its file or leaves it
            has_file = bool(rest) and rest[0].endswith(".csv")
            found.append(f"{flag}={rest.pop(0) if has_file else ''}")
        else:
            found.append(flag + equals + value)
    return found, said


class AiterCommand(ShapeCommand):
    """A command that takes AITER's flags; what `translate` said lies in the context's meta under META."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, after translation."""
        args, ctx.meta[META] = translate(args)
        return super().parse_args(ctx, args)
