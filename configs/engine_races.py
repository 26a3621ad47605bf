"""Beside which kernels of serving engines a solution was raced, and so in whose place it may run.

A solution has beaten torch's own product.  An engine's operator for the same problem runs the engine's kernel, which
may be the faster one; so a call of it is served only where that kernel was in the race and lost.  A solution says so
by a text, JSON that is empty where no engine's kernel was there:

    {"vllm_cutlass": ["0.32.0", 1.13], "vllm_deep_gemm": ["0.32.0", null]}

By backend: the version of its package, and the lower bound of how many times as long its kernel takes as the solution,
the smallest over all sizes that were raced; null where it does not run the problem.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from gemmtuned.configs.value_class import value_class

FASTER: Final = 1.02  # by which an engine's kernel must lose: what is less is a tie, and the engine's own goes on
MAX_TEXT: Final = 2048
MOST_ENGINES: Final = 15  # operators: kMostEngines of hooks/native/routes.h
FIRST_OF_GOOD: Final = 16  # the bit from which those stand in its Engines whose own kernel is as good
FAMILY: Final = "scaled"  # the family of all problems that these operators compute
_LONGEST: Final = 200  # name of a backend, version of a package
_NAME: Final = re.compile(rf"[\w.:+-]{{1,{_LONGEST}}}", re.ASCII)
_NUMBERS: Final = re.compile(r"\d{1,99}(?:\.\d{1,99})*", re.ASCII)
_LEAST: Final = 0.001  # what a text has in place of less


@value_class
class Engine:
    """Whose kernel an operator runs. packages: names that its distribution has had; backends: ours that race it."""

    packages: tuple[str, ...]
    backends: tuple[str, ...]


_VLLM: Final = ("vllm",)
_SGLANG: Final = ("sglang-kernel", "sgl-kernel")
ENGINES: Final[dict[str, Engine]] = {  # in this order they have numbers, from 1
    "_C::cutlass_scaled_mm": Engine(_VLLM, ("vllm_cutlass", "vllm_cutlass_blocks")),
    "_C::cutlass_scaled_mm_azp": Engine(_VLLM, ("vllm_cutlass_zero", "vllm_cutlass_zero_tensor")),
    "vllm::fp8_gemm_nt_op": Engine(_VLLM, ("vllm_deep_gemm",)),
    "sgl_kernel::fp8_scaled_mm": Engine(_SGLANG, ("sglang_fp8",)),
    "sgl_kernel::int8_scaled_mm": Engine(_SGLANG, ("sglang_int8",)),
    "sgl_kernel::fp8_blockwise_scaled_mm": Engine(_SGLANG, ("sglang_blocks",)),
    "vllm::w8a8_triton_block_scaled_mm_func": Engine(_VLLM, ("vllm_triton_blocks",)),
}
OPERATORS: Final = tuple(ENGINES)
OPERANDS: Final = "operands"  # among operators that a solution may not serve: calls with operands that it does not take
BACKENDS: Final = frozenset(name for engine in ENGINES.values() for name in engine.backends)
Peers = Mapping[str, "Peer"]  # by backend


class Peer(NamedTuple):
    """An engine's kernel in a race. version: of its package.  low: as the module says; None: it does not run this."""

    version: str
    low: float | None


def text_of(peers: Peers) -> str:
    """Canonical JSON; "" for none."""
    lows = {name: None if p.low is None else max(round(p.low, 3), _LEAST) for name, p in peers.items()}
    found = {name: [p.version, lows[name]] for name, p in sorted(peers.items())}
    return json.dumps(found, separators=(",", ":")) if found else ""


