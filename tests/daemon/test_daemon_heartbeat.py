"""A program that polls the CPU is quiet as long as it runs no product, and people are told who holds a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooked import Home, wait_for

from gemmtuned.configs.heartbeat_page import page_of
from gemmtuned.configs.processes import namespace_of
from gemmtuned.daemon.device.heartbeat_reader import beats_of
from gemmtuned.daemon.device.neighbours import Neighbours
from gemmtuned.daemon.device.process_use import Busiest, name_of, named

# polls as an engine without a request does, and answers on each line
ENGINE = """
import os, sys, threading, torch, gemmtuned
from gemmtuned.hooks import activate
x, w = torch.randn(4, 16), torch.randn(16, 8)
if sys.argv[1] == "tells":
    assert activate.current().tables.beats.show(activate.current().native)
def poll():
    while True:
        pass
threading.Thread(target=poll, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "work":
        x @ w
    elif line.strip() == "child" and os.fork() == 0:
        x @ w
        os._exit(0)
    elif line.strip() == "end":
        break
    print("done", flush=True)
gemmtuned.disable()
"""


def page(pid: int) -> Path:
    """Of a process in our own PID namespace."""
    return page_of(pid, os.geteuid(), namespace_of("self"))


@pytest.fixture
def engine(home: Home, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    process = home.start(ENGINE, request.param)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()
        page(process.pid).unlink(missing_ok=True)


def ask(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def busy(watch: Neighbours, looks: int = 6) -> set[str]:
    """What so many looks say that the daemon takes, of which the first knows nothing yet."""
    said = []
    for _ in range(looks):
        time.sleep(0.1)
        said.append(watch.busy(0.15) or "")
    return set(said)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["tells"], indirect=True)
def test_a_hooked_program_that_polls_is_quiet_until_it_runs_a_product(engine: subprocess.Popen[str]) -> None:
    assert beats_of(engine.pid) == 0
    ask(engine, "work")
    assert beats_of(engine.pid) == 1
    watch = Neighbours(lambda: iter([engine.pid]))
    busy(watch, 3)
    assert busy(watch) == {""}

    ask(engine, "work")
    said = watch.busy(0.15)
    assert said
    assert said.endswith("which holds the GPU, runs products")
    assert busy(watch) == {""}
    ask(engine, "child")  # another process, which has said nothing
    assert beats_of(engine.pid) == 2


@pytest.mark.parametrize("engine", ["tells", "silent"], indirect=True)
def test_one_that_says_nothing_of_its_products_goes_by_its_cpu_time(engine: subprocess.Popen[str]) -> None:
    watch = Neighbours(lambda: iter([engine.pid]))
    ask(engine, "other")
    busy(watch, 3)
    wait_for(lambda: any("works" in said for said in busy(watch, 2)))


@pytest.mark.parametrize("engine", ["tells"], indirect=True)
def test_the_page_is_gone_when_the_program_ends_and_after_a_kill_the_next_sweeps(
    engine: subprocess.Popen[str], home: Home
) -> None:
    shown = page(engine.pid)
    assert shown.stat().st_mode & 0o777 == 0o600
    assert engine.stdin is not None
    engine.stdin.write("end\n")
    engine.stdin.flush()
    engine.wait(20)
    assert not shown.exists()
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait()
    left = page(killed.pid)
    left.write_bytes(bytes(4096))
    elsewhere = [page_of(killed.pid, os.geteuid(), 1), page_of(killed.pid, os.geteuid(), 2)]  # in other containers
    for one, age_s in zip(elsewhere, (60, 7200), strict=True):
        one.write_bytes(bytes(4096))
        os.utime(one, (time.time() - age_s,) * 2)
    other = home.start(ENGINE, "tells")
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    assert [one.exists() for one in (left, *elsewhere)] == [False, True, False]
    other.kill()
    other.communicate()
    for one in (page(other.pid), *elsewhere):
        one.unlink(missing_ok=True)


def test_processes_of_two_containers_with_one_number_and_one_dev_shm_have_a_page_each(home: Home) -> None:
    """Each is the first of a PID namespace of its own, and runs as many products as its place in the line says."""
    program = """
    import ctypes, json, os, sys, torch
    from gemmtuned.hooks import activate
    native, beats = activate.current().native, activate.current().tables.beats

    def first_of_a_namespace(calls):
        ready, says = os.pipe()
        ends, end = os.pipe()
        if os.fork() == 0:
            os.close(end)
            if ctypes.CDLL(None).unshare(0x20000000 | (0 if os.geteuid() == 0 else 0x10000000)):
                os.write(says, b"no namespace to be had")
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                shown = beats.show(native)
                for _ in range(calls):
                    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
                os.write(says, b"shown" if shown and os.getpid() == 1 else b"not shown")
                os.read(ends, 1)
                beats.hide()
                os._exit(0)
            os.write(says, b"%d " % pid)
            os.waitpid(pid, 0)
            os._exit(0)
        os.close(ends)
        said = b""
        while not said.endswith(b"n") and b"had" not in said:
            said += os.read(ready, 100)
        return said.decode(), end

    there = [first_of_a_namespace(calls) for calls in (1, 2, 3)]
    print(json.dumps([said for said, _ in there]), flush=True)
    sys.stdin.readline()
    """
    process = home.start(program)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    try:
        if "had" in said[0]:
            pytest.skip(said[0])
        assert all(one.endswith("shown") and "not" not in one for one in said), said
        assert [beats_of(int(one.split()[0])) for one in said] == [1, 2, 3]
    finally:
        process.communicate("end\n", timeout=20)


# In a PID namespace with the /proc of the one outside: processes whose number there is nobody's, or another's
SWEEPS = """
import ctypes, json, os, subprocess, sys, time
from pathlib import Path
from gemmtuned.configs.heartbeat_page import page_of
from gemmtuned.configs.processes import life_of, namespace_of
from gemmtuned.hooks.heartbeat_writer import _sweep

if ctypes.CDLL(None).unshare(0x20000000 | (0 if os.geteuid() == 0 else 0x10000000)):
    print('"no namespace to be had"')
    sys.exit()
first = os.fork()
if first:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
namespace, alive = namespace_of("self"), []
while len(alive) < 300 and (not alive or Path(f"/proc/{alive[-1]}").exists()):
    alive.append(os.fork())
    if not alive[-1]:
        time.sleep(60)
        os._exit(0)
over = os.fork()
if not over:
    os._exit(0)
os.waitpid(over, 0)
folder = Path(sys.argv[1])
pages = {pid: folder / Path(page_of(pid, os.geteuid(), namespace)).name for pid in (*alive, over)}
for page in pages.values():
    page.touch()
_sweep(folder, namespace)
left = [pid for pid in alive if not pages[pid].exists()]
os.utime(pages[over], (time.time() - 7200,) * 2)
_sweep(folder, namespace)
try:
    hidden = life_of(alive[-1])
except OSError as err:
    hidden = type(err).__name__
for pid in alive:
    os.kill(pid, 9)
print(json.dumps([Path(f"/proc/{alive[-1]}").exists(), left, pages[over].exists(), hidden]))
"""


def test_a_sweep_leaves_pages_of_processes_that_another_namespaces_proc_does_not_show(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", SWEEPS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    if "no namespace" in said.stdout:
        pytest.skip(said.stdout)
    assert (said.returncode, said.stderr) == (0, "")
    assert json.loads(said.stdout) == [False, [], False, "PermissionError"]


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(8192), None])
def test_a_page_that_is_none_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    inside = tmp_path / "77/root/dev/shm"
    (tmp_path / "77/ns").mkdir(parents=True)
    (tmp_path / "77/ns/pid").touch()
    page = inside / page_of(5, os.geteuid(), namespace_of(77, tmp_path)).relative_to("/dev/shm")
    page.parent.mkdir(parents=True)
    (tmp_path / "77/status").write_text("Name:\tx\nNSpid:\t77\t5\n")
    if content is None:
        page.symlink_to("/etc/passwd")
    else:
        page.write_bytes(content)
    assert beats_of(77, tmp_path) is None
    page.unlink()
    page.write_bytes((3).to_bytes(8, sys.byteorder) + bytes(56) + (4).to_bytes(8, sys.byteorder) + bytes(4096 - 72))
    assert beats_of(77, tmp_path) == 7  # found by the number that it has in its own container


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3.11", "-m", "pytest", "-q"], "pytest"),
        (["python", "-X", "dev", "-u", "/srv/serve.py", "--port"], "serve.py"),
        (["/venv/bin/python", "/venv/bin/vllm", "serve"], "vllm"),
        (["VLLM::Worker_TP0"], "VLLM::Worker_TP0"),
        (["sglang::scheduler_TP1 rest"], "sglang::scheduler_TP1"),
        (["/usr/lib/gcc/cc1plus", "-quiet"], "cc1plus"),
        (["python3"], "python3"),
        (["python3", "-c", "secret words"], "python3 -c"),
        ([], ""),
    ],
)
def test_a_program_is_called_as_people_call_it(command: list[str], name: str) -> None:
    assert name_of(command) == name


def test_a_process_that_is_gone_is_a_number() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    assert named(gone.pid) == f"process {gone.pid}"
    assert named("no number") == "process no number"


def test_those_who_use_the_cpu_most_are_named_and_ours_are_not() -> None:
    now_s, used = [100.0], {os.getpid(): 5.0, 11: 1.0, 12: 50.0, 13: 7.0}
    who = Busiest(os.getpid(), times=lambda: used.items(), clock=lambda: now_s[0], name=lambda pid: f"program {pid}")
    assert who.look() == ""
    now_s[0] += 2.0
    used.update({os.getpid(): 7.0, 11: 1.9, 12: 51.9, 13: 7.01, 14: 0.5})
    assert who.look() == "program 12, program 11"
    now_s[0] += 0.5
    used[13] = 9.0
    assert who.look() == "program 12, program 11"  # all processes are looked at now and then alone
    now_s[0] += 100.0
    assert who.look() == ""  # too long ago to say who it is now
