"""Nothing of ours waits for what may never come, or turns in circles: each test has one thing that never ends."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counted_by_hand import Counted, stored
from hooked import LINEAR, Home, wait_for

from gemmtuned.configs import clock, stderr_lines
from gemmtuned.configs.frame_lock import Running
from gemmtuned.configs.sighting import Sighting
from gemmtuned.db.sightings import Sightings
from gemmtuned.hooks import background, flush, pace, pending
from gemmtuned.hooks.background import AFTER_ERROR_S, Background, Fork, Sleeper
from gemmtuned.hooks.inotify import GAP_S, Events
from gemmtuned.hooks.watch import Watcher


@pytest.fixture
def full_pipe() -> tuple[int, int]:
    """(what reads, what writes) of a pipe in which there is no room, as whoever reads only at the end leaves it."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    return reads, writes


STREAMS = {
    "our own thread": "stderr_lines.our_thread()",
    "as Python made it": "",
    "made anew": "sys.stderr = os.fdopen(2, 'w')",
    "of another number": "fd = os.dup(2); os.dup2(1, 2); sys.stderr = os.fdopen(fd, 'w')",
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_line_that_nobody_takes_is_left_out(full_pipe: tuple[int, int], stream: str) -> None:
    """Whoever reads a program's stderr once it has ended would wait for its end, and it for them."""
    reads, writes = full_pipe
    then = f"{STREAMS[stream]}\nstderr_lines.say('a word')\nos._exit(0)"
    code = f"import os, sys\nfrom gemmtuned.configs import stderr_lines\nstderr_lines.begin()\n{then}"
    try:
        done = subprocess.run([sys.executable, "-c", code], stderr=writes, stdout=subprocess.PIPE, timeout=30)
        assert done.returncode == 0
        os.read(reads, 1 << 20)  # with room again the same program is heard
        done = subprocess.run([sys.executable, "-c", code], stderr=writes, stdout=subprocess.PIPE, timeout=30)
        assert os.read(reads, 100) == b"gemmtuned: a word\n"
    finally:
        os.close(reads), os.close(writes)


def test_a_line_is_no_longer_than_a_pipe_takes_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    stderr_lines.begin()
    stderr_lines.our_thread()
    try:
        stderr_lines.say("x" * 10_000)
    finally:
        stderr_lines.our_thread_ends()
    said = capfd.readouterr().err
    assert len(said) == 4096 and said.startswith("gemmtuned: xxx") and said.endswith("x\n")


class Failing(Sleeper):
    """A part that is always due, and a sleeper: neither ever does what it should."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = self.waits = 0

    def due_s(self) -> float:
        return 0.0

    def turn(self) -> None:
        self.turns += 1
        raise MemoryError

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        if self.waits == 1:
            raise OSError("the sleeper's")
        super().wait(timeout_s)


def test_a_part_that_fails_has_its_next_turn_later_and_the_thread_outlives_its_sleeper(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stderr_lines.begin()
    failing = Failing()
    background = Background([failing], failing)
    background.start()
    wait_for(lambda: failing.turns >= 2)
    time.sleep(0.2)
    assert background.end(10) and not background.alive

    assert failing.turns <= 3
    assert failing.waits >= 2
    assert capfd.readouterr().err.count("the program runs on: OSError: the sleeper's") == 1
    assert AFTER_ERROR_S >= 0.5


def test_a_table_whose_folder_cannot_be_looked_at_costs_no_time(tmp_path: Path) -> None:
    """Its name is too long, or the folder is closed to us: the thread once looked again at once, for ever."""
    (tmp_path / "configs").mkdir()
    watcher = Watcher(tmp_path / "configs", lambda: None, automatic=True, files=[tmp_path / ("x" * 300) / "tuned.csv"])
    watcher.turn()
    watcher.events.changed = False

    assert watcher.due_s() > clock.monotonic() + 1
    assert watcher.events.alive, "the published tables are watched"
    watcher.events.close()


def test_a_watcher_whose_turn_fails_is_not_due_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(tmp_path, lambda: None, automatic=True)
    monkeypatch.setattr(watcher, "_watch", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watcher.turn()

    assert watcher.due_s() > clock.monotonic()


def test_a_file_that_is_written_all_the_time_wakes_us_now_and_then(tmp_path: Path) -> None:
    """A program may write its log, line by line, into the folder that its table lies in."""
    events = Events()
    events.watch({tmp_path: {"tuned.csv"}})
    looks, until_s = 0, clock.monotonic() + 10 * GAP_S
    with (tmp_path / "train.log").open("wb", buffering=0) as log:
        while clock.monotonic() < until_s:
            log.write(b"a line\n")
            events.wait(GAP_S)
            looks += 1
        assert looks <= 22
        assert not events.changed
        (tmp_path / "tuned.csv").write_text("")
        events.wait(10)
        assert events.changed
    began_s = clock.monotonic()
    events.wake()
    events.wait(10)
    assert clock.monotonic() - began_s < 5, "who is woken does not wait for the gap's end alone"
    events.close()


def test_who_is_woken_again_and_again_wakes_each_time(tmp_path: Path) -> None:
    """The first time takes the watches away, so the next has none to take away."""
    events = Events()
    events.watch({tmp_path: {"tuned.csv"}})
    for _ in range(3):
        began_s = clock.monotonic()
        events.wake()
        events.wait(4)
        assert clock.monotonic() - began_s < 2
    events.close()


def test_a_descriptor_whose_folder_is_gone_is_closed_at_once(tmp_path: Path) -> None:
    """A child that is forked then does not know it for ours, and kept its copy until its first count."""
    (tmp_path / "configs").mkdir()
    events = Events()
    events.watch({tmp_path / "configs": {"manifest.json"}, tmp_path: {"tuned.csv"}})
    assert events.descriptor() is not None
    (tmp_path / "configs").rmdir()
    events.wait(10)
    assert not events.alive and events.changed
    assert events._fd is None and events.descriptor() is None
    began_s = clock.monotonic()
    events.wait(0.1)
    assert clock.monotonic() - began_s < 5


def test_one_folder_by_two_names_is_watched_for_both(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "link").symlink_to("configs")
    events = Events()
    events.watch({tmp_path / "configs": {"manifest.json"}, tmp_path / "link": {"tuned.csv"}})
    (tmp_path / "configs/manifest.json").write_text("")
    events.wait(10)
    events.close()

    assert events.changed


def test_a_step_that_fails_keeps_no_other_from_its_turn(home: Home) -> None:
    """Weights of a subclass that refuses our operator once kept the kill switch from being seen."""
    done = home.run(
        """
        import os, torch
        from hooked import wait_for
        from torch import nn
        from gemmtuned.hooks import frozen_layers
        import gemmtuned, json
        frozen_layers.notes.append(lambda: 1 / 0)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        switch = os.path.join(os.environ["GEMMTUNED_HOME"], "disabled")
        wait_for(lambda: gemmtuned.status()["calls"])
        os.makedirs(os.path.dirname(switch), exist_ok=True)
        open(switch, "w").close()
        wait_for(lambda: gemmtuned.status()["note"] == f"switched off: {switch} exists")
        wait_for(lambda: not gemmtuned.status()["dispatch"])
        print(1)
        """
    )
    assert done.said == 1
    assert [line for line in done.ours if "ZeroDivisionError" not in line] == []


def test_frozen_weights_of_a_subclass_that_refuses_our_operator_are_noted_as_changed(home: Home) -> None:
    done = home.compiling().run(
        """
        import json, torch, gemmtuned
        from hooked import wait_for
        from torch import nn

        class Refusing(torch.Tensor):
            @staticmethod
            def __new__(cls, t):
                return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

            def __init__(self, t):
                self.t = t

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                return Refusing(args[0].t) if func is torch.ops.aten.detach.default else NotImplemented

        model = nn.Sequential(nn.Linear(16, 8)).eval()
        frozen = gemmtuned.freeze(model)
        model[0].weight = nn.Parameter(Refusing(model[0].weight.detach()), requires_grad=False)
        wait_for(lambda: "1 frozen layers are served plain" in gemmtuned.status()["note"])
        print(json.dumps(frozen))
        """
    )
    assert done.said == 1
    assert done.ours == []


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The hook's monotonic clock, which stands unless a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    return now


def test_the_end_of_a_program_reads_counters_for_half_a_second_and_says_that_there_were_more(
    tmp_path: Path, stopped_clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """60,000 problems that were new at the end once kept a program for 18 s."""

    class Endless(Counted):
        def drain(self) -> Iterator[Sighting]:
            for m in itertools.count(1):
                stopped_clock[0] += 0.1
                yield Sighting(LINEAR.with_m(m), "miss", 1)

    counted = Endless(tmp_path / "home")
    counted.flusher.stop()

    assert stopped_clock[0] <= 1000.0 + flush.EXIT_S + 0.11
    assert stored(counted) == counted.flusher.calls >= 5
    assert [record.getMessage() for record in caplog.records] == [
        "counts were lost calls=0 and more reason=the end of a program waits 2 s at most"
    ]


def test_the_end_of_a_program_writes_for_two_seconds_and_says_what_is_lost(
    tmp_path: Path, stopped_clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "MOST_AT_ONCE", 1)
    add = Sightings.add

    def slow(*args: object, **options: object) -> None:
        stopped_clock[0] += 0.9
        add(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Sightings, "add", slow)
    counted = Counted(tmp_path / "home")
    for m in range(1, 11):
        counted.call(2, m=m)
    counted.flusher.stop()

    assert stored(counted) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "counts were lost calls=14 reason=the end of a program waits 2 s at most"
    ]


def test_what_is_written_at_once_is_bounded_and_the_sums_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is one for all programs of a home: a transaction of 60,000 rows kept it for seconds."""
    monkeypatch.setattr(pending, "MOST_AT_ONCE", 4)
    sizes = []
    add = Sightings.add

    def noted(part: Sightings, run: str, environment: object, sightings: list[Sighting], **options: float) -> None:
        sizes.append(len(sightings))
        add(part, run, environment, sightings, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Sightings, "add", noted)
    counted = Counted(tmp_path / "home")
    for _ in range(2):
        for m in range(1, 11):
            counted.call(m, m=m)
        counted.flusher.flush()

    assert sizes == 2 * [4, 4, 2]
    assert stored(counted) == 2 * 55


def test_a_phase_that_begins_has_the_flush_before_it_read_without_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's own thread waits for it."""
    pauses: list[int] = []
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    monkeypatch.setattr(pace, "sleep", lambda _: pauses.append(read[0]))
    read = [0]

    class Asked(Counted):
        def drain(self) -> Iterator[Sighting]:
            for m in range(1, 101):
                read[0] = m
                self.flusher.hurried = self.flusher.hurried or m == 50  # as another thread in between_phases
                yield Sighting(LINEAR.with_m(m), "miss", 1)

    counted = Asked(tmp_path / "home")
    counted.flusher.flush()
    assert len(pauses) >= 40 and max(pauses) <= 50
    assert stored(counted) == 100


def test_forks_beside_a_flush_that_hangs_are_held_up_once(tmp_path: Path, stopped_clock: list[float]) -> None:
    """A home whose server does not answer cost each fork two seconds."""
    flusher = Counted(tmp_path / "home").flusher
    waits = []

    def fork() -> bool:
        began_s = stopped_clock[0]
        paused = flusher.pause(Running(sys._getframe()))
        waits.append(stopped_clock[0] - began_s)
        return paused

    class Held:
        free = False

        def hold(self, _: Running, timeout: float) -> bool:
            stopped_clock[0] += timeout
            return self.free

    flusher._lock, flusher.in_store = Held(), True
    assert [fork() for _ in range(3)] == [False] * 3
    Held.free = True
    assert fork()
    Held.free = False
    assert not fork()

    first, second, third, free, anew = waits
    assert first >= flush.FORK_S <= anew
    assert free < second < 0.1 > third


def test_a_phase_that_a_signals_handler_begins_in_the_middle_of_a_change_waits_for_nobody(tmp_path: Path) -> None:
    """The thread would wait for itself."""

    class Interrupted(Counted):
        def drain(self) -> Iterator[Sighting]:
            for number, sighting in enumerate(super().drain()):
                if number == 3:
                    self.flusher.between_phases(lambda: None)
                yield sighting

    counted = Interrupted(tmp_path / "home")
    for m in range(1, 11):
        counted.call(m, m=m)
    thread = threading.Thread(target=lambda: counted.flusher.between_phases(lambda: None), daemon=True)
    thread.start(), thread.join(10)
    assert not thread.is_alive()
    counted.flusher.flush()
    assert stored(counted) == 55


def test_counters_that_are_read_in_the_middle_of_their_reading_are_read_once(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from gemmtuned.hooks.activate import current
        native = current().native
        for m in range(1, 401):
            torch.mm(torch.ones(m, 3), torch.ones(3, 2))
        found = []
        for number, sighting in enumerate(native.drain()):
            found.append(sighting)
            if number == 5:
                found += native.drain()
        print(json.dumps([len(found), len({s.problem for s in found}), sum(s.calls for s in found)]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [400, 400, 400]


def test_a_fork_waits_for_a_thread_that_c_begins_and_that_nobody_can_end_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 and later count it, and warn the program of it."""
    monkeypatch.setattr(background, "_WARNS_OF_THREADS", True)
    ours = Background([], Sleeper())
    ours._coming = True  # as `begin_again` leaves it
    begins = threading.Timer(0.2, ours.start)
    begins.start()
    fork = Running(sys._getframe())
    how = ours.before_fork(fork, 10)
    was_there, fork.done = ours.alive, True
    begins.join()
    ours.end(10)

    assert how is not Fork.BESIDE and (was_there or how is Fork.ENDED)
