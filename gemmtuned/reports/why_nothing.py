"""Why nothing is recorded: programs are switched off, or this torch has no native hook."""

from __future__ import annotations

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings, is_given


def why_off(settings: Settings, *, program: bool = False) -> list[str]:
    """The line that begins a report while programs run stock torch because somebody said so; else none.

    program: one is started from this shell, so that its variables count, too.
    """
    if program and (settings.disabled or not settings.native):
        names = filter(is_given, ("GEMMTUNED_DISABLE", "AITER_BYPASS_TUNE_CONFIG"))
        cause = " and ".join(f"{name}=1" for name in names) if settings.disabled else "GEMMTUNED_NATIVE=0"
        return [f"SWITCHED OFF: {cause}, so the program runs stock torch and nothing is counted. Unset it to go on."]
    if not settings.switched_off:
        return []
    return [f"SWITCHED OFF: {settings.kill_switch} exists, every program runs stock torch. Remove it to go on."]


def why_nothing(settings: Settings) -> list[str]:
    """The line that begins a report of no calls where this torch has no native hook: then none can be recorded."""
    if settings.disabled or not settings.native:
        return []
    from gemmtuned.hooks.native.build import find_built, library_path

    try:
        if library_path(settings.cache) is None or find_built(settings.cache) is not None:
            return []
    except (GemmtunedError, OSError) as err:
        return [f"The native hook cannot be used, nothing is recorded: {err}"]
    return [
        "The native hook is not built yet for this torch: nothing is recorded. gemmtuned run builds it, or gemmtuned "
        "doctor --build"
    ]
