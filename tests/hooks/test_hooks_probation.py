"""Probation: which deaths count, for whom, how long, and what is left behind."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooked import HERE, Home

from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.settings import Settings
from gemmtuned.db.store import Store
from gemmtuned.hooks import native, probation
from gemmtuned.hooks.native.build import compiler
from gemmtuned.hooks.probation import DEATHS, STEPS_S, TRIAL_S, Probation, pages_of
from gemmtuned.reports import checks_host


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "probation"
    yield folder
    shutil.rmtree(pages_of(folder), ignore_errors=True)


def died(folder: Path, generation: int, run: str = "serve", *, where: str = "in a call") -> Path:
    """A process has taken the generation up, and is gone: its page, written as native/probation_page.h does."""
    with subprocess.Popen(["sleep", "60"]) as process:
        path = page(folder, generation, process.pid, run, going_on=where == "in a call")
        process.kill()
    return path


def page(
    folder: Path,
    generation: int,
    pid: int,
    run: str = "serve",
    *,
    going_on: int = 1,
    launched: int = 0,
    fault: int = 0,
    parent: int = 1,
) -> Path:
    """The page of a process."""
    there = pages_of(folder)
    there.parent.mkdir(mode=0o700, exist_ok=True)
    there.mkdir(mode=0o700, exist_ok=True)
    facts = {"run": run, "namespace": pid_namespace(), "start": life_of(pid)[1] if pid < 4000000 else "1"}
    path = there / f"{generation}-{pid}-{parent}-{time.time_ns()}"
    state = struct.pack("iIII", going_on, launched, fault, 0)
    path.write_bytes((state + json.dumps(facts).encode()).ljust(4096, b"\0"))
    return path


class Library:
    """Stands for the native hook: the page of this process is made where the real one would, and its start with it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.state = (ctypes.c_uint32 * 4)()
        self._asked: tuple[Path, int] | None = None

    def begin_probation(self, folder: Path, generation: int, facts: bytes, namespace: int) -> None:
        assert json.loads(facts + b'""}')["run"] == "serve"
        assert Path("/proc/self/ns/pid").stat().st_ino == namespace
        self._asked = folder, generation

    def routes(self) -> None:
        """A first routed call."""
        assert self._asked is not None
        folder, generation = self._asked
        self.path = folder / f"{generation}-{os.getpid()}-{os.getppid()}-{time.time_ns()}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def end_probation(self, *, keep: bool) -> None:
        if self.path is not None and not keep:
            self.path.unlink()
        self.path = self._asked = None

    def probation_page(self, *, make: bool = False) -> int | None:
        return ctypes.addressof(self.state) if self.path is not None else None


def test_a_death_in_a_routed_call_is_counted_for_its_run_and_generation_alone(folder: Path) -> None:
    for _ in range(DEATHS):
        assert not Probation(folder, "serve").refuses(7)
        died(folder, 7)

    assert Probation(folder, "serve").refuses(7)
    assert not Probation(folder, "train").refuses(7)
    settings = Settings(home=folder.parent, db=folder, config_dir=folder.parent, cache=folder, device_locks=folder)
    (told,) = [check for check in checks_host.checks(settings) if check.name == "probation"]
    assert told.result == "WARN"
    assert "generation 7: 2 processes of serve died in its kernels within 60 s" in told.found
    assert f"rm {folder}/7-*" in told.fix
    assert list(pages_of(folder).iterdir()) == []  # they were taken into the home
    assert not Probation(folder, "serve").refuses(8)
    Probation(folder, "serve", Library()).begin(8)
    assert not Probation(folder, "serve").refuses(7)  # marks of what is gone are cleared away


def test_who_dies_of_something_else_condemns_nothing(folder: Path) -> None:
    for _ in range(2 * DEATHS):
        died(folder, 7, where="elsewhere")

    assert not Probation(folder, "serve").refuses(7)


