"""Programs that look closely at what the hook changes in their process; the cells themselves: test_hooks_cells.py."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published
from matrices import matrix

from gemmtuned.db.store import Store

HOSTILE = (
    "watchdog", "click", "platformdirs", "pandas", "sqlite_utils", "psutil", "rich", "typer", "pluggy", "dateutil",
    "prometheus_client", "triton", "commands", "reports", "daemon", "kernels", "hooks", "db", "configs",
    "resource", "shlex", "secrets", "hmac", "html", "statistics", "getpass",
)  # fmt: skip


def run_among(home: Home, folder: Path, names: tuple[str, ...], **env: str) -> subprocess.CompletedProcess[str]:
    """A program whose folder has modules of these names, each of which ends a program that imports it."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(
            f"import os\nos.write(2, b'RAN {name}\\n')\nraise SystemExit('of the program')\n"
        )
    (folder / "main.py").write_text(
        "import sys, time, torch\nassert sys.path[0] == sys.argv[1]\n"
        "for _ in range(8):\n    torch.mm(torch.ones(4, 16), torch.ones(16, 8)); time.sleep(0.1)\nprint('1')\n"
    )
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    return subprocess.run(
        [sys.executable, str(folder / "main.py"), str(folder)],
        env=home.environment(PYTHONPATH="", **env), cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.long
def test_names_of_modules_in_the_programs_folder_are_the_programs(home: Home, tmp_path: Path) -> None:
    table = tmp_path / "bf16_tuned_gemm.csv"
    table.write_text("M,N,K,bias,dtype\n4,8,16,False,torch.bfloat16\n")
    done = run_among(home, tmp_path / "program", HOSTILE, AITER_CONFIG_GEMM_BF16=str(table))

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "1\n", 1)
    assert done.stderr.startswith("gemmtuned: table not taken reason=AITER_CONFIG_GEMM_BF16: 0 of 1 rows of ")
    assert home.calls() == 8


@pytest.mark.long
def test_a_program_with_an_sqlite3_of_its_own_is_not_counted_and_told_why(home: Home, tmp_path: Path) -> None:
    """All else that we import, torch has imported before."""
    done = run_among(home, tmp_path / "program", ("sqlite3",))

    assert (done.returncode, done.stdout) == (0, "1\n")
    first, *rest = done.stderr.splitlines()
    reason = f"the standard library's sqlite3 is not to be had: {tmp_path}/program/sqlite3.py is in its place"
    assert first == f"gemmtuned: counts stay in memory reason={reason}"
    assert rest == [f"gemmtuned: counts were lost calls=8 reason={reason}"]


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


def test_a_program_at_its_limit_of_open_files_is_told_what_helps_and_that_helps(home: Home) -> None:
    process = home.start(
        """
        import os, resource, sys, time, torch
        from hooked import wait_for
        from gemmtuned.hooks import activate

        def call():
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))

        call()
        calls, flusher = 1, activate.current().flusher
        wait_for(lambda: flusher.calls == 1 and not flusher._pending)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        while not flusher.complaint:  # wait_for opens files
            try:
                free = os.dup(0)
            except OSError:
                pass
            else:  # threads of ours had files open before, and have closed them
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            call()
            calls += 1
            time.sleep(0.01)
        print(flusher.complaint, flush=True)
        while flusher.complaint:
            time.sleep(0.01)
        print(calls)
        """
    )
    try:
        said = process.stdout.readline()
        advice = re.search(r"prlimit --pid [0-9]+ --nofile=[0-9]+:[0-9]+", said)
        assert advice and "write access" not in said, said
        subprocess.run(advice[0].split(), check=True)
        calls = int(process.stdout.readline())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert home.calls() == calls > 1


