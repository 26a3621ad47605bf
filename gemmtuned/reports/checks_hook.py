"""Doctor's checks of the hook: Python, torch, the entry point, and whether it takes effect in a fresh process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

from gemmtuned.configs.beside_aiter import aiter_captures
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.named_points import named_points
from gemmtuned.configs.settings import Settings, autoload_enabled, child_env, unknown_variables
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.checks_host import why_no_folder

OLDEST_TORCH: Final = (2, 9)
START_LIMIT_S: Final = 120.0  # a cold import of torch from a slow disk
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LET_IT: Final = f"unset {_AUTOLOAD}, or start programs with: gemmtuned run"
_INSTALL: Final = "install g++ (apt install g++, dnf install gcc-c++)"
_PROBE: Final = "import json, torch, gemmtuned; print(json.dumps(gemmtuned.status()))"


def checks(settings: Settings, *, quick: bool, not_built: str = "") -> Iterator[Check]:
    """Versions, entry point, native hook; unless `quick`, also a process started with the hook on.

    not_built: why a build of the native hook has just failed, so that to build it is no advice.
    """
    yield Check("python", PASS, f"{platform.python_version()} at {sys.executable}")
    yield Check("not counted", PASS, _NOT_COUNTED)
    yield _torch()
    yield _autoload()
    yield _entry_point()
    yield _native(settings, not_built)
    if settings.disabled:
        fix = "unset GEMMTUNED_DISABLE AITER_BYPASS_TUNE_CONFIG"
        yield Check("switched off", WARN, "this shell sends everything to the default", fix)
    for name, meant in unknown_variables().items():
        fix = f"unset {name}" + (f", or set {meant} if that is what you mean" if meant else "; the table below has all")
        yield Check("variables", WARN, f"{name} is set, and no variable of gemmtuned's: it changes nothing", fix)
    aiters = aiter_captures()
    if aiters:
        yield Check("AITER", WARN, aiters, "unset AITER_TUNE_GEMM; export GEMMTUNED=1")
    if not quick:
        yield _effective(not_built)


_NOT_COUNTED: Final = (
    "mv, addmv, dot, LSTM cells, sparse products, 1x1 convolutions, quantized::linear, _weight_int8pack_mm, oneDNN's "
    "fused linears: operators of their own, left alone"
)


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", FAIL, "not installed in this environment", "pip install 'torch>=2.9'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        return Check("torch", FAIL, f"{version}: too old", "pip install 'torch>=2.9'")
    return Check("torch", PASS, version)


def _autoload() -> Check:
    if not autoload_enabled():
        return Check("autoload", FAIL, f"{_AUTOLOAD} keeps torch from calling us", _LET_IT)
    return Check("autoload", PASS, f"{_AUTOLOAD} is not in the way")


def _entry_point() -> Check:
    points, broken = named_points("torch.backends")
    for path, why in broken.items():
        said = f"{path} is broken ({why}): torch cannot read any entry point, and `import torch` fails"
        return Check("entry point", FAIL, said, f"reinstall that package, or remove {path}")
    found = [e.value for e in points if e.name == "gemmtuned"]
    if not found:
        return Check(
            "entry point", FAIL, "torch.backends lists no gemmtuned", "pip install --force-reinstall gemmtuned"
        )
    return Check("entry point", PASS, f"torch.backends: {found[0]}")


def _native(settings: Settings, not_built: str) -> Check:
    from gemmtuned.hooks.native.build import Closed, compiler, failure, find_built

    if not_built:
        return Check("native hook", FAIL, f"nothing is counted: {not_built}", "" if compiler() else _INSTALL)
    if not settings.native:
        return Check("native hook", WARN, "GEMMTUNED_NATIVE=0: nothing is counted", "unset GEMMTUNED_NATIVE")
    try:
        built = find_built(settings.cache)
    except GemmtunedError as err:
        fix = "set GEMMTUNED_CACHE to a folder of your own" if isinstance(err, Closed) else f"rm -r {settings.cache}"
        return Check("native hook", FAIL, f"nothing is counted: {err}", fix)
    if built is not None:
        return Check("native hook", PASS, str(built))
    with_what = compiler()
    if with_what is None:
        fix = f"{_INSTALL}, then: gemmtuned doctor --build"
        return Check("native hook", WARN, "not built, and no C++ compiler: nothing is counted", fix)
    why = failure(settings.cache)
    if why is not None:
        return Check(
            "native hook",
            WARN,
            f"nothing is counted: does not build: {why}",
            "mend that, then: gemmtuned doctor --build",
        )
    trouble = why_no_folder(settings.cache / "native")
    if trouble:
        found = f"not built yet, and cannot be: {trouble}; nothing is counted"
        return Check("native hook", WARN, found, "set GEMMTUNED_CACHE to a folder of your own, or unset it")
    fix = "gemmtuned doctor --build; `gemmtuned run` and the daemon build it too"
    return Check("native hook", WARN, f"not built yet: nothing is counted. {with_what} is there to build it", fix)


def _effective(not_built: str) -> Check:
    """Start Python with the hook on, in a home that is thrown away, and ask it what it does."""
    with tempfile.TemporaryDirectory(prefix="gemmtuned-doctor-") as home:
        env = child_env(
            GEMMTUNED="1",
            GEMMTUNED_HOME=home,
            GEMMTUNED_DB=None,
            GEMMTUNED_CONFIG_DIR=None,
            GEMMTUNED_QUIET="1",
        )
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROBE] if sys.version_info >= (3, 11) else [sys.executable, "-c", _PROBE],
                env=env, cwd=home, capture_output=True, text=True, timeout=START_LIMIT_S,
            )  # fmt: skip
            state: Any = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            return Check("takes effect", WARN, f"a process that imports torch took longer than {START_LIMIT_S:.0f} s")
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"])[-1]
            return Check("takes effect", FAIL, f"`import torch` with GEMMTUNED=1 failed: {last}")
    if not_built:
        return Check("takes effect", FAIL, "GEMMTUNED=1 python: the hook stays off without the native hook")
    if state.get("note", "").startswith("nothing is counted"):
        return Check("takes effect", WARN, f"GEMMTUNED=1 python: {state['note']}", "gemmtuned doctor --build")
    if state.get("path", "off") == "off":
        why = state.get("note") or (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        fix = "" if autoload_enabled() else _LET_IT
        return Check("takes effect", FAIL, f"GEMMTUNED=1 python: the hook stays off: {why}", fix)
    return Check("takes effect", PASS, "GEMMTUNED=1 python: the hook is on")
