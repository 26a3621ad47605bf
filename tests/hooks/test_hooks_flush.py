"""Counts on their way to the store: nothing lost, nothing twice, and the program never held up."""

import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counted_by_hand import Counted, stored
from flushed_work import WORK
from hooked import LINEAR, Home, solution, wait_for
from store_cases import CPU, NEW

from gemmtuned.configs import stderr_lines
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.processes import pid_namespace
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.db import queries
from gemmtuned.hooks import flush, pending
from gemmtuned.hooks.account import Account
from gemmtuned.hooks.background import Background, Sleeper


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The hook's monotonic clock, which stands unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(flush.clock, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "home")


def test_sums_are_exact_over_many_flushes(counted: Counted) -> None:
    for n in range(1, 21):
        counted.call(n)
        counted.call(n, m=n)
        counted.flusher.flush()

    assert stored(counted) == counted.flusher.calls == 2 * sum(range(1, 21))


def test_more_of_what_is_stored_waits_and_what_is_new_does_not(counted: Counted, stopped_clock: list[float]) -> None:
    """A store is opened for a new problem with the next turn, for the same ones again every fifth second."""
    turns: list[int] = []  # what is stored after each

    def turn(**call: int) -> int:
        stopped_clock[0] += 1.0
        counted.call(**call)
        counted.flusher.turn()
        turns.append(stored(counted))
        return turns[-1]

    assert turn() == 1
    assert [turn() for _ in range(10)] == [1, 1, 1, 1, 6, 6, 6, 6, 6, 11]
    assert turn(m=5) == 12, "another problem"
    turn()
    counted.waiting.append(replace(Sighting(LINEAR.with_m(4), "miss", 1), outcome="exact"))
    assert turn() == 15, "another outcome, and all that waited"
    counted.call()
    counted.flusher.report_failure(solution(LINEAR, "onednn", "d", "s"), "it raised")
    assert turn() == 17, "a failed route"


@pytest.mark.parametrize("order", [(5, 4, 4), (4, 5, 4)])
def test_what_is_new_does_not_wait_for_what_is_counted_after_it(
    counted: Counted, stopped_clock: list[float], order: tuple[int, ...]
) -> None:
    counted.call()
    counted.flusher.turn()
    stopped_clock[0] += 1.0
    for m in order:
        counted.call(m=m)
    counted.flusher.turn()

    assert stored(counted) == 4


def test_a_note_is_stored_though_nothing_is_counted(counted: Counted, stopped_clock: list[float]) -> None:
    counted.call()
    counted.flusher.turn()
    counted.compiled = [(LINEAR, "CppTemplate", "cpu")]
    counted.flusher.turn()  # the next row of the session is due in five seconds

    with sqlite3.connect(counted.settings.db) as conn:
        assert conn.execute("SELECT kernel FROM compiled").fetchall() == [("CppTemplate",)]


@pytest.mark.parametrize("problems", [3, 4, 6, 7])
def test_counts_are_written_in_pieces_to_the_last_one(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, problems: int
) -> None:
    monkeypatch.setattr(pending, "MOST_AT_ONCE", 3)
    for m in range(1, problems + 1):
        counted.call(m, m=m)
    counted.flusher.flush()

    assert stored(counted) == counted.flusher.calls == sum(range(1, problems + 1))
    assert len(counted.flusher._pending) == 0


def test_a_programs_end_is_stored_though_it_has_nothing_more_to_count(counted: Counted) -> None:
    def session() -> list[tuple[int, bool]]:
        with sqlite3.connect(counted.settings.db) as conn:
            return [(calls, bool(end)) for calls, end in conn.execute("SELECT calls, ended_us FROM session")]

    counted.call(3)
    counted.flusher.flush()
    assert session() == [(3, False)]
    counted.flusher.stop()
    assert session() == [(3, True)]


def test_what_waits_is_counted_under_the_label_that_it_had(counted: Counted) -> None:
    counted.call()
    counted.flusher.flush()
    counted.call(2)
    counted.flusher.flush(whole=False)
    counted.flusher.run = "another"
    counted.call(4)
    counted.flusher.stop()

    assert stored(counted) == 7
    with sqlite3.connect(counted.settings.db) as conn:
        sql = "SELECT r.name, sum(calls) FROM sighting s JOIN run r ON r.id = s.run_id GROUP BY 1 ORDER BY 1"
        assert conn.execute(sql).fetchall() == [("another", 4), ("test", 3)]


