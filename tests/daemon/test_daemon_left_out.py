"""Packages of others that break or end a worker: the loss falls on that package alone, whatever it does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crashing_site
import pytest
import torch
from fakes import FakeMonitor

from gemmtuned.commands import daemon as command
from gemmtuned.configs.errors import PieceFailed, WorkerDied
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.daemon.protocol.wire import LeftOut, Message
from gemmtuned.daemon.seats import left_out
from gemmtuned.daemon.seats.left_out import Ended, Pieces
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Deadlines, Worker
from gemmtuned.daemon.service.check import ready
from gemmtuned.daemon.service.main import tune_now
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db.store import Store
from gemmtuned.kernels import backends, other_packages
from gemmtuned.kernels.backends import torch_op
from gemmtuned.reports import left_out as report

SUPPORT = Path(__file__).parents[1] / "support"
SEARCH = f"{SUPPORT / 'planted_pieces.py'}:tune"
SLOW = Deadlines(hello_s=30.0)
QUICK = Deadlines(hello_s=2.0)
ENDS = {
    **crashing_site.ENDS,
    "closes all files": "import os, time; os.closerange(3, 4096); time.sleep(1); os.abort()",
}
Start = Callable[..., Worker]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[Worker] = []

    def make(given: list[list[str]], pieces: Pieces, deadlines: Deadlines = SLOW) -> Worker:
        monkeypatch.setenv("PIECES", json.dumps(given))
        started.append(Worker("cpu", nice=0, search=SEARCH, deadlines=deadlines, pieces=pieces))
        return started[-1]

    yield make
    for worker in started:
        assert worker.stop()


def heard(worker: Worker) -> list[Message]:
    """Until it has said hello."""
    messages: list[Message] = []
    while worker.environment is None:
        messages += worker.poll()
        time.sleep(0.005)
    return messages


@pytest.mark.parametrize("how", ENDS)
def test_a_piece_that_ends_the_worker_is_left_out_of_the_next_and_of_nothing_else(
    how: str, start: Start, tmp_path: Path
) -> None:
    given = [["sound", "pass"], ["bad", ENDS[how]], ["behind", "pass"], ["broken", "raise SystemExit('no GPU')"]]
    pieces, hangs = Pieces(tmp_path), how in ("hang", "closes all files")

    with pytest.raises(PieceFailed, match=r"busy with import of bad \(package bad\)"):
        heard(start(given, pieces, QUICK if hangs else SLOW))
    said = [message for message in heard(start(given, pieces)) if isinstance(message, LeftOut)]

    why = {message.name: message.why for message in said}
    assert list(why) == ["bad", "broken"]
    assert why["bad"].startswith("import of bad ended a worker: ") and why["broken"] == "SystemExit: no GPU"
    (kept,) = left_out.read(tmp_path)
    assert (kept.piece, kept.package, kept.doubtful) == ("import of bad", "bad", how == "hang")
    # A daemon that starts later knows it, and so does one that cannot write
    assert Pieces(tmp_path).ended() == pieces.ended()
    unwritable = Pieces(tmp_path / "missing")
    unwritable.blame("import of bad", "bad", "killed by SIGSEGV", doubtful=False)
    assert unwritable.ended() == {"import of bad": "ended a worker: killed by SIGSEGV"}


LATER = """
import os, threading
threading.Timer(0.2, os.abort).start()
"""


def test_a_package_that_ends_the_worker_a_moment_later_is_left_out_with_all_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them it was cannot be told; where it was none, they are tried again."""
    monkeypatch.setenv("REST_S", "20")
    pieces, given = Pieces(), [["sound", "pass"], ["later", LATER]]
    for _ in range(left_out.UNEXPLAINED):
        with pytest.raises(WorkerDied, match="SIGABRT while starting"):
            heard(start(given, pieces))
    monkeypatch.setenv("REST_S", "0")

    said = [message for message in heard(start(given, pieces)) if isinstance(message, LeftOut)]

    assert [message.name for message in said] == ["sound", "later"]
    assert all("workers ended at their start" in message.why for message in said)
    assert not Pieces().ended("cpu") and not pieces.ended("cuda:0") and pieces.ended("cpu"), "so it stays here"
    pieces.at_start("cpu", well=False, with_pieces=False)
    assert not pieces.ended("cpu"), "it was none of them"


