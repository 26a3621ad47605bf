"""vLLM's CUDA graphs captured anew after a table has come that they do not have, while nothing is served.

Off unless GEMMTUNED_RECAPTURE=idle.  The engine's process hears of a new table and waits until it has had no request
for IDLE_S.  Then, in its own loop and as an order to all workers, each looks whether its graphs miss rows; if those of
the first rank do, all drop their graphs and capture them as at the start, and say how long that took.  A request that
comes meanwhile waits for it.  Where a capture fails the engine goes on without graphs: slower, and right.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from gemmtuned.configs import clock
from gemmtuned.configs.unpatched import allocate_lock, sleep
from gemmtuned.hooks import activate, ranks, stale, watch
from gemmtuned.hooks.engines import member
from gemmtuned.hooks.phase import Phase

IDLE_S: Final = 10.0
LOOK_S: Final = 0.5


def wanted() -> bool:
    """Whether the user asked for it."""
    hook = activate.current()
    return hook is not None and hook.settings.recapture == "idle"


# ---- the engine's process


def watch_vllm(engine: Any, log: logging.Logger) -> None:
    """Have this engine order it when a table has come and it is idle. Not where several engines go step by step."""
    if not wanted():
        return
    queue, callbacks = getattr(engine, "input_queue", None), getattr(engine, "_idle_state_callbacks", None)
    wake = getattr(import_module("vllm.v1.engine").EngineCoreRequestType, "WAKEUP", None)
    if queue is None or not isinstance(callbacks, list) or wake is None:
        log.info("gemmtuned: graphs are not captured anew with this version")
        return
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        log.info("gemmtuned: graphs are not captured anew: engines that share experts have to do it at one step")
        return
    watch.subscribe(lambda generation: _when_idle(engine, queue, callbacks, wake, log))


def _when_idle(engine: Any, queue: Any, callbacks: list[Any], wake: Any, log: logging.Logger) -> None:
    """Wait for the pause, in a thread of the reload's, then have the engine's own loop give the order."""
    quiet_s = 0.0
    while quiet_s < IDLE_S:
        sleep(LOOK_S)
        quiet_s = 0.0 if engine.scheduler.has_requests() else quiet_s + LOOK_S
    done = allocate_lock()
    done.acquire()

    def order(core: Any) -> None:
        member.quietly(log, core.collective_rpc, "gemmtuned_recapture")
        done.release()

    callbacks.append(order)
    queue.put_nowait((wake, None))
    done.acquire()


# ---- a worker


def recapture_vllm(worker: Any, group: Any, log: logging.Logger) -> float:
    """Capture this worker's graphs anew if they miss rows; seconds, 0.0 when there was nothing to do. Collective."""
    shared = ranks.is_shared(group)
    if shared:
        ranks.reload_group(activate.current(), group)
    missing = ranks.of_first(stale.launches, group) if shared else stale.launches()  # ranks capture together
    if not missing:
        return 0.0
    began_s = clock.monotonic()
    try:
        with Phase("capture"):
            _capture(worker)
    except Exception as err:
        _without_graphs(worker)
        log.error("gemmtuned: graphs could not be captured anew, and none are used from now on: %s", err)
        return 0.0
    took_s = clock.monotonic() - began_s
    what = "gemmtuned: graphs captured anew for generation %d took_s=%.1f launches=%d left=%d"
    log.info(what, activate.generation(), took_s, missing, stale.launches())
    return took_s


def _capture(worker: Any) -> None:
    """As at the start, but the earlier graphs go first: they hold memory that the new ones take."""
    runner = worker.model_runner
    config = import_module("vllm.config")
    manager = getattr(runner, "cudagraph_manager", None)
    with config.set_current_vllm_config(worker.vllm_config):
        if manager is not None:
            manager.release_graphs()
        else:
            import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper.clear_all_graphs()
            with suppress(ImportError, AttributeError):
                import_module("vllm.compilation.breakable_cudagraph").BreakableCUDAGraphWrapper.clear_all_graphs()
        runner.capture_model()


def _without_graphs(worker: Any) -> None:
    """Have every batch run as without graphs."""
    with suppress(Exception):
        mode = import_module("vllm.config").CUDAGraphMode.NONE
        worker.model_runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode)
