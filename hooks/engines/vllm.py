"""vLLM's plugin (entry point `vllm.general_plugins`), loaded in each of its processes before there is a model.

    server    builds the configuration: the label is known from there on
    engine    the scheduler's process: it has graphs captured anew where the user wants that (recapture.py)
    worker    runs the model: the table is active before the profile run, warm-ups are counted apart, and ranks that
              work on one model change tables at one step

Written for vLLM 0.32.  What is not there, or is not what it was, is left alone.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from gemmtuned.hooks import ranks
from gemmtuned.hooks.engines import member, recapture

log: Final = logging.getLogger("vllm.gemmtuned")  # vLLM's own form and level
_PHASES: Final = {"determine_available_memory": "profile", "compile_or_warm_up_model": "warm-up"}  # methods of a worker
_OURS: Final = "_gemmtuned"  # mark of a function that is wrapped


def install() -> None:
    """Patch what this process has of vLLM. A second call changes nothing."""
    with suppress(Exception):
        _around(import_module("vllm.config").VllmConfig, "__post_init__", after=_server)
    with suppress(Exception):
        wrappers = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        _around(wrappers, "init_device", after=_worker)
    with suppress(Exception):
        core = sys.modules.get("vllm.v1.engine.core")
        if core is not None:  # else this is not the engine's process
            _around(core.EngineCore, "_initialize_kv_caches", before=_engine)


def label_of(config: Any) -> str:
    """As member.label_of."""
    model = config.model_config
    name = model.served_model_name if isinstance(model.served_model_name, str) else model.model
    return member.label_of("vllm", name, config.parallel_config.tensor_parallel_size)


def _server(config: Any) -> None:
    """A configuration was made; the engine's process makes some, too."""
    if not member.role() and member.join(label_of(config), "server"):
        member.announce(log)


def _engine(engine: Any, *_: Any) -> None:
    if member.join(label_of(engine.vllm_config), "engine"):
        member.announce(log)
        recapture.watch_vllm(engine, log)


def _worker(wrapper: Any) -> None:
    """The device and the groups of ranks are there, the model is not."""
    worker, config = wrapper.worker, wrapper.vllm_config
    split = config.parallel_config.tensor_parallel_size
    group = member.that_agrees(member.group_of("vllm", split), log)
    member.take_table(group)  # collective: it comes before all that may go wrong in one rank alone
    together = member.together(group)
    if together is not None:
        _step_together(worker, together)
    if group is not None or split == 1:  # else ranks do not capture together
        worker.gemmtuned_recapture = functools.partial(recapture.recapture_vllm, worker, group, log)
    for name, phase in _PHASES.items():
        method = getattr(worker, name, None)
        if callable(method):
            setattr(worker, name, member.during(phase, method))
    if member.join(label_of(config), f"worker rank {config.parallel_config.rank}"):
        member.announce(log)


def _step_together(worker: Any, together: ranks.Together) -> None:
    """Every rank is told to run the model equally often."""
    run = worker.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        together.step()
        return run(*args, **kwargs)

    worker.execute_model = execute_model


def _around(
    of: type, name: str, *, before: Callable[..., object] | None = None, after: Callable[[Any], object] | None = None
) -> None:
    """Have `before(self, *args)` precede each call of a method, or `after(self)` follow it, whatever becomes of it."""
    method = getattr(of, name)
    if hasattr(method, _OURS):
        return

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            member.quietly(log, before, self, *args)
        result = method(self, *args, **kwargs)
        if after is not None:
            member.quietly(log, after, self)
        return result

    setattr(wrapped, _OURS, True)
    setattr(of, name, wrapped)
