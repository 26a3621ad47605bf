"""Compiling ahead: in processes of their own, of which any may crash or hang."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.passing import lack_in
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.daemon.child import compile_main
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.service.ahead import Ahead

H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
PROBLEM = Problem(m=1, n=64, k=512)
# Does what a candidate's config says
PLANTED = """
import json, os, sys, time
for line in sys.stdin:
    what = json.loads(line)["config"]
    if what == "abort":
        os.abort()
    if what == "hang":
        time.sleep(60)
    if what == "raise":
        raise ValueError("planted")
    print("nonsense" if what == "nonsense" else json.dumps("" if what == "good" else what), flush=True)
"""


def planted(**more: float) -> Compilers:
    return Compilers(2, command=(sys.executable, "-S", "-c", PLANTED), **more)


@pytest.fixture
def compilers() -> Iterator[Compilers]:
    one = planted(job_s=1.0)
    yield one
    one.close()


def test_every_candidate_is_compiled_and_failures_come_with_their_reason(compilers: Compilers) -> None:
    begun: list[Candidate] = []
    jobs = [Candidate(f"b{i}", what) for i, what in enumerate(("good", "it spills", "good", "good", "too large"))]

    failed = compilers.run(jobs, PROBLEM, H200, before=begun.append)

    assert failed == {jobs[1]: "it spills", jobs[4]: "too large"}
    assert begun == jobs


def test_a_cache_on_a_full_disk_is_told_and_does_not_end_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/root/.triton/cache")

    monkeypatch.setattr(compile_main, "compile_candidate", full)
    assert lack_in(compile_main.compile_one(Candidate("triton"), PROBLEM, H200)) == "disk"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("abort", "its compiler ended by SIGABRT"),
        ("hang", "its compiler took more than 1 s, or answered nonsense"),
        ("nonsense", "its compiler took more than 1 s, or answered nonsense"),
        ("raise", "its compiler ended with exit code 1: ValueError: planted"),
    ],
)
def test_what_kills_its_compiler_fails_alone_and_soon(compilers: Compilers, what: str, why: str) -> None:
    jobs = [Candidate(f"b{i}", "good") for i in range(6)]
    jobs.insert(2, Candidate("bad", what))
    began = time.monotonic()

    failed = compilers.run(jobs, PROBLEM, H200)

    assert failed == {Candidate("bad", what): why}
    assert time.monotonic() - began < 5
    assert compilers.run(jobs[:2], PROBLEM, H200) == {}  # with a new process in its place


def test_without_processes_every_candidate_fails_with_the_reason() -> None:
    compilers = Compilers(2, command=("/no/such/program",))

    assert compilers.run([Candidate("a")], PROBLEM, H200) == {
        Candidate("a"): "no process to compile in: No such file or directory"
    }


def test_a_compiler_that_never_works_is_no_verdict_on_the_kernels() -> None:
    compilers = Compilers(2, command=(sys.executable, "-S", "-c", "import no_such_module"))
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(TryLater, match=r"no kernel can be compiled here: .* exit code 1: .*no_such_module"):
        compilers.run([Candidate(f"b{i}") for i in range(8)], PROBLEM, H200)

    compilers.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_candidates_that_kill_their_compilers_are_to_blame_where_one_has_worked(compilers: Compilers) -> None:
    bad = [Candidate(f"b{i}", "raise") for i in range(6)]

    assert compilers.run([Candidate("a", "good")], PROBLEM, H200) == {}
    assert set(compilers.run(bad, PROBLEM, H200)) == set(bad)


def test_where_no_process_starts_there_is_no_verdict_on_many() -> None:
    compilers = Compilers(2, command=("/no/such/program",))

    with pytest.raises(TryLater, match="no kernel can be compiled here: no process to compile in: No such file"):
        compilers.run([Candidate(f"b{i}") for i in range(8)], PROBLEM, H200)


def test_a_full_disk_keeps_nothing_from_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a compiler's last line is lost, and nothing else."""
    monkeypatch.setattr("gemmtuned.daemon.child.compile_ahead.output_file", lambda: None)
    compilers = planted()
    bad = Candidate("bad", "raise")

    assert compilers.run([Candidate("a", "good"), bad], PROBLEM, H200) == {bad: "its compiler ended with exit code 1"}
    compilers.close()


@pytest.mark.long
def test_our_kernels_are_in_the_compilers_cache_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from gemmtuned.kernels.backends.triton_ import Triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    good = next(Triton(device=H200).candidates(PROBLEM))
    bad = Candidate("triton", '{"kernel":"gemv"}')
    compilers = Compilers(1)

    failed = compilers.run([good, bad, Candidate("torch")], PROBLEM, H200)
    maps = Path(f"/proc/{compilers._idle[0].pid}/maps").read_text()
    compilers.close()

    assert list(failed) == [bad] and "config has" in failed[bad]
    assert list(tmp_path.rglob("gemv.cubin"))
    assert "libtriton" in maps and "libtorch" not in maps  # seconds for each process, and far more memory