def test_a_busy_store_costs_no_counts_and_is_told_only_when_it_stays_busy(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flush, "BUSY_S", 0.02)
    counted.call()
    counted.flusher.flush()
    lock = counted.lock()
    for _ in range(3):
        counted.call()
        counted.flusher.flush()
    assert caplog.text == ""
    monkeypatch.setattr(flush, "BUSY_TOLD_S", 0.01)
    for _ in range(3):
        counted.call()
        counted.flusher.flush()
    assert caplog.text.count("counts stay in memory") == 1
    assert counted.flusher.complaint
    lock.release()
    counted.flusher.flush()

    assert stored(counted) == 7
    assert counted.flusher.complaint == ""


def test_the_end_waits_while_others_hold_the_store(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    counted.call()
    counted.flusher.flush()
    lock = counted.lock()
    timer = threading.Timer(0.8, lock.release)
    timer.start()
    counted.call(41)
    counted.flusher.stop()
    timer.join()

    assert stored(counted) == 42
    assert caplog.text == ""


def test_what_is_lost_at_the_end_is_said(
    counted: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted.call()
    counted.flusher.flush()
    lock = counted.lock()
    counted.call(41)
    began_s = time.monotonic()
    counted.flusher.stop()

    assert time.monotonic() - began_s < flush.EXIT_BUSY_S + 0.3
    assert len(caplog.records) == 1
    assert "counts were lost calls=41" in caplog.text
    lock.release()


def test_memory_is_bounded_while_the_store_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 10)
    counted = Counted(tmp_path / "home", db=Path("/proc/none/tune.db"))
    for m in range(1, 16):
        counted.call(2, m=m)
        counted.flusher.flush()

    assert (counted.flusher.calls, counted.flusher.dropped) == (30, 10)
    assert len(caplog.records) == 1


def test_what_runs_on_a_device_we_do_not_know_is_dropped_and_the_rest_goes_on(
    counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        counted.compiled = [(LINEAR, "TritonTemplate", "xpu:0"), (LINEAR, "CppTemplate", "cpu")]
        counted.call(3, place="xpu:0")
        counted.call(4)
        counted.flusher.report_failure(solution(LINEAR, "onednn", CPU.key, "2.13"), "no fp64")
        counted.flusher.beat_soon()
        counted.flusher.flush()

    assert stored(counted) == 8
    assert (counted.flusher.calls, counted.flusher.dropped, counted.flusher.complaint) == (14, 6, "")
    assert len(caplog.records) == 1
    assert "counts dropped place=xpu:0 reason='xpu:0' is no device we know" in caplog.text
    with sqlite3.connect(counted.settings.db) as conn:
        assert conn.execute("SELECT kernel FROM compiled").fetchall() == [("CppTemplate",)]
        assert conn.execute("SELECT reports FROM quarantine").fetchall() == [(2,)]
        assert conn.execute("SELECT calls FROM session").fetchall() == [(14,)]


def test_what_runs_on_a_cpu_that_cannot_be_asked_now_is_written_once_it_can(
    counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a program's tests have a file system of their own."""
    ask, facts = counted.flusher._environment, [False]

    def environment(place: str) -> Any:
        if not facts[0] and place == "cpu":
            raise AttributeError("a made up file")
        return ask("cpu")

    counted.flusher._environment = environment
    for _ in range(2):
        counted.call(3)
        counted.call(4, place="cuda:0")
        counted.flusher.turn()
    assert stored(counted) == 8, "what ran elsewhere does not wait for it"
    assert [record.getMessage() for record in caplog.records] == [
        "counts stay in memory reason=AttributeError: a made up file"
    ]
    facts[0] = True
    counted.flusher.flush()

    assert (stored(counted), counted.flusher.dropped, counted.flusher.complaint) == (14, 0, "")


@pytest.mark.parametrize("what", ["the session", "the notes", "the counters", "the CPU"])
def test_a_bug_elsewhere_keeps_back_nothing_else(counted: Counted, caplog: pytest.LogCaptureFixture, what: str) -> None:
    flusher = counted.flusher

    def raises(*given: object) -> Any:
        raise KeyError("a bug")

    def drained() -> Iterator[Sighting]:
        yield from counted.drain()
        raises()

    flusher._environment = lambda place: raises() if place == "cpu" else NEW
    if what == "the session":
        flusher._session = raises
    elif what == "the notes":
        flusher._compiled._take = raises
    elif what == "the counters":
        flusher._drain = drained
    for n in range(1, 3):
        counted.call(3, place="cuda:0")
        if what == "the CPU":
            counted.call(4)
        flusher.report_failure(solution(LINEAR, "onednn", CPU.key, "2.13"), "it raised")
        flusher.turn()
        assert stored(counted) == 3 * n
        with sqlite3.connect(counted.settings.db) as conn:
            assert conn.execute("SELECT reports FROM quarantine").fetchall() == [(n,)]
            assert conn.execute("SELECT count(*) FROM session").fetchone() == (what != "the session",)
    said = "counts stay in memory" if what == "the CPU" else "not all about this process is stored"
    assert [record.getMessage() for record in caplog.records] == [f"{said} reason=KeyError: 'a bug'"]
    counted.call(3, place="cuda:0")
    flusher.stop()
    assert stored(counted) == 9


def test_what_torch_compile_makes_is_bounded_while_the_store_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "MAX_COMPILED", 10)
    counted = Counted(tmp_path / "home", db=Path("/proc/none/tune.db"))
    for m in range(1, 16):
        counted.compiled = [(LINEAR.with_m(m), "CppTemplate", "cpu")] * 2
        counted.flusher.flush()

    assert len(counted.flusher._compiled) == 10


def test_an_error_in_housekeeping_stops_no_flush(counted: Counted, capfd: pytest.CaptureFixture[str]) -> None:
    def tick() -> None:
        raise RuntimeError("ours to mend")

    stderr_lines.begin()  # pytest has another stderr for each test
    counted.flusher._tick = tick
    counted.flusher._settings = Settings(**{**_values(counted.settings), "flush_s": 0.02})
    counted.call(5)
    background = Background([counted.flusher], Sleeper())
    background.start()
    wait_for(lambda: counted.flusher.calls == 5 and not counted.flusher._pending)
    time.sleep(0.1)
    assert background.end(10)
    counted.flusher.stop()

    assert stored(counted) == 5
    assert capfd.readouterr().err.count("ours to mend") == 1


def test_without_capture_no_database_is_made(tmp_path: Path) -> None:
    counted = Counted(tmp_path / "home", capture=False)
    counted.call(3)
    counted.flusher.flush()
    counted.flusher.stop()

    assert counted.flusher.calls == 3
    assert not counted.settings.home.exists()


def test_a_failed_route_is_reported_even_without_capture(tmp_path: Path) -> None:
    counted = Counted(tmp_path / "home", capture=False)
    counted.flusher.report_failure(solution(LINEAR, "onednn", CPU.key, "2.13"), "no fp64")
    counted.flusher.flush()

    with sqlite3.connect(counted.settings.db) as conn:
        assert conn.execute("SELECT reason FROM quarantine").fetchall() == [("no fp64",)]


def _values(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__dataclass_fields__}


def ends(home: Home, how: str, **env: str) -> tuple[int, float, list[str]]:
    """Exit code, seconds from the program's last line to its end, what was said."""
    process = home.start(
        WORK + f"\n    print('done', flush=True)\n    {how}\n", whole_end=True, GEMMTUNED_FLUSH_S="60", **env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    began_s = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode is not None
    return process.returncode, time.monotonic() - began_s, err.splitlines()


def test_the_last_batch_is_flushed_however_a_program_ends(home: Home) -> None:
    calls = 0
    for how, code, more in (
        ("t = threading.Thread(target=lambda: (work(5), sys.exit(3))); t.start(); t.join()", 0, 15),
        ("atexit.register(work, 7); sys.exit(5)", 5, 17),
        ("os._exit(0)", 0, 0),  # a killed process loses what it counted in the last interval: here all
    ):
        code_found, _, said = ends(home, how)
        calls += more
        assert (code_found, said, home.calls()) == (code, [], calls), how

    _, _, said = ends(home, "raise KeyboardInterrupt")
    assert said[-1] == "KeyboardInterrupt"
    assert home.calls() == calls + 10


@pytest.mark.long  # a program that imports torch by itself: only Python's own end of one tells
def test_a_program_that_ctrl_c_ends_dies_of_it(home: Home) -> None:
    """A shell stops a loop over programs for that alone, and who starts one tells a stop from a failure by it."""
    done = home.run(WORK + "\n    raise KeyboardInterrupt\n", fresh=True, GEMMTUNED_FLUSH_S="60")
    assert done.code == -signal.SIGINT
    assert home.calls() == 10


def test_the_end_of_a_program_comes_half_a_second_later_at_most(home: Home) -> None:
    done = home.run(
        WORK
        + """
    import json
    from gemmtuned.hooks import activate
    activate.current().flusher.flush()  # makes the database
    work()
    began = time.monotonic()
    activate._last_flush()
    print(json.dumps(time.monotonic() - began))
    """,
        whole_end=True,
        GEMMTUNED_FLUSH_S="60",
    )

    assert done.said < 0.5
    assert home.calls() == 20


def broken_homes(tmp_path: Path) -> dict[str, dict[str, str]]:
    (tmp_path / "garbage.db").mkdir()
    return {
        "closed home": {"GEMMTUNED_HOME": "/proc/closed"},
        "folder for a database": {"GEMMTUNED_DB": str(tmp_path / "garbage.db")},
        "full disk": {"GEMMTUNED_DB": "/dev/full"},
    }


@pytest.mark.parametrize("what", ["closed home", "folder for a database", "full disk"])
def test_a_program_runs_on_without_a_store_and_says_so_in_one_line(home: Home, tmp_path: Path, what: str) -> None:
    done = home.run(WORK + "\n    time.sleep(0.5); work(); print(1)\n", **broken_homes(tmp_path)[what])

    assert done.said == 1
    told = [line for line in done.ours if "were lost" not in line]
    assert len(told) == 1, done.err
    assert done.err.splitlines() == done.ours
    assert "counts stay in memory" in told[0]


def test_a_database_locked_by_others_costs_no_more_than_a_wait_at_the_end(home: Home) -> None:
    assert home.run(WORK).code == 0
    conn = sqlite3.connect(home.path / "tune.db", isolation_level=None)
    conn.execute("BEGIN IMMEDIATE")
    code, took_s, said = ends(home, "pass")
    conn.execute("ROLLBACK")
    conn.close()

    assert code == 0
    assert took_s < flush.EXIT_BUSY_S + 1.5
    assert len(said) == 1
    assert "counts were lost calls=10" in said[0]
    assert "sqlite3 shell" in said[0]


@pytest.mark.skipif(pid_namespace() is None, reason="this system does not name its PID namespaces")
def test_a_program_that_is_killed_is_gone_at_once(home: Home) -> None:
    program = home.start("import torch; torch.ones(8, 8) @ torch.ones(8, 8); print('on', flush=True); input()")

    def state() -> str:
        try:
            return str(queries.sessions(home.path / "tune.db")[0]["state"])
        except (StoreError, IndexError):
            return "none yet"

    try:
        end = time.monotonic() + 60
        while state() != "live":
            assert time.monotonic() < end, state()
            time.sleep(0.05)
    finally:
        program.kill()
        program.communicate()
    assert state() == "gone"


def test_a_bug_in_what_is_noted_of_a_call_loses_no_call(tmp_path: Path) -> None:
    """A counter is read once: what was read of it must not be lost with a note."""

    class Broken:
        def note(self, *given: object) -> None:
            raise KeyError("a bug")

    settings = replace(Counted(tmp_path).settings, dispatch=True)
    where = SimpleNamespace(environment=lambda place: NEW)
    account = Account(settings, SimpleNamespace(native=None), SimpleNamespace(table=()), None, where, Broken())  # type: ignore[arg-type]
    for m in (1, 2, 3):
        account.op_counts.add(LINEAR.with_m(m), "cpu")
    found: list[int] = []
    with pytest.raises(KeyError):
        found.extend(sighting.problem.m for sighting in account.drain())
    assert sorted(found) == [1, 2, 3]
