"""Switches the hook on and off. Only this module makes a Hook, and it sees the Hook through forks and the exit."""

from __future__ import annotations

import atexit
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gemmtuned.configs import key
from gemmtuned.configs.change_queue import ChangeQueue
from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.processes import own_process
from gemmtuned.configs.settings import Settings, UserTables, autoload_enabled, wants_activation
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.stderr_lines import after_fork as say_after_fork
from gemmtuned.configs.stderr_lines import begin, say
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.hooks import dispatch, ends, forks, imports, phase, ranks, watch
from gemmtuned.hooks.background import Fork, notices_forks
from gemmtuned.hooks.flush import never_again
from gemmtuned.hooks.forks import Paused
from gemmtuned.hooks.hook import Hook, close_inherited, is_at_rest
from gemmtuned.hooks.log_handler import speak_up
from gemmtuned.hooks.native.our_thread import python_tells

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

__builtins__ = builtins


_getframe = sys._getframe
_hook: Hook | None = None
_changes = ChangeQueue()  # for changes of _hook; torch is imported before one begins, since torch calls activate()
_tables: list[UserTables] = []  # tables that the program asked for, besides those of the environment
_halves: list[Hook] = []  # half switched on or off; an exception from a signal's handler may end either at any point
_trouble = ""  # why the last activation failed
_process = own_process()  # that all of this is of
_noticing = FrameLock()  # a fork, in its child
_pausing = forks.of_all_threads
_modules = sys.modules


def activate(
    settings: Settings | None = None, *, capture: bool | None = None, dispatch: bool | None = None
) -> Hook | None:
    """Switch the hook on, by the environment unless told otherwise; a second call replaces the first.

    Raises whatever is in the way, and keeps it for `describe`.  None in the middle of another change by this thread,
    as in a signal's handler: this one comes right after it.
    """
    try:
        import torch as torch  # the native hook links to its libraries; this import may call activate() too
    except Exception as err:
        _note_trouble(err)
        raise
    _notice_fork()
    return _changes.make(lambda: _activate(settings, capture, dispatch))


def _activate(settings: Settings | None, capture: bool | None, dispatch: bool | None) -> Hook:
    global _trouble
    try:
        hook = _replace(settings, capture, dispatch)
    except Exception as err:
        _note_trouble(err)
        raise
    _trouble = ""
    return hook


def _note_trouble(err: Exception) -> None:
    global _trouble
    _trouble = str(err) or type(err).__name__


def _replace(settings: Settings | None, capture: bool | None, dispatch: bool | None) -> Hook:
    """A new hook in the place of the one before."""
    global _hook
    _notice_fork()
    begin()
    speak_up()
    settings = settings or Settings.from_env()
    if capture is not None:
        settings = replace(settings, capture=capture)
    if dispatch is not None:
        settings = replace(settings, dispatch=dispatch)
    _switch_off()
    hook = Hook(settings, _tables, _notice_fork)
    while _to_register:
        _to_register[0]()
        del _to_register[0]
    _halves.append(hook)
    try:
        hook.install()
        hook.start()
    except BaseException:
        _end_halves()
        raise
    _hook = hook
    _halves.remove(hook)
    return hook


def enable(*, capture: bool, dispatch: bool) -> None:
    """See gemmtuned.enable."""
    try:
        activate(capture=capture, dispatch=dispatch)
    except Exception as err:
        say(f"not active, the program runs on stock torch: {err}. See: gemmtuned doctor")


def deactivate() -> None:
    """Take every patch back and flush."""
    _notice_fork()
    _changes.make(_switch_off)


def _switch_off() -> None:
    global _hook, _trouble
    _notice_fork()
    _trouble = ""
    if _hook is not None:
        _halves.append(_hook)
        _hook = None
    _end_halves()


def _end_halves() -> None:
    """Switch off what is half on, or half off.  What an exception keeps from that, the next change switches off."""
    while _halves:
        hook = _halves[-1]
        hook.remove()
        hook.stop()
        _halves.pop()


def take_tables(family: str, paths: tuple[Path, ...]) -> None:
    """Use these tuned tables in this process, whether the hook is on now or later."""
    table = UserTables("load_config", family, paths)
    hook = current()
    if hook is not None and hook.settings.dispatch:
        hook.add_table(table)
    _tables.append(table)


def current() -> Hook | None:
    """The active hook, or None. What goes on with a hook comes by here: a forked child learns that it is one."""
    _notice_fork()
    return _hook


def is_active() -> bool:
    """True while something is patched."""
    hook = current()  # another thread, or a signal's handler, may switch it off at any point
    return hook is not None and hook.path != "off"


def generation() -> int:
    """Generation of the table in use."""
    hook = current()
    return hook.table.generation if hook is not None else 0


def ready(timeout_s: float) -> bool:
    """See gemmtuned.ready."""
    hook = current()
    return hook is None or hook.ready.wait(timeout_s)


