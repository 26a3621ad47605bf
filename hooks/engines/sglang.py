"""SGLang's plugin (entry point `sglang.srt.plugins`), loaded in each of its processes before there is a model.

    server       checks its arguments: the label is known from there on
    scheduler    runs the model: the table is active before the graphs, their warm-up and capture are counted apart, and
                 ranks that work on one model change tables at one step

By SGLang's own registry of hooks, of names that are looked up first: what is not there is left alone.  Written for
SGLang 0.5.23.  The request that the server sends itself after its start looks like any other and is counted.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from gemmtuned.hooks import ranks
from gemmtuned.hooks.engines import member
from gemmtuned.hooks.phase import Phase

log: Final = logging.getLogger("sglang.srt.gemmtuned")
_WARM_UPS: Final = (
    "sglang.srt.model_executor.runner.base_runner.BaseRunner.warmup",
    "sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph",
)
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_together: list[ranks.Together] = []


def install() -> None:
    """Register what is there of SGLang. SGLang calls it once in each process."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    around, before, after = (registry.HookType[name] for name in ("AROUND", "BEFORE", "AFTER"))
    wanted: list[tuple[str, Callable[..., Any], Any]] = [
        ("sglang.srt.server_args.ServerArgs.check_server_args", _server, after),
        (f"{_RUNNER}.initialize", _model, around),
        (f"{_RUNNER}.forward", _step, before),
        *((name, _warm_up, around) for name in _WARM_UPS),
    ]
    for name, hook, kind in wanted:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            continue  # another version
        registry.HookRegistry.register(name, hook, kind)


def label_of(arguments: Any) -> str:
    """As member.label_of."""
    return member.label_of("sglang", arguments.served_model_name or arguments.model_path, int(arguments.tp_size))


def _server(_: object, arguments: Any, *__: Any, **___: Any) -> None:
    member.quietly(log, _join, arguments, "server")


def _model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """The groups of ranks are there, the model is not."""
    member.quietly(log, _prepare, runner)
    return original(runner, *args, **kwargs)


def _prepare(runner: Any) -> None:
    group = member.that_agrees(member.group_of("sglang.srt", int(runner.server_args.tp_size)), log)
    member.take_table(group)  # collective: it comes before all that may go wrong in one rank alone
    together = member.together(group)
    if together is not None and not _together:
        _together.append(together)
    _join(runner.server_args, f"scheduler rank {ranks.rank() or 0}")


def _join(arguments: Any, role: str) -> None:
    """Once in a process: a draft model has a runner of its own."""
    if not member.role() and member.join(label_of(arguments), role):
        member.announce(log)


def _step(*_: Any, **__: Any) -> None:
    """Every rank is told to run the model equally often."""
    if _together:
        _together[0].step()


def _warm_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Phase("warm-up"):
        return original(*args, **kwargs)