AHEAD = """
import sys, time
for line in sys.stdin:
    if '"n": 13' in line:
        sys.exit(1)
    print("done", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def ahead(pause_s: float = 0.0) -> Ahead:
    return Ahead([sys.executable, "-S", "-c", AHEAD, str(pause_s)])


def until_done(one: Ahead, now_s: float) -> None:
    end = time.monotonic() + 20
    while not one.wants(now_s):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_problems_are_compiled_once_and_what_ends_the_compiler_is_not_given_again() -> None:
    one = ahead()
    problems = [Problem(m=1, n=n, k=512) for n in (8, 13, 17)]
    given = []
    for turn in range(4):
        assert one.wants(100.0 * turn)
        one.begin(H200, problems, 100.0 * turn)
        given.append([p.n for _, p in one._given])
        assert not one.wants(100.0 * turn + 1)
        until_done(one, 100.0 * turn + 50)
    assert given == [[8, 13, 17], [17], [], []]
    one.stop()


def test_compiling_ahead_is_ended_at_once_and_goes_on_where_it_was() -> None:
    one = ahead(30.0)
    one.begin(H200, [Problem(m=1, n=n, k=512) for n in (8, 9, 10)], 0.0)
    pid = one._process.pid  # type: ignore[union-attr]
    end = time.monotonic() + 20
    while not one._done and time.monotonic() < end:
        one.wants(0.0)
        time.sleep(0.01)
    began = time.monotonic()
    one.stop()
    assert time.monotonic() - began < 2 and not Path(f"/proc/{pid}").exists()
    one.begin(H200, [Problem(m=1, n=n, k=512) for n in (8, 9, 10)], 100.0)
    assert [p.n for _, p in one._given] == [9, 10]
    one.stop()


def test_a_daemon_compiles_for_a_gpu_that_others_use_and_stops_when_it_tunes(tmp_path: Path) -> None:
    from fake_gpu import MIB, Card
    from fakes import Clock
    from gpu_machine import Machine

    one = ahead(30.0)
    machine = Machine(tmp_path, Clock(), [Card()], locks=tmp_path, ahead=one)
    guest = machine.cards[0].start(500, held=9000 * MIB)
    machine.see(3)
    machine.run(1)
    assert one._process is not None and [p.n for _, p in one._given][-2:] == [65, 64]  # it may be done with the first
    machine.cards[0].end(guest)
    machine.life.trial_s = 60.0
    machine.run(30)
    assert machine.daemon.seats[0].tuning and one._process is None
    machine.daemon.stop(machine.clock.now_s)
    machine.store.close()


def test_the_real_process_leaves_our_kernels_in_the_compilers_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = Ahead(nice=0)
    one.begin(H200, [Problem(m=1, n=64, k=64)], 0.0)
    end = time.monotonic() + 100
    while one._process is not None and time.monotonic() < end and not list(tmp_path.glob("*/*.cubin")):
        time.sleep(0.1)
    assert list(tmp_path.glob("*/*.cubin"))
    one.stop()


def test_the_real_process_does_without_what_nobody_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imported Triton, and compiled what no worker was to try."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    problem = Problem(m=1, n=64, k=64)
    one = Ahead(nice=0, without=("triton*", "moe_decode"))
    one.begin(H200, [problem], 0.0)
    until_done(one, 100.0)
    assert one._done == {(H200.key, problem)} and not one._given
    assert not list(tmp_path.rglob("*.cubin"))


def test_compilers_that_cannot_be_killed_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    kills: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: kills.append(process))
    compilers = Compilers(2, command=(sys.executable, "-S", "-c", "import time; time.sleep(100)"), job_s=0.2)
    try:
        for _ in range(3):
            failed = compilers.run([Candidate("triton", f'{{"n": {n}}}') for n in range(6)], PROBLEM, H200)
            assert len(failed) == 6
        assert len({process.pid for process in kills}) == 2
        assert any("cannot be killed" in reason for reason in failed.values())
    finally:
        for process in kills:
            real(process)
            process.wait(30)
        compilers.close()


def test_what_compiles_ahead_and_cannot_be_killed_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Ahead([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    one.begin(H200, [PROBLEM], 0.0)
    assert one._process is not None
    process = one._process
    monkeypatch.setattr("os.killpg", lambda pid, number: None)
    try:
        began = time.monotonic()
        one.stop()
        assert time.monotonic() - began < 1
        assert not one.wants(1000.0), "none is started beside it"
    finally:
        process.kill()
        process.wait(30)
    assert one.wants(2000.0)