@pytest.mark.parametrize("command", ["status", "coverage", "gains"])
def test_figures_name_a_run_that_goes_without(tmp_path: Path, command: str) -> None:
    for _ in range(DEATHS):
        died(tmp_path / "probation", 7)  # in /dev/shm: nobody has taken them into the home
    Store(tmp_path / "tune.db", locks=tmp_path / "locks").close()
    done = subprocess.run(
        [sys.executable, "-m", "gemmtuned", command, "--json"], env={**os.environ, "GEMMTUNED_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "serve goes without generation 7 until" in done.stdout
    shutil.rmtree(pages_of(tmp_path / "probation"))


def test_a_wait_that_ends_on_another_day_is_told_with_the_day(folder: Path) -> None:
    for _ in range(DEATHS + 2):
        died(folder, 7)
    until_s = Probation(folder, "serve").until_s(7)

    assert until_s is not None
    assert time.strftime("before %Y-%m-%d %H:%M:", time.localtime(until_s)) in Probation(folder, "serve").note(7)


def test_what_is_condemned_is_tried_again_and_waits_longer_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()

    def refused_for() -> float:
        until_s = Probation(folder, "serve").until_s(7)
        assert until_s is not None
        return until_s - now_s

    died(folder, 7)
    for step_s in (*STEPS_S, STEPS_S[-1]):
        died(folder, 7)
        assert step_s <= refused_for() < step_s + 60
        process = Probation(folder, "serve")
        assert process.refuses(7)
        monkeypatch.setattr(probation.clock, "now_s", lambda then=now_s + step_s + 60: then)
        assert not process.refuses(7)
        monkeypatch.undo()


def test_who_lives_or_ends_in_good_order_is_no_death(folder: Path) -> None:
    living = page(folder, 7, os.getpid())  # at this moment in a call
    library = Library()
    leaving = Probation(folder, "serve", library)
    leaving.begin(7)
    library.routes()
    leaving.leave()
    died(folder, 7)

    assert not Probation(folder, "serve").refuses(7)
    assert living.exists()


def test_a_survivor_clears_the_deaths_before_it(folder: Path) -> None:
    died(folder, 7)
    library = Library()
    survivor = Probation(folder, "serve", library)
    survivor.begin(7)
    survivor.turn(0.0)
    survivor.turn(10 * TRIAL_S)  # it has routed nothing: that proves nothing
    assert len(list(folder.iterdir())) == 1
    library.routes()
    survivor.turn(20 * TRIAL_S)
    survivor.turn(21 * TRIAL_S - 1)
    assert len(list(folder.iterdir())) == 1
    assert library.path is not None
    survivor.turn(21 * TRIAL_S)

    assert list(folder.iterdir()) == [] == list(pages_of(folder).iterdir())
    died(folder, 7)
    assert not Probation(folder, "serve").refuses(7)


def test_looks_at_the_marks_of_many_workers_take_a_hundredth_of_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them reads those of all: of a hundred each took 4 % of a CPU, for a minute after each publish."""
    now = [0.0]
    read = probation._read

    def slow(path: Path) -> object:
        now[0] += 0.001
        return read(path)

    for _ in range(50):
        page(folder, 7, os.getpid())
    monkeypatch.setattr(probation.clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(probation, "_read", slow)
    library = Library()
    worker = Probation(folder, "serve", library)
    worker.begin(7)
    looks, began_s = 0, now[0]
    for second in range(1, 60):
        if worker.turn(float(second)):
            looks += 1
            worker.refuses(7)

    assert looks >= 2
    assert now[0] - began_s < 0.02 * 60


def test_a_survivor_clears_no_death_that_came_after_it(folder: Path) -> None:
    """Of two workers one serves other calls: that it lives says nothing of the other's kernel."""
    library = Library()
    survivor = Probation(folder, "serve", library)
    survivor.begin(7)
    library.routes()
    survivor.turn(0.0)
    for _ in range(DEATHS):
        died(folder, 7)
    survivor.turn(TRIAL_S)

    assert survivor.refuses(7)


@pytest.mark.parametrize(
    ("launched", "fault", "counts"),
    [(1, 700, True), (1, 716, True), (1, 0, False), (0, 700, False)],
)
def test_a_fault_of_the_gpu_counts_when_the_table_ran_there(
    folder: Path, launched: int, fault: int, counts: bool
) -> None:
    """A program that catches the error and ends in good order leaves evidence as well as one that dies of it."""
    for _ in range(DEATHS):
        with subprocess.Popen(["sleep", "60"]) as process:
            path = page(folder, 7, process.pid, going_on=0, launched=launched, fault=fault)
            process.kill()
        library = Library()
        leaving = Probation(folder, "serve", library)
        leaving.begin(7)
        library.routes()
        library.state[1] = launched
        assert leaving.has_launched() is bool(launched)
        leaving.note_fault(fault)
        mine = library.path
        leaving.leave()
        assert mine is not None
        assert mine.exists() is counts
        mine.unlink(missing_ok=True)
        assert path.exists()

    assert Probation(folder, "serve").refuses(7) is counts


def test_a_home_that_cannot_be_written_means_that_evidence_stays_where_it_was_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "probation"
    for _ in range(DEATHS):
        died(folder, 7)
    process = Probation(folder, "serve")

    assert process.refuses(7)
    assert f"rm {pages_of(folder)}/7-*" in process.note(7)
    shutil.rmtree(pages_of(folder))


def test_pages_of_another_container_are_judged_by_their_age_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(DEATHS):
        died(folder, 7)
    monkeypatch.setattr(probation, "pid_namespace", lambda: "another 1")
    assert not Probation(folder, "serve").refuses(7)
    now_s = time.time()
    monkeypatch.setattr(probation.clock, "now_s", lambda: now_s + 2 * TRIAL_S + 1)

    assert Probation(folder, "serve").refuses(7)


def test_who_ends_in_good_order_leaves_marks_of_workers_that_another_container_numbers_as_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = page(folder, 7, 4000001, parent=os.getpid()), None
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "pid_namespace", lambda: "another 1")
        theirs = page(folder, 7, 4000002, parent=os.getpid())
    Probation(folder, "serve").leave()

    assert not mine.exists() and theirs.exists()


def test_a_folder_that_others_can_write_is_no_evidence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probation, "_MEMORY", folder.parent)
    for _ in range(DEATHS):
        died(folder, 7)
    pages_of(folder).parent.chmod(0o777)
    assert not Probation(folder, "serve").refuses(7)
    pages_of(folder).parent.chmod(0o700)

    assert Probation(folder, "serve").refuses(7)


