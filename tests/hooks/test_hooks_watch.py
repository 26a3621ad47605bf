"""Hot reload: what is published is in use within a second, and nothing that cannot be trusted ever is."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, publish, solution, wait_for
from matrices import matrix

from gemmtuned.configs import stderr_lines
from gemmtuned.configs.solution import Solution
from gemmtuned.hooks import watch
from gemmtuned.hooks.background import Background
from gemmtuned.hooks.inotify import Events
from gemmtuned.hooks.watch import Loader, Watcher

ROWS = [solution(LINEAR.with_m(m), "torch_swap", "cpu-test", "2.13") for m in (1, 2, 3)]


# ---- the watcher


class Program:
    """What a hooked program does with a watcher: it remembers what it took up, and when."""

    def __init__(self, folder: Path) -> None:
        self.loader = Loader(folder)
        self.generation = 0
        self.loads = self.looks = 0
        self.rows: list[Solution] = []
        self.watcher = Watcher(folder, self.reload, automatic=True)
        self.background = Background([self.watcher], self.watcher.events)

    def reload(self) -> int | None:
        self.looks += 1
        loaded = self.loader.load(newer_than=self.generation)
        if loaded is None:
            return None
        self.loads += 1
        self.generation, self.rows = loaded
        return self.generation

    def reaches(self, generation: int, limit_s: float = 1.0) -> None:
        wait_for(lambda: self.generation == generation, limit_s=limit_s, every_s=0.005)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program whose folder is not there yet, and that does not watch it yet."""
    program = Program(tmp_path / "home" / "configs")
    yield program
    assert program.background.end(60)  # its thread may not be left to the next test


@pytest.fixture
def running(program: Program) -> Program:
    """A program that watches a folder with nothing in it."""
    program.loader.folder.mkdir(mode=0o755, parents=True)
    program.background.start()
    return program


def watched(program: Program) -> None:
    wait_for(lambda: program.watcher.events.alive)


def test_a_publish_is_in_use_within_a_second(running: Program) -> None:
    watched(running)
    for generation in (1, 2, 3):
        publish(running.loader.folder, ROWS[:generation], generation)
        running.reaches(generation)


def test_looking_at_the_tables_is_no_reason_to_look_again(running: Program) -> None:
    """Reading a file is an event, too: the watcher once woke itself ten times a second for ever."""
    watched(running)
    publish(running.loader.folder, ROWS, 1)
    running.reaches(1)
    time.sleep(1.2)  # what the publish itself brings

    before = running.looks
    time.sleep(1.5)
    assert running.looks - before <= 1  # the poll


def test_a_first_publish_that_makes_the_folder_is_in_use_within_a_second(program: Program) -> None:
    program.background.start()
    time.sleep(0.2)
    publish(program.loader.folder, ROWS, 1)

    program.reaches(1)


def test_a_folder_made_anew_is_watched_again(running: Program) -> None:
    folder = running.loader.folder
    descriptors = []
    for generation in (1, 2, 3, 4):
        publish(folder, ROWS, generation)
        running.reaches(generation, limit_s=2.0)
        watched(running)
        descriptors.append(len(os.listdir("/proc/self/fd")))
        shutil.rmtree(folder)
        folder.mkdir(mode=0o755)
    assert max(descriptors) == descriptors[0]


