"""One process of a serving engine: the label that it counts under, its part in the engine, and one line in its log."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.settings import is_given
from gemmtuned.hooks import activate, ranks
from gemmtuned.hooks.hook import label
from gemmtuned.hooks.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

READY_S: Final = 10.0  # how long an engine's start waits for the table
EVERY: Final = 128  # steps of a model between two looks of several ranks for a table


def join(run: str, role: str) -> bool:
    """Count under this label from now on, unless the user gave one (GEMMTUNED_RUN). False when the hook is off.

    role: what the process does for the engine, such as `worker`.
    """
    hook = activate.current()
    if hook is None:
        return False
    label(hook, "" if is_given("GEMMTUNED_RUN") else run, role)
    return True


def label_of(engine: str, model: str, split: int) -> str:
    """`vllm:<name that the model is served under>`, and how it is split: one rank's products have other sizes."""
    return f"{engine}:{model}" + (f" tp{split}" if split > 1 else "")


def group_of(package: str, split: int) -> Any:
    """The group of the ranks that share the layers of one model; None where there is one rank."""
    if split <= 1:
        return None
    return import_module(f"{package}.distributed.parallel_state").get_tp_group().cpu_group


def that_agrees(group: torch.distributed.ProcessGroup | None, log: logging.Logger) -> Any:
    """The group, if all its ranks change tables together; None for one rank, and where a rank does otherwise.

    A rank without the plugin, with another version of it or another GEMMTUNED_RELOAD takes no part in our collectives,
    and the others would wait for it for minutes.
    """
    if not ranks.is_shared(group):
        return None
    hook = activate.current()
    asked = hook.settings.reload if hook is not None and is_given("GEMMTUNED_RELOAD") else ""
    if ranks.all_agree(group, f"{sys.modules['gemmtuned'].__version__} every {EVERY} steps {asked}"):
        return group
    log.warning(
        "gemmtuned: not all ranks have the plugin in one version and with one GEMMTUNED_RELOAD: "
        "each takes the table that is there when it starts, and no later one"
    )
    return None


def together(group: torch.distributed.ProcessGroup | None) -> ranks.Together | None:
    """What changes tables on all ranks at one step; None for one rank, and where GEMMTUNED_RELOAD says when."""
    if not ranks.is_shared(group) or is_given("GEMMTUNED_RELOAD"):
        return None
    return ranks.Together(group, hook=activate.current, every=EVERY)


def role() -> str:
    """What this process is known to do for an engine; "" as long as nobody has said."""
    hook = activate.current()
    return "" if hook is None else hook.account.role


def announce(log: logging.Logger) -> None:
    """One INFO line in the engine's own log, in its own form."""
    hook = activate.current()
    if hook is None or hook.settings.quiet:
        return
    session = hook.session()
    state = f"{session.path} hook" if session.path != "off" else f"off: {session.note}"
    note = f", {session.note}" if session.note and session.path != "off" else ""
    log.info(
        "gemmtuned %s: %s, counting as %s (%s), generation %d, %d rows%s, home %s",
        sys.modules["gemmtuned"].__version__, state, session.run, session.role or "program", hook.table.generation,
        len(hook.table), note, hook.settings.home,
    )  # fmt: skip


def take_table(group: torch.distributed.ProcessGroup | None) -> None:
    """Have the published table active now, the same on all ranks of the group; collective where there is one."""
    if ranks.is_shared(group):
        ranks.reload_group(activate.current(), group)
    if activate.current() is not None:
        activate.ready(READY_S)


def during(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` under a phase."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with Phase(phase):
            return call(*args, **kwargs)

    wrapped.__wrapped__ = call  # type: ignore[attr-defined]
    return wrapped


def quietly(log: logging.Logger, do: Callable[..., object], *args: Any) -> None:
    """Call it; what it raises is one line, for an engine of another version serves on without it."""
    try:
        do(*args)
    except Exception as err:
        name = getattr(do, "__name__", "a part").strip("_")
        log.info("gemmtuned: %s is left out with this version: %s: %s", name, type(err).__name__, err)
