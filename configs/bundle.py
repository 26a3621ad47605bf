"""The code of the modules that a program imports for us, in one file of the cache: reading each by itself takes longer.

Whoever builds the native library writes the file (`write`); a program that starts reads it (`in_use`).  Beside each
module's code is how long its source is and when that was changed, as Python has it in its own files of bytecode.  What
does not agree is imported as ever, so an edited or upgraded source is never overlooked, and so is all of it where the
file is another Python's, was made for another folder, or can be written by others.
"""

from __future__ import annotations

import gc
import marshal
import os
import stat
import sys
from _thread import _count as thread_count
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

_stat = os.stat
# By package; what is not listed is imported by itself. tests/hooks/test_hooks_modules.py compares it with a program
MODULES: Final = {
    "gemmtuned": "_testing db hooks kernels",
    "gemmtuned._testing": "faults",
    "gemmtuned.configs": (
        "change_queue clock cpu_wait file_size frame_lock key nearest_word old_stamps open_files packed padding "
        "pattern problem processes read_file rows_config sighting solution spelling stderr_lines temporary tunable "
        "unpatched"
    ),
    "gemmtuned.db": (
        "connect descriptors faults files guest handle lockfile migrations refusals row_ids sightings stale_log"
    ),
    "gemmtuned.hooks": (
        "account activate as_guest background breaker compiled crowd declared dispatch ends engine_operators engines "
        "flush followers foreign forks frozen_layers hook housekeeping imports inotify log_handler native op_counts "
        "overrides pace patches pending phase ranks ready tables watch where"
    ),
    "gemmtuned.hooks.native": "build library our_thread records",
    "gemmtuned.kernels": "device stamps",
}

FORM: Final = 2  # since 2 the file has slim code (slim_code.py)
# (source, name of its file of bytecode, whether it is a package, bytes of the source, its mtime in ns, code)
Entry = tuple[str, str, bool, int, int, CodeType]


class _Loader(SourceFileLoader):
    """Runs code that has been read already; afterwards the module has the usual loader."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._of_module = code

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        module.__loader__ = spec.loader = SourceFileLoader(self.name, self.path)
        exec(self._of_module, module.__dict__)  # noqa: S102


class _Finder:
    """Finds the modules whose sources are as they were."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries

    def find_spec(self, name: str, _: Sequence[str] | None = None, __: ModuleType | None = None) -> ModuleSpec | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        origin, bytecode, is_package, size, changed_ns, code = entry
        try:
            facts = _stat(origin)
        except OSError:
            return None
        if (facts.st_size, facts.st_mtime_ns) != (size, changed_ns):
            return None
        spec = ModuleSpec(name, _Loader(name, origin, code), origin=origin, is_package=is_package)
        spec.has_location = True
        folder = origin.rpartition("/")[0]
        prefix = sys.pycache_prefix  # as importlib.util.cache_from_source, which takes 6 us
        spec.cached = f"{folder}/__pycache__/{bytecode}" if prefix is None else f"{prefix}{folder}/{bytecode}"
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(folder)
        return spec


@contextmanager
def in_use(cache: Path | None) -> Iterator[None]:
    """Import inside what lies in the cache's file from there; None: there is no cache."""
    finder: Any = None
    with suppress(Exception):
        finder = _finder(cache) if cache is not None else None
    if finder is None:
        yield
        return
    try:
        sys.meta_path.insert(0, finder)
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(finder)


def write(cache: Path) -> None:
    """Write the file for this Python, unless it is there and agrees with all sources. Raises OSError."""
    path = _path(cache)
    with suppress(Exception):
        finder = _finder(cache)
        if finder is not None and all(map(finder.find_spec, names())):
            return
    entries = {name: entry for name in names() if (entry := _entry(name)) is not None}
    if not entries:  # a program that PyInstaller has frozen has no sources
        return
    from gemmtuned.configs.temporary import put  # a program that starts only reads

    put(path, marshal.dumps((_facts(), entries)))
    path.chmod(0o644)


def names() -> list[str]:
    """The modules in the file, packages before what is in them."""
    return [f"{package}.{name}" for package, inside in MODULES.items() for name in inside.split()]


def _path(cache: Path) -> Path:
    return (
        cache
        / "native"
        / f"modules-{sys.implementation.cache_tag}-{sha256(repr(_facts()).encode()).hexdigest()[:12]}.bin"
    )


def _facts() -> tuple[Any, ...]:
    """What the code depends on besides the sources: which Python, how it and we compile, and where we lie."""
    package: Any = sys.modules["gemmtuned"]
    return FORM, sys.version, sys.flags.optimize, package.__file__, tuple(package.__path__)


def _finder(cache: Path) -> _Finder | None:
    whole = _read(_path(cache))
    facts, entries = _loaded(whole) if whole is not None else (None, {})
    return _Finder(entries) if facts == _facts() else None


def _loaded(whole: bytes) -> Any:
    """What marshal makes of it, where no other thread can mind without a garbage collection.

    Two thousand code objects are made, of which none is garbage, and each few hundred would be looked at for it: that
    takes a third of the time.
    """
    is_on = gc.isenabled() and not thread_count()
    try:
        if is_on:
            gc.disable()
        return marshal.loads(whole)  # noqa: S302  see `_read`
    finally:
        if is_on:
            gc.enable()


def _read(path: Path) -> bytes | None:
    """All of a file that only its owner, who is root or this user, can write; it becomes code in this process."""
    facts = _stat(path.parent)
    if not _is_ours(facts):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or not _is_ours(facts):
            return None
        whole = os.read(fd, facts.st_size)
    finally:
        os.close(fd)
    return whole if len(whole) == facts.st_size else None


def _is_ours(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid()) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _entry(name: str) -> Entry | None:
    """What the file has of a module; None where there is no source, or it is being changed."""
    package: Any = sys.modules["gemmtuned"]
    inside = "/".join(name.split(".")[1:])
    there = (f"{root}/{inside}{end}" for root in package.__path__ for end in ("/__init__.py", ".py"))
    origin = next(filter(os.path.isfile, there), None)
    if origin is None or type(package.__spec__.loader) is not SourceFileLoader:
        return None
    before = _stat(origin)
    from gemmtuned.configs.slim_code import compiled  # a program that starts only reads

    code = compiled(Path(origin).read_bytes(), origin)
    facts = _stat(origin)
    if (before.st_size, before.st_mtime_ns) != (facts.st_size, facts.st_mtime_ns):
        return None
    bytecode = Path(cache_from_source(origin)).name
    return origin, bytecode, origin.endswith("/__init__.py"), facts.st_size, facts.st_mtime_ns, code