def test_polling_finds_it_when_no_events_can_be_had(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch_(self: Any, folders: Any) -> None:
        raise OSError(24, "inotify instance limit reached")

    assert watch.BLIND_POLL_S * 1.2 < 1.0  # with its jitter: within a second here, too
    monkeypatch.setattr(watch, "BLIND_POLL_S", 0.1)
    monkeypatch.setattr(Events, "watch", watch_)
    program.loader.folder.mkdir(mode=0o755, parents=True)
    program.background.start()
    wait_for(lambda: program.watcher.polling)
    publish(program.loader.folder, ROWS, 1)

    program.reaches(1)


def test_a_storm_of_publishes_is_taken_together_and_its_last_one_is_in_use_within_a_second(running: Program) -> None:
    watched(running)
    for generation in range(1, 101):
        publish(running.loader.folder, ROWS, generation)
        time.sleep(0.01)

    running.reaches(100)
    assert 1 <= running.loads <= 10


def test_the_watcher_outlives_errors_in_callbacks_and_loads(
    running: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def raises(generation: int) -> None:
        raise RuntimeError("the server's own mistake")

    stderr_lines.begin()  # pytest has another stderr for each test
    told: list[int] = []
    off = [watch.subscribe(raises), watch.subscribe(told.append)]
    watched(running)
    monkeypatch.setattr(running.loader, "load", lambda newer_than: 1 / 0)
    publish(running.loader.folder, ROWS, 1)
    said: list[str] = []
    wait_for(lambda: "reload failed" in (said.append(capfd.readouterr().err) or "".join(said)))
    monkeypatch.undo()
    publish(running.loader.folder, ROWS, 2)
    running.reaches(2)
    wait_for(lambda: told == [2])
    for each in off:
        each()
    publish(running.loader.folder, ROWS, 3)
    running.reaches(3, limit_s=2.0)

    assert told == [2]
    assert caplog.text.count("the server's own mistake") >= 1


def test_a_load_that_fails_again_and_again_is_told_once(
    running: Program, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stderr_lines.begin()
    watched(running)
    tried: list[int] = []

    def fails(newer_than: int) -> None:
        tried.append(newer_than)
        raise ValueError("a row of no sense")

    monkeypatch.setattr(running.loader, "load", fails)
    for generation in (1, 2, 3):
        publish(running.loader.folder, ROWS, generation)
        wait_for(lambda generation=generation: len(tried) >= generation)
    monkeypatch.undo()
    publish(running.loader.folder, ROWS, 4)
    running.reaches(4)

    assert capfd.readouterr().err.count("reload failed") == 1


def test_a_callback_for_which_no_thread_is_to_be_had_is_called_later(
    running: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would go on with the graphs of the table before."""
    start, refused = watch.threading.Thread.start, []

    def at_the_limit(thread: watch.threading.Thread) -> None:
        if thread.name == "gemmtuned-reload" and len(refused) < 2:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(watch.threading.Thread, "start", at_the_limit)
    told: list[int] = []
    off = watch.subscribe(told.append)
    watched(running)
    publish(running.loader.folder, ROWS, 1)
    running.reaches(1)
    for _ in range(3):
        running.watcher.turn()  # as the poll
    wait_for(lambda: told == [1])
    off()

    assert len(refused) == 2


def test_a_callback_that_takes_its_time_keeps_no_other_waiting_and_hears_of_each_generation_in_turn() -> None:
    """GEMMTUNED_RECAPTURE=idle waits in one for a pause of the engine: a server's own heard of nothing until then."""
    slow_may_end, slow, quick = threading.Event(), list[int](), list[int]()

    def takes_its_time(generation: int) -> None:
        assert slow_may_end.wait(20)
        slow.append(generation)

    off = [watch.subscribe(takes_its_time), watch.subscribe(quick.append)]
    try:
        for generation in (1, 2, 3):
            watch._tell_subscribers(generation)
        wait_for(lambda: quick == [1, 2, 3])
        assert slow == []
        slow_may_end.set()
        wait_for(lambda: slow == [1, 2, 3])
    finally:
        slow_may_end.set()
        for each in off:
            each()


def test_a_callback_that_was_taken_off_is_not_called_for_what_waits() -> None:
    may_end, told = threading.Event(), list[int]()

    def once(generation: int) -> None:
        told.append(generation)
        assert may_end.wait(20)

    off = watch.subscribe(once)
    watch._tell_subscribers(1)
    watch._tell_subscribers(2)
    wait_for(lambda: told == [1])
    off()
    off()
    may_end.set()
    wait_for(lambda: not any(thread.name == "gemmtuned-reload" for thread in threading.enumerate()))
    assert told == [1]


def test_stopping_ends_the_thread_and_gives_its_descriptor_back(program: Program) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    program.loader.folder.mkdir(mode=0o755, parents=True)
    tasks = len(os.listdir("/proc/self/task"))
    program.background.start()
    watched(program)
    assert len(os.listdir("/proc/self/task")) == tasks + 1
    assert program.background.end(10)

    assert sorted(os.listdir("/proc/self/fd")) == before
    assert len(os.listdir("/proc/self/task")) == tasks


def test_a_descriptor_that_is_the_programs_by_now_is_left_alone(running: Program) -> None:
    watched(running)
    events = running.watcher.events
    fd = events._fd
    assert fd is not None
    mine, theirs = os.pipe()
    os.dup2(mine, fd)  # as after os.closerange(3, 1024) and an open of the program's own
    os.write(theirs, b"the program's")
    wait_for(lambda: events._fd != fd)
    publish(running.loader.folder, ROWS, 1)
    running.reaches(1, limit_s=2.0)

    assert os.read(fd, 100) == b"the program's"
    os.close(fd)


# ---- in a hooked process


@pytest.mark.parametrize("count", matrix([10, 100], [10]))
def test_every_call_is_right_while_many_tables_come_in(home: Home, count: int) -> None:
    done = home.run(
        """
        import json, sys, threading, time, torch
        from hooked import LINEAR, publish, published, wait_for
        import gemmtuned
        from gemmtuned.hooks import activate

        count = int(sys.argv[1])
        hook = activate.current()
        hook.flusher.stop()
        x, w = torch.randn(4, 16), torch.randn(8, 16)
        other = torch.randn(9, 16)
        told = []
        gemmtuned.on_reload(told.append)

        def table(generation):
            backend = ("torch_swap", "onednn")[generation % 2]
            return [published(LINEAR, backend), published(LINEAR.with_m(9), backend)]

        publish(hook.settings.config_dir, table(1), 1)
        wait_for(lambda: gemmtuned.generation() == 1)
        reference, wide = torch.mm(x, w.t()), torch.mm(other, w.t())
        list(hook.native.drain())
        stop, wrong, calls = threading.Event(), [], []

        def work():
            n = 0
            while not stop.is_set():
                a, b = torch.mm(x, w.t()), torch.mm(other, w.t())
                if not (torch.allclose(a, reference, atol=1e-5) and torch.allclose(b, wide, atol=1e-5)):
                    wrong.append(a)
                n += 2
            calls.append(n)

        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]
        for generation in range(2, count + 2):
            publish(hook.settings.config_dir, table(generation), generation)
            gemmtuned.reload()
        began = time.monotonic()
        wait_for(lambda: gemmtuned.generation() == count + 1, limit_s=5)
        took = time.monotonic() - began
        stop.set()
        [t.join() for t in threads]
        outcomes = {}
        for s in hook.native.drain():
            outcomes[s.outcome] = outcomes.get(s.outcome, 0) + s.calls
        print(json.dumps([len(wrong), outcomes == {"exact": sum(calls)}, took, hook.native.failures()]))
        """,
        str(count),
    )
    wrong, all_hits, took, failures = done.said

    assert (wrong, failures) == (0, [])
    assert all_hits, "a call between two tables must find one of them"
    assert took < 1


def test_a_forked_child_watches_for_itself(home: Home) -> None:
    done = home.run(
        """
        import json, os, torch
        from hooked import LINEAR, publish, published, wait_for
        import gemmtuned
        from gemmtuned.hooks import activate

        folder = activate.current().settings.config_dir
        publish(folder, [published(LINEAR, "torch_swap")], 1)
        wait_for(lambda: gemmtuned.generation() == 1)
        ready, child = os.pipe(), os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())  # the thread begins with the first count
            wait_for(lambda: gemmtuned.generation() == 2)
            outcomes = []
            while not outcomes:  # the child's own flush may have been first
                torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
                outcomes = [s.outcome for s in activate.current().native.drain()]
            os._exit(0 if outcomes == ["exact"] else 7)
        os.read(ready[0], 1)
        publish(folder, [published(LINEAR, "onednn")], 2)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        """
    )

    assert done.said == 0
    assert done.ours == []


@pytest.mark.parametrize(("setting", "seen"), [("start", [1, 1, 2]), ("manual", [0, 0, 2])])
def test_a_program_may_choose_when_tables_are_taken_up(home: Home, setting: str, seen: list[int]) -> None:
    publish(home.path / "configs", [], 1)
    done = home.run(
        """
        import json, time, torch
        from hooked import publish
        import gemmtuned
        from gemmtuned.hooks import activate
        time.sleep(0.3)
        seen = [gemmtuned.generation()]
        publish(activate.current().settings.config_dir, [], 2)
        time.sleep(0.8)
        seen.append(gemmtuned.generation())
        print(json.dumps([*seen, gemmtuned.reload()]))
        """,
        GEMMTUNED_RELOAD=setting,
    )

    assert done.said == seen


def test_whoever_wakes_us_does_not_wait_for_a_file_server_that_does_not_answer(tmp_path, monkeypatch):
    events, in_stat, answers = Events(), threading.Event(), threading.Event()
    usual = Path.stat

    def stat(path, **options):
        if path == tmp_path and threading.current_thread() is not threading.main_thread():
            in_stat.set()
            answers.wait(20)
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    thread = threading.Thread(target=events.watch, args=({tmp_path: {"manifest.json"}},))
    thread.start()
    assert in_stat.wait(10)
    began_s = time.monotonic()
    events.wake()
    took_s = time.monotonic() - began_s
    answers.set()
    thread.join()
    events.close()

    assert took_s < 5