def test_a_worker_that_is_ended_from_outside_blames_nobody(start: Start, tmp_path: Path) -> None:
    """A service manager ends all processes of a daemon at once."""
    worker = start([["slow", "print('here', flush=True); import time; time.sleep(60)"]], Pieces(tmp_path))
    while worker._running is None:
        worker.poll()
    os.kill(worker.pid, signal.SIGTERM)
    with pytest.raises(WorkerDied, match="SIGTERM"):
        heard(worker)
    assert not left_out.read(tmp_path)


def test_it_is_tried_again_when_another_version_is_there_or_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    crashing_site.install(site, "bad", "import", "abort")
    monkeypatch.syspath_prepend(site)
    pieces = Pieces(tmp_path)
    pieces.blame("backend bad = bad:BACKEND", "bad", "killed by SIGABRT", doubtful=False)
    assert list(pieces.ended()) == ["backend bad = bad:BACKEND"]

    (site / "bad-1.0.dist-info").rename(site / "old")
    crashing_site.install(site, "bad", "stamps", "pass", version="1.1")
    assert not pieces.ended()
    pieces.blame("backend bad", "bad", "killed by SIGABRT", doubtful=False)
    assert [one.version for one in left_out.read(tmp_path)] == ["1.1"], "what no longer holds is not kept"
    (tmp_path / left_out.FILE).unlink()
    assert not pieces.ended()


# One host, or environment, of several that share a home: it has its own version of the package
BLAMES = """
import sys
from pathlib import Path
from gemmtuned.daemon.seats import left_out
left_out.here = lambda: sys.argv[2]
left_out.installed = lambda package: f"{package} of {sys.argv[2]}"
pieces = left_out.Pieces(Path(sys.argv[1]))
for number in range(20):
    pieces.blame(f"import of {sys.argv[2]}{number}", "bad", "killed by SIGABRT", doubtful=False)
"""


def test_hosts_that_share_a_home_keep_each_others_pieces(tmp_path: Path) -> None:
    hosts = [
        subprocess.Popen([sys.executable, "-c", BLAMES, str(tmp_path), host], stderr=subprocess.DEVNULL)
        for host in ("a", "b")
    ]
    assert [host.wait(timeout=30) for host in hosts] == [0, 0]
    assert {one.piece for one in left_out.read(tmp_path)} == {f"import of {h}{n}" for h in "ab" for n in range(20)}
    assert not Pieces(tmp_path).ended(), "none of them holds here"


def test_a_piece_of_another_host_goes_after_a_month_and_one_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    now = left_out.installed("pytest")
    theirs = Ended("import of x", "pytest", "1", now + "0", "killed by SIGSEGV", 1e9, False, "another host")
    assert theirs.is_kept(1e9 + 29 * 86_400) and not theirs.is_kept(1e9 + 31 * 86_400)
    assert not replace(theirs, where=left_out.here()).is_kept(1e9)
    row = {name: value for name, value in asdict(replace(theirs, installed=now)).items() if name != "where"}
    (tmp_path / left_out.FILE).write_text(json.dumps({"pieces": [row]}))
    assert list(Pieces(tmp_path).ended()) == ["import of x"]


def test_what_may_be_nobodys_fault_is_kept_for_a_day() -> None:
    now = left_out.installed("pytest")
    hung = Ended("import of x", "pytest", "1", now, "hung", 1e9, True)
    assert hung.holds(1e9 + 86_000) and not hung.holds(1e9 + 87_000)
    assert not Ended("import of x", "pytest", "1", now + "0", "killed by SIGSEGV", 1e9, False).holds(1e9)


@pytest.mark.parametrize("text", ["", "[]", '{"pieces": [{}]}', '{"pieces": [{"piece": 1}]}', '{"pieces": 3}', "\0"])
def test_a_file_that_is_none_of_ours_leaves_nothing_out(text: str, tmp_path: Path) -> None:
    (tmp_path / left_out.FILE).write_text(text)
    assert not Pieces(tmp_path).ended()


