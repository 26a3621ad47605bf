"""What the hook changes in a process that is not ours: the cells of docs/in-your-process.md."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published
from matrices import matrix

HOSTILE = (
    "watchdog", "click", "platformdirs", "pandas", "sqlite_utils", "psutil", "rich", "typer", "pluggy", "dateutil",
    "prometheus_client", "triton", "commands", "reports", "daemon", "kernels", "hooks", "db", "configs",
)  # fmt: skip

LOOK = """
    import atexit, json, os, re, signal, sys, threading, time, warnings
    import torch
    import torch.nn.functional as F
    from torch import nn
    torch.set_num_threads(1)
    x, w = torch.ones(4, 16), torch.ones(8, 16)
    torch.mm(x, w.t())
    handlers = {n: repr(signal.getsignal(n)) for n in signal.valid_signals()}

    class Seen:
        pass

    FUNCTIONS = (F.linear, torch.mm, torch.addmm, torch.bmm, torch.matmul, torch._C._nn.linear, nn.Linear.forward,
                 torch.Tensor.__matmul__, torch.Tensor.mm, os.fork, os.wait, threading.Thread.start, sys.excepthook,
                 sys.unraisablehook, threading.excepthook, signal.signal, __import__, open, print)

    def functions():
        return (F.linear, torch.mm, torch.addmm, torch.bmm, torch.matmul, torch._C._nn.linear, nn.Linear.forward,
                torch.Tensor.__matmul__, torch.Tensor.mm, os.fork, os.wait, threading.Thread.start, sys.excepthook,
                sys.unraisablehook, threading.excepthook, signal.signal, __import__, open, print)

    def children():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        return 1

    def masks():
        blocked = []
        for task in os.listdir("/proc/self/task"):
            text = open(f"/proc/self/task/{task}/status").read()
            blocked.append(int(re.search(r"SigBlk:\\s*(\\w+)", text)[1], 16))
        return sorted(blocked)

    def look():
        fds = {f: os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{f}")}
        maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
        return {
            "threads": [len(os.listdir("/proc/self/task")), [t.name for t in threading.enumerate()]],
            "descriptors": sorted(fds.values()),
            "mappings": sorted(m for m in maps if "gemmtuned" in m or "tune.db" in m or "/home/" in m),
            "children": children(),
            "modules": sorted({m.split(".")[0] for m in sys.modules}),
            "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()} == handlers,
            "masks": masks(),
            "atexit": atexit._ncallbacks(),
            "environment": sorted(os.environ.items()),
            "filters": [repr(f) for f in warnings.filters],
            "functions": all(a is b for a, b in zip(functions(), FUNCTIONS)),
            "dispatcher": [op for op in ("mm", "mm.out", "addmm", "bmm", "baddbmm", "linear", "add.Tensor")
                           if "c_api.cpp" in torch._C._dispatch_dump(f"aten::{op}")],
            "path": sys.path, "hooks": len(sys.meta_path), "trace": [sys.gettrace(), sys.getprofile()],
            "umask": os.umask(0o22), "cwd": os.getcwd(), "threads set": torch.get_num_threads(),
        }
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, native_cache: Path) -> tuple[dict, dict, dict]:
    """(off, on, after disable()) of one process, between two flushes, with a table in use and counts in the store."""
    home = Home(tmp_path_factory.mktemp("guest") / "home", native_cache)
    home.path.mkdir()
    publish(home.path / "configs", [published(replace(LINEAR, threads=1), "torch_swap")], 1)
    done = home.run(
        LOOK
        + """
    off = look()
    import gemmtuned
    from hooked import wait_for
    gemmtuned.enable()
    for _ in range(20):
        torch.mm(x, w.t())
    wait_for(lambda: gemmtuned.generation() == 1 and gemmtuned.status()["calls"] >= 20)
    torch.mm(x, w.t())  # routed

    def between_flushes():  # in which the store is open, and /proc/PID/stat for a moment
        found = look()
        return None if any("tune.db" in fd or fd.endswith("/stat") for fd in found["descriptors"]) else found

    on = wait_for(between_flushes)
    gemmtuned.disable()
    print(json.dumps([off, on, look()]))
    """,
        AITER_TUNE_GEMM="0",
    )
    off, on, after = done.said
    return off, on, after


