"""Patches of Python code of other projects, through which products pass that no dispatcher sees as one call.

Each is known by a name, off unless `gemmtuned.patch(name)` or GEMMTUNED_PATCH asks for it, and can be taken back.  One
that does not know the version of what it finds leaves it alone and says so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Final, Protocol, cast

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.hooks import followers
from gemmtuned.hooks.imports import importing

log = logging.getLogger("gemmtuned")
PATCHES: Final = {  # name -> (the module that is patched, ours that does it)
    "deep_gemm": ("deep_gemm", "gemmtuned.kernels.from_deep_gemm"),
    "flashinfer": ("flashinfer.gemm", "gemmtuned.kernels.from_flashinfer"),
    "transformers.moe": ("transformers.integrations.moe", "gemmtuned.ops.transformers_moe"),
    "transformers.fp8_moe": ("transformers.integrations.finegrained_fp8", "gemmtuned.ops.transformers_fp8_moe"),
}


class Patch(Protocol):
    """What the module that does it has."""

    def is_ready(self, module: ModuleType) -> bool:
        """Whether the module has been imported to its end."""

    def apply(self, module: ModuleType) -> Callable[[], None]:
        """Patch it; the result takes that back. Raises GemmtunedError for a version that it does not know."""


def patch(name: str) -> Callable[[], None]:
    """As gemmtuned.patch."""
    target, ours = _of(name)
    try:
        module = import_module(target)
    except ImportError as err:
        raise GemmtunedError(f"{name} cannot be patched: {target} does not import ({err})") from err
    return cast(Patch, import_module(ours)).apply(module)


def follow(names: Iterable[str]) -> None:
    """Have each patched as soon as the program has imported what it is of; nothing is imported for it before."""
    for name in dict.fromkeys(names):
        try:
            followers.each_tick.append(_Waiting(name, *_of(name)))
        except GemmtunedError as err:  # noqa: PERF203  one is left out, the others are not
            tell(log, logging.WARNING, "GEMMTUNED_PATCH: %s", err)


class _Waiting:
    """A patch whose module the program has not imported yet; called by the hook's thread, True once it is done."""

    def __init__(self, name: str, target: str, ours: str) -> None:
        self._name, self._target, self._ours = name, target, ours

    def __call__(self) -> bool:
        module = sys.modules.get(self._target)
        if module is None:
            return False
        try:
            with importing():
                ours = cast(Patch, import_module(self._ours))
            if not ours.is_ready(module):
                return False
            ours.apply(module)
        except Exception as err:  # a version that nobody has seen: the program goes on without
            tell(log, logging.WARNING, "GEMMTUNED_PATCH: %s is left alone: %s", self._name, err)
        return True


def _of(name: str) -> tuple[str, str]:
    if not isinstance(name, str) or name not in PATCHES:
        raise GemmtunedError(f"there is no patch {repr(name)[:80]}, there are: {', '.join(PATCHES)}")
    return PATCHES[name]
