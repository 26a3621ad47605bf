"""Doctor's checks of the machine: folders, file system, disk, inotify."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.human_units import moment
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.open_files import free_bytes, in_the_way
from gemmtuned.configs.settings import Settings
from gemmtuned.db.faults import no_locks
from gemmtuned.db.files import is_network
from gemmtuned.hooks.probation import DEATHS, TRIAL_S, deaths, without
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.published import standing
from gemmtuned.reports.render import several, size

DOUBTFUL: Final = ("fuse", "virtiofs")  # a network or a local disk behind them: cannot be seen from here
LOW_BYTES: Final = 1 << 30
EMPTY_BYTES: Final = 64 << 20  # below this a flush or a publish may fail any moment
# One watcher a process takes one instance; 128, the usual limit, is shared by all programs of the user.
_FOLDERS: Final = ("bin", "checked", "ingest", "probation")  # in the home, beside `locks`
_OWN: Final = "set GEMMTUNED_HOME to a folder of your own"
FEW_INSTANCES: Final = 64


def checks(settings: Settings) -> Iterator[Check]:
    """Home, its file system and space, published tables, inotify, kill switch."""
    yield (home := _home(settings))
    if not cannot_be(settings.db, settings, home):
        yield _file_system(nearest(settings.db))
        yield from _names(settings.db)
    if home.result == PASS:  # where there can be no home the space says nothing
        yield _space(nearest(settings.home))
    if not cannot_be(settings.config_dir, settings, home):
        yield _tables(settings)
    yield from _probation(settings)
    yield _inotify()
    yield from _gpus()
    if settings.switched_off:
        fix = f"rm {settings.kill_switch}"
        yield Check("kill switch", WARN, f"{settings.kill_switch} exists: every program runs stock torch", fix)


def _gpus(devices: Path = Path("/dev")) -> Iterator[Check]:
    """A GPU's device file without what it takes: the library that asks its driver, the compilers of our kernels."""
    for name, module, package in (("nvidia0", "pynvml", "nvidia-ml-py"), ("kfd", "amdsmi", "amdsmi")):
        if (devices / name).exists() and find_spec(module) is None:
            found = f"{devices / name} is there, and the daemon cannot ask its driver: {package} is not installed"
            yield Check("GPU monitor", WARN, found, f"pip install {package}")
    if not (devices / "nvidia0").exists():
        return
    compilers = (  # torch's builds for CUDA bring both
        ("Triton", find_spec("triton"), "triton"),
        ("NVRTC", nvrtc.version(), "nvidia-cuda-nvrtc"),
    )
    for name, here, package in compilers:
        if here is None:
            found = f"{devices / 'nvidia0'} is there, and {name} is not installed: kernels it compiles do not compete"
            yield Check(name, WARN, found, f"pip install {package}")


def cannot_be(path: Path, settings: Settings, home: Check) -> bool:
    """Whether it is missing because the home cannot be made or written; home: the check of the home."""
    return home.result == FAIL and path.is_relative_to(settings.home) and not os.path.lexists(path)


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110  (Path.exists raises in a folder closed to us)
        path = path.parent
    return path


def why_no_folder(folder: Path) -> str:
    """Why nothing can be made in this folder, or ""."""
    if what := in_the_way(folder):
        return what
    there = nearest(folder)
    err = _refusal(there)
    return f"{there} takes no folder ({err.strerror})" if err else ""


def _refusal(folder: Path) -> OSError | None:
    """Why it takes no other, by trying: permissions alone do not tell, to root /proc looks writable."""
    try:
        Path(tempfile.mkdtemp(prefix=".gemmtuned-doctor-", dir=folder)).rmdir()
    except OSError as err:
        return err
    return None


def _home(settings: Settings) -> Check:
    home = settings.home
    there = nearest(home)
    counts = settings.counts[0]
    if counts == settings.ingest:
        if os.access(counts.parent, os.W_OK | os.X_OK):
            return Check("home", PASS, f"{home}, another user's: counts go to {counts}")
        fix = f"have yourself added to the group of {counts.parent}, or set GEMMTUNED_HOME"
        return Check("home", FAIL, f"{home} is another user's, and {counts.parent} is not writable", fix)
    err = _refusal(there)
    if err is not None and err.errno != errno.ENOSPC:  # the line on the disk reports a full one
        verb = "written" if there == home else "made"
        fix = _OWN
        if err.errno == errno.EACCES and there.is_dir() and there.stat().st_uid == os.geteuid():
            fix = f"chmod u+wx {there}, or {fix}"
        return Check("home", FAIL, f"{home} cannot be {verb}: {there} takes no folder ({err.strerror})", fix)
    for folder in (settings.locks, *(home / name for name in _FOLDERS)):
        if what := in_the_way(folder):
            return Check("home", FAIL, f"{what}: {folder} is a folder of gemmtuned's", "move it away")
        if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return Check(
                "home", FAIL, f"{folder} is closed to uid {os.geteuid()}", f"have it made writable for you, or {_OWN}"
            )
    return Check("home", PASS, f"{home}" if there == home else f"{home} (made at first use)")


