"""Have the native hook built before programs need it: a program itself never starts a compiler."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings, unhooked_env
from gemmtuned.hooks.native.build import BuildFailed, build, find_built, may_try

log = logging.getLogger("gemmtuned.daemon")
BUILDING: Final = "building the native hook for this torch, once, about 15 s on an idle machine"


def build_before(argv: list[str], settings: Settings) -> None:
    """Build what the program `argv` will look for, unless it is there; a failure is said and stops nothing."""
    if settings.disabled or not settings.native:
        return
    try:
        python = other_python(argv)
        if python is not None:
            _build_by(python)
        elif find_built(settings.cache) is None and may_try(settings.cache):
            say(BUILDING)
            build(settings.cache)
    except (GemmtunedError, OSError) as err:
        say(f"the program runs on stock torch: {err}")


def build_now(settings: Settings) -> str:
    """Build it if it is not there, whatever became of earlier tries, and say where it is; why that failed, or ""."""
    try:
        found = find_built(settings.cache)
        if found is not None and not _loads(found):
            found.unlink()
            found = None
        if found is None:
            say(BUILDING)
        say(f"the native hook is {build(settings.cache)}")
    except (GemmtunedError, OSError) as err:
        return str(err)
    return ""


def _loads(library: Path) -> bool:
    """Whether it can be loaded into a process with torch; tried in a child, which may die of it."""
    code = "import sys, torch, gemmtuned.hooks.native as n, pathlib; n.Native(pathlib.Path(sys.argv[1]))"
    return not subprocess.run(
        [sys.executable, "-c", code, str(library)], env=unhooked_env(), cwd="/", capture_output=True, check=False
    ).returncode


class Beside:
    """A build beside the daemon, in a niced process of its own session; ended with the daemon."""

    def __init__(self, settings: Settings) -> None:
        self._process: subprocess.Popen[str] | None = None
        try:
            if settings.native and find_built(settings.cache) is None and may_try(settings.cache):
                self._start()
        except (GemmtunedError, OSError) as err:
            log.warning("native hook not built reason=%r", str(err))

    def _start(self) -> None:
        log.info("building the native hook for the programs of this machine")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemmtuned.hooks.native.build", "--nice"],
            env=unhooked_env(), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._wait, args=(self._process,), name="gemmtuned-build", daemon=True).start()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        _, said = process.communicate()
        if process.returncode == 0:
            log.info("native hook built")
        elif self._process is not None:
            log.warning("native hook not built reason=%r", (said.strip().splitlines() or ["no word"])[-1])

    def stop(self) -> None:
        """End it and its compiler; what is half built is built anew the next time."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


def other_python(argv: list[str]) -> str | None:
    """The interpreter that `argv` starts when it is not ours: it may have another torch."""
    found = shutil.which(argv[0])
    if found is None or not Path(found).name.startswith("python"):
        return None
    here, there = (Path(p).absolute().parent for p in (sys.executable, found))  # unresolved: environments are links
    return None if here == there else found


def _build_by(python: str) -> None:
    done = subprocess.run(
        [python, "-m", "gemmtuned.hooks.native.build"], stdin=subprocess.DEVNULL, check=False, cwd="/"
    )
    if done.returncode:
        raise BuildFailed(f"{python} -m gemmtuned.hooks.native.build ended with {done.returncode}")


def say(text: str) -> None:
    """One line of progress on stderr."""
    sys.stderr.write(f"gemmtuned: {text}\n")
    sys.stderr.flush()
