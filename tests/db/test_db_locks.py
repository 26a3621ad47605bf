"""Locks: nobody else can hold them or hang us with them, and a file system without any is named as such."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_users import as_user
from store_cases import NEW, found, open_store, problem, saw

from gemmtuned.configs.errors import GemmtunedError, TableError, TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.verdicts import Verdicts
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.service import main, only_one
from gemmtuned.db import faults, queries
from gemmtuned.db.files import is_network
from gemmtuned.db.lockfile import LockFile, holder, open_lock

NOLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int flock(int fd, int op) { errno = ENOLCK; return -1; }
static int locks(int cmd) { return cmd == F_SETLK || cmd == F_SETLKW || cmd == F_GETLK || cmd == F_OFD_SETLK; }
static int pass(const char *name, int fd, int cmd, void *arg) {
    if (locks(cmd)) { errno = ENOLCK; return -1; }
    return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, name))(fd, cmd, arg);
}
int fcntl(int fd, int cmd, ...) { va_list a; va_start(a, cmd); void *p = va_arg(a, void *); va_end(a);
    return pass("fcntl", fd, cmd, p); }
int fcntl64(int fd, int cmd, ...) { va_list a; va_start(a, cmd); void *p = va_arg(a, void *); va_end(a);
    return pass("fcntl64", fd, cmd, p); }
"""


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_lock_is_for_its_owner_alone_whatever_the_umask_and_old_ones_are_mended(tmp_path: Path) -> None:
    shared = tmp_path / "locks"
    shared.mkdir()
    shared.chmod(0o2750)
    before = os.umask(0o007)
    try:
        os.close(open_lock(shared / "new.lock"))
        (shared / "old.lock").touch()
        (shared / "old.lock").chmod(0o640)
        os.close(open_lock(shared / "old.lock"))
        ingest = tmp_path / "ingest"
        ingest.mkdir()
        ingest.chmod(0o2770)
        os.close(open_lock(ingest / "ingest.db.lock"))
    finally:
        os.umask(before)
    assert (mode(shared / "new.lock"), mode(shared / "old.lock")) == (0o600, 0o600)
    assert mode(ingest / "ingest.db.lock") == 0o660, "what members write they lock, too"


def test_a_home_is_open_to_its_owner_whatever_the_umask_of_the_program_that_makes_it(tmp_path: Path) -> None:
    tried = found(problem())
    with tempfile.TemporaryDirectory(prefix="gemmtuned-open-") as name:
        open_to_all = Path(name)
        open_to_all.chmod(0o777)
        for umask in (0o777, 0o277, 0o077):
            home = open_to_all / oct(umask) / "made" / "too"

            def makes(home: Path = home, umask: int = umask) -> object:
                os.umask(umask)
                for _ in range(2):
                    open_store(home).sightings.add("serve", NEW, [saw(problem(), 3)], now_s=time.time())
                Verdicts(home).ask([tried])
                Verdicts(home).answer(tried, "")
                os.umask(0o022)
                return Verdicts(home).of(tried), queries.coverage(home / "tune.db")[0]["calls"]

            assert as_user(65534, 65534, makes) == "('', 6)"
            assert mode(home) | mode(home.parent) | mode(home / "locks") == 0o700


def test_a_home_of_an_earlier_version_is_mended_by_who_uses_it(tmp_path: Path) -> None:
    here = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    here.locks.mkdir()
    names = ("tune.db.lock", "publish.lock", "daemon.lock")
    for name in names:
        (here.locks / name).touch()
        (here.locks / name).chmod(0o644)
    store = open_store(tmp_path)
    store.sightings.add("serve", NEW, [saw(problem())], now_s=1e9)
    publish(store, here.config_dir, here.locks, now_s=1e9)
    with only_one.only_daemon(here):
        pass
    assert [mode(here.locks / name) for name in names] == [0o600] * 3
    store.close()


def test_no_other_user_can_hold_a_lock_of_a_shared_home() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    with tempfile.TemporaryDirectory(prefix="gemmtuned-locks-", dir="/var/tmp") as folder:
        home = Path(folder)
        os.chown(home, 54400, 54321)
        home.chmod(0o2750)

        def begin() -> str:
            os.umask(0o027)
            here = Settings.from_env({"GEMMTUNED_HOME": str(home)})
            with only_one.only_daemon(here):
                store = open_store(home)
                store.sightings.add("serve", NEW, [saw(problem())], now_s=1e9)
                publish(store, here.config_dir, here.locks, now_s=1e9)
                store.close()
            return "done"

        assert as_user(54400, 54321, begin) == "done"
        assert sorted(p.name for p in (home / "locks").iterdir()) == ["daemon.lock", "publish.lock", "tune.db.lock"]
        for path in (home / "locks").iterdir():
            assert "PermissionError" in as_user(54401, 54321, lambda path=path: os.open(path, os.O_RDONLY)), path


