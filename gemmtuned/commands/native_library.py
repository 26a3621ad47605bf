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

from gemmtuned.configs import bundle
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.more_threads import begin
from gemmtuned.configs.settings import Settings, unhooked_env
from gemmtuned.hooks.native.build import BuildFailed, build, find_built, may_try

log = logging.getLogger("gemmtuned.daemon")
LOOK_S: Final = 30.0
LONGEST_S: Final = 3600.0
BUILDING: Final = "building the native hook for this torch, once, about 15 s on an idle machine"


def build_before(argv: list[str], settings: Settings) -> None:
    """Build what the program `argv` will look for, unless it is there; a failure is said and stops nothing."""
    if settings.disabled or not settings.native:
        return
    try:
        python = other_python(argv)
        if python is not None:
            _build_by(python)
        elif find_built(settings.cache) is not None:
            bundle_modules(settings.cache)
        elif may_try(settings.cache):
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


def bundle_modules(cache: Path) -> None:
    """Bring the file of our modules' code up to date; without it programs start all the same."""
    with suppress(OSError):
        bundle.write(cache)


def _loads(library: Path) -> bool:
    """Whether it can be loaded into a process with torch; tried in a child, which may die of it."""
    code = "import sys, torch, gemmtuned.hooks.native as n, pathlib; n.Native(pathlib.Path(sys.argv[1]))"
    return not subprocess.run(
        [sys.executable, "-c", code, str(library)], env=unhooked_env(), cwd="/", capture_output=True, check=False
    ).returncode


class Beside:
    """Builds beside the daemon, each in a niced process of its own session, ended with the daemon.

    The library is looked for every LOOK_S: a cache may have been full, or be removed, and torch may be upgraded.
    """

    def __init__(self, settings: Settings, *, look_s: float = LOOK_S) -> None:
        self._settings, self._look_s = settings, look_s
        self._process: subprocess.Popen[str] | None = None
        self._ends = threading.Event()
        if settings.native:
            thread = threading.Thread(target=self._run, name="gemmtuned-build", daemon=True)
            begin(thread, "the native hook is not built")

    def _run(self) -> None:
        said, wait_s, cache = "", self._look_s, self._settings.cache
        while True:
            trouble = ""
            try:
                if find_built(cache) is not None:
                    bundle_modules(cache)
                elif may_try(cache):
                    trouble = self._build()
            except (GemmtunedError, OSError) as err:
                trouble = str(err)
            if trouble and trouble != said and not self._ends.is_set():
                log.warning("native hook not built reason=%r", trouble)
            said, wait_s = trouble, min(2 * wait_s, LONGEST_S) if trouble else self._look_s
            if self._ends.wait(wait_s):
                return

    def _build(self) -> str:
        """Why it failed, or ""."""
        log.info("building the native hook for the programs of this machine")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemmtuned.hooks.native.build", "--nice"],
            env=unhooked_env(), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        if self._ends.is_set():
            self.stop()
        _, said = self._process.communicate()
        if self._process.returncode:
            return (said.strip().splitlines() or ["no word"])[-1]
        log.info("native hook built")
        return ""

    def stop(self) -> None:
        """End it and its compiler; what is half built is built anew the next time."""
        self._ends.set()
        process = self._process
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