@pytest.mark.parametrize("at_s", ["1e999", "-1e999", "NaN", "1" + 30 * "0", "1e18"])
def test_a_time_that_is_none_ends_no_report(at_s: str, tmp_path: Path) -> None:
    Pieces(tmp_path).blame("import of x", "pytest", "hung", doubtful=True)
    file = tmp_path / left_out.FILE
    file.write_text(re.sub(r'"at_s": [0-9.]+', f'"at_s": {at_s}', file.read_text()))
    assert list(report.checks(Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))) == []
    assert not Pieces(tmp_path).ended()


class Kept:
    """A home and its database."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder), "GEMMTUNED_IDLE_S": "0"})
        self.store = Store(self.settings.db, locks=self.settings.locks)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Kept]:
    home = Kept(tmp_path / "home")
    yield home
    home.store.close()


@pytest.mark.parametrize("when", ["", "+tune"])
def test_a_run_in_the_foreground_ends_with_a_verdict_whatever_there_is(
    when: str, home: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pieces than a run starts workers in vain: each start that leaves one more out was not in vain."""
    bad = [[f"bad{i}{when}", crashing_site.ENDS["abort"]] for i in range(4)]
    monkeypatch.setenv("PIECES", json.dumps(bad))
    problem = Problem(m=8, n=64, k=64)

    done = tune_now(
        Request(problems=[problem]), home.settings,
        make_worker=partial(Worker, nice=0, search=SEARCH, pieces=Pieces.of(home.settings)),
    )  # fmt: skip

    assert list(done.solutions) == [problem], done.failed
    assert len(left_out.read(home.settings.home)) == 4


def test_a_worker_that_is_asked_alone_is_started_again(start: Start) -> None:
    pieces = Pieces()
    bad = [["bad", crashing_site.ENDS["exit"]]]
    assert ready(lambda: start(bad, pieces)).environment is not None


def test_reports_say_it_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    crashing_site.install(site, "bad", "import", "abort")
    monkeypatch.syspath_prepend(site)
    Pieces(home).blame("import of bad", "bad", "killed by SIGABRT", doubtful=False)
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home)})

    (check,) = report.checks(settings)

    assert check.result == "WARN" and "import of bad of bad 1.0 ended a worker (killed by SIGABRT)" in check.found
    assert "GEMMTUNED_WITHOUT=bad" in check.fix and f"rm {home / left_out.FILE}" in check.fix
    seats: list[dict[str, Any]] = [{"name": name, "left_out": ["bad: why"]} for name in ("cuda:0", "cuda:1")]
    assert list(report.notes(seats)) == ["The worker of cuda:0, cuda:1 does without bad: why."]


# --- names that somebody wants left out


def test_what_is_named_is_neither_imported_nor_asked_for_its_version(start: Start, tmp_path: Path) -> None:
    given = [["named", crashing_site.ENDS["abort"]], ["pattern_1", crashing_site.ENDS["abort"]], ["sound", "pass"]]
    pieces = Pieces(tmp_path, without=("named", "pattern_*", "nmaed"))

    said = [message for message in heard(start(given, pieces)) if isinstance(message, LeftOut)]

    assert [(message.name, message.wanted) for message in said] == [
        ("named", True), ("pattern_1", True), ("nmaed", False)
    ]  # fmt: skip


def test_a_name_covers_whatever_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's build of DeepGEMM is imported as `deep_gemm`, too; packages are named with - or _."""
    said: dict[str, tuple[str, bool]] = {}
    guests = other_packages.Guests()
    guests.without, guests.say = (
        ("deep_gemm", "flashinfer_python", "sgl"),
        lambda n, why, wanted: said.update({n: (why, wanted)}),
    )
    for module in (backends, torch_op):
        monkeypatch.setattr(module, "GUESTS", guests)

    backends.environment(Device("cuda-x-132", "cuda", "x", "sm_90", 132))
    guests.say_unused()

    wanted = {name for name, (_, wanted) in said.items() if wanted}
    assert wanted == {"deep_gemm", "deep_gemm_sglang", "flashinfer_blocks", "flashinfer_tensors"}
    alike = "sgl-deep-gemm, sgl-kernel, sgl_kernel, sglang-kernel, sglang_blocks, sglang_fp8 and more"
    assert said["sgl"][0].endswith(f"nothing here has that name, only {alike}")
    crashing_site.install(tmp_path, "sgl-kernel", "import", "abort")
    monkeypatch.syspath_prepend(tmp_path)
    Pieces(tmp_path).blame("import of sgl_kernel", "sgl-kernel", "killed by SIGABRT", doubtful=False)
    for name, count in (("sgl", 1), ("sgl_kernel", 0)):
        settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path), "GEMMTUNED_WITHOUT": name})
        assert len(list(report.checks(settings))) == count