def test_a_command_at_its_limit_of_open_files_is_told_what_helps_and_that_helps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gemmtuned", "db", "backup", str(tmp_path / "copy.db")]
    environment = {**os.environ, "GEMMTUNED_HOME": str(tmp_path)}
    Store(tmp_path / "tune.db", locks=tmp_path / "locks").close()

    def under(limit: str) -> subprocess.CompletedProcess[str]:
        shell = ["sh", "-c", f'{limit} && exec "$@"', "sh", *command]
        return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)

    refused = under("ulimit -S -n 6")
    advice = re.search(r"ulimit -n [0-9]+", refused.stderr)
    assert refused.returncode == 1 and advice and "write access" not in refused.stderr, refused.stderr
    assert under(f"ulimit -S -n 6; {advice[0]}").returncode == 0


def test_a_file_that_a_program_opens_in_the_place_of_its_stderr_has_none_of_our_lines(
    home: Home, tmp_path: Path
) -> None:
    """The loader's thread has something to say meanwhile: what is published is broken."""
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import gemmtuned, json, os, sys
        from hooked import LINEAR, publish, published, wait_for
        from gemmtuned.hooks import activate

        wait_for(lambda: gemmtuned.generation() == 1)
        os.close(2)
        mine = open(sys.argv[1], "w+b")
        assert mine.fileno() == 2
        hook = activate.current()
        (hook.settings.config_dir / "manifest.json").write_text("no JSON")
        wait_for(lambda: hook.tables.loader.refused)
        gemmtuned.disable()
        print(json.dumps(mine.read().decode()))
        """,
        str(tmp_path / "mine"),
    )

    assert done.said == ""


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


@pytest.mark.part(2)
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


def test_a_write_of_ours_beyond_a_limit_on_files_ends_no_program_whose_signals_are_as_the_system_has_them(
    home: Home,
) -> None:
    done = home.run(
        """
        import resource, signal, time, torch
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # as in a program that embeds Python without its handlers
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        print(1)
        """
    )
    assert (done.code, done.said) == (0, 1)
    assert any(line.startswith("gemmtuned: counts were lost calls=1 ") for line in done.ours)


def test_a_closed_standard_stream_stays_closed(home: Home) -> None:
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    done = home.run(
        """
        import json, os, torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks.activate import current
        gemmtuned.disable()
        os.close(0)
        gemmtuned.enable()
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        flusher = current().flusher
        wait_for(lambda: current().watcher.events.alive and flusher.calls == 1 and not flusher._pending)
        with flusher._lock:
            print(json.dumps(os.open("/", os.O_RDONLY)))
        """
    )
    assert done.said == 0
    assert home.calls() == 1


def test_a_program_in_another_root_folder_finds_nothing_of_ours_there(home: Home) -> None:
    """A folder of its own that has no home of ours; who has one there, has its calls counted."""
    done = home.run(
        """
        import json, os, pathlib, shutil, torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks import as_guest
        from gemmtuned.hooks.activate import current
        home = pathlib.Path(os.environ["GEMMTUNED_HOME"])
        as_guest.root = lambda: (0, 0)
        shutil.rmtree(home, ignore_errors=True)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        wait_for(lambda: current().flusher.complaint)
        found = [current().flusher.complaint, home.exists()]
        home.mkdir()
        wait_for(lambda: not current().flusher.complaint)
        print(json.dumps(found))
        """
    )
    assert done.said == [f"the program has changed its root folder, and there is no {home.path} in the new one", False]
    assert home.calls() == 1


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
    from hooked import opened, wait_for
    background._WARNS_OF_THREADS = {warns}
    hook.FORK_S = 60  # a fork waits for the thread, however loaded the machine is

    def look():
        return sorted(os.listdir("/proc/self/task")), sum("inotify" in link for link in opened().values())

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


@pytest.mark.parametrize("warns", [False, True])
def test_a_program_whose_hook_before_a_fork_forks_itself_has_our_thread_in_the_end(home: Home, warns: bool) -> None:
    """The hook runs after ours, with our thread asleep or gone for the fork that is about to come."""
    done = home.run(
        f"""
    import json, os, torch
    import gemmtuned
    from hooked import wait_for

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def within():
        global is_within
        if not is_within:
            is_within = True
            fork()
            seen.append(len(os.listdir("/proc/self/task")))
            is_within = False

    is_within, seen = True, []
    os.register_at_fork(before=within)
    gemmtuned.enable()
    from gemmtuned.hooks import background, hook
    background._WARNS_OF_THREADS = {warns}
    hook.FORK_S = 60
    for calls in range(1, 4):
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        wait_for(lambda: gemmtuned.status()["calls"] == calls)
        is_within = False
        fork()
        is_within = True
    wait_for(lambda: len(os.listdir("/proc/self/task")) == 2)
    print(json.dumps(seen))
    """,
        AITER_TUNE_GEMM="0",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )

    assert done.said == [1 if warns else 2] * 3
    assert home.calls() == 3


def test_a_fork_by_python_after_one_in_its_hook_keeps_pythons_lock(home: Home) -> None:
    """Were it taken for one by C code, it would let other threads run while it waits for ours, which is busy."""
    done = home.run(
        """
    import json, os, sys, threading, time, torch
    import gemmtuned
    from hooked import wait_for

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def within():
        global is_within
        if not is_within:
            is_within = True
            fork()
            begun.append(turns)

    def count():
        global turns
        while True:
            turns += 1
            time.sleep(0.001)

    def busy():
        is_busy.set()
        time.sleep(3)

    is_within, begun, ended, turns, is_busy = True, [], [], 0, threading.Event()
    os.register_at_fork(before=within, after_in_parent=lambda: ended.append(turns))
    gemmtuned.enable()
    from gemmtuned.hooks import activate
    threading.Thread(target=count, daemon=True).start()
    wait_for(lambda: turns > 9)
    activate.current().flusher._tick = busy
    is_busy.wait()
    sys.setswitchinterval(30)  # another thread runs where this one waits, and nowhere else
    is_within = False
    fork()
    print(json.dumps([len(begun), len(ended), ended[-1] - begun[-1]]))
    """,
        AITER_TUNE_GEMM="0",
    )

    assert done.said == [1, 2, 0]


def test_our_thread_begins_again_when_python_has_counted_the_threads_after_a_fork(home: Home) -> None:
    """From 3.13 on it counts them after all hooks. Only C may run before that: `count` is a hook as ours is."""
    done = home.run(
        """
    import functools, itertools, json, os, time, torch, warnings
    import gemmtuned
    from gemmtuned.hooks import background, hook
    from hooked import wait_for
    background._WARNS_OF_THREADS = True
    hook.FORK_S = 60
    warnings.simplefilter("error")

    def fork():
        if os.fork() == 0:
            os._exit(0)
        os.wait()

    counted, tasks = [], "/proc/self/task"
    count = functools.partial(next, map(counted.append, map(len, map(os.listdir, itertools.repeat(tasks)))))
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    wait_for(lambda: gemmtuned.status()["calls"] == 1)
    fork()
    os.register_at_fork(after_in_parent=count)
    for _ in range(10):
        wait_for(lambda: len(os.listdir(tasks)) == 2)
        fork()
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    wait_for(lambda: gemmtuned.status()["calls"] == 2)
    print(json.dumps(counted))
    """,
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )

    assert done.said == [1] * 10
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
            gemmtuned.hooks.activate.current().flusher.flush()  # one may be going on, which _exit would cut off
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


def test_a_child_that_is_forked_while_the_hook_is_half_on_has_nothing_of_its_descriptor(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "onednn")], 1)
    done = home.run(
        """
        import json, os, threading, torch, gemmtuned
        from hooked import opened, wait_for
        from gemmtuned.hooks import activate

        def watches():
            return sum("inotify" in link for link in opened().values())

        def start(hook):
            began(hook)
            wait_for(watches)
            thread = threading.Thread(target=forks)  # another one of the program's
            thread.start()
            thread.join()

        def forks():
            if os.fork() == 0:
                os._exit(watches())
            codes.append(os.waitstatus_to_exitcode(os.wait()[1]))

        codes, began, activate.Hook.start = [], activate.Hook.start, start
        gemmtuned.enable()
        print(json.dumps([codes, watches()]))
        """,
        AITER_TUNE_GEMM="0",
    )
    assert done.said == [[0], 1]


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


@pytest.mark.parametrize(("flush_s", "kept"), [("60", {}), ("0.1", {(str(LINEAR), "miss"): 1})])
def test_a_program_that_dies_by_a_signal_leaves_what_was_flushed_before(
    home: Home, flush_s: str, kept: dict[tuple[str, str], int]
) -> None:
    done = home.run(
        """
        import os, signal, sqlite3, sys, time, torch
        torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
        until = time.monotonic() + float(sys.argv[2])
        found = False
        while not found and time.monotonic() < until:
            time.sleep(0.05)
            try:
                store = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
                found = store.execute("SELECT 1 FROM problem").fetchall()
            except sqlite3.OperationalError:
                pass  # it is being made
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        str(home.path / "tune.db"),
        "0.3" if not kept else "30",
        GEMMTUNED_FLUSH_S=flush_s,
    )

    assert done.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert (home.counts() if (home.path / "tune.db").exists() else {}) == kept


