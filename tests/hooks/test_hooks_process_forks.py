"""A program that forks, whatever goes on meanwhile: its children have our thread, and are counted."""

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import LINEAR, Home, publish, published


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
