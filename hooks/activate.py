"""Switches the hook on and off. Only this module makes a Hook, and it sees the Hook through forks and the exit."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gemmtuned.configs import key
from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.say import after_fork as say_after_fork
from gemmtuned.configs.say import begin, say
from gemmtuned.configs.settings import Settings, UserTables, autoload_enabled, wants_activation
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.unpatched import allocate_rlock
from gemmtuned.hooks import dispatch, imports, phase, ranks, watch
from gemmtuned.hooks.hook import Hook
from gemmtuned.hooks.notice import speak_up

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from gemmtuned.hooks.background import Fork
    from gemmtuned.hooks.flush import Flusher


_hook: Hook | None = None
_changing = allocate_rlock()  # held while _hook changes; never while torch is imported, since torch calls activate()
_tables: list[UserTables] = []  # tables that the program asked for, besides those of the environment
_forking = threading.local()  # .paused: what this thread has paused for its fork, a _Paused or None
_at_exit_known = False
_trouble = ""  # why the last activation failed


def activate(settings: Settings | None = None, *, capture: bool | None = None, dispatch: bool | None = None) -> Hook:
    """Switch the hook on, by the environment unless told otherwise; a second call replaces the first.

    Raises whatever is in the way, and keeps it for `describe`.
    """
    global _trouble
    try:
        hook = _activate(settings, capture, dispatch)
    except Exception as err:
        _trouble = str(err) or type(err).__name__
        raise
    _trouble = ""
    return hook


def _activate(settings: Settings | None, capture: bool | None, dispatch: bool | None) -> Hook:
    import torch as torch  # the native hook links to its libraries; with GEMMTUNED=1 this import calls activate() too

    with _changing:
        return _replace(settings, capture, dispatch)


def _replace(settings: Settings | None, capture: bool | None, dispatch: bool | None) -> Hook:
    """A new hook in the place of the one before."""
    global _hook, _at_exit_known
    begin()
    speak_up()
    settings = settings or Settings.from_env()
    if capture is not None:
        settings = replace(settings, capture=capture)
    if dispatch is not None:
        settings = replace(settings, dispatch=dispatch)
    deactivate()
    hook = Hook(settings, _tables)
    try:
        hook.install()
        hook.start()
    except BaseException:
        hook.remove()
        raise
    _hook = hook
    if not _at_exit_known:
        _at_exit_known = True
        atexit.register(_last_flush)
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
        _finish_in_multiprocessing_children()
    return hook


def enable(*, capture: bool, dispatch: bool) -> None:
    """See gemmtuned.enable."""
    try:
        activate(capture=capture, dispatch=dispatch)
    except Exception as err:
        say(f"not active, the program runs on stock torch: {err}. See: gemmtuned doctor")


def deactivate() -> None:
    """Take every patch back and flush."""
    global _hook, _trouble
    with _changing:
        _trouble = ""
        hook, _hook = _hook, None
        if hook is not None:
            hook.remove()
            hook.stop()


def take_tables(family: str, paths: tuple[Path, ...]) -> None:
    """Use these tuned tables in this process, whether the hook is on now or later."""
    table = UserTables("load_config", family, paths)
    if _hook is not None and _hook.settings.dispatch:
        _hook.add_table(table)
    _tables.append(table)


def current() -> Hook | None:
    """The active hook, or None."""
    return _hook


def is_active() -> bool:
    """True while something is patched."""
    return _hook is not None and _hook.path != "off"


def generation() -> int:
    """Generation of the table in use."""
    return _hook.table.generation if _hook is not None else 0


def ready(timeout_s: float) -> bool:
    """See gemmtuned.ready."""
    return _hook is None or _hook.ready.wait(timeout_s)


def describe() -> dict[str, Any]:
    """See gemmtuned.status."""
    if _hook is None:
        off = Session(
            host=platform.node(), pid=os.getpid(), started_us=0, run="", path="off", generation=0, note=_why_off()
        )  # fmt: skip
        return {
            **asdict(off),
            "rows": 0,
            "refused": {},
            "overridden": {},
            "engine_operators": [],
            "capture": False,
            "dispatch": False,
            "polling": False,
        }
    facts = asdict(_hook.session())
    return {
        **facts,
        "rows": len(_hook.table),
        "refused": dict(_hook.table.refused),
        "overridden": _hook.patches.overridden(anew=True),
        "engine_operators": list(_hook.patches.foreign.seen),
        "capture": _hook.settings.capture,
        "dispatch": _hook.patches.dispatches,
        "polling": _hook.watcher.polling,
    }


def _why_off() -> str:
    if _trouble:
        return f"off: {_trouble}"
    try:
        wanted = wants_activation()
        if wanted:
            Settings.from_env()
    except SettingError as err:
        return f"off: {err}"
    if not wanted:
        return "off: set GEMMTUNED=1"
    if not autoload_enabled():
        return (
            "off: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling gemmtuned; unset it, or start the "
            "program with: gemmtuned run"
        )
    return "off: torch is not imported yet, or gemmtuned.disable() was called"


def reload_now(group: torch.distributed.ProcessGroup | None = None) -> int:
    """See gemmtuned.reload."""
    if group is not None:
        ranks.reload_group(_hook, group)
    elif _hook is not None:
        _hook.reload()
    return generation()


def graph_replayed(graph: torch.cuda.CUDAGraph, times: int) -> None:
    """See gemmtuned.graph_replayed."""
    if _hook is not None and _hook.patches.graphs is not None:
        _hook.patches.graphs.replayed(graph, times)


def _last_flush() -> None:
    if _hook is not None:
        try:
            _hook.stop()
        except Exception as err:
            say(f"the last counts were not written: {err}")


class _Paused:
    """What a thread has paused for its fork. Each pause is noted at once, since an interrupt may come at any point."""

    def __init__(self, hook: Hook | None) -> None:
        self.hook = hook
        self.how: Fork | None = None
        self.imports = False
        self.flusher: Flusher | None = None


def _before_fork() -> None:
    """Leave nothing of ours half done in the child: wait until the hook's thread sleeps or has ended its step."""
    paused = _forking.paused = _Paused(_hook)
    if paused.hook is not None:
        paused.how = paused.hook.before_fork()
    paused.imports = imports.pause()  # before flushes: one may be importing, which can take longer than we wait for it
    if paused.hook is not None and paused.hook.pause_flushes():
        paused.flusher = paused.hook.flusher
    connect = sys.modules.get("gemmtuned.db.connect")
    if connect is not None:  # its own hook may have run before the flush was over
        connect.let_go()


