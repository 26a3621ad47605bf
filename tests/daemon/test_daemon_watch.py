"""The daemon's socket: what it says, to whom, and that nobody who asks can keep the daemon from its work."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import NEW, found, new_store, problem, saw

from gemmtuned.configs.errors import TryLater
from gemmtuned.daemon.status_file import Notice, SeatNotice
from gemmtuned.daemon.watch import looks, server
from gemmtuned.daemon.watch.ask import ask
from gemmtuned.daemon.watch.server import FILE, Watch
from gemmtuned.db import watched

HERE = Path(__file__).parents[1] / "support"
BUSY = """
import os, time
if os.fork() == 0:
    print(os.getpid(), flush=True)
    until = time.time() + 30
    while time.time() < until:
        pass
"""


def notice(**changes: object) -> Notice:
    seat = SeatNotice(id="cpu", name="cpu", device="cpu-test", state="waiting", reason="x", others=0.5, clear_s=0.0)
    values = {
        "owner": "h:1:b", "pid": 1, "started_s": 1.5, "updated_s": 2.5, "state": "waiting", "reason": "x",
        "generation": 1, "solved": 3, "seats": [seat], **changes,
    }  # fmt: skip
    return Notice(**values)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with a faster problem, one that is best on torch, and one that waits."""
    store = new_store(tmp_path)
    now_s = time.time()
    seen = [
        saw(problem(), 100, us=10.0),
        saw(problem(n=64), 7, us=10.0),
        saw(problem(n=128), 10, us=10.0),
    ]
    store.sightings.add("serve", NEW, seen, now_s=now_s - 100)
    best = found(problem(n=128), backend="torch", config="", state="default_best", us=10.0, baseline_us=10.0)
    for solution in (found(problem()), best):
        store.solutions.install(None, [solution], environment=NEW, now_s=now_s - 50)
    store.close()
    return tmp_path


@pytest.fixture
def watch(home: Path) -> Iterator[Watch]:
    made = Watch(home, home / "tune.db")
    made.tell(notice(), used_today_s=12.5)
    yield made
    made.close()


def settled(home: Path, key: str = "covered") -> dict:
    """The answer once the slow questions were answered, too."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        said = ask(home)
        if said[key]:
            return said
        time.sleep(0.1)
    raise AssertionError(f"{key} was never answered: {said}")


def test_the_socket_says_what_the_daemon_and_the_database_say(home: Path, watch: Watch) -> None:
    said = settled(home)

    assert said["notice"]["seats"][0]["state"] == "waiting" and said["used_today_s"] == 12.5
    assert said["covered"] == {"faster": 1000.0, "best": 100.0, "none": 70.0}
    assert said["waiting"] == 1
    assert {(row["problem"], row["state"]) for row in said["verdicts"]} == {
        (str(problem()), "published"),
        (str(problem(n=128)), "default_best"),
    }
    assert said["trouble"] == ""


def test_who_uses_the_cpu_is_named(home: Path, watch: Watch) -> None:
    """A process that is no child of the daemon's: here the daemon is this test, so the busy one is a grandchild's."""
    starter = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.wait()
    try:
        until_s = time.monotonic() + 20
        names: list[dict] = []
        while time.monotonic() < until_s and pid not in [one["pid"] for one in names]:
            names = ask(home)["users"].get("cpu", [])
            time.sleep(0.2)
        busy = next(one for one in names if one["pid"] == pid)
        assert busy["name"] == f"{Path(sys.executable).name} -c" and 0.1 < busy["cores"] <= 1.1
    finally:
        os.kill(pid, 9)


def test_the_socket_is_the_owners_and_goes_with_the_daemon(home: Path) -> None:
    made = Watch(home, home / "tune.db")
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    made.close()

    assert not (home / FILE).exists()
    with pytest.raises(TryLater, match="Start it: gemmtuned daemon"):
        ask(home)


def test_a_socket_that_a_killed_daemon_left_is_replaced(home: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(home / FILE))
    left.close()
    with pytest.raises(TryLater, match="no daemon runs"):
        ask(home)
    made = Watch(home, home / "tune.db")
    try:
        assert ask(home)["schema"] == server.SCHEMA
    finally:
        made.close()


def test_a_socket_that_has_gone_with_its_home_is_made_anew(home: Path) -> None:
    """The daemon goes on in a new home: it is not said to be none."""
    made = Watch(home, home / "tune.db")
    try:
        for _ in range(2):
            home.rename(home.with_name(f"moved-{time.monotonic_ns()}"))
            with pytest.raises(TryLater, match="no daemon runs"):
                ask(home)
            home.mkdir()
            made.tell(notice(), used_today_s=0.0)
            assert ask(home)["notice"]["generation"] == notice().generation
        before = (home / FILE).stat()
        made.tell(notice(), used_today_s=0.0)
        assert (home / FILE).stat().st_ino == before.st_ino
    finally:
        made.close()
    assert not (home / FILE).exists()


def test_a_socket_that_could_not_be_made_at_first_is_made_later(home: Path) -> None:
    (home / FILE).write_text("in the way")
    made = Watch(home, home / "tune.db")
    try:
        (home / FILE).unlink()
        made.tell(notice(), used_today_s=0.0)
        assert ask(home)["notice"] is not None
    finally:
        made.close()


def test_a_file_in_its_place_is_left_alone(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / FILE).write_text("mine")
    with caplog.at_level("WARNING", "gemmtuned.daemon"):
        made = Watch(home, home / "tune.db")
        made.tell(notice(), used_today_s=0.0)
        made.close()

    assert (home / FILE).read_text() == "mine" and "no socket" in caplog.text


def test_a_home_of_any_depth_has_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    made = Watch(deep, deep / "tune.db")
    made.tell(notice(), used_today_s=0.0)
    try:
        assert ask(deep)["notice"]["pid"] == 1
    finally:
        made.close()


def test_one_who_does_not_read_keeps_nobody_waiting_for_long(
    home: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer does not fit what the kernel holds for it: it is left after SEND_S, the loop never waits."""
    monkeypatch.setattr(server, "SEND_S", 0.2)
    watch.tell(notice(reason="r" * 3_000_000), used_today_s=0.0)
    idle = socket.socket(socket.AF_UNIX)
    idle.connect(str(home / FILE))
    began_s = time.monotonic()
    watch.tell(notice(), used_today_s=0.0)
    assert time.monotonic() - began_s < 0.1
    assert ask(home)["schema"] == server.SCHEMA
    idle.close()