def test_a_program_that_counts_nothing_leaves_nothing(home: Home) -> None:
    done = home.run("import torch; print(1)", whole_end=True, GEMMTUNED_FLUSH_S="60")

    assert done.said == 1 and done.err == ""
    assert not home.path.exists()


@pytest.mark.long
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
    one_call = "import torch, gemmtuned; torch.mm(torch.ones(2, 2), torch.ones(2, 2)); gemmtuned.reload(); print(1)"
    before = home.run(one_call, GEMMTUNED_QUIET="0")
    assert "native, nothing tuned yet, home" in before.err
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
    again = code.replace(
        "print(1)", "[(gemmtuned.disable(), gemmtuned.enable(), gemmtuned.reload()) for _ in 'xx']; print(1)"
    )
    often = home.run(again, GEMMTUNED_QUIET="0")
    off_between = home.run(
        """
        import os, torch, gemmtuned
        gemmtuned.reload()
        for native in "01":
            os.environ["GEMMTUNED_NATIVE"] = native
            gemmtuned.disable(), gemmtuned.enable(), gemmtuned.reload()
        """,
        GEMMTUNED_QUIET="0",
    )

    misspelt = home.run(
        code, GEMMTUNED_QUIET="0", GEMMTUNED_FLUSCH_S="1", GEMMTUNED_NONSENSE="1", **{"GEMMTUNED_\x1b[31m": "1"}
    ).err

    version = json.loads(json.dumps(__import__("gemmtuned").__version__))
    assert quiet.err == ""
    assert misspelt.endswith(
        f"home {home.path} - GEMMTUNED_FLUSCH_S, set here, is no variable of gemmtuned's (GEMMTUNED_FLUSH_S?) "
        "- GEMMTUNED_NONSENSE, set here, is no variable of gemmtuned's (GEMMTUNED_QUIET=1 silences this)\n"
    )
    first, off, last = off_between.err.splitlines(keepends=True)
    assert "this program runs stock torch" in off and first == last == loud.err
    assert (
        loud.err
        == often.err
        == (f"gemmtuned {version}: native, generation 7, 1 rows, home {home.path} (GEMMTUNED_QUIET=1 silences this)\n")
    )


