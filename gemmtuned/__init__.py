"""gemmtuned: your model's matrix products get faster while it runs, by itself.

    GEMMTUNED=1 python serve.py      # count untuned GEMM shapes, use what is tuned; no change to serve.py
    gemmtuned daemon                       # tune them while the machine is idle; serve.py picks the results up

The functions below are the whole public API; importing this module imports neither torch nor sqlite.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from gemmtuned.hooks.phase import Phase
    from gemmtuned.reports.notebook import Answer
    from gemmtuned.reports.of_model import ModelLayers

__all__ = [
    "coverage",
    "disable",
    "enable",
    "frame",
    "freeze",
    "gains",
    "generation",
    "graph_replayed",
    "is_enabled",
    "layers",
    "on_reload",
    "patch",
    "phase",
    "ready",
    "reload",
    "set_phase",
    "status",
    "unfreeze",
]
__version__ = "0.2.0"

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and not (_root / "gemmtuned" / "daemon").is_dir():
    __path__.append(str(_root))  # a checkout that lost its symbolic links: the sub-packages are siblings


def enable(capture: bool = True, dispatch: bool = True) -> None:
    """Switch the hook on in this process, as GEMMTUNED=1 does at start.

    Never raises for reasons of the machine (no library, no compiler, read-only home): the program then runs on stock
    torch, and `status()` says why.
    """
    from gemmtuned.hooks.activate import enable as switch_on

    switch_on(capture=capture, dispatch=dispatch)


def disable() -> None:
    """Undo `enable`: every patch is taken back, the counts so far are flushed."""
    from gemmtuned.hooks.activate import deactivate

    deactivate()


def is_enabled() -> bool:
    """True while this process captures or dispatches."""
    from gemmtuned.hooks.activate import is_active

    return is_active()


def status() -> dict[str, Any]:
    """What the hook does in this process: path (native, off), generation, rows, calls, errors, note ...

    calls is as of the last flush, about once a second.
    """
    from gemmtuned.hooks.activate import describe

    return describe()


def generation() -> int:
    """The published generation this process's table holds; 0 before the first."""
    from gemmtuned.hooks.activate import generation as active

    return active()


def ready(timeout: float = 30.0) -> bool:
    """Wait until the published table is active on every device that this process has a context on.

    timeout: seconds.  True when it is, and when there is nothing to wait for: no table, the hook or dispatch off.  For
    servers, before they serve or capture graphs; a capture that begins with torch.cuda.CUDAGraph waits by itself.

    Raises TypeError when timeout is no number.
    """
    if not isinstance(timeout, int | float):
        raise TypeError(f"ready: timeout is {timeout!r}, expected seconds")
    from gemmtuned.hooks.activate import ready as active

    return active(timeout)


def on_reload(callback: Callable[[int], None]) -> Callable[[], None]:
    """Call `callback(generation)` after each new table is active, in a thread of its own, one after another.

    Returns a function that takes the callback off again.  A table that is active already is not reported.  A server
    sets a flag here and captures its CUDA graphs again in the thread that replays them, between two requests.

    Raises TypeError when the callback cannot be called.
    """
    from gemmtuned.hooks.watch import subscribe

    return subscribe(callback)


def patch(name: str) -> Callable[[], None]:
    """Have Python code of another project run its products through gemmtuned.ops; `transformers.moe` is one.

    `deep_gemm` and `flashinfer` register functions of these as operators, which published solutions can call.
    Returns a function that takes the patch back.  GEMMTUNED_PATCH=transformers.moe does it without a change to the
    program, about a second after it has imported the project.  Off unless asked for: results may differ by rounding.
    While the hook is off, and where no kernel is known to be faster, the project's own code runs as without the patch.
    Raises GemmtunedError for another name, and for a version of the project that the patch does not know.
    """
    from gemmtuned.patches import patch as apply

    return apply(name)


def phase(name: str) -> Phase:
    """Have the calls of a block left out of what is worth tuning: `with gemmtuned.phase("warm-up"): ...`.

    For warm-ups and profile runs, whose shapes no user asks for.  It holds for the whole process; of blocks inside each
    other the innermost counts.  The calls are served as ever, and `gemmtuned coverage` says how many were left out.
    Raises TypeError for a name that is no text, ValueError for an empty one.
    """
    from gemmtuned.hooks.phase import Phase

    return Phase(name)


