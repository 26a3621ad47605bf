"""What `gemmtuned tune` takes, and how its text is read. AITER's other spellings are in aiter_flags.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Final

import typer

from gemmtuned.commands import completing
from gemmtuned.commands.options import choice, number, threads_option, whole_number
from gemmtuned.configs.aiter_columns import DTYPE_NAMES
from gemmtuned.configs.numbers import whole
from gemmtuned.configs.problem import DTYPES, MAX_DIM
from gemmtuned.kernels import catalog
from gemmtuned.kernels.own_kernel import Parameter

# AITER's --libtype in our words; "all" and "both" restrict nothing, those without a backend of ours are named
_LIBRARIES: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("torch",), "triton": ("triton",), "hipblaslt": ("hipblaslt", "cublaslt"),
    "skinny": (), "asm": (), "ck": (), "cktile": (), "flydsl": (), "opus": (),
}  # fmt: skip
# The Triton guides' parameters in our kernels' words, and those that our kernels do not have
_PARAMETERS: Final = {
    "BLOCK_SIZE_M": "tokens", "BLOCK_SIZE_N": "rows", "BLOCK_SIZE_K": "block_k", "GROUP_SIZE_M": "group",
    "NUM_KSPLIT": "split", "num_warps": "warps", "num_stages": "stages",
}  # fmt: skip
_NO_PARAMETERS: Final = ("waves_per_eu", "kpack", "matrix_instr_nonkdim", "cache_modifier", "SPLITK_BLOCK_SIZE")


def dtype(text: str) -> str:
    """Our name of a dtype given as bf16, bfloat16, torch.bfloat16 or dtypes.bf16."""
    short = text.lower().removeprefix("torch.").removeprefix("dtypes.")
    if short == "fp8":  # AITER's word for the device's own of four formats
        raise typer.BadParameter(
            "fp8 is one of four formats, with scales: name the problem, such as "
            "scaled:fp8_e4m3>bf16:8x4096x7168,scale=row"
        )
    return choice(tuple(DTYPES))(DTYPE_NAMES.get(short, short))


def sizes(text: str) -> tuple[int, ...]:
    """`1,512,1024` as numbers."""
    parts = text.replace(",", " ").split()
    found = [number for number in map(whole, parts) if number is not None and 0 < number < 2**31]
    if not found or len(found) < len(parts):
        raise typer.BadParameter(f"{text!r} is not a list of sizes: write 1,512,1024")
    return tuple(found)


def libraries(texts: list[str], known: tuple[str, ...]) -> tuple[tuple[str, ...] | None, list[str]]:
    """(backends to try, None for all; a line for each name that has none here). Usage error for an unknown one.

    texts: each a name or several with commas, AITER's or our own (`known`).
    """
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not names or {"all", "both"} & set(names):
        return None, []
    wanted: list[str] = []
    said = []
    for name in names:
        found = (name,) if name in known else _LIBRARIES.get(name)
        if found is None:
            allowed = dict.fromkeys(("all", *_LIBRARIES, *known))
            raise typer.BadParameter(f"--libtype {name!r} is not one of {', '.join(allowed)}")
        here = [backend for backend in found if backend in known]
        if not here:
            said.append(f"--libtype {name}: no such backend in this version (there are {', '.join(known)})")
        wanted += here
    if not wanted:
        raise typer.BadParameter("; ".join(said))
    return tuple(dict.fromkeys(wanted)), said


def space(texts: list[str]) -> tuple[dict[str, tuple[int | str, ...]], list[str]]:
    """(`NAME=V,V` by our parameter names, a line for each parameter that our kernels do not have)."""
    found: dict[str, tuple[int | str, ...]] = {}
    said = []
    by_kernel = catalog.parameters() if texts else {}
    own = list(dict.fromkeys(["kernel", *(p.name for declared in by_kernel.values() for p in declared)]))
    for text in texts:
        name, equals, values = text.partition("=")
        ours = _PARAMETERS.get(name, name)
        if name in _NO_PARAMETERS:
            said.append(f"--space {name} has no effect: our kernels have no such parameter")
        elif ours not in own or not equals or not values:
            names = ", ".join((*_PARAMETERS, *own))
            raise typer.BadParameter(f"--space {text!r}: write NAME=VALUE[,VALUE...] with NAME one of {names}")
        else:
            found[ours] = tuple(_value(text, ours, value.strip()) for value in values.split(","))
            _check_values(text, ours, found[ours], by_kernel)
    return found, said


def _check_values(
    text: str, name: str, values: tuple[int | str, ...], by_kernel: dict[str, tuple[Parameter, ...]]
) -> None:
    """Usage error for a value that no kernel has."""
    if name == "kernel":
        known = [kernel.partition(".")[2] for kernel in by_kernel]
        wrong = [value for value in values if value not in known]
        expected = ", ".join(known)
    else:
        declared = {str(p): p for parameters in by_kernel.values() for p in parameters if p.name == name}
        wrong = [value for value in values if not any(p.allows(value) for p in declared.values())]
        expected = ", or ".join(declared)
    if wrong:
        raise typer.BadParameter(f"--space {text!r}: {name} {wrong[0]} is of no kernel, expected {expected}")


def _value(text: str, parameter: str, value: str) -> int | str:
    if parameter == "kernel" and value:
        return value
    number = whole(value)
    if number is None:
        raise typer.BadParameter(f"--space {text!r}: {value!r} is not a whole number")
    return number


def _readable(text: str) -> Path:
    """A file that can be read, or - for stdin, which typer 0.29 takes for the name of a file."""
    file = Path(text)
    if text == "-":
        return file
    try:
        is_folder = stat.S_ISDIR(file.stat().st_mode)
    except OSError as err:
        why = "does not exist" if isinstance(err, FileNotFoundError) else f"cannot be read ({err.strerror})"
        raise typer.BadParameter(f"file {text!r} {why}") from err
    if is_folder:
        raise typer.BadParameter(f"file {text!r} is a directory")
    if not os.access(file, os.R_OK):
        raise typer.BadParameter(f"file {text!r} is not readable")
    return file


Problems = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="M N K | PROBLEM",
        autocompletion=completing.problems,
        help="For example fp32:8x2048x1024,threads=2; a shape alone is the problems of that shape that were seen here, "
        "else one of --dtype.",
    ),
]
Input = Annotated[
    Path | None,
    typer.Option(
        "-i", "--input", parser=_readable, metavar="FILE",
        help="A problem a line, # begins a comment; or an AITER table (header M,N,K,...). - is stdin.",
    ),
]  # fmt: skip
ModelDir = Annotated[
    Path | None,
    typer.Option(
        "--model-dir", exists=True, readable=True, metavar="DIR",
        help="A Hugging Face model: the shapes follow from its config.json, and the report says how.",
    ),
]  # fmt: skip
Tp = Annotated[
    int, typer.Option("--tp", parser=whole_number(1), metavar="N", help="With --model-dir: tensor parallel ranks.")
]
Ep = Annotated[
    int,
    typer.Option(
        "--ep",
        parser=whole_number(1),
        metavar="N",
        help="With --model-dir: ranks that a mixture's experts are spread over, whole.",
    ),
]
VisionNsets = Annotated[
    str | None,
    typer.Option(
        "--vision-nsets", metavar="M,M,...", help="With --model-dir: values of M (patches) of a vision tower."
    ),
]
FromTransformers = Annotated[
    bool,
    typer.Option(
        "--from-transformers", help="With --model-dir: read the layers from transformers' own model, unfused."
    ),
]
Nsets = Annotated[
    str | None,
    typer.Option("--nsets", metavar="M,M,...", help="With --model-dir: values of M; default 1,512 ... 16384."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        parser=whole_number(1, MAX_DIM),
        metavar="N",
        help="With --model-dir: --nsets are times this. Built-in shapes: the only M.",
    ),
]
Unfused = Annotated[
    bool, typer.Option("--unfused", help="With --model-dir: q, k, v, gate and up apart, as transformers runs them.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", "--input-type", parser=dtype, metavar="NAME",
        help="Where nothing names one; default bf16, or the model's.",
    ),
]  # fmt: skip
OutDtype = Annotated[
    str | None,
    typer.Option("--out-dtype", parser=dtype, metavar="NAME", help="Data type of results, where nothing names one."),
]
AllBias = Annotated[bool, typer.Option("--all-bias", help="Each shape without and with a bias.")]
Threads = Annotated[
    int | None,
    threads_option(
        "CPU threads where nothing says; default: as many as torch takes, or 0 (the GPU) where there is one."
    ),
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and go on.")]
All = Annotated[bool, typer.Option("--all", help="Also what has a verdict already.")]

Libtype = Annotated[
    list[str] | None,
    typer.Option("--libtype", metavar="NAME[,NAME]", help="Try only these backends beside torch's own; default all."),
]
Space = Annotated[
    list[str] | None,
    typer.Option(
        "--space", "--search-space", metavar="NAME=V[,V]",
        help="Try only these values of a kernel's parameter, for example num_warps=4,8. May be repeated.",
    ),
]  # fmt: skip
Iters = Annotated[
    int | None,
    typer.Option(
        "--iters",
        parser=whole_number(1),
        metavar="N",
        help="Timed pairs of a deciding race, 6 to 2000; default: by time.",
    ),
]
Warmup = Annotated[int, typer.Option("--warmup", parser=whole_number(), metavar="N", help="Untimed calls before.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", parser=number(1), metavar="SECONDS", help="Seconds one candidate may take; default 120 and more."
    ),
]
ErrRatio = Annotated[
    float | None,
    typer.Option(
        "--err-ratio", "--errRatio", parser=number(0, 1), metavar="SHARE",
        help="Largest share of elements outside atol + rtol * |y|; on top of our own check, never instead.",
    ),
]  # fmt: skip
Atol = Annotated[
    float | None,
    typer.Option("--atol", parser=number(), metavar="X", help="Default 5e-2 for bf16 results, 1e-2 for others."),
]
Rtol = Annotated[
    float | None,
    typer.Option("--rtol", parser=number(), metavar="X", help="The same. Given without --err-ratio, that is 0."),
]
MinImprovement = Annotated[
    float | None,
    typer.Option(
        "--min-improvement-pct", parser=number(), metavar="PERCENT", help="Gain that a solution must exceed; default 2."
    ),
]
Mp = Annotated[
    int | None, typer.Option("--mp", parser=whole_number(1), metavar="N", help="Devices to use at most; default all.")
]

Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", dir_okay=False, metavar="CSV", help="AITER's tuned table, written after each shape."
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "-o2", "--profile-file", dir_okay=False, metavar="CSV", help="Every candidate with its time and error."
    ),
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort the tuned table by device, N, M, K.")]
RunConfig = Annotated[
    str | None,
    typer.Option(
        "--run-config", metavar="[CSV]",
        help="Tune nothing: check and time what a tuned table, or what is published, says for these shapes.",
    ),
]  # fmt: skip
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log every candidate.")]
Idle = Annotated[bool, typer.Option("--idle", help="Wait for an idle device, as the daemon does.")]