def test_threads_one_more_while_it_is_on_and_threading_does_not_know_it(cells: tuple[dict, dict, dict]) -> None:
    off, on, after = (cell["threads"] for cell in cells)

    assert on == [off[0] + 1, ["MainThread"]]
    assert after == off


def test_descriptors_one_inotify_while_it_is_on_and_nothing_of_the_store(cells: tuple[dict, dict, dict]) -> None:
    off, on, after = (cell["descriptors"] for cell in cells)
    more = list(on)
    for each in off:
        more.remove(each)

    assert more == ["anon_inode:inotify"]
    assert after == off


def test_mappings_the_library_and_nothing_of_the_store(cells: tuple[dict, dict, dict]) -> None:
    off, on, after = (cell["mappings"] for cell in cells)

    assert off == []
    mark = [each for each in on if each.startswith("/dev/shm/")]  # of a table that is on probation, for a minute
    assert [Path(each).suffix for each in on if each not in mark] == [".so"] == [Path(each).suffix for each in after]
    assert len(mark) == 1


@pytest.mark.parametrize("what", ["children", "environment", "filters", "path", "trace", "umask", "cwd", "threads set"])
def test_what_nothing_becomes_of(cells: tuple[dict, dict, dict], what: str) -> None:
    off, on, after = (cell[what] for cell in cells)

    assert off == on == after


def test_modules_the_standard_librarys_and_ours(cells: tuple[dict, dict, dict]) -> None:
    off, on, _ = (set(cell["modules"]) for cell in cells)

    assert on - off <= {*sys.stdlib_module_names, "gemmtuned", "hooked", "forked"}


def test_signals_handlers_stay_and_our_thread_takes_none(cells: tuple[dict, dict, dict]) -> None:
    off, on, after = cells
    assert off["signals"] and on["signals"] and after["signals"]
    (ours,) = (mask for mask in on["masks"] if on["masks"].count(mask) > off["masks"].count(mask))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        fault = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
        if number < 32 and not fault and number != signal.SIGABRT:
            assert ours >> (number - 1) & 1, signal.Signals(number).name


def test_atexit_two_functions_that_do_nothing_when_it_is_off(cells: tuple[dict, dict, dict]) -> None:
    off, on, after = (cell["atexit"] for cell in cells)

    assert off < on <= after <= off + 2


def test_functions_are_the_same_objects(cells: tuple[dict, dict, dict]) -> None:
    assert all(cell["functions"] for cell in cells)


def test_dispatcher_entries_of_matrix_products_alone(cells: tuple[dict, dict, dict]) -> None:
    off, on, _ = (cell["dispatcher"] for cell in cells)

    assert off == []
    assert on == ["mm", "mm.out", "addmm", "bmm", "baddbmm"]


# ---- programs that look closely


