"""`gemmtuned top`: what goes on now, on a screen that renews itself."""

from __future__ import annotations

import json
import sys
from importlib import util

from gemmtuned.commands.options import Json, settings
from gemmtuned.configs.errors import SettingError


def top(as_json: Json = False) -> None:
    """Watch daemon, devices and programs.

    Asks the daemon twice a second, over a socket in the home; the database is not read. Keys: p pauses and resumes, e
    explains the problem of the line, w withdraws its solution, q ends. Needs Textual: pip install textual.
    """
    from gemmtuned.daemon.watch.ask import ask

    here = settings()
    if as_json:
        print(json.dumps(ask(here.home)))
        return
    if util.find_spec("textual") is None:
        raise SettingError("gemmtuned top needs Textual: pip install textual. Without it: gemmtuned status")
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # Textual draws on the last
        raise SettingError("gemmtuned top draws on a terminal. In a pipe: gemmtuned status, or gemmtuned top --json")
    from gemmtuned.top import actions, picture
    from gemmtuned.top.app import Top

    def look() -> picture.Picture:
        return picture.of(ask(here.home), switched_off=str(here.kill_switch) if here.switched_off else "")

    Top(look, actions.run).run()