def test_finalizers_of_the_programs_that_run_in_our_thread_leave_it_unknown_to_threading(home: Home) -> None:
    done = home.run(
        """
        import gc, json, logging, threading, torch, gemmtuned
        from gemmtuned.hooks import activate
        from hooked import wait_for

        class Logs:
            def __del__(self):
                ran_in.append(threading.current_thread().name)
                logging.getLogger("mine").error("gone")

        ran_in, flusher = [], activate.current().flusher
        drained = flusher._drain

        def drain():  # in our thread: the collector runs where something is made
            if not ran_in:
                one = Logs()
                one.itself = one
                del one
                gc.collect()
            return drained()

        flusher._drain = drain
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        wait_for(lambda: ran_in)
        wait_for(lambda: len(threading.enumerate()) == 1)  # after the turn at the latest
        print(json.dumps(ran_in[0].startswith("Dummy")))
        """,
    )

    assert done.said is True, done.err


@pytest.mark.long
def test_a_spawned_child_whose_program_imports_torch_first_says_nothing(home: Home, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import multiprocessing, time, torch\n\ndef work():\n    torch.mm(torch.ones(4, 16), torch.ones(16, 8))\n\n"
        "if __name__ == '__main__':\n    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start(), child.join()\n    print(child.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env=home.environment(GEMMTUNED_QUIET="0"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "0\n"
    assert len(done.stderr.splitlines()) == 1 and home.calls() == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_children_of_a_copy_of_multiprocessing_flush_at_their_end(home: Home, tmp_path: Path, how: str) -> None:
    """`multiprocess`, which has dill for pickle, is the standard library's under another name."""
    copy = tmp_path / "multiprocess"
    for source in Path(multiprocessing.__file__).parent.glob("*.py"):
        copy.mkdir(exist_ok=True)
        (copy / source.name).write_text(re.sub(r"(?<![_\w])multiprocessing", "multiprocess", source.read_text()))
    (tmp_path / "main.py").write_text(
        "import torch, multiprocess\n\ndef work():\n    torch.mm(torch.ones(4, 16), torch.ones(16, 8))\n\n"
        f"if __name__ == '__main__':\n    child = multiprocess.get_context('{how}').Process(target=work)\n"
        "    child.start(), child.join()\n    print(child.exitcode)\n"
    )
    env = {"GEMMTUNED_FLUSH_S": "60", "PYTHONPATH": str(tmp_path)}
    if how == "fork":
        done = home.run(f"import runpy; runpy.run_path({str(tmp_path / 'main.py')!r}, run_name='__main__')", **env)
        said = done.out, done.err
    else:  # it starts an interpreter, which looks for the file of `__main__`
        words = [sys.executable, str(tmp_path / "main.py")]
        fresh = subprocess.run(words, env=home.environment(**env), capture_output=True, text=True, timeout=60)
        said = fresh.stdout, fresh.stderr
    assert said == ("0\n", "") and home.calls() == 1


def test_a_module_of_that_name_that_fails_when_it_is_asked_costs_a_child_nothing(home: Home) -> None:
    done = home.run(
        """
        import json, os, sys, types, torch
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))

        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise RuntimeError("not here")

        sys.modules["multiprocess.util"] = Lazy("multiprocess.util")
        sys.modules["multiprocess.process"] = types.ModuleType("multiprocess.process")
        if os.fork() == 0:
            torch.mm(torch.ones(4, 16), torch.ones(16, 24))
            sys.exit()
        print(json.dumps(os.waitstatus_to_exitcode(os.wait()[1])))
        """
    )
    assert (done.said, done.err) == (0, "") and sorted(home.counts().values()) == [1, 1]


def test_a_forked_child_flushes_soon_for_the_first_time(home: Home) -> None:
    done = home.run(
        """
        import json, os, torch
        from gemmtuned.configs import clock
        from gemmtuned.hooks import activate
        from hooked import wait_for
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))

        def due_in():
            hook = activate.current()
            wait_for(lambda: hook._parts is not None)
            return hook.flusher.due_s() - clock.monotonic()

        longest, (reads, writes) = due_in(), os.pipe()
        if os.fork() == 0:
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            os.write(writes, str(due_in()).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([longest, float(os.read(reads, 99))]))
        """,
        GEMMTUNED_FLUSH_S="60",
    )
    parents, childs = done.said
    assert 40 < parents < 73 and 10 < childs < 29


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
        assert "Traceback" not in said.stderr + said.stdout and said.returncode == (1 if "doctor" in command else 2)
        assert "set GEMMTUNED_HOME to a" in said.stderr + " ".join(said.stdout.split())
