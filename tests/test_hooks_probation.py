"""Probation: which deaths count, for whom, how long, and what is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.configs.settings import Settings
from gemmtuned.db.store import Store
from gemmtuned.hooks import probation
from gemmtuned.hooks.probation import DEATHS, STEPS_S, TRIAL_S, Probation
from gemmtuned.reports import checks_host

DIES = """
import ctypes, os, sys
from pathlib import Path
from gemmtuned.hooks.probation import Probation
process = Probation(Path(sys.argv[1]), sys.argv[3])
process.begin(int(sys.argv[2]), 0.0)
if sys.argv[4] == "in a call":
    ctypes.c_uint32.from_address(process._address).value = 1
os._exit(1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "probation"


def died(folder: Path, generation: int, run: str = "serve", *, where: str = "in a call") -> None:
    """A process takes the generation up and is gone."""
    subprocess.run([sys.executable, "-P", "-c", DIES, str(folder), str(generation), run, where], check=False)


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
    assert not Probation(folder, "serve").refuses(8)
    Probation(folder, "serve").begin(8, 0.0)
    assert not Probation(folder, "serve").refuses(7)  # marks of what is gone are cleared away


def test_who_dies_of_something_else_condemns_nothing(folder: Path) -> None:
    for _ in range(2 * DEATHS):
        died(folder, 7, where="elsewhere")

    assert not Probation(folder, "serve").refuses(7)


@pytest.mark.parametrize("command", ["status", "coverage", "gains"])
def test_figures_name_a_run_that_goes_without(tmp_path: Path, command: str) -> None:
    for _ in range(DEATHS):
        died(tmp_path / "probation", 7)
    Store(tmp_path / "tune.db", locks=tmp_path / "locks").close()
    done = subprocess.run(
        [sys.executable, "-m", "gemmtuned", command, "--json"], env={**os.environ, "GEMMTUNED_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "serve goes without generation 7 until" in done.stdout


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
        monkeypatch.setattr(probation.time, "time", lambda then=now_s + step_s + 60: then)
        assert not process.refuses(7)
        monkeypatch.undo()


def test_who_lives_or_ends_in_good_order_is_no_death(folder: Path) -> None:
    living, leaving = Probation(folder, "serve"), Probation(folder, "serve")
    living.begin(7, 0.0)
    assert living._address is not None
    ctypes.c_uint32.from_address(living._address).value = 1  # at this moment in a call
    leaving.begin(7, 0.0)
    leaving.leave()
    died(folder, 7)

    assert not Probation(folder, "serve").refuses(7)


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


@pytest.mark.parametrize(
    ("launched", "fault", "counts"),
    [(1, 700, True), (1, 716, True), (1, 0, False), (0, 700, False)],
)
def test_a_fault_of_the_gpu_counts_when_the_table_ran_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launched: int, fault: int, counts: bool
) -> None:
    """A program that catches the error and ends in good order leaves evidence as well as one that dies of it."""
    monkeypatch.setattr(probation, "_is_gone", lambda path, facts: True)
    for _ in range(DEATHS):
        process = Probation(folder, "serve")
        process.begin(7, 0.0)
        assert process._address is not None
        ctypes.c_uint32.from_address(process._address + 4).value = launched
        assert process.has_launched() is bool(launched)
        process.note_fault(fault)
        process.leave()

    assert Probation(folder, "serve").refuses(7) is counts


def test_a_folder_that_cannot_be_written_means_no_probation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = Probation(tmp_path / "file" / "probation", "serve")
    process.begin(7, 0.0)
    process.turn(TRIAL_S)
    process.leave()

    assert not process.refuses(7)


def test_marks_of_another_container_are_judged_by_their_age_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(DEATHS):
        died(folder, 7)
    monkeypatch.setattr(probation, "pid_namespace", lambda: "another")
    assert not Probation(folder, "serve").refuses(7)
    now_s = time.time()
    monkeypatch.setattr(probation.time, "time", lambda: now_s + 2 * TRIAL_S + 1)

    assert Probation(folder, "serve").refuses(7)


def test_nothing_is_held_but_a_page(folder: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    process = Probation(folder, "serve")
    process.begin(7, 0.0)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert str(folder) in Path("/proc/self/maps").read_text()
    process.turn(TRIAL_S)

    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("module", "name", "error"), [(os, "write", errno.ENOSPC), (Path, "rename", errno.EIO)])
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


# ---- whole programs

PROGRAM = """
    import os, signal, sys, threading, time, torch, gemmtuned
    from hooked import wait_for
    wait_for(lambda: gemmtuned.generation() == 1 or "is not used" in gemmtuned.status()["note"])
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    torch.nn.functional.linear(x, w)
    print(gemmtuned.generation(), flush=True)
    {end}
    """
IN_A_CALL = """
    big, wide = torch.ones(2048, 4096), torch.ones(4096, 4096)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSEGV)).start()
    torch.set_num_threads(2)
    while True:
        torch.mm(big, wide.t())
"""


@pytest.mark.parametrize(
    ("end", "condemned"),
    [
        ("os._exit(0)", False),
        ("raise RuntimeError('its own')", False),
        ("sys.exit(3)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("import ctypes; ctypes.string_at(0)", False),  # its own SIGSEGV
        (IN_A_CALL, True),
    ],
)
def test_a_generation_is_condemned_by_deaths_in_its_kernels_alone(home: Home, end: str, condemned: bool) -> None:
    home.path.mkdir()
    big = replace(LINEAR, m=2048, n=4096, k=4096)
    publish(home.path / "configs", [published(LINEAR, "torch_swap"), published(big, "torch_swap")], 1)
    said = [home.run(PROGRAM.replace("{end}", end.strip())).out for _ in range(DEATHS + 1)]

    assert said == ["1\n"] * DEATHS + (["0\n"] if condemned else ["1\n"])


FAULTY = """
    from gemmtuned.hooks import activate
    hook = activate.current()
    page = hook.probation._state()
    if page is not None:
        page.launched = 1  # as a kernel on a GPU does
        ours = next(iter(hook.table.items()))[2]
        from gemmtuned.hooks import hook as hooks
        hook.native.fault = lambda: ({fault}, [3])
        hooks.solution_of = lambda ident: ours
    raise RuntimeError("CUDA error")
"""


@pytest.mark.parametrize(("fault", "condemned"), [(700, True), (0, False)])
def test_programs_that_leave_a_gpu_with_a_fault_condemn_the_generation_and_the_daemon_is_told(
    home: Home, fault: int, condemned: bool
) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    ended = [home.run(PROGRAM.replace("{end}", FAULTY.replace("{fault}", str(fault)).strip())) for _ in range(DEATHS)]
    third = home.run(PROGRAM.replace("{end}", ""))

    assert [one.code for one in ended] == [1] * DEATHS
    assert third.out == ("0\n" if condemned else "1\n")
    with contextlib.closing(sqlite3.connect(home.path / "tune.db")) as conn:
        found = conn.execute("SELECT backend, how, reports FROM quarantine").fetchall()
    assert found == ([("torch_swap", "failed", DEATHS)] if condemned else [])
