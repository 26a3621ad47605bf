"""Switching the hook on and off: the one place that makes a Hook, and what becomes of it at a fork and at the end."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.settings import Settings, UserTables, autoload_enabled, wants_activation
from gemmtuned.configs.sighting import Session
from gemmtuned.hooks import imports, ranks
from gemmtuned.hooks.hook import Hook
from gemmtuned.hooks.notice import speak_up

if TYPE_CHECKING:
    from pathlib import Path

    import torch


_hook: Hook | None = None
_tables: list[UserTables] = []  # that the program asked for, besides those of the environment
_forking = threading.local()  # .flusher, .imports: what this thread paused for its fork
_at_exit_known = False


def activate(settings: Settings | None = None, *, capture: bool | None = None, dispatch: bool | None = None) -> Hook:
    """Switch the hook on, by the environment unless told otherwise; a second call replaces the first."""
    global _hook, _at_exit_known
    import torch as torch  # the native hook is linked with its libraries; with GEMMTUNED=1 it comes back in here

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


def deactivate() -> None:
    """Take every patch back and flush."""
    global _hook
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


def describe() -> dict[str, Any]:
    """See gemmtuned.status."""
    if _hook is None:
        off = Session(
            host=platform.node(), pid=os.getpid(), started_us=0, run="", path="off", generation=0, note=_why_off()
        )  # fmt: skip
        return {**asdict(off), "rows": 0, "refused": {}, "capture": False, "dispatch": False, "polling": False}
    facts = asdict(_hook.session())
    return {
        **facts,
        "rows": len(_hook.table),
        "refused": dict(_hook.table.refused),
        "capture": _hook.settings.capture,
        "dispatch": _hook.dispatches,
        "polling": _hook.watcher.polling,
    }


def _why_off() -> str:
    try:
        wanted = wants_activation()
        if wanted:
            Settings.from_env()
    except SettingError as err:
        return f"not enabled: {err}"
    if not wanted:
        return "not enabled: set GEMMTUNED=1"
    if not autoload_enabled():
        return (
            "not enabled: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling gemmtuned; unset it, or start the "
            "program with: gemmtuned run"
        )
    return "not enabled: torch is not imported yet, or gemmtuned.disable() was called"


def reload_now(group: torch.distributed.ProcessGroup | None = None) -> int:
    """See gemmtuned.reload."""
    if group is not None:
        ranks.reload_group(_hook, group)
    elif _hook is not None:
        _hook.reload()
    return generation()


def graph_replayed(graph: torch.cuda.CUDAGraph, times: int) -> None:
    """See gemmtuned.graph_replayed."""
    if _hook is not None and _hook.graphs is not None:
        _hook.graphs.replayed(graph, times)


def _last_flush() -> None:
    if _hook is not None:
        try:
            _hook.stop()
        except Exception as err:
            sys.stderr.write(f"gemmtuned: the last counts were not written: {err}\n")


def _before_fork() -> None:
    _forking.imports = imports.pause()  # first: a flush may be importing, for longer than it is waited for
    _forking.flusher = _hook.flusher if _hook is not None and _hook.flusher.pause(for_fork=True) else None
    connect = sys.modules.get("gemmtuned.db.connect")
    if connect is not None:  # its own hook may have run before the flush was over
        connect.let_go()


def _after_fork_in_parent() -> None:
    if _forking.flusher is not None:
        _forking.flusher.resume()
    if _forking.imports:
        imports.resume()


def _after_fork() -> None:
    imports.after_fork()
    if _hook is not None:
        try:
            _hook.after_fork(in_a_flush=_forking.flusher is None)
        except Exception as err:
            sys.stderr.write(f"gemmtuned: not active in this forked process: {err}\n")


def _finish_in_multiprocessing_children() -> None:
    """multiprocessing ends its children without atexit: have it flush there too, before other finalizers."""
    from multiprocessing import process, util

    def register(_: object = None) -> None:
        util.Finalize(None, _last_flush, exitpriority=100)

    util.register_after_fork(sys.modules[__name__], register)
    if process.parent_process() is not None:
        register()