def test_names_of_modules_in_the_programs_folder_are_the_programs(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(
            f"import os\nos.write(2, b'RAN {name}\\n')\nopen({str(tmp_path / 'ran')!r}, 'a').write('{name}\\n')\n"
            "raise SystemExit('of the program')\n"
        )
    (folder / "main.py").write_text(
        "import sys, time, torch\nassert sys.path[0] == sys.argv[1]\n"
        "for _ in range(8):\n    torch.mm(torch.ones(4, 16), torch.ones(16, 8)); time.sleep(0.1)\nprint('1')\n"
    )
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    env = home.environment(PYTHONPATH="")
    done = subprocess.run(
        [sys.executable, str(folder / "main.py"), str(folder)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert not (tmp_path / "ran").exists()
    assert home.calls() == 8


ENDS = {
    "join all": "for t in threading.enumerate():\n        if t is not threading.current_thread(): t.join()",
    "wait for the last": "while threading.active_count() > 1: time.sleep(0.01)",
    "os.wait": "assert raises(ChildProcessError, os.wait)",
    "own child": "pid = os.posix_spawn('/bin/sleep', ['sleep', '0.3'], os.environ); assert os.wait()[0] == pid",
    "blocked signal": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.kill(os.getpid(), signal.SIGTERM); "
        "time.sleep(0.2); assert signal.SIGTERM in signal.sigpending()"
    ),
    "closerange": (
        "os.closerange(3, 1024)\n    import tempfile\n    mine = [tempfile.TemporaryFile() for _ in 9 * '.']\n"
        "    time.sleep(0.6)\n    assert [f.seek(0, 2) for f in mine] == [0] * 9"
    ),
    "no descriptors left": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096)); "
        "time.sleep(0.4)"
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_programs_do_with_threads_children_signals_and_descriptors(home: Home, how: str) -> None:
    """Each of these went wrong once, or could."""
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    process = home.start(
        f"""
    import os, signal, sys, threading, time, torch

    def raises(what, run):
        try:
            run()
        except what:
            return True

    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    while not os.path.exists(os.environ["GEMMTUNED_HOME"] + "/tune.db-wal"):
        time.sleep(0.01)
    time.sleep(0.4)
    {ENDS[how]}
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    print("right", flush=True)
    """,
        whole_end=True,
        OMP_NUM_THREADS="1",  # a thread of OpenMP's or OpenBLAS's takes a signal as ours would have
        OPENBLAS_NUM_THREADS="1",
    )
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (0, "right\n"), err


STEPS = ("store.open", "store.migrate", "store.begin", "store.commit", "store.committed", "lock.release")


@pytest.mark.parametrize("step", STEPS)
def test_who_closes_all_descriptors_in_the_middle_of_a_flush_finds_nothing_in_its_files(
    home: Home, tmp_path: Path, step: str
) -> None:
    log = tmp_path / "passed"
    done = home.run(
        """
        import json, os, sys, tempfile, time
        import gemmtuned, torch
        from gemmtuned._testing import faults
        from gemmtuned.hooks import activate

        def passed():
            return open(log).read().split().count(step) if os.path.exists(log) else 0

        def call():
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            time.sleep(0.01)

        step, log = sys.argv[1:]
        while passed() == 0:
            call()
        os.closerange(3, 1024)
        mine = [tempfile.TemporaryFile() for _ in range(9)]
        time.sleep(0.5)
        counted = gemmtuned.status()["calls"]
        until = time.monotonic() + 20
        while gemmtuned.status()["calls"] < counted + 20 and time.monotonic() < until:  # some flushes more
            call()
        assert gemmtuned.status()["calls"] >= counted + 20
        print(json.dumps([f.seek(0, os.SEEK_END) for f in mine]))
        """,
        step,
        str(log),
        GEMMTUNED_FAILPOINTS=f"{step}=sleep 0.3",
        GEMMTUNED_FAILPOINTS_LOG=str(log),
        whole_end=True,
    )

    assert done.said == [0] * 9
    assert all("the program closed its descriptors" in line for line in done.ours), done.err


def test_a_limit_on_threads_leaves_the_program_its_own(home: Home) -> None:
    """Ours takes one place; where there is none for it the program runs, and its own threads start."""
    done = home.run(
        """
        import json, os, sys, threading, gemmtuned, torch
        from gemmtuned.hooks import background

        def none(*arguments):
            raise OSError(11, "Resource temporarily unavailable")

        background._start = none
        gemmtuned.enable()
        thread = threading.Thread(target=torch.mm, args=(torch.ones(2, 2), torch.ones(2, 2)))
        thread.start()
        thread.join()
        print(json.dumps([gemmtuned.is_enabled(), gemmtuned.status()["note"], [t.name for t in threading.enumerate()]]))
        """,
        AITER_TUNE_GEMM="0",
    )
    enabled, note, threads = done.said

    assert (enabled, threads) == (False, ["MainThread"])
    assert note == "off: [Errno 11] Resource temporarily unavailable"


@pytest.mark.parametrize("warns", [False, True])
def test_a_fork_finds_the_thread_asleep_or_gone_where_python_would_warn(home: Home, warns: bool) -> None:
    """From 3.12 on os.fork warns a process that has two threads; before, ours has no reason to end."""
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    done = home.run(
        f"""
    import json, os, time, torch
    import gemmtuned
    from gemmtuned.hooks import background, hook
    from hooked import wait_for
    background._WARNS_OF_THREADS = {warns}
    hook.FORK_S = 60  # a fork waits for the thread, however loaded the machine is

    def look():
        links = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(64) if os.path.islink(f"/proc/self/fd/{{fd}}")]
        return sorted(os.listdir("/proc/self/task")), sum("inotify" in link for link in links)

    def child(read, write):
        if os.fork() == 0:
            try:
                os.write(write, json.dumps(look()).encode())
            finally:
                os._exit(0)
        os.wait()
        return json.loads(os.read(read, 4096))

    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    wait_for(lambda: gemmtuned.status()["calls"] == 1 and look()[1] == 1)
    tasks, watches = look()
    children = [child(*os.pipe()) for _ in range(20)]
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    wait_for(lambda: gemmtuned.status()["calls"] == 2 and look()[1] == 1)
    after, watches_after = look()
    seen = [[len(tasks), watches] for tasks, watches in children]
    print(json.dumps([len(tasks), watches, seen, len(after), watches_after, tasks == after]))
    """,
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )

    assert done.said == [2, 1, [[1, 0]] * 20, 2, 1, not warns]
    assert home.calls() == 2


def test_a_forked_child_has_a_thread_from_its_first_count_on_and_writes_nothing_without(home: Home) -> None:
    done = home.run(
        """
        import json, os, time, torch, gemmtuned
        torch.set_num_threads(1)
        from hooked import wait_for
        read, write = os.pipe()

        def tasks():
            return len(os.listdir("/proc/self/task"))

        child = os.fork()
        if child == 0:
            before = tasks()
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            wait_for(lambda: tasks() == before + 1)
            wait_for(lambda: gemmtuned.status()["calls"] == 1)
            grandchild = os.fork()
            if grandchild == 0:
                os.write(write, json.dumps(tasks()).encode())
                raise SystemExit(0)
            os.waitpid(grandchild, 0)
            wait_for(lambda: tasks() == before + 1)  # it is there again after the fork
            os._exit(before)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, int(os.read(read, 9))]))
        """
    )

    assert done.said == [1, 1], done.err
    assert home.calls() == 1
    import sqlite3

    with sqlite3.connect(home.path / "tune.db") as conn:
        assert conn.execute("SELECT count(*) FROM session").fetchone()[0] <= 2  # not of the grandchild


def test_threads_that_fork_at_the_same_time_leave_ours_to_go_on(home: Home) -> None:
    done = home.run(
        """
        import json, os, threading, torch, gemmtuned
        from hooked import wait_for
        wait_for(lambda: len(os.listdir("/proc/self/task")) == 2)

        def forks():
            for _ in range(15):
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)

        both = [threading.Thread(target=forks) for _ in range(2)]
        [thread.start() for thread in both]
        [thread.join() for thread in both]
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        wait_for(lambda: gemmtuned.status()["calls"] == 1)
        print(json.dumps(len(os.listdir("/proc/self/task"))))
        """,
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )

    assert done.said == 2, done.err


def test_a_forked_child_has_one_thread_whatever_begins_it(home: Home) -> None:
    """Waiting for the table begins it, and so does the first count: in C, which does not know of the other."""
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, os, time, torch, gemmtuned
        from hooked import wait_for
        torch.set_num_threads(1)
        read, write = os.pipe()
        if os.fork() == 0:
            before = len(os.listdir("/proc/self/task"))
            ready = gemmtuned.ready(5.0)
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            wait_for(lambda: gemmtuned.status()["calls"] == 1)
            time.sleep(0.2)
            os.write(write, json.dumps([ready, len(os.listdir("/proc/self/task")) - before]).encode())
            raise SystemExit(0)
        os.wait()
        print(os.read(read, 99).decode())
        """,
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )

    assert done.said == [True, 1], done.err


def test_a_program_that_counts_nothing_leaves_nothing(home: Home) -> None:
    done = home.run("import torch; print(1)", whole_end=True, GEMMTUNED_FLUSH_S="60")

    assert done.said == 1 and done.err == ""
    assert not home.path.exists()


@pytest.mark.parametrize(
    ("stderr", "switch"),
    matrix(
        itertools.product(["closed", "a pipe that nobody reads", "full"], ["1", "yes"]),
        [("closed", "1"), ("a pipe that nobody reads", "yes"), ("full", "yes")],
    ),
)
def test_import_torch_works_whatever_stderr_is(home: Home, tmp_path: Path, switch: str, stderr: str) -> None:
    redirect = {"closed": "2>&-", "a pipe that nobody reads": "2> >(exec true)", "full": "2>/dev/full"}[stderr]
    command = (
        f"sleep 0.2; exec {sys.executable} -P -c 'import time; time.sleep(0.2); import torch; print(7)' {redirect}"
    )
    env = home.environment(GEMMTUNED=switch, GEMMTUNED_QUIET="0", GEMMTUNED_DB="/proc/none/tune.db")
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "7\n")


def test_a_start_says_once_that_it_is_on_unless_it_is_told_to_be_quiet(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 7)
    code = """
        import os, time, torch, gemmtuned
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        from hooked import wait_for
        wait_for(lambda: gemmtuned.generation() == 7)
        gemmtuned.reload()
        print(1)
        """
    loud, quiet = home.run(code, GEMMTUNED_QUIET="0"), home.run(code)

    version = json.loads(json.dumps(__import__("gemmtuned").__version__))
    assert quiet.err == ""
    assert loud.err == (
        f"gemmtuned {version}: native, generation 7, 1 rows, home {home.path} (GEMMTUNED_QUIET=1 silences this)\n"
    )


@pytest.mark.parametrize("by", ["the file", "GEMMTUNED_NATIVE"])
def test_a_start_says_once_that_it_is_switched_off_and_by_what(home: Home, by: str) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 7)
    env = {"GEMMTUNED_NATIVE": "0"} if by == "GEMMTUNED_NATIVE" else {}
    if not env:
        (home.path / "disabled").touch()
    code = """
        import torch, gemmtuned
        from hooked import wait_for
        wait_for(lambda: gemmtuned.generation() == 7)
        gemmtuned.reload()
        print(1)
        """
    said = home.run(code, GEMMTUNED_QUIET="0", **env).err

    off = "switched off by GEMMTUNED_NATIVE=0" if env else f"switched off: {home.path / 'disabled'} exists"
    assert said == (
        f"gemmtuned {__import__('gemmtuned').__version__}: {off}, this program runs stock torch "
        "(GEMMTUNED_QUIET=1 silences this)\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that nobody knows")
def test_a_user_without_a_home_folder_runs_on_stock_torch_and_is_told_in_words() -> None:
    run = "import torch, gemmtuned; gemmtuned.enable(); print(gemmtuned.status()['note'], gemmtuned.is_enabled())"

    def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env={"GEMMTUNED": "1"}, user=424242, extra_groups=[], cwd="/",
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    try:
        if as_nobody("-c", "import torch").returncode:
            pytest.skip("this installation is closed to other users")
    except PermissionError:
        pytest.skip("this interpreter is closed to other users")
    done = as_nobody("-c", run)
    assert done.returncode == 0
    assert done.stdout.startswith("off: this user has no home folder") and done.stdout.endswith(
        "folder of your own False\n"
    )
    for command in ("status", "coverage", "db check", "doctor --quick"):
        said = as_nobody("-m", "gemmtuned", *command.split())
        assert said.returncode == 1 and "Traceback" not in said.stderr + said.stdout, said.stderr
        assert "set GEMMTUNED_HOME to a" in said.stderr + " ".join(said.stdout.split())