def describe() -> dict[str, Any]:
    """See gemmtuned.status."""
    hook = current()
    if hook is None:
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
    facts = asdict(hook.session())
    return {
        **facts,
        "rows": len(hook.table),
        "refused": dict(hook.table.refused),
        "overridden": hook.patches.overridden(anew=True),
        "engine_operators": list(hook.patches.foreign.seen),
        "capture": hook.settings.capture,
        "dispatch": hook.patches.dispatches,
        "polling": hook.watcher.polling,
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
    hook = current()
    if group is not None:
        ranks.reload_group(hook, group)
    elif hook is not None:
        hook.reload()
    return generation()


def graph_replayed(graph: torch.cuda.CUDAGraph, times: int) -> None:
    """See gemmtuned.graph_replayed."""
    hook = current()
    graphs = hook.patches.graphs if hook is not None else None
    if graphs is not None:
        graphs.replayed(graph, times)


def _notice_fork() -> bool:
    """Do in a forked child what nobody has done yet. True: it is done now.

    Each page that a child writes to is copied, and most children never come here.
    """
    if _process == own_process():
        return False
    with _noticing as first:
        if not first or _process == own_process():
            return False
        _after_fork(None, late=True)
    return True


# torch's compiler traces ops of ours that ask whether something is patched: it asks this once, as kernels/compiling.py
# says, and takes the answer for a constant.  It cannot trace os.getpid
_notice_fork._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_counted_nothing() -> bool:
    """Whether this is a forked child that was of no use to us."""
    if _process == own_process():
        return False
    return _hook is None or (_hook.native is not None and _hook.native.at_first_count(None))


def _last_flush() -> None:
    if _has_counted_nothing():
        return
    if _notice_fork() and _hook is not None:
        _ = _hook.parts  # it may have counted without a thread
    for hook in (*_halves, _hook):
        if hook is not None:
            try:
                hook.stop()
            except Exception as err:
                say(f"the last counts were not written: {err}")


def _before_fork() -> None:
    """Leave nothing of ours half done in the child: wait until the hook's thread sleeps or has ended its step.

    Mostly it sleeps, and C has seen to it that it goes on to: then nothing is written, and so no page copied.
    """
    rests = (_hook is None or is_at_rest(_hook)) and not (_halves or _pausing or imports.is_going_on())
    if rests and not ends.has_copies(_modules):
        return
    _notice_fork()
    caller = _getframe().f_back
    forks.end_all([fork for fork in forks.of_this_thread() if fork.called_by_c or fork.is_by(caller) or fork.is_over()])
    paused = Paused(_hook, caller)
    forks.begin(paused)
    if paused.hook is not None:
        paused.how = paused.hook.before_fork(paused)
    imports.pause(paused)  # before flushes: one may be importing, which can take longer than we wait for it
    if paused.hook is not None:
        paused.flushes = paused.hook.pause_flushes(paused)
    for half in _halves:  # its last flush may be inside SQLite, which the program may use in the child
        half.pause_flushes(paused)
    connect = sys.modules.get("gemmtuned.db.connect")
    if connect is not None:  # its own hook may have run before the flush was over
        connect.close_all_before_fork()


def _after_fork_in_parent() -> None:
    if not _pausing:
        return
    paused = forks.was_paused(_getframe().f_back)
    if paused is None or paused.hook is None:
        return
    if paused.how == Fork.ENDED and paused.hook is _hook:
        with suppress(OSError):
            paused.hook.background.begin_again(paused.hook.native)


def _after_fork_in_child() -> None:
    if _pausing:  # else it is time when this child makes use of us
        with _noticing:
            _after_fork(forks.was_paused(_getframe().f_back))


def _after_fork(paused: Paused | None, *, late: bool = False) -> None:
    """In a forked child: replace what is the parent's. paused: for the fork, if anything was. late: some time ago."""
    global _changes, _process
    forks.in_child()
    _changes = ChangeQueue()
    if any(half.in_store for half in _halves):
        never_again("it was forked in the middle of a flush")
    for half in _halves:
        close_inherited(half)
    _halves.clear()  # their threads and counts are the parent's
    imports.after_fork()
    ends.after_fork()
    say_after_fork()
    watch.after_fork()
    phase.after_fork()
    dispatch.after_fork()
    key.after_fork()
    hook = _hook
    if hook is not None:
        try:
            if paused is not None:
                hook.after_fork(paused=paused.flushes, at_us=paused.at_us)
            else:
                at_us = hook.native.forked_us if hook.native is not None else 0
                hook.after_fork(paused=False, at_us=at_us, late=late)
        except Exception as err:
            say(f"not active in this forked process: {err}")
    _process = own_process()


_to_register: list[Callable[[], object]] = [  # once a process; what an exception keeps from that, the next change does
    lambda: atexit.register(_last_flush),
    lambda: notices_forks(_notice_fork),
    lambda: os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    ),
    python_tells,
    lambda: ends.finish_in_children(_last_flush),
]
