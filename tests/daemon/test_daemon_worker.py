from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import fakes
import psutil
import pytest
from worker_messages import said

from gemmtuned.configs.errors import WorkerDied, WorkerFailed, WorkerHung, WorkerKilled
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.daemon import process_output
from gemmtuned.daemon.child.compile_ahead import JOB_S
from gemmtuned.daemon.leftovers import alive_in_group
from gemmtuned.daemon.process_output import MOST_OUTPUT_BYTES, cut, last_line, output_file
from gemmtuned.daemon.protocol.wire import Failed, Found, Inbox, Message, Order, Trial, decode, encode
from gemmtuned.daemon.seats.worker import (
    KILL_WAIT_S,
    ON_GPU,
    TERM_GRACE_S,
    Deadlines,
    Worker,
)

SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"
QUICK = Deadlines(hello_s=20, prepare_s=20, candidate_s=0.4, other_s=20, gflop_s=0)
Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Worker] = []

    def make(deadlines: Deadlines = QUICK, search: str = SEARCH, nice: int = 0) -> Worker:
        worker = Worker("cpu", nice=nice, search=search, deadlines=deadlines)  # 0: a loaded machine must not starve it
        started.append(worker)
        return worker

    yield make
    for worker in started:
        assert worker.stop()


def order(n: int, skip: tuple[Candidate, ...] = ()) -> Order:
    problem = Problem(m=8, n=n, k=64)
    return Order((problem,), "exact", problem, "eager", skip)


def ready(worker: Worker) -> Worker:
    said(worker, lambda heard: worker.environment is not None)
    return worker


def answered(heard: list[Message]) -> bool:
    return bool(heard) and isinstance(heard[-1], (Found, Failed))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_that_dies_between_orders_is_said_to_have_waited(start: Start) -> None:
    for solved_one in (False, True):
        worker = ready(start())
        if solved_one:
            worker.tune(order(8))
            said(worker, answered)
        os.kill(worker.pid, signal.SIGKILL)

        with pytest.raises(WorkerKilled, match=r"SIGKILL .* while waiting for work"):
            said(worker, lambda heard: False)


def test_a_worker_says_its_environment_and_solves_one_order_after_another(start: Start) -> None:
    worker = ready(start())
    assert worker.environment == fakes.ENVIRONMENT
    for n in (8, 9):
        worker.tune(order(n))
        heard = said(worker, answered)
        assert isinstance(heard[-1], Found)
        assert heard[-1].solution.problem.n == n
        trials = [m for m in heard if isinstance(m, Trial)]
        assert [t.candidate.backend for t in trials if t.phase == "start"] == ["torch", "slow", "bad", "fast"]


def test_candidates_to_skip_are_not_run(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(17, skip=(Candidate("bad"),)))  # bad would abort
    assert isinstance(said(worker, answered)[-1], Found)


@pytest.mark.parametrize(
    ("n", "words"),
    [(17, "SIGABRT"), (19, "SIGKILL"), (31, "exit code 7"), (31, "last words")],
    ids=["abort", "killed", "exit", "its last line of output"],
)
def test_a_death_is_told_with_its_reason(start: Start, n: int, words: str) -> None:
    worker = ready(start())
    worker.tune(order(n))
    with pytest.raises(WorkerDied, match=words) as caught:
        said(worker, answered)
    assert isinstance(caught.value, WorkerKilled) == (words == "SIGKILL")
    assert "trying bad on" in str(caught.value)
    assert caught.value.args[0].isprintable()
    assert not is_running(worker.pid)


def test_what_a_worker_said_before_it_died_is_heard_first(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(17))
    worker._process.wait(10)  # its words lie in the socket now
    heard = []
    with pytest.raises(WorkerDied):
        while True:
            heard += worker.poll()
    assert [m.candidate.backend for m in heard if isinstance(m, Trial) and m.phase == "screen"] == ["torch", "slow"]