def test_what_root_locks_does_not_shut_the_owner_of_the_folder_out() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    with tempfile.TemporaryDirectory(prefix="gemmtuned-locks-", dir="/var/tmp") as folder:
        os.chown(folder, 54400, 54321)
        os.close(open_lock(Path(folder) / "publish.lock"))
        assert (Path(folder) / "publish.lock").stat().st_uid == 54400


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.fixture
def deadline() -> Iterator[None]:
    """A hang in `open` must fail the test, not the run: a handler that raises ends the retried call."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [_fifo, _socket, _link, Path.mkdir])
def test_what_is_no_regular_file_holds_nobody_up(
    tmp_path: Path, make: Callable[[Path], None], deadline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    here.locks.mkdir()
    for name in ("tune.db.lock", "publish.lock", "daemon.lock"):
        make(here.locks / name)
    make(tmp_path / "gemmtuned-gpu-1.lock")
    with pytest.raises(GemmtunedError):
        open_store(tmp_path).sightings.add("serve", NEW, [saw(problem())], now_s=1e9)
    with pytest.raises(TableError, match=r"daemon\.lock"), only_one.only_daemon(here):
        pass
    store = open_store(tmp_path / "other")
    with pytest.raises(TableError, match=r"publish\.lock"):
        publish(store, here.config_dir, here.locks, now_s=1e9)
    store.close()
    said = DeviceLock(tmp_path, "GPU-1", "me").take()
    assert "gemmtuned-gpu-1.lock" in said and "GEMMTUNED_DEVICE_LOCKS" in said


HOLDS = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
)


def test_who_holds_a_lock_without_a_word_is_named(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "daemon.lock"
    os.close(open_lock(path))
    path.write_text("pid 4590, since 2020-01-01 00:00:00\n")
    (tmp_path / "gemmtuned-gpu-1.lock").write_text("")
    (tmp_path / "locks" / "publish.lock").touch()
    here = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    names = (path, tmp_path / "gemmtuned-gpu-1.lock", tmp_path / "locks" / "publish.lock")
    holders = [subprocess.Popen([sys.executable, "-c", HOLDS, str(p)], stdout=subprocess.PIPE) for p in names]
    try:
        for one in holders:
            assert one.stdout is not None and one.stdout.readline() == b"held\n"
        if not holder(path):
            pytest.skip("the kernel does not tell who holds a lock here (/proc/locks)")
        with (
            pytest.raises(only_one.AnotherRuns, match=rf"held by pid {holders[0].pid} \(.*, uid "),
            only_one.only_daemon(here),
        ):
            pass
        assert f"pid {holders[1].pid} (" in DeviceLock(tmp_path, "GPU-1", "me").take()
        store = open_store(tmp_path)
        with pytest.raises(TryLater, match=f"pid {holders[2].pid} "):
            publish(store, here.config_dir, here.locks, now_s=1e9)
        store.close()
    finally:
        for one in holders:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


@pytest.mark.parametrize(
    "kind",
    ["nfs4", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs", "fuse.lustre", "beegfs", "wekafs", "panfs", "ocfs2",
     "gfs2", "pvfs2", "fuse.sshfs", "smb3", "cifs", "9p", "ceph", "afs", "fuse.rclone", "fuse.s3fs", "gpfs",
     "fuse.fuse_dfs", "fuse.eosxd", "fuse.gvfsd-fuse", "acfs", "cvfs", "fuse.cvmfs2"],
)  # fmt: skip
def test_file_systems_of_several_hosts_are_known(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "overlay",
        "f2fs",
        "fuse.fuse-overlayfs",
        "fuseblk",
        "fuse.mergerfs",
        "fuse.encfs",
    ],
)
def test_file_systems_of_one_host_are_not_refused(kind: str) -> None:
    assert not is_network(kind)


def test_errors_of_sqlites_locks_are_told_as_what_they_are(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 does not tell SQLite's codes")
    for code in (15, 3850, 5130, 2314):
        err = sqlite3.OperationalError("disk I/O error")
        err.sqlite_errorcode = code
        assert "gives no locks" in str(faults.store_error(err, tmp_path / "tune.db"))
    assert "gives no locks" in str(faults.store_error(OSError(37, "No locks available"), tmp_path / "tune.db"))
    assert faults.no_locks(tmp_path) == ""
    assert "locked by another process" in str(faults.busy(tmp_path / "tune.db", 1.0))


@pytest.fixture(scope="module")
def nolock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library under which the kernel seems to give no locks."""
    folder = tmp_path_factory.mktemp("nolock")
    (folder / "nolock.c").write_text(NOLOCK)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "nolock.so"), str(folder / "nolock.c"), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a C compiler")
    return folder / "nolock.so"


