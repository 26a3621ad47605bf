"""Whose kernel serves an operator: torch's own, ours or somebody else's.

Engines put batch-invariant kernels in torch's place, libraries faster ones, users what they like.  Where that is there
before us we leave the operator alone; where it comes later it goes on top of ours, as they meant it.  Either way their
calls are neither counted nor routed, which is reported.  What torch itself says of its dispatcher is all that is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

OURS: Final = "gemmtuned/hooks/native/c_api.cpp"  # GEMMTUNED_REGISTERED of c_api.cpp
_ROUTER: Final = (
    "/torch/_native/"  # since 2.12: torch's own choice of a kernel, which calls ours for all it does not take
)
_TORCHS: Final = "/ATen/Register"  # files that are generated when torch is built, wherever that was: RegisterCPU_0.cpp


def registered_at(operator: str) -> str:
    """Where the kernel comes from that calls of it reach, "file:line"; "" where there is none.

    operator: as the native hook names it, "CPU aten::mm.out".
    """
    import torch

    key, _, name = operator.partition(" ")
    try:
        dump = torch._C._dispatch_dump(name)
    except RuntimeError:  # this torch has no such operator
        return ""
    for line in dump.splitlines():  # what is beneath another is called "CPU (inactive)"
        at, _, rest = line.partition(": registered at ")
        if at == key:
            return rest.partition(" :: ")[0]
    return ""


def is_there(operator: str) -> bool:
    """Whether the program has `namespace::name` or `namespace::name.overload`, at a microsecond."""
    import torch

    return torch._C._dispatch_has_kernel(operator)


def schema_of(operator: str) -> Any:
    """Torch's schema of `namespace::name` or `namespace::name.overload`; None while the program has none such."""
    import torch

    name, _, overload = operator.partition(".")
    try:
        if not is_there(operator):  # an exception that is not raised is 100 us
            return None
        return torch._C._get_schema(name, overload)
    except RuntimeError:
        return None


def is_torchs(registered: str) -> bool:
    """Whether what `registered_at` gave is torch's own kernel, and no other in its stead."""
    path, _, line = registered.replace("\\", "/").rpartition(".cpp:")
    _, begins, name = path.rpartition(_TORCHS)
    return bool(begins) and name.replace("_", "").isalnum() and line.isdecimal()


class Watch:
    """Tells of kernels that went on top of ours, since it was made, for these operators."""

    def __init__(self, operators: Iterable[str]) -> None:
        self._of_aten = self._operators = tuple(operators)
        self._known = self._impls()
        self._over: dict[str, str] = {}

    def add(self, operator: str) -> None:
        """Tell of this one as well."""
        self._of_aten = (*self._of_aten, operator)
        self._operators = (*self._operators, operator)

    def others(self, operators: Iterable[str]) -> None:
        """Tell of these as well, engines' own that we stand before now; another list takes the place of the last."""
        now = (*self._of_aten, *operators)
        if now != self._operators:
            self._operators, self._known = now, frozenset()

    def look(self, *, anew: bool = False) -> dict[str, str]:
        """Operator -> where the kernel on top of ours was registered.

        Looks only where torch.library has noted a change, unless `anew`: then what C++ registered shows, too.
        """
        known = self._impls()
        if anew or known != self._known:
            self._known = known
            registered_now = {operator: registered_at(operator) for operator in self._operators}
            self._over = {
                o: registered
                for o, registered in registered_now.items()
                if registered and not registered.startswith(OURS) and _ROUTER not in registered
            }
        return self._over

    def _impls(self) -> frozenset[str]:
        """What Python has registered for these operators, as torch.library keeps it: "aten/mm/CPU"."""
        import torch

        impls = getattr(torch.library, "_impls", ())
        parts = (operator.partition(" ") for operator in self._operators)
        return frozenset(f"{name.replace('::', '/')}/{key}" for key, _, name in parts).intersection(impls)