@pytest.mark.long
def test_running_out_of_memory_is_this_problems_failure_and_the_worker_lives(start: Start) -> None:
    worker = ready(start(Deadlines()))
    worker.tune(order(23))
    assert said(worker, answered)[-1] == Failed("out of memory")
    worker.tune(order(8))
    assert isinstance(said(worker, answered)[-1], Found)


def test_a_refused_problem_is_answered_with_the_reason(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(29))
    assert said(worker, answered)[-1] == Failed("this one cannot be done")


def test_a_hang_is_killed_at_its_deadline(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(13))
    began = time.monotonic()
    with pytest.raises(WorkerHung, match="trying bad on"):
        said(worker, answered)
    assert 0.3 < time.monotonic() - began < 2.0
    assert not is_running(worker.pid)


def test_a_candidate_that_may_compile_at_its_first_call_has_minutes_for_it(start: Start) -> None:
    """A library that builds its kernels with nvcc was taken for one that hangs."""
    worker = ready(start())
    worker.tune(order(53))
    assert isinstance(said(worker, answered)[-1], Found)
    assert ON_GPU.may_compile_s > 300


def test_a_hanging_kernel_has_a_gpu_for_less_than_half_a_minute() -> None:
    assert ON_GPU.candidate_s + TERM_GRACE_S + KILL_WAIT_S < 30
    assert ON_GPU.compile_s > JOB_S, "a slow compiler is given up by the child, and costs no worker"


def test_larger_problems_have_longer_deadlines(start: Start) -> None:
    worker = ready(start(Deadlines(candidate_s=0.1, gflop_s=1e9)))
    worker.tune(order(13))
    said(worker, lambda heard: any(isinstance(m, Trial) and m.candidate.backend == "bad" for m in heard))
    time.sleep(0.3)
    assert worker.poll() == []


