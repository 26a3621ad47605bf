"""A daemon whose package was upgraded or removed under it says so, instead of what its worker died of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.daemon.child import worker_main
from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.seats import installed
from gemmtuned.daemon.seats.keeper import Keeper


def no_worker(device_id: str) -> NoReturn:
    raise WorkerFailed("worker ended with exit code 1 while starting: No module named gemmtuned.daemon.child")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker's file of an installed package, as the daemon saw it when it began."""
    child = tmp_path / "gemmtuned" / "daemon" / "child" / "worker_main.py"
    child.parent.mkdir(parents=True)
    child.write_text("old")
    monkeypatch.setattr(installed, "WORKER", child)
    monkeypatch.setattr(installed, "_AT_FIRST", installed.fingerprint(child))
    return child


def failure() -> str:
    keeper = Keeper("cpu", no_worker, lock=None, always=False)
    keeper.start(0.0)
    return keeper.trouble


def test_the_file_that_is_looked_at_is_the_one_that_workers_run() -> None:
    assert installed.WORKER.samefile(worker_main.__file__)
    assert installed.what_changed() == ""


def test_an_upgrade_is_told_with_what_to_do(package: Path) -> None:
    assert failure().startswith("worker ended with exit code 1")
    new = package.with_suffix(".new")  # as pip writes it: another file under the same name, of the same size here
    new.write_text("new")
    os.utime(new, ns=(0, package.stat().st_mtime_ns))
    new.replace(package)

    told = failure()
    assert told.startswith("gemmtuned was replaced under this daemon (") and "worker ended with exit code 1" in told
    assert advice(told).startswith("restart the daemon")


def test_a_removed_package_is_told_with_what_to_do(package: Path) -> None:
    package.unlink()
    package.parent.rmdir()

    told = failure()
    assert told.startswith("gemmtuned was removed under this daemon (")
    assert "install gemmtuned again" in advice(told)


def test_names_of_other_programs_are_no_reasons() -> None:
    told = "others use 40% of the CPUs (database-server 71 of www, disk-watch 72 of www)"
    assert advice(told) == advice("others use 40% of the CPUs")
    assert advice("store not written: database is locked") == "gemmtuned doctor, gemmtuned db check"
