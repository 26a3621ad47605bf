"""What the hook's thread looks after before each flush: kill switch, failed routes, a native library that came in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemmtuned.configs import clock
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.configs.unpatched import builtins
from gemmtuned.hooks import followers, frozen_layers

if TYPE_CHECKING:
    from gemmtuned.hooks.hook import Hook

__builtins__ = builtins

log = logging.getLogger("gemmtuned.hooks")


def keep_house(hook: Hook) -> None:
    """Take each step, whatever becomes of the others; raises what the last of them raised."""
    error: Exception | None = None
    steps: tuple[Callable[[], object], ...] = (
        lambda: _look_for_library(hook),
        lambda: _watch_failures(hook),
        hook.patches.follow_switches,
        hook.tables.follow_probation,
        hook.account.look_at_layers,
        hook.tables.follow_places,
        hook.patches.look_for_new_foreign,
        lambda: hook.patches.tell_of_others(clock.monotonic()),
        followers.turn,
    )
    for step in steps:
        try:
            step()
        except Exception as err:  # noqa: PERF203  ours to mend
            error = err
    if error is not None:
        raise error


def _look_for_library(hook: Hook) -> None:
    if hook.patches.look_again(clock.monotonic()):
        hook.account.announce()
        for follow in frozen_layers.when_native:
            follow()


def _watch_failures(hook: Hook) -> None:
    breaker = hook.patches.breaker
    if breaker.turn(clock.monotonic(), hook.account.report_failures(hook.flusher)):
        tell(log, logging.WARNING, "dispatch switched off reason=%s", breaker.note)