@pytest.mark.parametrize("value", [None, 3, [None], "own"], ids=str)
def test_a_backend_may_have_such_attributes_for_something_else(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package, whose backend ended every worker by them."""
    guests = other_packages.Guests()
    guests.without, guests.package_of["own"] = ("vllm",), "own"
    monkeypatch.setattr(backends, "GUESTS", guests)
    own: Any = SimpleNamespace(name="own", order=50, package=value, imports=value, stamps=lambda device: {"own": "1"})
    monkeypatch.setitem(backends.BACKENDS, "own", own)
    assert backends.environment(Device("cuda-x-132", "cuda", "x", "sm_90", 132)).stamps["own"] == "1"


def test_names_come_from_the_variable_and_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path))
    monkeypatch.setenv("GEMMTUNED_WITHOUT", "vllm, deep_gemm")
    monkeypatch.setattr(command, "_beside", nullcontext)
    monkeypatch.setattr(
        "gemmtuned.daemon.service.main.run_daemon", lambda *a, make_worker, **how: made.append(make_worker)
    )

    command.daemon(without="moe_*,triton")

    (make_worker,) = made
    assert make_worker.keywords["pieces"].without == ("vllm", "deep_gemm", "moe_*", "triton")


# --- real daemons with the real search


def real(home: Kept, site: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SUPPORT / "daemon_process.py"), str(home.settings.home), "--own-search", *options]
    return subprocess.Popen(
        command, env={**os.environ, **(env or {}), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def told(home: Kept, count: int, seconds: float = 60.0) -> dict[str, str]:
    """What the worker does without, once it is there and says so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        notice = read_notice(home.settings.home)
        if notice is not None and notice["running"] and notice["environment"]:
            (seat,) = notice["seats"]
            if len(seat["left_out"]) >= count:
                return dict(line.split(": ", 1) for line in seat["left_out"])
        time.sleep(0.1)
    raise AssertionError(notice)


def seen(home: Kept) -> None:
    environment = Environment(FakeMonitor.device, {"torch": torch.__version__})
    problem = Problem.parse("fp32:8x16x16,threads=1")
    home.store.sightings.add("serve", environment, [Sighting(problem, "miss", 10)], now_s=time.time())


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_daemon_goes_on_beside_packages_that_do_all_of_it(home: Kept, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, where, end in (
        ("segfaults", "module", "segfault"), ("aborts", "stamps", "abort"), ("exits", "import", "exit"),
        ("hangs", "import", "hang"), ("kinds", "family", "segfault"), ("family", "family's import", "raise SystemExit"),
        ("sound", "", "pass"),
    ):  # fmt: skip
        crashing_site.install(site, name, where, end)
    seen(home)
    daemon = real(home, site, "--hello-s", "8")
    try:
        why = told(home, 6)
    finally:
        daemon.terminate()
        log = daemon.communicate()[0]

    assert set(why) == {"segfaults", "aborts", "exits", "hangs", "kinds.mine", "family"}
    assert log.count("it ended a worker") == 5 and "worker start failed" not in log, log
    assert {one.package for one in left_out.read(home.settings.home)} == set(why) - {"family", "kinds.mine"} | {"kinds"}

    # The next daemon starts at once, and tries what has another version
    (site / "aborts-1.0.dist-info").rename(site / "old")
    crashing_site.install(site, "aborts", "", "pass", version="2.0")
    daemon = real(home, site)
    try:
        assert set(told(home, 5)) == set(why) - {"aborts"}
    finally:
        daemon.terminate()
        assert "it ended a worker" not in daemon.communicate()[0]
