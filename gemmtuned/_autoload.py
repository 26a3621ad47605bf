"""What torch calls at the end of `import torch` (entry point group `torch.backends`).

Switched off it reads three environment variables and returns: no torch, no sqlite, nothing patched.  It never raises:
an exception here would make `import torch` itself fail.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmtuned.configs.settings import Settings


def _settings() -> Settings | None:
    from gemmtuned.configs.errors import SettingError
    from gemmtuned.configs.settings import Settings

    try:
        return Settings.from_env()
    except SettingError:  # which the hook meets and reports
        return None


def autoload() -> None:
    """Activate the hook when the environment asks for it."""
    try:
        from gemmtuned.configs.settings import wants_activation

        if not wants_activation():
            return
        package = sys.modules["gemmtuned"]
        if package.__file__ is None:
            raise ImportError(
                f"the folder {next(iter(package.__path__))} beside the program hides the package gemmtuned, which is "
                "installed editable. Run the program from another folder, or install gemmtuned without -e"
            )
        from gemmtuned.configs import bundle

        settings = _settings()
        with bundle.in_use(settings.cache if settings is not None else None):
            from gemmtuned.hooks.activate import activate

            hook = activate(settings)
        if hook is not None and hook.settings.patches:
            from gemmtuned.patches import follow

            follow(hook.settings.patches)
    except Exception as err:
        try:
            from gemmtuned.configs.stderr_lines import say

            say(f"not active, the program runs on stock torch: {err}. See: gemmtuned doctor")
        except Exception:  # noqa: S110  a broken installation: `import torch` must go on, even without a message
            pass