@pytest.mark.parametrize(("name", "error"), [("write_bytes", errno.ENOSPC), ("replace", errno.EIO)])
def test_evidence_that_cannot_be_taken_home_is_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    def fails(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    for _ in range(DEATHS):
        died(folder, 7)
    monkeypatch.setattr(Path, name, fails)
    assert Probation(folder, "serve").refuses(7)
    monkeypatch.undo()

    assert list(folder.iterdir()) == []
    assert Probation(folder, "serve").refuses(7)
    assert len(list(folder.iterdir())) == DEATHS


NO_PAGE = """
    import json, os, resource, sys
    from pathlib import Path
    from gemmtuned.hooks import activate

    library = activate.current().native
    shm, said = Path("/dev/shm") / f"test-{os.getpid()}", []

    def page(base, namespace=0, facts=b'{"run": "x", "start": '):
        library.begin_probation(base / "pages", 7, facts, namespace)
        made = library.probation_page(make=True) is not None
        found = [json.loads(p.read_bytes()[16:].rstrip(bytes(1))) for p in (base / "pages").glob("*")]
        mapped = str(base) in Path("/proc/self/maps").read_text()
        library.end_probation(keep=False)
        left = len(list((base / "pages").glob("*"))) + (str(base) in Path("/proc/self/maps").read_text())
        said.append([made, mapped, found, left])

    fds = os.listdir("/proc/self/fd")
    page(shm)
    page(shm, namespace=1)  # a child that was made in another PID namespace: its number is another process's there
    page(shm, facts=b"x" * 5000)
    page(Path(sys.argv[1]))  # a disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # more ends the process by a signal
    page(shm)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shm.chmod(0o777)
    page(shm)
    (shm / "pages").rmdir()
    shm.rmdir()
    shm.symlink_to(sys.argv[1])
    page(shm)
    shm.unlink()
    start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    print(json.dumps([said, start, os.listdir("/proc/self/fd") == fds]))
    """


def test_a_page_is_made_in_memory_of_our_own_alone_and_leaves_nothing(home: Home, tmp_path: Path) -> None:
    on_a_disk = tmp_path / "base"
    (first, *others), start, closed = home.run(NO_PAGE, str(on_a_disk)).said

    assert first == [True, True, [{"run": "x", "start": start}], 0]
    on_memory = subprocess.run(["stat", "-fc", "%T", str(tmp_path)], capture_output=True, text=True, check=True)
    if on_memory.stdout.strip() == "tmpfs":
        others.pop(2)
    assert others == [[False, False, [], 0]] * len(others)
    assert closed


@pytest.mark.long
def test_a_call_that_lasts_longer_than_its_probation_is_not_counted_for_the_next(tmp_path: Path) -> None:
    cxx = compiler()
    assert cxx is not None
    program, pages = tmp_path / "late_calls", pages_of(tmp_path / "probation")
    sources = ["-I", str(Path(native.__file__).parent), str(HERE / "late_calls.cpp")]
    subprocess.run([cxx, "-std=c++20", "-O1", "-pthread", *sources, "-o", str(program)], check=True)
    try:
        done = subprocess.run([program, pages, "500"], capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(pages, ignore_errors=True)
    assert done.stdout == "0 1\n", "pages that hold a call of another; the address that is used again"
