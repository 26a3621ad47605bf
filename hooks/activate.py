"""Switches the hook on and off. Only this module makes a Hook, and it sees the Hook through forks and the exit."""

from __future__ import annotations

import atexit
import platform
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gemmtuned.configs import clock, key
from gemmtuned.configs.change_queue import ChangeQueue
from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.frame_lock import Running
from gemmtuned.configs.processes import own_process
from gemmtuned.configs.settings import Settings, UserTables, autoload_enabled, wants_activation
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.stderr_lines import after_fork as say_after_fork
from gemmtuned.configs.stderr_lines import begin, say
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.hooks import dispatch, ends, imports, phase, ranks, watch
from gemmtuned.hooks.background import Fork, when_untold
from gemmtuned.hooks.flush import never_again
from gemmtuned.hooks.hook import Hook, close_inherited
from gemmtuned.hooks.log_handler import speak_up
from gemmtuned.hooks.native.our_thread import python_forks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    import torch

__builtins__ = builtins


_getframe = sys._getframe
_hook: Hook | None = None
_changes = ChangeQueue()  # for changes of _hook; torch is imported before one begins, since torch calls activate()
_tables: list[UserTables] = []  # tables that the program asked for, besides those of the environment
_halves: list[Hook] = []  # half switched on or off; an exception from a signal's handler may end either at any point
_forking = threading.local()  # .paused: a _Paused for each fork that this thread is in; a hook before one may fork
_trouble = ""  # why the last activation failed
_process = 0  # that _hook is of


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
    global _hook, _process
    _notice_fork()
    _process = own_process()
    begin()
    speak_up()
    settings = settings or Settings.from_env()
    if capture is not None:
        settings = replace(settings, capture=capture)
    if dispatch is not None:
        settings = replace(settings, dispatch=dispatch)
    _switch_off()
    hook = Hook(settings, _tables)
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
    hook = _hook
    if hook is not None and hook.settings.dispatch:
        hook.add_table(table)
    _tables.append(table)


def current() -> Hook | None:
    """The active hook, or None."""
    return _hook


def is_active() -> bool:
    """True while something is patched."""
    hook = _hook  # another thread, or a signal's handler, may switch it off at any point
    return hook is not None and hook.path != "off"


def generation() -> int:
    """Generation of the table in use."""
    hook = _hook
    return hook.table.generation if hook is not None else 0


def ready(timeout_s: float) -> bool:
    """See gemmtuned.ready."""
    hook = _hook
    return hook is None or hook.ready.wait(timeout_s)


def describe() -> dict[str, Any]:
    """See gemmtuned.status."""
    hook = _hook
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
    hook = _hook
    if group is not None:
        ranks.reload_group(hook, group)
    elif hook is not None:
        hook.reload()
    return generation()


def graph_replayed(graph: torch.cuda.CUDAGraph, times: int) -> None:
    """See gemmtuned.graph_replayed."""
    hook = _hook
    graphs = hook.patches.graphs if hook is not None else None
    if graphs is not None:
        graphs.replayed(graph, times)


def _notice_fork() -> bool:
    """Do in a child of a fork by C code what Python does in others, unless it has been done. True: it is done now."""
    if _hook is None or _process == own_process():
        return False
    _after_fork()
    return True


def _begin_untold() -> Callable[[], None] | None:
    noticed, hook = _notice_fork(), _hook
    return hook.begin if noticed and hook is not None else None


def _last_flush() -> None:
    if _notice_fork() and _hook is not None:
        _ = _hook.parts  # it may have counted without a thread
    for hook in (*_halves, _hook):
        if hook is not None:
            try:
                hook.stop()
            except Exception as err:
                say(f"the last counts were not written: {err}")


class _Paused(Running):
    """What a thread has paused for its fork; all of it goes on with `done`.

    An exception from a signal's handler may keep any of our functions from running to its end, or from running at all.
    So the fork is over, too, when the caller is at another instruction.
    """

    def __init__(self, hook: Hook | None, caller: FrameType | None) -> None:
        here = caller or _getframe()
        super().__init__(here, at=here.f_lasti)
        self.hook, self.called_by_c = hook, caller is None
        self.how: Fork | None = None
        self.flushes = False  # none goes on
        self.at_us = clock.now_ns() // 1000  # Unix time

    def is_over(self) -> bool:
        """Whether the fork is."""
        return self.done or (not self.called_by_c and super().is_over())

    def is_by(self, caller: FrameType | None) -> bool:
        """Whether it is the fork that this caller is in; None: C code, without any of Python's."""
        return self.called_by_c if caller is None else not self.called_by_c and self.is_of(caller)


def _before_fork() -> None:
    """Leave nothing of ours half done in the child: wait until the hook's thread sleeps or has ended its step."""
    caller = _getframe().f_back
    _end_all([fork for fork in _forks() if fork.called_by_c or fork.is_by(caller) or fork.is_over()])
    paused = _Paused(_hook, caller)
    _forks().append(paused)
    python_forks(True)  # also where no hook is on: one that is being switched on or off has a thread
    if paused.hook is not None:
        paused.how = paused.hook.before_fork(paused)
    imports.pause(paused)  # before flushes: one may be importing, which can take longer than we wait for it
    if paused.hook is not None:
        paused.flushes = paused.hook.pause_flushes(paused)
    connect = sys.modules.get("gemmtuned.db.connect")
    if connect is not None:  # its own hook may have run before the flush was over
        connect.let_go()


def _forks() -> list[_Paused]:
    """Those that this thread is in, the innermost last."""
    found: list[_Paused] = _forking.__dict__.setdefault("paused", [])
    return found


def _end_all(over: list[_Paused]) -> None:
    for fork in over:
        fork.done = True
        try:
            _forks().remove(fork)
        except ValueError:  # a handler's fork has
            pass


def _was_paused(caller: FrameType | None) -> _Paused | None:
    """What `_before_fork` has paused for the fork by this caller.

    None when C code forked, as servers that embed Python do.
    """
    forks = _forks()
    for at in range(len(forks) - 1, -1, -1):
        if forks[at].is_by(caller):
            found = forks[at]
            _end_all(forks[at:])  # of those within it nobody has told the end
            return found
    return None


def _after_fork_in_parent() -> None:
    paused = _was_paused(_getframe().f_back)
    python_forks(bool(_forks()))
    if paused is None or paused.hook is None:
        return
    if paused.how is Fork.ENDED and paused.hook is _hook:
        with suppress(OSError):
            paused.hook.background.begin_again(paused.hook.native)


def _after_fork() -> None:
    global _changes, _process
    paused, _process = _was_paused(_getframe().f_back), own_process()
    for fork in _forks():
        fork.how = None  # the thread that it has ended is the parent's
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
            python_forks(bool(_forks()))
            if paused is not None:
                hook.after_fork(paused=paused.flushes, at_us=paused.at_us)
            else:
                hook.after_fork(paused=False)
        except Exception as err:
            say(f"not active in this forked process: {err}")


_to_register: list[Callable[[], object]] = [  # once a process; what an exception keeps from that, the next change does
    lambda: atexit.register(_last_flush),
    lambda: when_untold(_begin_untold),
    lambda: os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork),
    lambda: ends.finish_in_children(_last_flush),
]