def _was_paused() -> _Paused | None:
    """What `_before_fork` has paused for this fork; None when C code forked, as servers that embed Python do."""
    paused: _Paused | None = getattr(_forking, "paused", None)
    _forking.paused = None
    return paused


def _after_fork_in_parent() -> None:
    paused = _was_paused()
    if paused is None:
        return
    if paused.flusher is not None:
        paused.flusher.resume()
    if paused.imports:
        imports.resume()
    if paused.hook is not None and paused.how is not None:
        paused.hook.after_fork_in_parent(paused.how, goes_on=paused.hook is _hook)


def _after_fork() -> None:
    global _changing
    paused = _was_paused()
    _changing = allocate_rlock()
    imports.after_fork()
    say_after_fork()
    watch.after_fork()
    phase.after_fork()
    dispatch.after_fork()
    key.after_fork()
    if _hook is not None:
        try:
            _hook.after_fork(paused=paused is not None and paused.flusher is not None)
        except Exception as err:
            say(f"not active in this forked process: {err}")


def _finish_in_multiprocessing_children() -> None:
    """Flush at the end of multiprocessing's children too, which skip atexit; before other finalizers run."""
    from multiprocessing import process, util

    def register(_: object = None) -> None:
        util.Finalize(None, _last_flush, exitpriority=100)

    util.register_after_fork(sys.modules[__name__], register)
    if process.parent_process() is not None:
        register()