def peers_of(text: str) -> dict[str, Peer]:
    """What such a text says; what is no such thing is left out, as if it had not been raced."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    peers = {}
    for name, entry in found.items() if isinstance(found, dict) else ():
        if not (isinstance(entry, list) and len(entry) == 2 and _NAME.fullmatch(name) and _is_version(entry[0])):
            continue
        low = entry[1]
        is_number = isinstance(low, int | float) and not isinstance(low, bool)
        if low is None or (is_number and 0 < low <= sys.float_info.max):  # also of whole numbers too large for a float
            peers[name] = Peer(entry[0], low)
    return peers


def checked(text: object) -> str:
    """The text in canonical form, as far as it can be read: others' tables may hold anything."""
    found = text_of(peers_of(text)) if isinstance(text, str) and len(text) <= MAX_TEXT else ""
    return found if len(found) <= MAX_TEXT else ""  # letters beyond ASCII have become longer


class Standing(NamedTuple):
    """How a solution's race with the kernel of an engine's operator ended: whether there was one, and who won."""

    raced: bool
    won: bool
    why: str  # for people; "" where it won


def standing(operator: str, backend: str, beside: str, version: str | None) -> Standing:
    """Whether a solution by `backend` may run in the place of an engine's operator.

    beside: of the solution.  version: of the operator's package in the program, None where it has none of the
    packages.  The version that was raced counts, and newer ones until the daemon has raced those; older ones do not.
    """
    engine = ENGINES[operator]
    if backend in engine.backends:
        return Standing(raced=True, won=False, why="the engine's own kernel is the best")
    peers = peers_of(beside)
    found = [peers[name] for name in engine.backends if name in peers]
    raced = [peer for peer in found if peer.low is not None]
    if not raced:
        why = "does not run it where it was tuned" if found else "was not in the race"
        return Standing(raced=False, won=False, why=f"the kernel of {operator} {why}")
    if version is None:
        return Standing(raced=False, won=False, why=f"{operator} is of another package than {engine.packages[0]}")
    if any(_is_older(version, peer.version) for peer in raced):
        newest = max((peer.version for peer in raced), key=_numbers)
        return Standing(
            raced=False, won=False, why=f"the kernel of {newest} was raced, here is {version}, an older one"
        )
    low = min(peer.low for peer in raced if peer.low is not None)
    if low < FASTER:
        return Standing(raced=True, won=False, why=f"the engine's own kernel is as good ({low:.2f}x its time at least)")
    return Standing(raced=True, won=True, why="")


def is_outdated(beside: str, versions: Mapping[str, str]) -> bool:
    """Whether a solution was raced with an older kernel than one of these. versions: by backend."""
    return any(
        peer.low is not None and _is_older(peer.version, versions[name])
        for name, peer in peers_of(beside).items()
        if name in versions
    )


def installed() -> dict[str, str]:
    """The version of its package by backend, for the engines that are installed here; imports nothing of them."""
    from importlib.metadata import version

    found: dict[tuple[str, ...], str] = {}  # a question reads the folders of sys.path: one a package
    for packages in {engine.packages for engine in ENGINES.values()}:
        for package in packages:
            with suppress(Exception):  # not there, or its metadata cannot be read; it may also say no version
                found[packages] = str(version(package) or "")
                break
    return {
        name: found[engine.packages]
        for engine in ENGINES.values()
        if engine.packages in found
        for name in engine.backends
    }


def shown(beside: str) -> str:
    """The text for people: `vllm_cutlass 0.32.0 (1.13x)`; "" where no engine's kernel was raced."""
    return ", ".join(
        f"{name} {peer.version} ({f'{peer.low:.2f}x' if peer.low is not None else 'does not run it'})"
        for name, peer in peers_of(beside).items()
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers in front of a version: (0, 32, 1) of `0.32.1rc2+cu129`."""
    found = _NUMBERS.match(version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _is_version(text: object) -> bool:
    """Whether it is one that can be shown; others' tables may hold anything."""
    return isinstance(text, str) and len(text) <= _LONGEST and text.isprintable()


def _is_older(version: str, than: str) -> bool:
    ours, theirs = _numbers(version), _numbers(than)
    size = max(len(ours), len(theirs))
    return ours + (0,) * (size - len(ours)) < theirs + (0,) * (size - len(theirs))
