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

from gemmtuned.configs.settings import is_given
from gemmtuned.hooks import activate, ranks
from gemmtuned.hooks.engines import member, recapture

log: Final = logging.getLogger("vllm.gemmtuned")  # vLLM's own form and level
_PHASES: Final = {"determine_available_memory": "profile", "compile_or_warm_up_model": "warm-up"}  # methods of a worker
_OURS: Final = "_gemmtuned"  # mark of a function that is wrapped


def install() -> None:
    """Patch what this process has of vLLM. A second call changes nothing."""
    with suppress(Exception):
        _after(import_module("vllm.config").VllmConfig, "__post_init__", _server)
    with suppress(Exception):
        wrappers = import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        _after(wrappers, "init_device", _worker)
    with suppress(Exception):
        core = sys.modules.get("vllm.v1.engine.core")
        if core is not None:  # else this is not the engine's process
            _before(core.EngineCore, "_initialize_kv_caches", _engine)


def label_of(config: Any) -> str:
    """`vllm:<name that the model is served under>`, and how it is split: one rank's products have other sizes."""
    model = config.model_config
    name = model.served_model_name if isinstance(model.served_model_name, str) else model.model
    split = config.parallel_config.tensor_parallel_size
    return f"vllm:{name}" + (f" tp{split}" if split > 1 else "")


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
    group = _group(config)
    member.take_table(group)  # collective: it comes before all that may go wrong in one rank alone
    if group is not None and ranks.size_of(group) > 1 and not is_given("GEMMTUNED_RELOAD"):
        _step_together(worker, group)
    worker.gemmtuned_recapture = functools.partial(recapture.recapture_vllm, worker, group, log)
    for name, phase in _PHASES.items():
        method = getattr(worker, name, None)
        if callable(method):
            setattr(worker, name, member.during(phase, method))
    if member.join(label_of(config), f"worker rank {config.parallel_config.rank}"):
        member.announce(log)


def _group(config: Any) -> Any:
    """Of the ranks that share the layers of one model; None where there is one rank."""
    if config.parallel_config.tensor_parallel_size <= 1:
        return None
    return import_module("vllm.distributed.parallel_state").get_tp_group().cpu_group


def _step_together(worker: Any, group: Any) -> None:
    """Every rank is told to run the model equally often."""
    together = ranks.Together(group, hook=activate.current, every=member.EVERY)
    run = worker.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        together.step()
        return run(*args, **kwargs)

    worker.execute_model = execute_model


def _after(of: type, name: str, do: Callable[[Any], object]) -> None:
    """Have `do(self)` follow each call of a method, whatever becomes of it."""
    method = getattr(of, name)
    if hasattr(method, _OURS):
        return

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        member.quietly(log, do, self)
        return result

    setattr(wrapped, _OURS, True)
    setattr(of, name, wrapped)


def _before(of: type, name: str, do: Callable[..., object]) -> None:
    """Have `do` precede each call of a method, with its arguments."""
    method = getattr(of, name)
    if hasattr(method, _OURS):
        return

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        member.quietly(log, do, self, *args)
        return method(self, *args, **kwargs)

    setattr(wrapped, _OURS, True)
    setattr(of, name, wrapped)
