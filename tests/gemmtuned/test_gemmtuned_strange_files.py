"""GEMMTUNED_DB names somebody's file that is no database of ours: it stays as it is, and every message says so."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes import FakeMonitor
from store_cases import NEW, problem, saw

from gemmtuned._testing import faults
from gemmtuned.cli import build
from gemmtuned.configs.errors import StoreError, TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service import main
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.store import Store, check

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
T = 1_800_000_000.0


def weights(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(100_000))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(100_000))


def damaged_photos(path: Path) -> None:
    conn = sqlite3.connect(path)
    conn.executescript("CREATE TABLE photos (name); INSERT INTO photos VALUES (hex(randomblob(9000)))")
    conn.close()
    data = bytearray(path.read_bytes())
    data[100:] = random.Random(1).randbytes(len(data) - 100)
    path.write_bytes(bytes(data))


FILES = {"weights": weights, "zeros": zeros, "a damaged database of another program": damaged_photos}


@pytest.fixture(params=FILES.values(), ids=FILES)
def theirs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    make: Callable[[Path], None] = request.param
    make(tmp_path / "model.bin")
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GEMMTUNED_DB", str(tmp_path / "model.bin"))
    return tmp_path / "model.bin"


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        build()(list(words), prog_name="gemmtuned")
    assert end.value.code
    out = capsys.readouterr()
    return out.out + out.err


@pytest.mark.parametrize("words", [("coverage",), ("untuned",), ("db", "check"), ("daemon", "--once")], ids=" ".join)
def test_commands_say_what_it_is_and_leave_it(
    theirs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    before = theirs.read_bytes()
    said = said_by(capsys, *words)
    assert "it is left as it is" in said and "Set GEMMTUNED_DB to another file" in said, said
    assert "Start gemmtuned daemon" not in said and "Traceback" not in said
    assert theirs.read_bytes() == before and list(theirs.parent.glob("*corrupt*")) == []


def test_a_program_leaves_it(theirs: Path) -> None:
    before = theirs.read_bytes()
    for kind in (Store, GuestStore):
        with pytest.raises(StoreError, match="it is left as it is"):
            kind(theirs, locks=theirs.parent / "locks", timeout_s=1.0).sightings.add(
                "r", NEW, [saw(problem())], now_s=T
            )
    assert theirs.read_bytes() == before and list(theirs.parent.glob("*corrupt*")) == []


def test_ours_by_another_name_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "gemms.sqlite"
    store = Store(path, locks=tmp_path / "locks")
    store.sightings.add("r", NEW, [saw(problem(m), 3) for m in range(1, 50)], now_s=T)
    store.checkpoint()
    store.close()
    with path.open("r+b") as file:
        file.write(os.urandom(4096))  # its header, and the list of its tables
    store = Store(path, locks=tmp_path / "locks")
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    assert check(path) == []
    store.close()


def tuned(home: Path) -> main.Tuned:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home), "GEMMTUNED_IDLE_S": "0"})
    monitor = FakeMonitor()
    monitor.read(T)
    make = partial(Worker, nice=0, search=SEARCH)
    return main.tune_now(Request(problems=[problem(threads=1)]), settings, monitors=[monitor], make_worker=make)


def test_tune_on_a_disk_that_becomes_full_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path / "tune.db", locks=tmp_path / "locks").close()
    monkeypatch.setattr(main, "WAIT_S", 1.0)
    with faults.armed("store.begin=4+:ENOSPC"), pytest.raises(TryLater) as end:
        tuned(tmp_path)
    said = str(end.value)
    assert "disk full" in said and str(tmp_path / "tune.db") in said and "Free space" in said
    assert list(tuned(tmp_path).solutions) == [problem(threads=1)], "once there is room it is done"


def test_tune_says_when_what_it_found_could_not_be_put_in_use(tmp_path: Path) -> None:
    with faults.armed("publish.write=1+:ENOSPC"):
        done = tuned(tmp_path)
    assert list(done.solutions) == [problem(threads=1)]
    assert str(tmp_path / "configs") in done.trouble and "No space" in done.trouble
    assert tuned(tmp_path).trouble == ""


def test_that_ends_with_1_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    monkeypatch.setattr(main, "tune_now", lambda *a, **how: main.Tuned(trouble="/c: cannot be written"))
    said = said_by(capsys, "tune", "fp32:8x64x64")
    assert "/c: cannot be written; what was found is in the database" in said and "gemmtuned db publish" in said


def test_tune_beside_a_paused_daemon_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    monkeypatch.setattr(main, "tune_now", lambda *a, **how: main.Tuned())
    (tmp_path / "paused").touch()
    for words, said in (((), "the daemon rests, this run does not"), (("--idle",), "this run waits")):
        with pytest.raises(SystemExit):
            build()(["tune", "fp32:8x64x64", *words], prog_name="gemmtuned")
        assert f"paused: {said}" in capsys.readouterr().err
    (tmp_path / "paused").unlink()
    with pytest.raises(SystemExit):
        build()(["tune", "fp32:8x64x64"], prog_name="gemmtuned")
    assert "paused" not in capsys.readouterr().err
