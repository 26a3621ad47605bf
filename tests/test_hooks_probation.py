"""Probation: which deaths count, for whom, and what is left behind. Whole programs: test_programs_bad_cases.py."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.probation import DEATHS, TRIAL_S, Probation
from gemmtuned.reports import checks_host


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "probation"


def died(folder: Path, generation: int, run: str = "serve", now_s: float = 0.0) -> None:
    """A process takes the generation up and is gone: the kernel has closed what it held."""
    process = Probation(folder, run)
    process.begin(generation, now_s)
    assert process._mark is not None
    os.close(process._mark.fd)


def test_a_death_is_counted_for_its_run_and_generation_alone(folder: Path) -> None:
    for _ in range(DEATHS):
        assert not Probation(folder, "serve").refuses(7)
        died(folder, 7)

    assert Probation(folder, "serve").refuses(7)
    assert not Probation(folder, "train").refuses(7)
    settings = Settings(home=folder.parent, db=folder, config_dir=folder.parent, cache=folder, device_locks=folder)
    (told,) = [check for check in checks_host.checks(settings) if check.name == "probation"]
    assert told.result == "WARN"
    assert "generation 7: 2 processes of serve died within 60 s" in told.found
    assert f"rm {folder}/7-*" in told.fix
    assert not Probation(folder, "serve").refuses(8)
    Probation(folder, "serve").begin(8, 0.0)
    assert not Probation(folder, "serve").refuses(7)  # marks of what is gone are cleared away


def test_who_lives_or_ends_in_good_order_is_no_death(folder: Path) -> None:
    living, leaving = Probation(folder, "serve"), Probation(folder, "serve")
    living.begin(7, 0.0)
    leaving.begin(7, 0.0)
    leaving.leave()
    died(folder, 7)

    assert not Probation(folder, "serve").refuses(7)


def test_a_program_that_ends_in_good_order_has_ended_its_own_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # the marks below are of workers of this process
    for _ in range(DEATHS):
        died(folder, 7)
    program = Probation(folder, "serve")
    assert program.refuses(7)

    monkeypatch.setattr(sys, "last_value", RuntimeError("a worker died"), raising=False)
    program.leave()
    assert program.refuses(7)
    monkeypatch.delattr(sys, "last_value")
    program.leave()
    assert not program.refuses(7)


def test_a_survivor_clears_the_generation(folder: Path) -> None:
    died(folder, 7)
    survivor = Probation(folder, "serve")
    survivor.begin(7, 100.0)
    survivor.turn(100.0 + TRIAL_S - 1)
    assert len(list(folder.iterdir())) == 2
    survivor.turn(100.0 + TRIAL_S)

    assert list(folder.iterdir()) == []
    died(folder, 7)
    assert not Probation(folder, "serve").refuses(7)


def test_a_folder_that_cannot_be_written_means_no_probation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = Probation(tmp_path / "file" / "probation", "serve")
    process.begin(7, 0.0)
    process.turn(TRIAL_S)
    process.leave()

    assert not process.refuses(7)


CRASHES = """
import os, sys
from pathlib import Path
os.getpid, os.getppid = (lambda: 7), (lambda: 1)
from gemmtuned.hooks.probation import Probation
Probation(Path(sys.argv[1]), "serve").begin(7, 0.0)
os._exit(1)
"""


def test_a_container_that_starts_again_with_the_same_process_ids_counts_its_deaths(folder: Path) -> None:
    for _ in range(DEATHS):
        assert subprocess.run([sys.executable, "-P", "-c", CRASHES, str(folder)], check=False).returncode == 1

    assert Probation(folder, "serve").refuses(7)


class Meanwhile:
    """A lock before which, the first time it is taken, another thread does something."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what: Callable[[], None] | None = what
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        what, self._what = self._what, None
        if what is not None:
            what()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_a_table_taken_up_while_the_one_before_ends_its_trial_stays_on_trial(folder: Path) -> None:
    process = Probation(folder, "serve")
    process.begin(7, 0.0)
    process._lock = Meanwhile(lambda: process.begin(8, TRIAL_S))  # type: ignore[assignment]
    process.turn(TRIAL_S)

    assert [mark.name.partition("-")[0] for mark in folder.iterdir()] == ["8"]


def test_who_reads_marks_keeps_no_process_from_leaving_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def while_others_read(fd: int, how: int) -> None:
        readers = [os.open(mark, os.O_RDONLY) for mark in folder.glob("[0-9]*")]
        for reader in readers:
            real(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
        try:
            real(fd, how)
        finally:
            for reader in readers:
                os.close(reader)

    monkeypatch.setattr(fcntl, "flock", while_others_read)
    process = Probation(folder, "serve")
    process.begin(7, 0.0)

    assert process._mark is not None


@pytest.mark.parametrize(("module", "name", "error"), [(fcntl, "flock", errno.ENOLCK), (os, "write", errno.ENOSPC)])
def test_a_mark_that_cannot_be_made_leaves_nothing_open_and_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, error: int
) -> None:
    def fails(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    before = os.listdir("/proc/self/fd")
    process = Probation(folder, "serve")
    monkeypatch.setattr(module, name, fails)
    process.begin(7, 0.0)
    monkeypatch.undo()

    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert list(folder.iterdir()) == []
    assert process._mark is None