def _file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Check:
    kind = _kind_of(path, mounts)
    why = no_locks(path if path.is_dir() else path.parent)
    if why:
        fix = "set GEMMTUNED_HOME (or GEMMTUNED_DB) to a local disk, or have the file system's lock service started"
        return Check("file system", FAIL, f"{path} is on {kind or 'a file system'} that gives no locks ({why})", fix)
    if kind is None:
        return Check("file system", PASS, "kind not known here")
    fix = "set GEMMTUNED_HOME (or GEMMTUNED_DB) to a local disk"
    if is_network(kind):
        return Check("file system", FAIL, f"{path} is on {kind}: the database needs a local disk", fix)
    if kind.split(".")[0] in DOUBTFUL:
        return Check("file system", WARN, f"{path} is on {kind}: safe only if one host uses it", fix)
    if kind in ("tmpfs", "ramfs"):
        return Check("file system", WARN, f"{path} is on {kind}: lost at restart", "set GEMMTUNED_HOME to a disk")
    return Check("file system", PASS, f"{path} is on {kind}")


def _names(db: Path) -> Iterator[Check]:
    """What is said of a database with several hard links, as `cp -al` and some backups make them."""
    try:
        names = db.stat().st_nlink
    except OSError:
        return
    if names > 1:
        found = (
            f"{db} has {names} names (hard links): who opens it by another does not see the log beside this one, "
            "and each loses what the other writes"
        )
        fix = f"stop what uses it by either, then: cp {db} {db}.own && mv {db}.own {db}"
        yield Check("database file", WARN, found, fix)


def _kind_of(path: Path, mounts: Path) -> str | None:
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    best: tuple[int, str] | None = None
    real = path.resolve()
    for fields in (line.split() for line in lines):
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        # of several mounts on one point the last is the one in force
        if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), fields[2])
    return best[1] if best else None


def _space(path: Path) -> Check:
    try:
        facts = os.statvfs(path)
    except OSError as err:
        return Check("disk", WARN, f"{path}: {err.strerror}")
    if facts.f_files and not facts.f_favail:  # some file systems count none
        return Check("disk", FAIL, f"no room for another file at {path}: all inodes are taken", "remove some files")
    free = free_bytes(path)
    if free is None:
        return Check("disk", PASS, f"the file system at {path} does not count what is free")
    if free < EMPTY_BYTES:
        return Check("disk", FAIL, f"{size(free)} free at {path}", "free some space: counts are being lost")
    if free < LOW_BYTES:
        return Check("disk", WARN, f"{size(free)} free at {path}", "free some space")
    return Check("disk", PASS, f"{size(free)} free at {path}")


def _tables(settings: Settings) -> Check:
    """Read every published table the way a program would."""
    folder = settings.config_dir
    there = nearest(folder)
    if there.exists() and not there.is_dir():
        fix = "set GEMMTUNED_CONFIG_DIR to a folder, or unset it"
        return Check("published tables", FAIL, f"nothing can be published in {folder}: {there} is a file", fix)
    differs = standing(settings)
    if differs is not None and differs.result == FAIL:
        return differs
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return Check("published tables", PASS, f"nothing published yet in {folder}")
        read = [read_table(folder, file) for file in manifest.files]
    except TableError as err:
        fix = "the command in the line; without one: gemmtuned daemon --once. Programs run on meanwhile"
        return Check("published tables", FAIL, str(err), fix)
    rows = sum(len(solutions) for solutions, _ in read)
    bad = [complaint for _, complaints in read for complaint in complaints]
    amount = f"{several(rows, 'solution')} in {several(len(manifest.files), 'file')}"
    found = f"generation {manifest.generation}: {amount}, {folder}"
    if bad:
        return Check(
            "published tables", WARN, f"{found}; {several(len(bad), 'row is', 'rows are')} not used, first {bad[0]}"
        )
    if differs is not None:
        return differs
    return Check("published tables", PASS, found)


def _probation(settings: Settings) -> Iterator[Check]:
    """One line for each run whose processes died soon after taking a generation up."""
    folder = settings.home / "probation"
    waits = without(folder)
    for (generation, run), count in sorted(deaths(folder).items()):
        until_s = waits.get((generation, run))
        used = f"after {DEATHS} it is not used for a while" if count < DEATHS else "its next start tries it again"
        if until_s is not None:
            used = f"it goes without it until {moment(until_s, time.time())}"
        died = f"{count} processes" if count > 1 else "1 process"
        when = f"died in its kernels within {TRIAL_S:.0f} s of taking it up"
        found = f"generation {generation}: {died} of {run} {when}; {used}"
        fix = f"gemmtuned rollback, or withdraw what is to blame; if it is not to blame: rm {folder}/{generation}-*"
        yield Check("probation", WARN, found, fix)


def _inotify(folder: Path = Path("/proc/sys/fs/inotify")) -> Check:
    try:
        instances = int((folder / "max_user_instances").read_text())
        watches = int((folder / "max_user_watches").read_text())
    except (OSError, ValueError):
        return Check("inotify", PASS, "no limits to read here; tables are polled as well")
    found = f"{instances} instances, {watches} watches a user"
    if instances < FEW_INSTANCES or watches < 1024:
        fix = "sudo sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536"
        return Check("inotify", WARN, f"{found}: few; new tables may be seen by the slow poll only", fix)
    return Check("inotify", PASS, found)