def set_phase(name: str) -> None:
    """As `phase`, for all calls from now on outside of such blocks; "" ends it."""
    from gemmtuned.hooks.phase import set_phase as put

    put(name)


def graph_replayed(graph: torch.cuda.CUDAGraph, times: int = 1) -> None:
    """Count the launches of a captured graph `times` times more, for servers that do not replay through Python.

    `CUDAGraph.replay` counts by itself.  A graph captured while the hook was off is not known and not counted.
    """
    from gemmtuned.hooks.activate import graph_replayed

    graph_replayed(graph, times)


def reload(group: torch.distributed.ProcessGroup | None = None) -> int:
    """Take up the newest published table now and return the active generation.

    With a process group every rank takes up the table that the group's first rank reads; all ranks must call it at the
    same point, whether their hook is on or not.
    """
    from gemmtuned.hooks.activate import reload_now

    return reload_now(group)


def freeze(module: torch.nn.Module) -> int:
    """Let the linear layers of `module` keep a packed copy of their weights; returns how many layers.

    You promise not to change the weights until `unfreeze(module)`.  Costs the memory of the weights once more.  Without
    the native hook nothing is frozen and 0 returned; the layers are frozen once it is there.  Raises GemmtunedError
    when the module is in training mode, TypeError for what is no module.
    """
    from gemmtuned.hooks.freeze import freeze as apply

    return apply(module)


def unfreeze(module: torch.nn.Module) -> int:
    """Undo `freeze`; returns how many layers were frozen. Raises TypeError for what is no module."""
    from gemmtuned.hooks.freeze import unfreeze as apply

    return apply(module)


def layers(model: torch.nn.Module, since_s: float = 7 * 86_400.0, run: str | None = None) -> ModelLayers:
    """Which linear layers of `model` got faster: their names, sizes, calls, GEMM time on stock torch and now.

    since_s: how many seconds back traffic counts.  run: of programs of this label alone; else of all that called such
    sizes.  Linear layers of one size share a row, as they share their problems.  Shows as a table when printed, and in
    notebooks.  Raises GemmtunedError when there is no database, or no such label; TypeError for what is no module.
    """
    from gemmtuned.configs.settings import Settings
    from gemmtuned.db.of_runs import called_by
    from gemmtuned.db.queries import served
    from gemmtuned.reports.ask import seconds_back
    from gemmtuned.reports.of_model import of_model

    seconds_back(since_s)
    database = Settings.from_env().db
    if run is not None:
        called_by(database, run)  # a label that there is not is an error, not an empty table
    return of_model(model, served(database, since_s=since_s, run=run))


def coverage(by: str = "family", since_s: float = 86_400.0, weight: str = "time", run: str | None = None) -> Answer:
    """How much of the traffic is tuned, by family, device, run, problem or layer: what `gemmtuned coverage` shows.

    since_s: how many seconds back traffic counts.  weight: time, calls or flops.  run: of programs of this label alone.
    Shows as a table when printed, and in notebooks; `.frame()` is a DataFrame.  Raises GemmtunedError when there is no
    database, or for another word or label.
    """
    from gemmtuned.configs.settings import Settings
    from gemmtuned.reports.ask import coverage as ask
    from gemmtuned.reports.notebook import Answer

    return Answer(ask(Settings.from_env(), by=by, since_s=since_s, weight=weight, run=run))


def gains(limit: int = 50, by: str = "solution", run: str | None = None) -> Answer:
    """What was gained, by solution or layer: what `gemmtuned gains` shows; limit: rows, 0 for all.

    run: of what programs of this label call.  Shows as a table when printed, and in notebooks; `.frame()` is a
    DataFrame.  Raises GemmtunedError when there is no database, or for another word or label.
    """
    from gemmtuned.configs.settings import Settings
    from gemmtuned.reports.ask import gains as ask
    from gemmtuned.reports.notebook import Answer

    return Answer(ask(Settings.from_env(), by=by, run=run, limit=limit))


def frame(view: str) -> pd.DataFrame:
    """A promised view of the database (coverage, untuned, solutions, trials ...) as a pandas DataFrame.

    Raises GemmtunedError for an unknown view or when there is no database.
    """
    from gemmtuned.configs.settings import Settings
    from gemmtuned.db.queries import frame as read

    return read(Settings.from_env().db, view)
