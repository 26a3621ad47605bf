"""Programs that look closely at what the hook changes in their process; the cells themselves: test_hooks_cells.py."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published

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