def test_a_worker_that_never_says_hello_is_killed(start: Start, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(WorkerHung, match="starting"):
        ready(start(Deadlines(hello_s=0.5), f"{slow}:tune"))


def test_a_worker_that_cannot_start_says_why(start: Start, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    with pytest.raises(WorkerDied, match="no_such_module"):
        ready(start(search=f"{broken}:tune"))


def test_stopping_takes_a_moment_even_in_the_middle_of_a_trial(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(37))
    time.sleep(0.1)
    began = time.monotonic()
    assert worker.stop()
    assert time.monotonic() - began < 0.2
    assert not is_running(worker.pid)


def test_a_worker_that_ends_when_told_to_has_not_failed(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(37))
    said(worker, lambda heard: bool(heard) and heard[-1].candidate.backend == "bad")  # type: ignore[union-attr]
    worker.terminate()
    while is_running(worker.pid):
        assert worker.poll() == []
        time.sleep(0.002)
    assert worker.poll() == []
    assert worker.stop()


def test_a_worker_that_ignores_sigterm_is_gone_within_half_a_second(start: Start, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import signal, time\nfrom fakes import ENVIRONMENT\n"
        "def environment(device):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    return ENVIRONMENT\n"
        "def tune(*a, **k):\n    time.sleep(60)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
        worker = ready(start(search=f"{deaf}:tune"))
    worker.tune(order(8))
    time.sleep(0.05)
    began = time.monotonic()
    assert worker.stop()
    assert time.monotonic() - began < 0.5


def test_what_a_worker_started_dies_with_it(start: Start) -> None:
    worker = ready(start())
    worker.tune(order(41))
    with pytest.raises(WorkerDied):
        said(worker, answered)
    end = time.monotonic() + 1
    while any(_group(p.pid) == worker.pid and is_running(p.pid) for p in psutil.process_iter()):
        assert time.monotonic() < end
        time.sleep(0.01)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def test_a_worker_gives_way_to_all_others(start: Start) -> None:
    worker = ready(start(Deadlines(), nice=19))
    process = psutil.Process(worker.pid)
    assert process.nice() == 19
    assert os.getpgid(worker.pid) == worker.pid
    assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() == "1000"
    autogroup = Path(f"/proc/{worker.pid}/autogroup")  # only where the kernel shares the CPU by session
    assert not autogroup.exists() or autogroup.read_text().split()[-1] == "19"
    with suppress(psutil.AccessDenied, OSError):  # on a loaded machine it would not end in time
        process.nice(0)
        autogroup.write_text("0")


def test_a_worker_does_not_count_its_own_calls(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    worker = ready(start())
    assert "AITER_TUNE_GEMM" not in psutil.Process(worker.pid).environ()


@pytest.mark.parametrize("busy", [False, True], ids=["at rest", "in a trial"])
def test_a_worker_dies_with_a_killed_parent(busy: bool) -> None:
    script = (
        "import sys, time\nfrom gemmtuned.daemon.seats.worker import Worker\n"
        "from gemmtuned.daemon.protocol.wire import Order\n"
        "from gemmtuned.configs.problem import Problem\n"
        f"w = Worker('cpu', nice=0, search={SEARCH!r})\n"
        "while w.environment is None: w.poll(); time.sleep(.005)\n"
        "p = Problem(m=8, n=37, k=64)\n"
        f"if {busy}: w.tune(Order((p,), 'exact', p, 'eager'))\n"
        "print(w.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    end = time.monotonic() + 2
    while is_running(child):
        assert time.monotonic() < end, "the worker outlived its parent"
        time.sleep(0.01)


def test_a_worker_is_started_from_the_main_thread_only() -> None:
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            Worker("cpu", search=SEARCH)
        except WorkerFailed as err:
            caught.append(err)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_no_descriptor_is_left_behind(start: Start) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for n in (8, 17):
        worker = ready(start())
        worker.tune(order(n))
        try:
            said(worker, answered)
        except WorkerDied:
            pass
        worker.stop()
    assert descriptors() == before


MESSAGES: list[Message] = [
    order(8, skip=(Candidate("fast"), Candidate.of("slow", bm=4))),
    Trial(Problem(m=1, n=2, k=3), Candidate.of("x", a=1), "verify", 1.5, None, "wrong", "K tail", 5),
    Found(fakes.solution(Problem(m=1, n=2, k=3))),
    Failed("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_arrive_as_they_were_sent_whatever_pieces_they_come_in(message: Message) -> None:
    data = encode(message) * 2
    for size in (1, 7, len(data)):
        inbox = Inbox()
        got = [m for i in range(0, len(data), size) for m in inbox.feed(data[i : i + size])]
        assert got == [message, message]


def test_a_figure_that_is_no_number_becomes_none() -> None:
    trial = Trial(Problem(m=1, n=2, k=3), Candidate("x"), "verify", float("nan"), float("inf"), "wrong", "", 5)
    heard = decode(encode(trial)[4:])
    assert isinstance(heard, Trial)
    assert (heard.us, heard.err) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b"\xff", b'{"found": {}}', b'{"trial": {"m": 1, "n": 1, "k": 1}}', b'{"tune": 3}',
        b'{"hello": {"key": 1}, "stamps": {}}', b'{"failed"', b"[" * 100_000,
        b'{"memory": 1e999}',
    ],
)  # fmt: skip
def test_nonsense_from_a_worker_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(WorkerFailed):
        decode(body)


def test_an_endless_message_is_refused() -> None:
    with pytest.raises(WorkerFailed, match="bytes"):
        Inbox().feed(b"\xff\xff\xff\xff")


def test_a_worker_that_talks_nonsense_is_ended(start: Start, tmp_path: Path) -> None:
    liar = tmp_path / "liar.py"
    liar.write_text(
        "import os, socket, sys\n"
        "socket.socket(fileno=os.dup(int(sys.argv[1]))).sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')\n"
        "import time; time.sleep(60)\n"
    )
    worker = start(search=f"{liar}:tune")
    with pytest.raises(WorkerFailed):
        ready(worker)
    assert not is_running(worker.pid)


def test_the_real_search_answers_an_order() -> None:
    from gemmtuned.daemon.child import worker_main

    tune, environment = worker_main.load("", "cpu")
    ours, theirs = socket.socketpair()
    problem = Problem(m=4, n=64, k=64, dtype="fp32", threads=1)
    serving = threading.Thread(target=worker_main.serve, args=(theirs, tune, environment), daemon=True)
    serving.start()
    ours.sendall(encode(Order((problem,), "exact", problem, "eager")))
    inbox, heard = Inbox(), []
    while not answered(heard):
        heard += inbox.feed(ours.recv(65536))
    ours.close()
    serving.join(5)
    last: Any = heard[-1]
    assert isinstance(last, Found), last
    assert isinstance(last.solution, Solution)
    assert environment.accepts(last.solution.backend, last.solution.stamp)


def test_a_candidate_short_of_memory_is_told_as_that_and_not_as_faulty() -> None:
    from gemmtuned.daemon.child.worker_main import serve

    ours, theirs = socket.socketpair()
    problem = Problem(m=8, n=8, k=64)

    def tune(*args: Any, emit: Callable[[Trial], None], **options: Any) -> Solution:
        for note in ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "RuntimeError: no kernel image"):
            emit(Trial(problem, Candidate("bad"), "screen", None, None, "refused", note, 1))
        return fakes.solution(problem)

    with ours, theirs:
        ours.sendall(encode(order(8)))
        ours.shutdown(socket.SHUT_WR)
        serve(theirs, tune, fakes.ENVIRONMENT)
        theirs.close()
        inbox, heard = Inbox(), []
        while data := ours.recv(1 << 16):
            heard += inbox.feed(data)
    assert [m.outcome for m in heard if isinstance(m, Trial)] == ["oom", "refused"]


def test_a_worker_is_not_gone_while_something_it_started_is_stuck(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ready(start())
    left = [4242]  # a compiler at a dead disk, say: SIGKILL does nothing to it
    monkeypatch.setattr("gemmtuned.daemon.seats.worker.alive_in_group", lambda leader: left)
    assert not worker.stop() and not worker.stop()
    left.clear()
    assert worker.stop()


def test_who_is_alive_in_a_group_is_known_and_the_dead_do_not_count() -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); "
    )
    script += "print('up', flush=True); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
    assert len(alive_in_group(leader.pid)) == 2
    leader.kill()
    leader.wait()
    assert len(alive_in_group(leader.pid)) == 1
    os.killpg(leader.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while alive_in_group(leader.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert alive_in_group(leader.pid) == []
    leader.stdout.close()


def test_what_a_worker_writes_is_cut_and_nothing_it_says_meanwhile_is_lost() -> None:
    output = output_file()
    assert output is not None
    code = "for n in range(40000): print('onednn_verbose,exec,cpu,matmul,', n, flush=True)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=output)
    largest = 0
    while child.poll() is None:
        cut(output)
        largest = max(largest, room(output))
        time.sleep(0.001)
    assert child.returncode == 0 and largest < 2 * MOST_OUTPUT_BYTES
    cut(output)
    assert room(output) <= MOST_OUTPUT_BYTES
    assert last_line(output) == "onednn_verbose,exec,cpu,matmul, 39999"
    written = sum(len(f"onednn_verbose,exec,cpu,matmul, {n}\n") for n in range(40000))
    assert os.fstat(output.fileno()).st_size == written, "a file that is shortened loses what is written at that moment"


@pytest.mark.parametrize("how", ["no holes", "too long"])
def test_what_cannot_be_emptied_is_shortened(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "no holes":
        monkeypatch.setattr(process_output, "_emptied", lambda file, upto: False)
    else:
        monkeypatch.setattr(process_output, "LONGEST_BYTES", MOST_OUTPUT_BYTES)
    output = output_file()
    assert output is not None
    os.write(output.fileno(), b"a line\n" * 200_000 + b"the last\n")
    assert room(output) > MOST_OUTPUT_BYTES
    cut(output)
    assert os.fstat(output.fileno()).st_size < 1 << 14 and last_line(output) == "the last"
    os.write(output.fileno(), b"one more\n")
    assert last_line(output) == "one more"


def room(file: IO[bytes]) -> int:
    """Bytes that it takes of its disk."""
    return os.fstat(file.fileno()).st_blocks * 512