@pytest.mark.parametrize(
    ("command", "code"),
    [(["daemon", "--once"], 1), (["status"], 1), (["coverage"], 1), (["doctor", "--quick"], 1),
     (["withdraw", "fp32:8x1024x512,threads=2"], 1), (["tune", "fp32:8x1024x512,threads=2"], 1)],
)  # fmt: skip
@pytest.mark.part(2)
def test_a_file_system_without_locks_is_named_by_every_command(
    nolock: Path, tmp_path: Path, command: list[str], code: int
) -> None:
    store = open_store(tmp_path)
    store.sightings.add("serve", NEW, [saw(problem())], now_s=time.time())
    store.close()
    env = {**os.environ, "GEMMTUNED_HOME": str(tmp_path), "LD_PRELOAD": str(nolock), "NO_COLOR": "1", "COLUMNS": "300"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gemmtuned", *command], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    said = done.stdout + done.stderr
    assert "gives no locks" in said, said
    assert time.monotonic() - began < 20, "nobody holds them, so nobody waits: the store's own limit is 30 s"
    assert "Traceback" not in said and "locked by another process" not in said
    assert "builds the database anew" not in said, "nothing is damaged"
    assert done.returncode == code, said


def test_tune_ends_with_75_while_another_process_holds_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmtuned.daemon.seats.request import Request

    monkeypatch.setattr(main, "WAIT_S", 1.0)
    store = open_store(tmp_path)
    store.close()
    other = sqlite3.connect(tmp_path / "tune.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    try:
        with pytest.raises(GemmtunedError, match="locked by another process") as err:
            main.tune_now(Request(problems=[problem()]), Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    finally:
        other.close()
    assert err.value.exit_code == 75
    assert time.monotonic() - began < 20


def test_a_lock_file_is_still_one_lock(tmp_path: Path) -> None:
    one, other = LockFile(tmp_path / "a.lock"), LockFile(tmp_path / "a.lock")
    assert one.acquire(0.1) and not other.acquire(0.05)
    fcntl.flock(os.open(tmp_path / "b.lock", os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    one.release()
    assert other.acquire(1.0)
    other.release()


def test_a_file_of_the_program_never_gets_the_number_of_a_lock_that_it_closed(tmp_path: Path) -> None:
    """A look at whose a descriptor is and its close are two steps, and another thread may run between them."""
    lock = LockFile(tmp_path / "x.lock")
    assert lock.acquire(1)
    held = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(lock.path)]
    lowest = os.dup(held[0])
    os.close(lowest)
    assert len(held) == 1 and held[0] >= lowest + 16 and not os.get_inheritable(held[0])
    os.close(held[0])
    # a file gets the lowest number that is free; other tests of this process may have left few below the lock's
    below = set(range(held[0])) - {int(fd) for fd in os.listdir("/proc/self/fd")}
    files = [tempfile.TemporaryFile() for _ in range(min(9, len(below)))]  # noqa: SIM115
    assert files and held[0] not in {file.fileno() for file in files}
    lock.release()
    lock.close()
    assert all(file.write(b"x") for file in files)
    for file in files:
        file.close()


@pytest.mark.parametrize("files", [0, 40, 300])
def test_a_lock_has_a_number_for_which_the_kernel_makes_no_larger_table(tmp_path: Path, files: int) -> None:
    """It waits for RCU to make one in a process with several threads, and the program's end would wait for that."""
    lines = f"""
import os, threading
from pathlib import Path
from gemmtuned.db.lockfile import LockFile
def size(): return next(line for line in Path("/proc/self/status").read_text().splitlines() if "FDSize" in line)
threading.Thread(target=threading.Event().wait, daemon=True).start()
files = [os.open("/", os.O_RDONLY) for _ in range({files})]
before, lock, lowest = size(), LockFile(Path({str(tmp_path)!r}) / "x.lock"), os.dup(0)
os.close(lowest)
assert lock.acquire(1)
number = max(int(name) for name in os.listdir("/proc/self/fd"))
assert size() == before and number >= lowest + 16, (before, size(), number, lowest)
others = [LockFile(Path({str(tmp_path)!r}) / f"{{i}}.lock") for i in range(40)]
assert all(other.acquire(1) for other in others), "there is room for more than one"
"""
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_where_no_high_number_is_to_be_had_a_lock_is_a_lock(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        one, other = LockFile(tmp_path / "x.lock"), LockFile(tmp_path / "x.lock")
        assert one.acquire(1) and not other.acquire(0)
        one.release()
        assert other.acquire(0)
        other.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_lock_file_that_was_removed_is_not_one_lock_of_two(tmp_path: Path) -> None:
    """Who had it open goes over to what lies there now, also while it waits; to close, no folder comes back."""
    folder = tmp_path / "locks"
    one, other = LockFile(folder / "a.lock"), LockFile(folder / "a.lock")
    assert one.acquire(0.1)
    one.release()
    shutil.rmtree(folder)
    assert one.acquire(0.1) and not folder.exists(), "what only closes makes nothing"
    one.release()
    assert one.acquire(0.1, make=True) and not other.acquire(0.05)
    one.release()
    shutil.rmtree(folder)
    assert other.acquire(0.1) and not one.acquire(0.05), "another file lies there by now"
    replaced = threading.Timer(0.05, lambda: (folder / "a.lock").unlink())
    replaced.start()
    assert one.acquire(5.0, make=True), "the file that it waited for is none any more"
    replaced.join()
    one.release()
    other.release()