@pytest.mark.parametrize("bytes_", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"schema": "gemmtuned.watch/1", "notice": 3}'])
def test_an_answer_that_is_none_is_a_line(tmp_path: Path, bytes_: bytes) -> None:
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(tmp_path / FILE))
    other.listen(1)

    def answer() -> None:
        asker, _ = other.accept()
        asker.sendall(bytes_)
        asker.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(TryLater):
        ask(tmp_path)
    thread.join()
    other.close()


def test_calls_a_second_are_told_between_two_reports() -> None:
    rates = looks.Rates()
    row = {"host": "h", "pid": 1, "started": 5, "calls": 100, "last_seen": 1_000_000, "state": "live"}
    rates.see([row])
    assert rates.of(row) is None
    later = {**row, "calls": 400, "last_seen": 3_000_000}
    rates.see([later])
    rates.see([later])  # nothing new: the rate stays
    assert rates.of(later) == 150.0
    assert rates.of({**later, "state": "silent"}) is None


def test_a_question_that_takes_long_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(looks.time, "monotonic", lambda: clock[0])
    asked = []

    def slow() -> int:
        asked.append(clock[0])
        clock[0] += 1.0
        return 1

    look = looks.Look(slow, 2.0, None)
    while clock[0] < 200.0:
        look.take()
        clock[0] += 0.25
    assert len(asked) == pytest.approx(200 * looks.SHARE, abs=1)


def test_a_database_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tune.db").write_bytes(b"no database at all" * 100)
    made = Watch(tmp_path, tmp_path / "tune.db")
    made.tell(notice(), used_today_s=0.0)
    try:
        assert "tune.db" in settled(tmp_path, "trouble")["trouble"]
    finally:
        made.close()


def test_a_running_daemon_answers(home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "daemon_process.py"), str(home), "--busy"], stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until_s = time.monotonic() + 30
        said = None
        while said is None and time.monotonic() < until_s:
            try:
                said = ask(home)
                said = said if said["notice"] else None
            except TryLater:
                pass
            time.sleep(0.1)
        assert said is not None and said["notice"]["pid"] == process.pid
        assert said["notice"]["seats"][0]["others"] == 1.0
    finally:
        process.terminate()
        process.wait(10)
    assert not (home / FILE).exists()


def test_the_answers_by_time_are_those_of_coverage(home: Path) -> None:
    from gemmtuned.db import queries

    by = watched.answered(home / "tune.db")
    assert (by["faster"] + by["best"], sum(by.values())) == queries.covered_time(home / "tune.db")
